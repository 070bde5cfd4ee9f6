"""The published training runs, set by set: what a row says was measured, and the job that it was.

A row that hetplan cannot say raises NotPosedError with the reason.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from evidence.truth.job import VTRAIN, Job, machine
from evidence.truth.ranked import cheapest, predicted
from evidence.truth.recipes import recipe_of, release
from evidence.truth.simumax import simumax_job, simumax_published
from evidence.truth.tables import GIB, Cells, Published, Source, require
from hetplan.files import read_json
from hetplan.plans.plan import Recomputation
from hetplan.profiling.frameworks import FSDP, MEGATRON, Framework
from hetplan.profiling.models.adapters import Adapters
from hetplan.profiling.models.configurations import from_config
from hetplan.profiling.models.operators import ROUTER_LAUNCHES, STACKS, Precision
from hetplan.profiling.models.transformer import Experts, Latent, Transformer, transformer
from hetplan.profiling.models.zoo import bert, built_in, gpt2


def over(amount: float, rate: float | None) -> float | None:
    """Seconds of an amount at a published rate; None where none is published."""
    return amount / rate if rate else None


def vtrain_published(row: Cells) -> Published:
    """vTrain (Bang et al., MICRO 2024): milliseconds of an iteration."""
    workload = (
        "GPT {# layers} x {hidden size}, {sequence length} tokens, batch {global batch}, "
        "{# GPUs} A100"
    ).format_map(row)
    seconds = over(row.number("iteration time (ms)") or 0.0, 1e3)
    # these decide the seconds of a layer; replicas, stages and numbers of layers only add them up
    cell = "{hidden size} wide, tensor {tensor parallelism}, micro-batch {micro batch}"
    return Published(workload, seconds, kind="A100", cell=cell.format_map(row))


def vtrain_job(row: Cells, *, single: bool) -> Job:
    """Megatron-LM's GPT in fp16 under 1F1B, with full recomputation and GPT-2's 50257 tokens padded
    to a multiple of 128 per tensor rank, Megatron's default.

    Single nodes ran vTrain's own model, whose tensor ranks share the tokens evenly, without the
    rest and without padding (vTrain, src/model/gpt_modeling.py). The set says full recomputation of
    them, too, but that cannot be: a further sample of a layer 2048 wide takes 1.86 ms on one A100,
    which are 240 of its 312 TFLOP/s with recomputation, norms and unfused attention among them, and
    180 without.
    """
    tokens, gpus = row.whole("sequence length"), row.whole("# GPUs")
    tensor, pipeline = row.whole("tensor parallelism"), row.whole("pipeline parallelism")
    require(tensor * pipeline * row.whole("data parallelism") == gpus, "degrees are not the GPUs")
    return Job(
        gpt2(
            row.whole("# layers"),
            row.whole("hidden size"),
            row.whole("attention heads"),
            vocabulary=50257 // tensor * tensor if single else padded(50257, tensor),
            positions=tokens,
            attention="standard",
        ),
        tokens,
        "fp16",
        VTRAIN,
        gpus,
        row.whole("global batch"),
        row.whole("micro batch"),
        tensor=tensor,
        pipeline=pipeline,
        recomputation="none" if single else "full",
        stack=STACKS["eager-2021"],
    )


# MosaicML llm-foundry, scripts/train/yamls/pretrain/mpt-*.yaml: layers, width, heads. Learned
# positions, biases, tied head, no dropout, 50368 tokens; these give the published NumParams.
MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
LLM_FOUNDRY = FSDP.model_copy(
    update={
        "name": "llm-foundry",
        "logit_bytes": 4,
        "sequence_parallel": False,
        "origin": "as FSDP, but the fused cross-entropy of flash-attn on 16-bit logits (MPT's "
        "loss_fn)",
    }
)
SHARDING = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}


def mosaic_published(row: Cells) -> Published:
    """MosaicML llm-foundry's benchmarks: tokens per second, and MFU in percent."""
    workload = (
        "MPT-{Model}, {SeqLen (T)} tokens, batch {GlobalBatchSize}, {# GPUs} {GPU}"
    ).format_map(row)
    amount = (row.number("SeqLen (T)") or 0.0) * (row.number("GlobalBatchSize") or 0.0)
    seconds = over(amount, row.number("Throughput (T/s)")) or None
    return Published(workload, seconds, None, over(row.number("MFU") or 0.0, 100), row["GPU"])


