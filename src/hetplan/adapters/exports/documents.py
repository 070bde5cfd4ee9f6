"""Exports plans as configuration files: DeepSpeed's JSON, torchtitan's TOML, and the YAML of
FlagScale and Megatron Bridge.

Every exporter raises UnsupportedError where the plan uses something that its framework cannot
express.
"""

import json
from itertools import chain, groupby
from typing import Any

import yaml

from hetplan.adapters.exports.grid import Grid, heading
from hetplan.adapters.exports.megatron_arguments import (
    RECOMPUTATION,
    bridge_sections,
    remarks,
    settings,
    spoken,
    word,
)
from hetplan.adapters.exports.megatron_model import model_settings
from hetplan.files import to_json
from hetplan.plans.degrees import Degrees
from hetplan.plans.plan import Plan
from hetplan.profiling.models.transformer import Transformer
from hetplan.text import comments

TORCHTITAN = (
    "torchtitan's TOML job config: torchtitan/config/job_config.py at 6404b93 (September 2025)"
)
FLAGSCALE = "FlagScale, branch main-legacy at 0526731: its heterogeneous training guide"
BRIDGE_VERSION = "docs.nvidia.com/nemo/megatron-bridge, Using Recipes: overrides by YAML"
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved-1f1b": "Interleaved1F1B"}
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def deepspeed(plan: Plan, shape: Transformer | None = None, *, model: bool = True) -> str:
    """DeepSpeed's JSON: batch sizes, precision and ZeRO stage of a purely data-parallel plan.

    When DeepSpeed starts, it checks that `train_batch_size` is micro-batch x accumulation steps x
    processes. It therefore refuses to run on another number of devices than the plan's.
    """
    grid = Grid(plan, "DeepSpeed's JSON")
    degrees, narrow = plan.degrees or Degrees(), plan.workload.narrow
    grid.refuse(
        plan.degrees is not None or narrow,
        narrow or degrees.text,
        "what the model's code and DeepSpeed's would have to do",
    )
    for i, replica in enumerate(plan.replicas):
        grid.refuse(
            len(replica.stages) > 1,
            f"pipelines (replicas[{i}] has {len(replica.stages)} stages)",
            "the cut into stages, which DeepSpeed takes from the model's code (PipelineModule)",
        )
    grid.check()
    grid.refuse(
        grid.widths[0] > 1,  # the only stage's
        f"tensor parallelism of degree {grid.widths[0]}",
        "the tensor groups; every device would hold the whole model",
    )
    grid.only(
        "recomputation",
        ("none",),
        "that layers are computed again, which the model's code has to do; without it "
        "memory may not suffice",
    )
    precision = plan.workload.precision
    return to_json(
        {
            "train_batch_size": plan.workload.global_batch,
            "train_micro_batch_size_per_gpu": grid.micro_batch,
            "gradient_accumulation_steps": grid.micro_batches,
            "zero_optimization": {"stage": plan.zero},
            "fp16": {"enabled": precision == "fp16"},
            "bf16": {"enabled": precision == "bf16"},
        }
    )


def torchtitan(plan: Plan, shape: Transformer | None = None, *, model: bool = True) -> str:
    """torchtitan's TOML: degrees, micro-batch, the modules of each stage, schedule and sharding.

    torchtitan's device mesh numbers ranks with the pipeline outermost, then data, then tensor;
    torchrun numbers the nodes one after the other. ZeRO 0 becomes data_parallel_replicate_degree
    (DDP). ZeRO 3 becomes data_parallel_shard_degree (FSDP), and FSDP frees the gathered weights
    after the forward pass. torchtitan's tensor parallelism is sequence parallel too, which hetplan
    does not assume.
    """
    grid = Grid(plan, "torchtitan")
    degrees = plan.degrees or Degrees()
    grid.only("precision", tuple(DTYPES), "the precision of training")
    grid.only("zero", (0, 3), "which states are sharded (FSDP shards all of them)")
    grid.only(
        "recomputation",
        tuple(CHECKPOINTING),
        "which activations are kept (torchtitan's selective mode keeps others)",
    )
    grid.check()
    tensor = grid.equal_width()
    grid.refuse(
        degrees.recompute_layers
        or degrees.offloaded
        or degrees.exchange != "ring"
        or plan.workload.narrow,
        plan.workload.narrow or degrees.text,
        "which activations are kept, which states are on the host, or how context ranks meet",
    )
    devices_of_replica = grid.pipeline * tensor * degrees.context
    if devices_of_replica > 1:
        check_divided(grid, degrees.context)
    node_options = [
        f"--node-rank {node_rank}: node {node} of the plan, --nproc-per-node {ranks}"
        for node_rank, (node, ranks) in enumerate(grid.nodes())
    ]
    lines = [*heading(plan, "torchtitan", TORCHTITAN), *comments(*node_options)]
    if tensor > 1 and not degrees.sequence_parallel:
        lines += comments(
            "tensor parallel groups are sequence parallel too, which the prediction does not count"
        )
    for section, entries in titan_sections(grid, tensor, degrees).items():
        lines += ["", f"[{section}]"]
        # JSON's strings, numbers, booleans and lists are TOML's
        lines += [f"{key} = {json.dumps(value)}" for key, value in entries.items()]
    return "\n".join(lines) + "\n"


