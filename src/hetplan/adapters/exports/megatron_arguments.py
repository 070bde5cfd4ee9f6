"""Translates a plan into arguments of Megatron-LM. FlagScale takes them as they are, Megatron
Bridge under other names.

An argument has its name with underscores as its key. The value True stands for a flag without a
value. Arguments of the plan that would only repeat Megatron's defaults are left out; those of the
model (`megatron_model`) are written in any case.
"""

from collections.abc import Iterable
from typing import Any

from hetplan.adapters.exports.balancing import runs_text
from hetplan.adapters.exports.division import check_division
from hetplan.adapters.exports.grid import Grid
from hetplan.adapters.exports.megatron_model import (
    LLAMA3_SCALING,
    Settings,
    inexpressible,
    model_settings,
    vocabulary_multiple,
    yarn_settings,
)
from hetplan.plans.degrees import Degrees
from hetplan.plans.plan import Plan

BRIDGE_NAME = "Megatron Bridge"

Row = tuple[str, Any, object]
"""An argument, its value, and whether it is written (a truth value)."""

# The recomputation of a plan -> Megatron-LM's arguments, which are FlagScale's as well.
RECOMPUTATION: dict[str, dict[str, str | int]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}
# ZeRO level that needs Megatron's FSDP -> the sharding strategy of FSDP.
FSDP_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}


def written(rows: Iterable[Row]) -> Settings:
    """The arguments of the rows that are to be written."""
    return {argument: value for argument, value, is_written in rows if is_written}


def settings(grid: Grid) -> Settings:
    """All arguments of a plan: batch, stages, recomputation, degrees and the optimizer's sharding,
    and the model's figures where its shape is known."""
    plan = grid.plan
    degrees = plan.degrees or Degrees()
    tensor = grid.equal_width()
    check_options(grid, degrees)
    arguments: Settings = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": grid.pipeline,
        "micro_batch_size": grid.micro_batch,
        "global_batch_size": plan.workload.global_batch,
        "num_layers": grid.blocks(),
        "seq_length": plan.workload.sequence,
    }
    if plan.workload.precision != "fp32":
        arguments[plan.workload.precision] = True
    arguments |= stage_settings(grid)
    arguments |= recomputation_settings(plan.recomputation, degrees)
    arguments |= degree_settings(grid, degrees)
    check_division(grid, degrees)
    if grid.writes_model:
        arguments |= described_model(grid, tensor)
    return arguments


def described_model(grid: Grid, tensor: int) -> Settings:
    """The arguments of the model. Refuses a model that no arguments describe. tensor: the tensor
    degree."""
    shape = grid.shape
    assert shape is not None and shape.function is not None  # as `Grid.writes_model` says
    function = shape.function
    # Only Megatron Bridge's recipes of GPT-OSS have fields for YaRN.
    yarn = grid.framework == BRIDGE_NAME and function.kind == "gpt_oss"
    names = inexpressible(shape, yarn=yarn)
    grid.refuse(
        names,
        f"the model: {'; '.join(names)}",
        "the model; the arguments would train another one",
        "--without-model, which leaves the model's arguments to you, or --to torchrun",
    )
    # `grid.blocks` has refused a plan without a sequence.
    arguments = model_settings(shape, grid.plan.workload.sequence or 0, tensor)
    if yarn and function.rope is not None and function.rope.kind == "yarn":
        arguments |= yarn_settings(function.rope)
    return arguments