def mosaic_job(row: Cells) -> Job:
    """MPT under FSDP with fused attention. The mode PURE reduces gradients in the training
    precision, others in fp32 (Composer, get_mixed_precision)."""
    model, precision = row.text("Model"), row.text("Precision")
    sharding, tokens = row.text("Sharding Strategy"), row.whole("SeqLen (T)")
    require(model in MPT, f"unknown model {model}")
    require(sharding in SHARDING, f"sharding {sharding} is not modelled")
    require(not row.flag("Activation CPUOffload"), "offloaded activations are not modelled")
    return Job(
        gpt2(*MPT[model], vocabulary=50368, positions=tokens, dropout=False, attention="fused"),
        tokens,
        "fp16" if "fp16" in precision else "bf16",
        machine(row.text("GPU")),
        row.whole("# GPUs"),
        row.whole("GlobalBatchSize"),
        row.whole("MicroBatchSize"),
        zero=SHARDING[sharding],
        recomputation="full" if row.flag("Activation Checkpointing") else "none",
        framework=LLM_FOUNDRY,
        stack=replace(
            STACKS["eager" if "amp" in precision else "fused"],
            flash=1,
            casts=False,
            gradient_bytes=None if row.text("MP Mode") == "PURE" else 4,
            fp8="fp8" in precision,
        ),
    )


# Names as the sources write them, in capitals and with hyphens, and as the zoo has them.
NAMES = {
    "LLAMA3-8B": "llama3-8b",
    "LLAMA3-70B": "llama3-70b",
    "LLAMA3.1-8B": "llama3-8b",
    "LLAMA3.1-70B": "llama3-70b",
    "LLAMA2-7B": "llama2-7b",
    "LLAMA2-13B": "llama2-13b",
    "LLAMA2-70B": "llama2-70b",
}
CHECKPOINTING: dict[str, Recomputation] = {
    "none": "none", "full": "full", "selective per op": "operators",
}  # fmt: skip


@cache
def shape_of(model: str) -> Transformer:
    """The model of that name, less what stands behind it in brackets; raises NotPosedError.

    Others than hetplan's own stand in `models.json` with their sources.
    """
    name = model.partition(" (")[0].upper().replace("_", "-")
    known = read_json(Path(__file__).with_name("models.json"))
    require(name in NAMES or name in known, f"unknown model {model}")
    own = NAMES.get(name)
    shape = (built_in(own) if own else from_config(known[name]["config"], name=name)).shape
    assert shape is not None, "all are text models"
    experts = shape.experts and replace(shape.experts, early=True)  # as Megatron Core has them
    return replace(shape, experts=experts)


def by_rate(row: Cells, gpu: str, *more: str) -> Published:
    """Tokens per second and GPU; a workload is named by model, `more`, tokens, batch and GPUs."""
    named = ", ".join([row["model"], *more])
    run = "{sequence} tokens, batch {global_batch}, {gpus}".format_map(row)
    tokens = (row.number("global_batch") or 0.0) * (row.number("sequence") or 0.0)
    rate = (row.number("tokens_per_second_per_gpu") or 0.0) * (row.number("gpus") or 0.0)
    return Published(f"{named}, {run} {gpu}", over(tokens, rate) or None, kind=gpu)


def titan_published(row: Cells) -> Published:
    """torchtitan's reports: tokens per second and GPU, peak GiB."""
    memory = row.number("memory_gib")
    held = None if memory is None else memory * GIB
    return replace(by_rate(row, row.text("gpu")), held_bytes=held)


