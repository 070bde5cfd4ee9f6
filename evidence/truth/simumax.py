"""Megatron-LM on eight B200, as SimuMax measured it: seconds and the bytes of the fullest rank.

The rows cut the layers of published models down to some that fit on one node. Every row states its
shape, but for the ranks of latent attention, which follow from the model's name.
"""

from dataclasses import replace
from typing import Any

from evidence.truth.job import Job, machine
from evidence.truth.tables import Cells, Published, require
from hetplan.plans.plan import Recomputation
from hetplan.profiling.frameworks import MEGATRON
from hetplan.profiling.models.operators import STACKS
from hetplan.profiling.models.transformer import Experts, Latent, Transformer
from hetplan.profiling.models.zoo import llama

RECOMPUTATION: dict[str, Recomputation] = {"none": "none", "full": "full", "selective": "selective"}
# DeepSeek-V2 and V3 have latent vectors of 1536 and 512 numbers; keys of 64 rotated numbers and 128
# others, values of 128 (DeepSeek-AI 2024, "DeepSeek-V2", Section 3.1.2; "DeepSeek-V3", Section
# 4.2). DeepSeek-V2-Lite and Moonlight project queries from the hidden state.
LATENT = Latent(1536, 512, 64, 128, 128)
LATENT_WITHOUT_QUERY_RANK = ("lite", "moonlight")


def simumax_published(row: Cells) -> Published:
    """Seconds of an iteration, and the most that torch's allocator gave on any rank."""
    seconds, held = row.number("seconds") or None, row.number("max_allocated_bytes") or None
    run = (
        "{model}, {layers} layers, {sequence} tokens, batch {global_batch}, {gpus} {gpu}"
    ).format_map(row)
    return Published(run, seconds, held, kind=row["gpu"])


def simumax_job(row: Cells) -> Job:
    """The run of a row. Its cases are named `cef`, for the loss that Transformer Engine fuses."""
    recompute = row.text("recompute") or "none"
    require(recompute in RECOMPUTATION, f"recomputation {recompute} is not modelled")
    require(row.text("precision") == "bf16", f"precision {row['precision']} is not modelled")
    shape, tensor = simumax_shape(row), row.whole("tp", 1)
    divided_tokens = row.flag("sequence_parallel")
    return Job(
        shape,
        row.whole("sequence"),
        "bf16",
        machine(row.text("gpu")),
        row.whole("gpus"),
        row.whole("global_batch"),
        row.whole("micro_batch"),
        tensor=tensor,
        pipeline=row.whole("pp", 1),
        zero=int(row.flag("distributed_optimizer")),
        recomputation=RECOMPUTATION[recompute],
        framework=MEGATRON.model_copy(update={"sequence_parallel": divided_tokens}),
        stack=replace(STACKS["fused"], sequence_parallel=divided_tokens),
        context=row.whole("cp", 1),
        expert=row.whole("ep", 1) if shape.experts else 1,
        expert_tensor=row.whole("etp", tensor),
    )


def simumax_shape(row: Cells) -> Transformer:
    """The model of a row: a Llama, with experts and latent attention where the row has them."""
    heads, layers = row.whole("heads"), row.whole("layers")
    more: dict[str, Any] = {
        "vocabulary": row.whole("vocab"),
        "kv_heads": row.whole("kv_groups", heads),
        "tied": False,
    }
    count = row.whole("experts", 0)
    if count:
        more["experts"] = Experts(
            count,
            row.whole("topk", 1),
            dense=row.whole("dense_layers", 0),
            width=row.whole("moe_ffn", row.whole("ffn")),
            shared=row.whole("shared_ffn", 0),
            early=True,
        )
    if row.flag("mla"):
        name, latent = row.text("model").lower(), LATENT
        if any(known in name for known in LATENT_WITHOUT_QUERY_RANK):
            latent = replace(latent, query=None)
        more |= {"latent": latent, "head_dim": latent.rope + latent.nope, "kv_heads": heads}
    return llama(layers, row.whole("hidden"), heads, row.whole("ffn"), **more)
