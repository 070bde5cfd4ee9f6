"""Exports plans for loops that load a model of Hugging Face: the `device_map` of `from_pretrained`,
and a configuration of `accelerate launch`.

A device map says on which device each module is. transformers then passes each batch through the
devices one after the other, in one process. It holds only the plan's cut: no micro-batches of one
batch are on several devices at a time.

accelerate starts one process for each replica of one device. Its configuration has no place for
unequal samples. They stand in comments, and `hetplan.runtime.sampler.PlannedBatches` gives each
rank its rows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import yaml

from hetplan.adapters.exports.grid import Grid, heading, listed, unequal
from hetplan.adapters.exports.scripts import local_number
from hetplan.errors import UnsupportedError
from hetplan.files import to_json
from hetplan.plans.plan import Plan
from hetplan.profiling.models.transformer import Transformer
from hetplan.text import comments

ACCELERATE = "accelerate 1.x: accelerate/commands/config/config_args.py"
PORT = 29500  # accelerate's default
# ZeRO level -> FSDP's strategy, which shards the same states
FSDP_STRATEGIES = {2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}


@dataclass(frozen=True)
class ModuleNames:
    """The names of the modules of a language model of transformers, without its blocks' own."""

    blocks: str  # the list of blocks; block i is `blocks.i`
    first: tuple[str, ...]  # before the blocks
    last: tuple[str, ...]  # behind the blocks, without the head


HEAD = "lm_head"  # of all models that transformers 5 has


def names_of(model: str, blocks: str, first: str, last: str) -> ModuleNames:
    """The names from those within the module `model`. first, last: several with spaces between."""
    return ModuleNames(
        f"{model}.{blocks}",
        tuple(f"{model}.{name}" for name in first.split()),
        tuple(f"{model}.{name}" for name in last.split()),
    )


USUAL = names_of("model", "layers", "embed_tokens rotary_emb", "norm")
BEFORE_LAYERS = names_of("model", "layers", "embed_tokens rotary_emb", "final_layernorm")
GPT = names_of("transformer", "h", "wte wpe drop", "ln_f")
# `model_type` of transformers -> the names of its modules
NAMES: Mapping[str, ModuleNames] = {
    **dict.fromkeys(
        (
            *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma"),
            *("gemma2", "gemma3_text", "phi3", "starcoder2", "stablelm", "cohere", "cohere2"),
            *("olmo", "olmo2", "granite", "glm", "glm4", "smollm3", "deepseek_v2", "deepseek_v3"),
            *("gpt_oss", "nemotron", "exaone4", "ernie4_5", "helium", "arcee", "apertus"),
        ),
        USUAL,
    ),
    "phi": BEFORE_LAYERS,
    **dict.fromkeys(("gpt2", "gpt_neo"), GPT),
    "gpt_bigcode": names_of("transformer", "h", "wte wpe drop bias", "ln_f"),
    **dict.fromkeys(("gptj", "codegen"), names_of("transformer", "h", "wte drop", "ln_f")),
    "gpt_neox": names_of(
        "gpt_neox", "layers", "embed_in emb_dropout rotary_emb", "final_layer_norm"
    ),
    "bloom": names_of("transformer", "h", "word_embeddings word_embeddings_layernorm", "ln_f"),
    "falcon": names_of("transformer", "h", "word_embeddings rotary_emb", "ln_f"),
    "mpt": names_of("transformer", "blocks", "wte emb_drop", "norm_f"),
    "opt": names_of(
        "model.decoder",
        "layers",
        "embed_tokens embed_positions project_in",
        "final_layer_norm project_out",
    ),
}


def device_map(
    plan: Plan, shape: Transformer | None = None, *, model: bool = True, kind: str = ""
) -> str:
    """The `device_map` of a plan of one replica, as JSON: name of a module -> number of a device.

    Every block has its own entry. A head that shares the embedding's weights is on the embedding's
    device, since transformers keeps tied weights on one device. kind: the model's `model_type`.
    """
    grid = Grid(plan, "device_map", shape, model=model)
    grid.refuse(
        len(plan.replicas) > 1,
        f"{len(plan.replicas)} replicas",
        "all replicas but one: one process has one model",
        "a plan of one pipeline, or --to accelerate",
    )
    check_one_device_each(grid)
    if kind not in NAMES:
        raise UnsupportedError(
            "names of the model's modules are not known",
            where=plan.name,
            got=kind or "a model of unknown type",
            expected=f"one of {', '.join(NAMES)}; --model names its config.json",
        )
    names, blocks = NAMES[kind], grid.blocks()
    number_of = device_numbers(plan)
    device_of_layer: dict[int, int] = {}
    for stage in plan.replicas[0].stages:
        (device,) = stage.all_devices
        for first, last in stage.layers:
            device_of_layer |= dict.fromkeys(range(first, last), number_of[device])
    entries = dict.fromkeys(names.first, device_of_layer[0])
    for block in range(blocks):
        entries[f"{names.blocks}.{block}"] = device_of_layer[block + 1]
    entries |= dict.fromkeys(names.last, device_of_layer[blocks + 1])
    tied = shape is not None and shape.tied
    entries[HEAD] = device_of_layer[0 if tied else blocks + 1]
    return to_json(entries)