def check_divided(grid: Grid, context: int) -> None:
    """Refuse a plan without FSDP that needs data parallelism or mixed precision for replicas of
    several devices. torchtitan offers them for such replicas only with FSDP.

    context: the context-parallel degree.
    """
    plan = grid.plan
    # FSDP divides the weights over data and context ranks; over one rank there is none.
    sharded = plan.zero == 3 and grid.data * context > 1
    # Several replicas that are not sharded have ZeRO 0: `torchtitan` lets 0 and 3 pass.
    grid.refuse(
        grid.data > 1 and not sharded,
        f"ZeRO 0 on {grid.data} replicas beside a pipeline or tensor groups "
        "(its DDP stands alone; ZeRO 3 would do)",
        "the replicas: it ends with an error",
    )
    grid.refuse(
        plan.workload.precision != "fp32" and not sharded,
        f"{plan.workload.precision} on a pipeline or tensor groups without FSDP "
        "(fp32, or ZeRO 3 on several replicas, would do)",
        "the precision: mixed_precision_param would do nothing, and everything run in fp32",
    )


def titan_sections(grid: Grid, tensor: int, degrees: Degrees) -> dict[str, dict[str, Any]]:
    """The sections of torchtitan's configuration: section -> key -> value.

    tensor: the tensor degree. With a pipeline, `local_batch_size` counts the samples of all
    micro-batches of a step; without one, torchtitan accumulates micro-batches of that size.
    """
    plan = grid.plan
    sharded = plan.zero == 3
    local_micro_batches = grid.micro_batches if grid.pipeline > 1 else 1
    training = {
        "local_batch_size": grid.micro_batch * local_micro_batches,
        "global_batch_size": plan.workload.global_batch,
        "mixed_precision_param": DTYPES[plan.workload.precision],
    }
    if plan.workload.sequence is not None:
        training["seq_len"] = plan.workload.sequence
    replicate_degree, shard_degree = grid.data, 1
    if sharded:
        replicate_degree = degrees.shard_groups
        shard_degree = grid.data // degrees.shard_groups
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": replicate_degree,
        "data_parallel_shard_degree": shard_degree,
        "tensor_parallel_degree": tensor,
        "pipeline_parallel_degree": grid.pipeline,
    }
    if degrees.context > 1:
        parallelism["context_parallel_degree"] = degrees.context
    if degrees.expert > 1:
        parallelism["expert_parallel_degree"] = degrees.expert
        parallelism["expert_tensor_parallel_degree"] = degrees.expert_tensor
    if sharded:
        parallelism["fsdp_reshard_after_forward"] = "always"
    if grid.pipeline > 1:
        blocks = [[f"layers.{i}"] for i in range(grid.blocks())]
        modules_of_layer = [["tok_embeddings"], *blocks, ["norm", "output"]]
        modules_of_stage = [
            list(chain.from_iterable(modules_of_layer[first:last]))
            for first, last in grid.virtual_stages
        ]
        parallelism |= {
            "pipeline_parallel_schedule": SCHEDULES[plan.schedule],
            "pipeline_parallel_microbatch_size": grid.micro_batch,
            "module_fqns_per_model_part": modules_of_stage,
        }
    return {
        "training": training,
        "parallelism": parallelism,
        "activation_checkpoint": CHECKPOINTING[plan.recomputation],
    }


# The recomputation of a plan -> torchtitan's section `activation_checkpoint`.
CHECKPOINTING: dict[str, dict[str, str]] = {
    "none": {"mode": "none"},
    "operators": {"mode": "selective", "selective_ac_option": "op"},
    "full": {"mode": "full"},
}


def flagscale(plan: Plan, shape: Transformer | None = None, *, model: bool = True) -> str:
    """FlagScale's YAML, for training on Megatron-LM with or without process meshes.

    A plan with degrees becomes Megatron's plain arguments, see `plain_document`. The stages of any
    other plan become process meshes, see `flagscale_document`.
    """
    grid = Grid(plan, "FlagScale", shape, model=model)
    plain = plan.degrees is not None
    schedules = ("1f1b", "interleaved-1f1b") if plain else ("1f1b",)
    grid.only("schedule", schedules, "the model chunks of each stage, or the order of passes")
    grid.only("zero", (0, 1, 3) if plain else (0, 1), "sharded gradients and weights")
    grid.only("recomputation", tuple(RECOMPUTATION), "which activations are kept")
    grid.check()
    document = plain_document(grid) if plain else flagscale_document(grid, stage_types(grid))
    type_of_node = {device.node: device.type for device in plan.devices}
    nodes = [f"node {node} slots={ranks} type={type_of_node[node]}" for node, ranks in grid.nodes()]
    lines = [
        *heading(plan, "FlagScale", FLAGSCALE),
        *comments(f"hostfile, in this order: {', '.join(nodes)}", *remarks(grid)),
        yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=110),
    ]
    return "\n".join(lines)