def titan_job(row: Cells) -> Job:
    """Llama 3 under FSDP2 over what tensor ranks leave."""
    techniques = row.text("techniques").lower()
    require("rowwise" not in techniques, "float8 with a scale for each row is not modelled")
    model, tensor = row.text("model"), row.whole("tp", 1)
    pipeline = row.whole("pp", 1)
    others = tensor * pipeline * row.whole("cp", 1)
    # where a row states none, that of torchtitan's own configuration (models/llama3/train_configs)
    usual = "selective per op" if model.lower().endswith("8b") else "full"
    mode = row.text("activation_checkpointing").lower() or usual
    shards = row.whole("fsdp", row.whole("gpus") // others)
    require(shards * others == row.whole("gpus"), f"{shards} shards of {others} ranks each")
    require(mode in CHECKPOINTING, f"activation checkpointing {mode!r} is not modelled")
    return Job(
        shape_of(model),
        row.whole("sequence"),
        "bf16",
        machine(row.text("gpu")),
        row.whole("gpus"),
        row.whole("global_batch"),
        max(1, row.whole("local_batch") // pipeline),
        tensor=tensor,
        pipeline=pipeline,
        context=row.whole("cp", 1),
        zero=3,
        recomputation=CHECKPOINTING[mode],
        framework=FSDP,
        stack=replace(
            STACKS["compiled" if "compile" in techniques else "fused"],
            flash=2,  # of scaled_dot_product_attention (PyTorch's documentation)
            fp8="float8" in techniques,
            # torchao's Float8Linear scales by the present maximum, and casts in every pass
            cast_elements=3.0,
            casts_weights=True,
            hidden_reduces="async" in techniques,
            sequence_parallel=True,
            # DTensor cuts [batch, sequence, width] along the sequence: copies behind each gather
            # and before each scatter (torch/distributed/_functional_collectives.py), but for those
            # of asynchronous tensor parallelism (_symmetric_memory restrides).
            gather_copies="async" not in techniques,
        ),
        pooled=True,  # components/metrics.py: reserved_bytes.all.peak
    )


def megatron_published(row: Cells) -> Published:
    """Megatron-LM's functional tests: median seconds, and the most that torch's allocator gave.
    Tiny models and deterministic kernels on busy machines: a truth of memory, and of seconds no
    more than their order of magnitude."""
    family, gpu = row.text("case").partition("/")[0], row.text("gpu") or row.text("platform")
    run = ("{sequence} tokens, batch {global_batch}, {nodes} x {gpus_per_node}").format_map(row)
    shape = f"{family} {row['layers']} x {row['hidden']}, {row['experts'] or 0} experts"
    seconds = row.number("seconds_per_iteration_median") or None
    held = row.number("max_allocated_bytes") or None
    return Published(f"{shape}, {run} {gpu}", seconds, held, kind=gpu, scored=False)


def megatron_job(row: Cells) -> Job:
    """GPT or BERT. The log is the last rank's (megatron/training/global_vars.py)."""
    require(row.flag("training_complete"), "the row is no complete training run")
    family = row.text("case").partition("/")[0]
    require(family in ("gpt", "bert", "moe"), f"models of {family} are not modelled")
    require(not row.flag("fsdp"), "Megatron's FSDP is not modelled")
    require(not row.text("layout"), f"layout {row.text('layout')} is not modelled")
    incomplete = family == "moe" or row.whole("experts", 0) or "mla" in row.text("case").split("_")
    require(not incomplete, INCOMPLETE)
    recompute = row.text("recompute")
    require(recompute in ("", "selective", "full"), f"recomputation {recompute} is not modelled")
    require(not row.text("recompute_layers"), "recomputation of some layers is not modelled")
    shape = megatron_shape(row, family)
    precision: Precision = "bf16" if row.flag("bf16") else "fp16" if row.flag("fp16") else "fp32"
    mode: Recomputation = "full" if recompute == "full" else "selective" if recompute else "none"
    return Job(
        shape,
        row.whole("sequence"),
        precision,
        machine(row.text("gpu")),
        row.whole("nodes", 1) * row.whole("gpus_per_node", 8),
        row.whole("global_batch"),
        row.whole("micro_batch"),
        tensor=row.whole("tp", 1),
        pipeline=row.whole("pp", 1),
        **megatron_stages(row, shape.layers),
        zero=int(row.flag("distributed_optimizer")),
        recomputation=mode,
        framework=MEGATRON.model_copy(update={"sequence_parallel": row.flag("sequence_parallel")}),
        stack=replace(
            STACKS["fused"],
            sequence_parallel=row.flag("sequence_parallel"),
            fp8=bool(row.text("fp8")),
        ),
        last_stage=True,
        context=row.whole("cp", 1),
        expert=row.whole("ep", 1) if shape.experts else 1,
        expert_tensor=row.whole("etp", row.whole("tp", 1)),
    )


# What decides seconds and bytes of a row with experts, and has no column.
INCOMPLETE = (
    "incomplete: no column has the widths of experts and of the shared expert, the ranks of latent "
    "attention, or the layers of further tokens"
)


def padded(tokens: int, tensor: int) -> int:
    """Megatron's vocabulary: a multiple of 128 per tensor rank (make_vocab_size_divisible_by)."""
    return -(-tokens // (128 * tensor)) * 128 * tensor


def megatron_shape(row: Cells, family: str) -> Transformer:
    """The model; without a stated vocabulary GPT-2's or BERT's tokens. Deterministic tests state
    the attention backend `unfused` in their configuration, those of speed and memory none."""
    unfused = row.flag("deterministic") and not row.text("case").endswith("memory_speed")
    hidden, heads = row.whole("hidden"), row.whole("heads")
    tokens = row.whole("vocab", 50257 if family == "gpt" else 30522)
    changes: dict[str, Any] = {
        "vocabulary": padded(tokens, row.whole("tp", 1)),
        "positions": row.whole("sequence"),
        "tied": not row.flag("untie"),
        "gated": row.flag("swiglu"),
        "kv_heads": row.whole("kv_groups", heads),
        "attention": "standard" if unfused else "fused",
    }
    if "mla" in row.text("case").split("_"):  # ranks by default: arguments.py, _add_mla_args
        changes |= {"latent": Latent(None, 32, 64, 128, 128), "head_dim": 192, "rotary": True}
    experts, build = row.whole("experts", 0), bert if family == "bert" else transformer
    if experts:
        changes["experts"] = Experts(experts, row.whole("topk", 1), early=True)
    return build(row.whole("layers"), hidden, heads, row.whole("ffn", 4 * hidden), **changes)


def megatron_stages(row: Cells, layers: int) -> dict[str, Any]:
    """`chunks` of each stage, or `blocks` of each where the first or last differ."""
    pipeline, each = row.whole("pp", 1), row.whole("vp_layers", 0) * row.whole("pp", 1)
    first, last = row.whole("first_pp_layers", 0), row.whole("last_pp_layers", 0)
    if each:
        require(layers % each == 0, "uneven chunks are not modelled")
        return {"chunks": layers // each}
    if not first and not last:
        return {"chunks": row.whole("vp_stages", 1)}
    inner = pipeline - bool(first) - bool(last)
    middle, rest = divmod(layers - first - last, max(1, inner))
    require(not rest and middle > 0, "uneven stages do not add up")
    return {"blocks": (*[first] * bool(first), *[middle] * inner, *[last] * bool(last))}


def bridge_job(row: Cells) -> Job:
    """Megatron Bridge's tables, with what its recipes say besides; the distributed optimizer is
    ZeRO 1, FSDP ZeRO 3."""
    precision = row.text("precision")
    # Release 25.09 names no precision; 25.11 names FP8's two scalings for the same rows, and cells
    # of 25.09 hold as many figures.
    precision = precision or ("FP8" if row.text("release").startswith("25.09") else "")
    require(precision in BITS, f"precision {precision or 'not stated'}")
    zero = 3 if row.whole("fsdp", 0) else 1
    # current scaling reads an operand once more than delayed scaling and scales of blocks do
    cast_elements = 3.0 if precision.startswith("FP8-CS") else 2.0
    system, bits = row.text("system"), BITS[precision]
    # set_llama3_common_configs and the like (scripts/performance/configs): grad_reduce_in_fp32 off
    framework = MEGATRON.with_choices(gradient_bytes=2, loss="te")
    job = nemo_job(
        row,
        system,
        zero=zero,
        bits=bits,
        framework=FSDP if zero == 3 else framework,
        adapters=BRIDGE_ADAPTERS,
        # comm_overlap.tp_comm_overlap, which the recipes of NVFP4 switch off
        hidden_reduces=bits > 4,
        cast_elements=cast_elements,
    )
    recipe = recipe_of(row)
    stack = replace(
        job.stack,
        graphs=recipe.graphs,
        router_launches=ROUTER_LAUNCHES["deepep" if recipe.one_copy else "fused"],
        one_copy=recipe.one_copy,
        hidden_experts=recipe.hidden_experts,
        fp8_attention=recipe.fp8_attention,
    )
    return replace(
        job,
        expert=row.whole("ep", 1) if job.shape.experts else 1,
        stack=stack,
        recomputation="full" if recipe.recomputed else "none",
        recomputed=recipe.recomputed,
    )


# Columns of what was measured, and of where; all others are the configuration.
BRIDGE_MEASURED = (
    "source", "licence", "release", "tokens_per_second_per_gpu", "model_tflops_per_gpu",
    "seconds_per_step",
)  # fmt: skip


def older_releases(rows: Sequence[Cells]) -> dict[int, str]:
    """Rows of configurations that a newer release measured, too. Releases differ in software, by up
    to 1.8 times, and hetplan has no stack for each of them."""
    configurations = [
        tuple(text for column, text in row.texts.items() if column not in BRIDGE_MEASURED)
        for row in rows
    ]
    newest: dict[tuple[str, ...], tuple[int, ...]] = {}
    for row, configuration in zip(rows, configurations, strict=True):
        newest[configuration] = max(newest.get(configuration, ()), release(row))
    return {
        i: "a newer release measured the configuration"
        for i, (row, configuration) in enumerate(zip(rows, configurations, strict=True))
        if release(row) < newest[configuration]
    }


def bridge_published(row: Cells) -> Published:
    """Tokens per second and GPU; unknown where a cell held two figures, which the table has as one:
    more TFLOP/s than any GPU has."""
    published = by_rate(row, row.text("system"), row.text("task"), row.text("precision"))
    possible = (row.number("model_tflops_per_gpu") or 0.0) <= FASTEST_TFLOPS
    return published if possible else replace(published, seconds=None)


FASTEST_TFLOPS = 20_000.0  # beyond the 4-bit rate of a GB300
# Of the products of a published precision.
BITS = {
    "BF16": 16,
    "FP8": 8,
    "FP8-CS": 8,
    "FP8-MX": 8,
    "FP8-CS (FP8-MX)": 8,
    "MXFP8": 8,
    "NVFP4": 4,
}


# The adapters of NeMo 24.07 (NeMo-Framework-Launcher, conf/peft/llama/squad.yaml: adapter_dim 32,
# no modules; NeMo, nlp/parts/peft_config.py: then those of `attention_qkv`), of Megatron Bridge's
# recipe of Llama 3 70B (recipes/llama/llama3.py: dim 16; peft/lora.py: one for each product), and
# of the MLPerf benchmark (training_policies, Llama 2 70B LoRA: rank 16, samples of 8192 tokens;
# mlcommons/training, llama2_70b_lora/run_llama_70B_scrolls_r16.sh: modules).
NEMO_ADAPTERS = Adapters(32, "qkv")
BRIDGE_ADAPTERS = Adapters(16, "qkv,o,gate_up,down")
MLPERF_ADAPTERS, MLPERF_LORA_TOKENS = Adapters(16, "qkv,o"), 8192


def beside_tensor_ranks(framework: Framework, tensor: int) -> Framework:
    """The framework with sequence parallelism where there are tensor ranks, as NeMo's recipes have
    it: its memory divides the tokens as its seconds do. tensor: the tensor degree."""
    return framework.model_copy(update={"sequence_parallel": tensor > 1})


def nemo_24_framework(row: Cells) -> Framework:
    """Megatron-LM with the optimizer of NeMo 24.07, which is Apex's distributed fused Adam.

    Its recipes of speed reduce gradients in bf16 (`grad_sync_dtype`). An fp32 weight is held as the
    bf16 weight and 16 further bits (`store_param_remainders`). Full fine-tuning holds moments in
    bf16, too, and no fp32 weights (conf/peft/llama/sft.yaml: `dtype`; NeMo,
    megatron_base_model.py, setup_optimization: `store_params`).
    """
    optimizer_bytes = 4 if row.text("task") == "SFT" else 10
    return MEGATRON.model_copy(update={"gradient_bytes": 2, "optimizer_bytes": optimizer_bytes})


def nemo_job(
    row: Cells,
    gpu: str,
    zero: int,
    *,
    bits: int,
    framework: Framework,
    adapters: Adapters,
    hidden_reduces: bool,
    cast_elements: float = 2.0,
) -> Job:
    """A model that is trained in bf16, its products in so many bits.

    Fine-tuning takes whole samples, as packing makes them; tensor ranks hold whole experts, as
    Bridge's recipes have it. Gradients are reduced in bf16. framework: of Megatron-LM's kind.
    adapters: of fine-tuning with some. hidden_reduces, cast_elements: of `Stack`.
    """
    shape = shape_of(row.text("model"))
    if "lora" in row.text("task").lower():
        shape = replace(shape, adapters=adapters)
    return Job(
        replace(shape, input_bytes=1 if bits < 16 else None),
        row.whole("sequence"),
        "bf16",
        machine(gpu),
        row.whole("gpus"),
        row.whole("global_batch"),
        row.whole("micro_batch"),
        tensor=row.whole("tp", 1),
        pipeline=row.whole("pp", 1),
        chunks=row.whole("vp", 1),
        zero=zero,
        framework=beside_tensor_ranks(framework, row.whole("tp", 1)),
        stack=replace(
            STACKS["fused"],
            flash=3,
            gradient_bytes=2,
            hidden_reduces=hidden_reduces,
            fp8=bits == 8,
            fp4=bits == 4,
            sequence_parallel=True,
            cast_elements=cast_elements,
        ),
        buckets=8,  # NeMo overlaps reductions with the backward pass
        context=row.whole("cp", 1),
    )


# Models whose recipes overlap the collectives of tensor ranks (NeMo-Framework-Launcher,
# conf/training, `ub_tp_comm_overlap`); those of GPT-3 175B, Llama 2 70B and of fine-tuning do not.
NEMO_OVERLAPS = ("GPT3-20B", "Nemotron-8B", "Nemotron-22B", "Nemotron-340B", "LLAMA3-70B")


def nemo_24_job(row: Cells) -> Job:
    """NeMo 24.07 on H100 in FP8."""
    job = nemo_job(
        row,
        "DGX-H100",
        zero=1,
        bits=8,
        framework=nemo_24_framework(row),
        adapters=NEMO_ADAPTERS,
        hidden_reduces=row.text("model") in NEMO_OVERLAPS and row.text("task") == "pretrain",
    )
    return cheapest(job)


def mlperf_published(row: Cells) -> Published:
    """MLPerf training v5.0: the median of the steps, else by the rate."""
    seconds = row.number("step_seconds_median") or row.number("seconds_per_step_from_throughput")
    workload = (
        "{benchmark}, batch {global_batch}, {nodes} x {accelerators_per_node} {accelerator}"
    ).format_map(row)
    return Published(workload, seconds or None, kind=row["accelerator"])


def mlperf_job(row: Cells) -> Job:
    """In FP8; virtual stages are not stated, and count as one. Where LoRA's degrees are not stated,
    the GPUs that share a sample are context ranks, as they are where they are stated; batch and
    accumulation say how many."""
    gpus, batch = row.whole("nodes") * row.whole("accelerators_per_node"), row.whole("global_batch")
    lora = "lora" in row.text("benchmark")
    if lora:
        shape = replace(shape_of("LLAMA2-70B"), adapters=MLPERF_ADAPTERS)
        context, rest = divmod(gpus * row.whole("grad_accum"), batch)
        require(context > 0 and not rest, f"a batch of {batch} does not divide over {gpus} GPUs")
    else:
        shape, context = shape_of("LLAMA3.1-405B"), row.whole("cp")
    tensor = row.whole("tp", 1) if lora else row.whole("tp")
    job = Job(
        replace(shape, input_bytes=1),
        row.whole("sequence", MLPERF_LORA_TOKENS) if lora else row.whole("sequence"),
        "bf16",
        machine(row.text("accelerator")),
        gpus,
        batch,
        1,
        tensor=tensor,
        framework=beside_tensor_ranks(MEGATRON, tensor),
        pipeline=row.whole("pp", 1) if lora else row.whole("pp"),
        zero=1,
        stack=replace(
            STACKS["fused"],
            # version 3 is written for Hopper alone (Shah et al. 2024)
            flash=2 if row.text("accelerator").startswith("AMD") else 3,
            fp8=True,
            sequence_parallel=True,
            hidden_reduces=True,  # TP_COMM_OVERLAP of NVIDIA's configurations
        ),
        buckets=8,
        context=row.whole("cp", context),
    )
    return cheapest(job)


def nothing_passed_over(rows: Sequence[Cells]) -> dict[int, str]:
    """No rows: every one is predicted."""
    return {}


def runs(
    published: Callable[[Cells], Published],
    job: Callable[[Cells], Job],
    *,
    by_hand: bool = False,
    passed_over: Callable[[Sequence[Cells]], Mapping[int, str]] = nothing_passed_over,
) -> Source:
    """A file of training runs, which are replayed. Parameters: see `Source`."""
    return Source(published, lambda row: predicted(job(row)), job, by_hand, passed_over)


# Files of each set of training runs.
SOURCES = {
    "vtrain": {
        "vtrain_single_node_a100.csv": runs(vtrain_published, partial(vtrain_job, single=True)),
        "vtrain_multi_node_a100.csv": runs(vtrain_published, partial(vtrain_job, single=False)),
    },
    "mosaicml": {"mosaicml_llm_foundry.csv": runs(mosaic_published, mosaic_job)},
    "torchtitan": {"torchtitan.csv": runs(titan_published, titan_job, by_hand=True)},
    "megatron": {"megatron_golden.csv": runs(megatron_published, megatron_job, by_hand=True)},
    "nemo": {
        "nemo_megatron_bridge.csv": runs(
            bridge_published,
            bridge_job,
            by_hand=True,
            passed_over=older_releases,
        ),
        "nemo_24.07_h100_fp8.csv": runs(  # system and precision are the table's title
            lambda row: by_rate(row, "DGX-H100", row.text("task")),
            nemo_24_job,
            by_hand=True,
        ),
    },
    "simumax": {"simumax_b200.csv": runs(simumax_published, simumax_job, by_hand=True)},
    "mlperf": {"mlperf_v5.0_llm.csv": runs(mlperf_published, mlperf_job, by_hand=True)},
}
PARTIAL = ("vtrain", "operators")  # sets of which a file may be absent