def device_numbers(plan: Plan) -> dict[int, int]:
    """Device in use -> its number in the one machine that a device map reaches.

    It is the number within the node where all devices in use are of one node. Otherwise the plan's
    nodes stand for cards of several types in one machine, and their devices count in the plan's
    order.
    """
    in_use = sorted(plan.ranks)
    nodes = {plan.devices[device].node for device in in_use}
    if len(nodes) == 1:
        return {device: local_number(plan, device) for device in in_use}
    of_nodes = [d for d, device in enumerate(plan.devices) if device.node in nodes]
    return {device: of_nodes.index(device) for device in in_use}


def device_map_notes(plan: Plan) -> Iterator[str]:
    """A sentence on the numbers of a device map of several nodes."""
    nodes = {plan.devices[device].node for device in plan.ranks}
    if len(nodes) > 1:
        yield (
            f"the devices of {len(nodes)} nodes are numbered as those of one machine, in the "
            "plan's order: a device map reaches no other machine"
        )


def check_one_device_each(grid: Grid) -> None:
    """Refuse a plan with several devices in a stage."""
    for replica in grid.plan.replicas:
        for stage in replica.stages:
            grid.refuse(
                len(stage.all_devices) > 1,
                f"a stage on {len(stage.all_devices)} devices",
                "the division of its weights or of its samples",
            )
    grid.refuse(
        grid.plan.degrees is not None,
        grid.plan.degrees.text if grid.plan.degrees is not None else "",
        "what these degrees divide",
    )


def accelerate(plan: Plan, shape: Transformer | None = None, *, model: bool = True) -> str:
    """A configuration for `accelerate launch --config_file`: DDP for ZeRO 0 and 1, FSDP for ZeRO 2
    and 3. The comments before it list the samples of each rank, and the optimizer of ZeRO 1."""
    grid = Grid(plan, "accelerate", shape, model=model)
    grid.refuse(
        grid.pipeline > 1,
        f"pipelines (replicas[0] has {grid.pipeline} stages)",
        "the cut into stages",
        "a plan of replicas of one device, or --to device-map",
    )
    check_one_device_each(grid)
    grid.only("recomputation", ("none", "full"), "which activations are kept")
    for lacks, lost in unequal(plan):
        # unequal samples stand in the comments
        grid.refuse(not lacks.startswith(("micro-batches", "different numbers")), lacks, lost)
    document = accelerate_document(grid)
    lines = [
        *heading(plan, "accelerate", ACCELERATE),
        *comments(*accelerate_remarks(grid)),
        yaml.safe_dump(document, sort_keys=False, width=110),
    ]
    return "\n".join(lines)


def accelerate_document(grid: Grid) -> dict[str, Any]:
    """The configuration's keys."""
    plan = grid.plan
    ranks = len(plan.replicas)
    machines = len(grid.nodes())
    if not equal_nodes(grid):
        machines = 1
    precision = {"fp32": "no"}.get(plan.workload.precision, plan.workload.precision)
    document: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "NO" if ranks == 1 else "MULTI_GPU",
        "downcast_bf16": "no",
        "gpu_ids": "all",
        "machine_rank": 0,
        "main_process_ip": None,
        "main_process_port": PORT,
        "main_training_function": "main",
        "mixed_precision": precision,
        "num_machines": machines,
        "num_processes": ranks,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if plan.zero in FSDP_STRATEGIES and ranks > 1:
        document["distributed_type"] = "FSDP"
        document["fsdp_config"] = {
            "fsdp_activation_checkpointing": plan.recomputation == "full",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_backward_prefetch": "BACKWARD_PRE",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_forward_prefetch": False,
            "fsdp_offload_params": False,
            "fsdp_sharding_strategy": FSDP_STRATEGIES[plan.zero],
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_sync_module_states": True,
            "fsdp_use_orig_params": True,  # frozen and trained parameters are in one unit
        }
    return document


def equal_nodes(grid: Grid) -> bool:
    """Whether all nodes have equally many ranks."""
    return len({ranks for _, ranks in grid.nodes()}) == 1


def accelerate_remarks(grid: Grid) -> Iterator[str]:
    """Comments: the samples of every rank, and what the loop itself has to do."""
    plan = grid.plan
    for rank, replica in enumerate(plan.replicas):
        (device,) = replica.stages[0].all_devices
        place = plan.devices[device]
        sizes = chain.from_iterable(
            [batch.samples] * batch.count for batch in replica.micro_batches
        )
        yield (
            f"rank {rank}, {place.type} of node {place.node}: samples of each step {listed(sizes)}"
        )
    samples = {sum(b.count * b.samples for b in r.micro_batches) for r in plan.replicas}
    if len(samples) > 1:
        yield (
            "The ranks' samples differ: hetplan.runtime.sampler.PlannedBatches gives each rank its "
            "rows and weights; leave the loader out of accelerate's prepare."
        )
    if plan.zero == 1:
        yield (
            "ZeRO 1: torch.distributed.optim.ZeroRedundancyOptimizer(parameters, optimizer_class) "
            "shards the optimizer states."
        )
    if plan.recomputation == "full" and plan.zero not in FSDP_STRATEGIES:
        yield "The plan computes activations again: model.gradient_checkpointing_enable()."
    if not equal_nodes(grid):
        yield (
            "The nodes have different numbers of ranks, which accelerate cannot start: this file "
            "is for one machine with all cards. For several machines: --to torchrun."
        )
    elif len(grid.nodes()) > 1:
        yield (
            "On every machine set machine_rank, and main_process_ip to that of machine 0. For "
            "cards of several types in one machine set num_machines to 1."
        )