def plain_document(grid: Grid) -> dict[str, Any]:
    """Megatron's arguments of a plan with degrees, in FlagScale's sections `system` and `model`.

    FlagScale passes an argument on from either section: the division only helps readers.
    """
    model_arguments = {"num_layers", "seq_length", "micro_batch_size", "global_batch_size"}
    if grid.shape is not None and grid.writes_model:
        model_arguments |= set(model_settings(grid.shape, 0))  # names alone: any sequence will do
    document: dict[str, Any] = {"system": {}, "model": {}}
    for name, value in spoken(settings(grid)).items():
        section = "model" if name in model_arguments else "system"
        # FlagScale writes a list as several words, where Megatron wants one.
        document[section][name] = word(value) if isinstance(value, list | tuple) else value
    return document


def bridge(plan: Plan, shape: Transformer | None = None, *, model: bool = True) -> str:
    """Overrides of a recipe of NeMo's Megatron Bridge, in the YAML that its `--config-file` reads.

    Megatron Bridge numbers ranks as Megatron-LM does.
    """
    grid = Grid(plan, "Megatron Bridge", shape, model=model)
    grid.only("schedule", ("1f1b", "interleaved-1f1b"), "the order of passes")
    grid.only("recomputation", tuple(RECOMPUTATION), "which activations are kept")
    grid.check()
    grid.nodes()  # refuses ranks of a node that are not consecutive
    document = bridge_sections(grid)
    if plan.workload.precision != "fp32":
        # The recipe `mixed_precision` replaces the model's fields of FP8 and FP4, so that its name
        # has to say them as well.
        narrow = {"fp8": "_with_fp8_delayed_scaling", "fp4": "_with_nvfp4"}
        narrow_suffix = narrow.get(plan.workload.stack, "")
        document["mixed_precision"] = f"{plan.workload.precision}{narrow_suffix}_mixed"
    lines = [
        *heading(plan, "Megatron Bridge", BRIDGE_VERSION),
        *comments(*remarks(grid), *activation_remark(grid)),
    ]
    return "\n".join([*lines, yaml.safe_dump(document, sort_keys=False, width=110)])


def activation_remark(grid: Grid) -> list[str]:
    """The sentence that names the activation of the model: overrides of a recipe hold no functions,
    so that the recipe has to bring it."""
    function = grid.shape.function if grid.shape is not None else None
    if function is None or not grid.writes_model:
        return []
    return [f"The recipe's model has to have the activation {function.activation}."]


def stage_types(grid: Grid) -> list[str]:
    """The device type of each stage. Refuses a plan with a stage over several device types."""
    type_by_stage = []
    for j, groups in enumerate(grid.devices):
        devices = chain.from_iterable(groups)
        types = sorted({grid.plan.devices[device].type for device in devices})
        grid.refuse(
            len(types) > 1,
            f"a stage over several device types (stage {j}: {', '.join(types)})",
            "which replica runs on which type",
        )
        type_by_stage += types  # a single one
    return type_by_stage


def flagscale_document(grid: Grid, types: list[str]) -> dict[str, Any]:
    """FlagScale's sections for heterogeneous training, of a plan without degrees.

    Consecutive stages of equal tensor degree on one device type are one process mesh, given by its
    tensor, context, expert, data and pipeline degree. Meshes, stages and ranks follow each other in
    the order of the pipeline. Refuses a plan with a stage that has no blocks, only the embedding or
    the head. types: the device type of each stage.
    """
    plan, blocks = grid.plan, grid.blocks_by_stage()
    grid.refuse(
        not all(blocks),
        f"a stage without blocks (stage {blocks.index(min(blocks))})",  # the first with 0
        "a stage of embedding or head alone",
    )
    mesh_types = []  # the device type of each mesh
    mesh_degrees = []  # tensor, context, expert, data and pipeline degree of each mesh in turn
    for (tensor, device_type), run in groupby(zip(grid.widths, types, strict=True)):
        stages = len(list(run))
        mesh_types.append(device_type)
        mesh_degrees += [tensor, 1, 1, grid.data, stages]
    precision = plan.workload.precision
    system: dict[str, Any] = {
        "tensor_model_parallel_size": grid.widths[0],
        "pipeline_model_parallel_size": grid.pipeline,
        "context_parallel_size": 1,
        "use_distributed_optimizer": plan.zero == 1,
        "precision": {} if precision == "fp32" else {precision: True},
        "hetero": {
            "enable_hetero": True,
            "hetero_pipeline_layer_split": blocks,
            "hetero_process_meshes": mesh_degrees,
            "hetero_device_types": mesh_types,
            "hetero_current_device_type": mesh_types[0],
            "standalone_embedding_stage": False,
        },
        **RECOMPUTATION[plan.recomputation],
    }
    return {
        "system": system,
        "model": {
            "num_layers": grid.blocks(),
            "seq_length": plan.workload.sequence,
            "micro_batch_size": grid.micro_batch,
            "global_batch_size": plan.workload.global_batch,
        },
    }