def remarks(grid: Grid) -> list[str]:
    """Sentences about what the arguments of the model do not say, or assume."""
    shape, tensor = grid.shape, grid.widths[0]
    if shape is None or not grid.writes_model or shape.function is None:
        return [] if grid.missing is None else [grid.missing]
    function, sentences = shape.function, []
    multiple = tensor * vocabulary_multiple(shape.vocabulary, tensor)
    padded = -(-shape.vocabulary // multiple) * multiple
    if padded > shape.vocabulary:
        sentences.append(f"The vocabulary of {shape.vocabulary} tokens is padded to {padded}.")
    if function.predictions:
        sentences.append(
            "Without multi-token prediction (num_nextn_predict_layers "
            f"{function.predictions}), as transformers builds the model."
        )
    rope = function.rope
    if rope is not None and rope.kind == "llama3" and rope.low_freq_factor is None:
        fixed = ", ".join(f"{name} {value:g}" for name, value in LLAMA3_SCALING.items())
        sentences.append(f"Assumed of the scaled rotary positions: {fixed}, as in Llama 3.1.")
    return sentences


def check_options(grid: Grid, degrees: Degrees) -> None:
    """Refuse degrees and overlaps that Megatron takes only together with others
    (`validate_args` of its `arguments.py`)."""
    plan, overlap = grid.plan, degrees.overlap
    needs = "(Megatron wants {})"
    grid.refuse(
        degrees.expert > 1 and grid.widths[0] > 1 and not degrees.sequence_parallel,
        "expert parallelism beside tensor ranks that are not sequence parallel",
        "the division of what lies between matrix products",
    )
    grid.refuse(
        "weights" in overlap and "gradients" not in overlap,
        f"overlap of weights without overlap of gradients {needs.format('overlap_grad_reduce')}",
        "what runs beside computation",
    )
    grid.refuse(
        "weights" in overlap and plan.zero == 0,
        f"overlap of weights without ZeRO {needs.format('use_distributed_optimizer')}",
        "what runs beside computation",
    )
    grid.refuse(
        "tensor" in overlap and not degrees.sequence_parallel,
        f"overlap of tensor ranks without sequence parallelism {needs.format('sequence_parallel')}",
        "what runs beside computation",
    )
    grid.refuse(
        degrees.offloaded > 0 and plan.zero == 0,
        "optimizer states on the host without ZeRO "
        f"{needs.format('use_precision_aware_optimizer, which wants use_distributed_optimizer')}",
        "which states are on the host",
    )
    grid.refuse(
        degrees.expert > 1 and plan.workload.precision == "fp16",
        "expert parallelism in fp16",
        "the precision of training",
    )


def recomputation_settings(recomputation: str, degrees: Degrees) -> Settings:
    """The arguments that say which layers, and which parts of a layer, the backward pass computes
    again."""
    arguments: Settings = dict(RECOMPUTATION[recomputation])
    if degrees.recompute_layers is not None:
        arguments["recompute_method"] = degrees.recompute_method or "uniform"
        arguments["recompute_num_layers"] = degrees.recompute_layers
    return arguments


def degree_settings(grid: Grid, degrees: Degrees) -> Settings:
    """The arguments of FP8 and FP4, of the degrees of parallelism, of overlap, and of the sharding
    and offloading of the optimizer's states."""
    stack = grid.plan.workload.stack
    experts_spread = degrees.expert > 1
    return written([
        ("fp8_format", "hybrid", stack == "fp8"),
        ("fp4_format", "e2m1", stack == "fp4"),
        ("context_parallel_size", degrees.context, degrees.context > 1),
        ("cp_comm_type", "a2a", degrees.exchange == "all-to-all"),
        ("expert_model_parallel_size", degrees.expert, experts_spread),
        ("expert_tensor_parallel_size", degrees.expert_tensor, experts_spread),
        ("sequence_parallel", True, degrees.sequence_parallel),
        *overlap_rows(grid, degrees),
        *optimizer_rows(grid.plan, degrees),
    ])  # fmt: skip


def overlap_rows(grid: Grid, degrees: Degrees) -> list[Row]:
    """The rows of messages and collectives that overlap with computation."""
    overlap = degrees.overlap
    # Megatron sends messages between model chunks beside computation unless it is told not to.
    # A plan without degrees says nothing about overlap.
    interleaved = grid.plan.degrees is not None and grid.chunks > 1
    return [
        ("tp_comm_overlap", True, "tensor" in overlap),
        ("overlap_grad_reduce", True, "gradients" in overlap),
        ("overlap_param_gather", True, "weights" in overlap),
        ("overlap_cpu_optimizer_d2h_h2d", True, "offload" in overlap),
        ("no_overlap_p2p_communication", True, interleaved and "messages" not in overlap),
    ]


def optimizer_rows(plan: Plan, degrees: Degrees) -> list[Row]:
    """The rows of sharded and offloaded optimizer states, and of fully sharded weights."""
    fsdp = plan.zero in FSDP_STRATEGIES
    hybrid = degrees.shard_groups > 1
    offload_fraction = float(f"{degrees.offloaded:.4g}")  # a share for people to read
    return [
        ("use_distributed_optimizer", True, plan.zero > 0),
        ("use_megatron_fsdp", True, fsdp),
        ("data_parallel_sharding_strategy", FSDP_STRATEGIES.get(plan.zero), fsdp),
        ("num_distributed_optimizer_instances", degrees.shard_groups, hybrid),
        ("outer_dp_sharding_strategy", "no_shard", hybrid),
        ("ckpt_format", "fsdp_dtensor", fsdp),
        ("optimizer_cpu_offload", True, degrees.offloaded > 0),
        # Without a fraction Megatron offloads all states.
        ("optimizer_offload_fraction", offload_fraction, degrees.offloaded > 0),
        ("use_precision_aware_optimizer", True, degrees.offloaded > 0),
    ]


def stage_settings(grid: Grid) -> Settings:
    """The shortest arguments that say how the blocks divide over the stages.

    Megatron's default is an even cut, which needs no argument. Where only the first and the last
    stage differ, their numbers of blocks are enough: Megatron divides the rest evenly over the
    other stages. Any other cut is written as a pipeline layout, unit by unit.
    """
    counts = grid.blocks_by_stage()
    if len(counts) == 1:
        return {}
    blocks_everywhere = all(counts)
    if blocks_everywhere and len(set(counts)) == 1:
        return written([("num_layers_per_virtual_pipeline_stage", counts[0], grid.chunks > 1)])
    first, *middle, last = counts
    # Two stages of different numbers have no `middle`, and get a layout.
    if blocks_everywhere and grid.chunks == 1 and len(set(middle)) == 1:
        return written([
            ("decoder_first_pipeline_num_layers", first, first != middle[0]),
            ("decoder_last_pipeline_num_layers", last, last != middle[0]),
        ])  # fmt: skip
    units = ["E", *["t"] * grid.blocks(), "L"]
    stages = [runs_text(units[begin:end]) for begin, end in grid.virtual_stages]
    layout = "|".join(stages)  # such as `Et*5|t*6|t*5L`
    return {"pipeline_model_parallel_layout": layout}


# Megatron's argument -> the fields of Megatron Bridge's ConfigContainer that it sets. An argument
# that is not listed here sets the field of the same name in the section `model`; one with no fields
# here is left out. A field that begins with ! takes the opposite truth value.
BRIDGE: dict[str, tuple[str, ...]] = {
    "num_experts": ("model.num_moe_experts",),
    "norm_epsilon": ("model.layernorm_epsilon",),
    "use_rope_scaling": ("model.rope_scaling",),
    "rotary_seq_len_interpolation_factor": ("model.seq_len_interpolation_factor",),
    "no_bias_gelu_fusion": (),
    "quick_geglu": (),
    "squared_relu": (),
    "fp8_format": ("model.fp8",),
    "fp4_format": ("model.fp4",),
    "swiglu": ("model.gated_linear_unit",),
    "disable_bias_linear": ("!model.add_bias_linear",),
    "untie_embeddings_and_output_weights": ("!model.share_embeddings_and_output_weights",),
    "group_query_attention": (),
    "max_position_embeddings": (),
    "seq_length": ("model.seq_length", "dataset.sequence_length"),
    "micro_batch_size": ("train.micro_batch_size",),
    "global_batch_size": ("train.global_batch_size",),
    "decoder_first_pipeline_num_layers": ("model.num_layers_in_first_pipeline_stage",),
    "decoder_last_pipeline_num_layers": ("model.num_layers_in_last_pipeline_stage",),
    "no_overlap_p2p_communication": ("!model.overlap_p2p_comm",),
    "tp_comm_overlap": ("comm_overlap.tp_comm_overlap",),
    "overlap_grad_reduce": ("ddp.overlap_grad_reduce",),
    "overlap_param_gather": ("ddp.overlap_param_gather",),
    "use_distributed_optimizer": (
        "ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer",
    ),
    "use_megatron_fsdp": ("ddp.use_megatron_fsdp", "dist.use_megatron_fsdp"),
    "data_parallel_sharding_strategy": ("ddp.data_parallel_sharding_strategy",),
    "num_distributed_optimizer_instances": ("ddp.num_distributed_optimizer_instances",),
    "outer_dp_sharding_strategy": ("ddp.outer_dp_sharding_strategy",),
    "ckpt_format": ("checkpoint.ckpt_format",),
    "optimizer_cpu_offload": ("optimizer.optimizer_cpu_offload",),
    "use_precision_aware_optimizer": ("optimizer.use_precision_aware_optimizer",),
    "optimizer_offload_fraction": ("optimizer.optimizer_offload_fraction",),
    "overlap_cpu_optimizer_d2h_h2d": ("optimizer.overlap_cpu_optimizer_d2h_h2d",),
}  # fmt: skip


def bridge_sections(grid: Grid) -> dict[str, Any]:
    """Sections of Megatron Bridge's configuration: section -> field -> value."""
    arguments = settings(grid)
    arguments.pop(grid.plan.workload.precision, None)  # the exporter sets `mixed_precision` instead
    # Megatron Bridge takes the number of model chunks, Megatron-LM the layers of each.
    if arguments.pop("num_layers_per_virtual_pipeline_stage", None) is not None:
        arguments["virtual_pipeline_model_parallel_size"] = grid.chunks
    sections: dict[str, Any] = {}
    for argument, value in arguments.items():
        for field in BRIDGE.get(argument, (f"model.{argument}",)):
            opposite = field.startswith("!")
            section, _, name = field.removeprefix("!").partition(".")
            entries = sections.setdefault(section, {})
            # YAML has no tuples.
            plain = list(value) if isinstance(value, tuple) else value
            entries[name] = not plain if opposite else plain
    return sections


# Arguments that only later versions of Megatron-LM have -> their defaults.
LATER = {"softmax_type": "vanilla", "glu_linear_offset": 0.0}


def command_line_arguments(arguments: Settings) -> Settings:
    """The arguments that a command line has to state.

    It leaves out those with the value False or None, and those of `LATER` with their default: there
    a missing flag says the same. Only a file that replaces the values of a recipe states them all.
    """
    stated = {}
    for name, value in arguments.items():
        is_off = value is None or value is False
        if not is_off and LATER.get(name) != value:
            stated[name] = value
    return stated


def command_line_value(value: Any) -> str:
    """The value of an argument on a command line. Megatron reads lists and pairs without spaces."""
    return str(value).replace(" ", "") if isinstance(value, list | tuple) else str(value)
