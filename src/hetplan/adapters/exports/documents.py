"""Exports plans as configuration files: DeepSpeed's JSON, and the YAML of FlagScale and Megatron
Bridge.

Every exporter raises UnsupportedError where the plan uses something that its framework cannot
express.
"""

from itertools import chain, groupby
from typing import Any

import yaml

from hetplan.adapters.exports.division import check_division
from hetplan.adapters.exports.grid import Grid, heading
from hetplan.adapters.exports.megatron_arguments import (
    BRIDGE_NAME,
    RECOMPUTATION,
    bridge_sections,
    command_line_arguments,
    command_line_value,
    remarks,
    settings,
)
from hetplan.adapters.exports.megatron_model import model_settings
from hetplan.files import to_json
from hetplan.plans.degrees import Degrees
from hetplan.plans.plan import Plan
from hetplan.profiling.models.transformer import Transformer
from hetplan.text import comments

FLAGSCALE = "FlagScale, branch main-legacy at 0526731: its heterogeneous training guide"
# Arguments of the model that Megatron-LM got after FlagScale's copy of it.
NEWER = (
    "moe_shared_expert_gate",
    "softmax_type",
    "quick_geglu",
    "glu_linear_offset",
    "activation_func_clamp_value",
)
BRIDGE_VERSION = "docs.nvidia.com/nemo/megatron-bridge, Using Recipes: overrides by YAML"


def deepspeed(plan: Plan, shape: Transformer | None = None, *, model: bool = True) -> str:
    """DeepSpeed's JSON: batch sizes, precision and ZeRO stage of a purely data-parallel plan.

    When DeepSpeed starts, it checks that `train_batch_size` is micro-batch x accumulation steps x
    processes. It therefore refuses to run on another number of devices than the plan's.
    """
    grid = Grid(plan, "DeepSpeed's JSON")
    degrees = plan.degrees or Degrees()
    narrow = plan.workload.narrow
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
    arguments = command_line_arguments(settings(grid))
    newer = [name for name in NEWER if name in arguments]
    grid.refuse(newer, f"the model: {', '.join(newer)}", "the model; its Megatron-LM is older")
    for name, value in arguments.items():
        section = "model" if name in model_arguments else "system"
        # FlagScale writes a list as several words, where Megatron wants one.
        document[section][name] = (
            command_line_value(value) if isinstance(value, list | tuple) else value
        )
    return document


def bridge(plan: Plan, shape: Transformer | None = None, *, model: bool = True) -> str:
    """Overrides of a recipe of NeMo's Megatron Bridge, in the YAML that its `--config-file` reads.

    Megatron Bridge numbers ranks as Megatron-LM does.
    """
    grid = Grid(plan, BRIDGE_NAME, shape, model=model)
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
    check_division(grid, Degrees())
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
