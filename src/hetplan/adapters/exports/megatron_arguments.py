"""Translates a plan into arguments of Megatron-LM. FlagScale takes them as they are, Megatron
Bridge under other names.

An argument has its name with underscores as its key. The value True stands for a flag without a
value. Arguments that would only repeat Megatron's defaults are left out.
"""

from collections.abc import Iterable
from typing import Any

from hetplan.adapters.exports.balancing import runs_text
from hetplan.adapters.exports.grid import Grid
from hetplan.plans.degrees import Degrees
from hetplan.plans.plan import Plan
from hetplan.profiling.models.transformer import Experts, Latent, Transformer

Settings = dict[str, Any]
"""Argument -> its value."""
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
    grid.refuse(
        degrees.expert > 1 and tensor > 1 and not degrees.sequence_parallel,
        "expert parallelism beside tensor ranks that are not sequence parallel",
        "the division of what lies between matrix products",
    )
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
    if grid.shape is not None:
        # `grid.blocks` has refused a plan without a sequence.
        arguments |= model_settings(grid.shape, plan.workload.sequence or 0)
    return arguments


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
    offload_fraction = round(degrees.offloaded, 4)  # a share for people to read
    return [
        ("use_distributed_optimizer", True, plan.zero > 0),
        ("use_megatron_fsdp", True, fsdp),
        ("data_parallel_sharding_strategy", FSDP_STRATEGIES.get(plan.zero), fsdp),
        ("num_distributed_optimizer_instances", degrees.shard_groups, hybrid),
        ("outer_dp_sharding_strategy", "no_shard", hybrid),
        ("ckpt_format", "fsdp_dtensor", fsdp),
        ("optimizer_cpu_offload", True, degrees.offloaded > 0),
        ("optimizer_offload_fraction", offload_fraction, offload_fraction > 0),
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


def model_settings(shape: Transformer, sequence: int) -> Settings:
    """The arguments that describe a text model. Megatron pads the vocabulary itself.

    sequence: tokens of a sample, the number of positions of a model without learned positions.
    """
    rows = [*width_rows(shape), *position_rows(shape, sequence), *block_rows(shape)]
    if shape.latent is not None:
        rows += latent_rows(shape.latent)
    if shape.experts is not None:
        rows += expert_rows(shape.experts, shape.layers)
    return written(rows)


def width_rows(shape: Transformer) -> list[Row]:
    """The rows of widths, heads and the vocabulary."""
    grouped_queries = shape.kv_heads < shape.heads
    return [
        ("hidden_size", shape.hidden, True),
        ("ffn_hidden_size", shape.feed_forward, True),
        ("num_attention_heads", shape.heads, True),
        ("kv_channels", shape.head_dim, True),
        ("group_query_attention", True, grouped_queries),
        ("num_query_groups", shape.kv_heads, grouped_queries),
        ("vocab_size", shape.vocabulary, True),
    ]


def position_rows(shape: Transformer, sequence: int) -> list[Row]:
    """The rows of positions. Megatron's default is learned positions; `none` stands for a model
    without positions."""
    learned_positions = shape.positions > 0 and not shape.rotary
    return [
        ("max_position_embeddings", max(sequence, shape.positions), True),
        ("position_embedding_type", "rope" if shape.rotary else "none", not learned_positions),
    ]


def block_rows(shape: Transformer) -> list[Row]:
    """The rows of how blocks are built: norms, biases, windows and dropout."""
    return [
        ("normalization", "RMSNorm", shape.norm == "rms"),
        ("swiglu", True, shape.gated),
        ("disable_bias_linear", True, not shape.feed_forward_bias),
        # Without `disable_bias_linear`, the products of attention have biases already.
        ("add_qkv_bias", True, shape.attention_bias and not shape.feed_forward_bias),
        ("qk_layernorm", True, shape.qk_norm != "none"),
        ("untie_embeddings_and_output_weights", True, not shape.tied),
        # Megatron counts the tokens before and after a token, hetplan the token itself as well.
        ("window_size", f"({(shape.window or 0) - 1},0)", shape.window),
        ("window_attn_skip_freq", shape.full_every, shape.full_every),
        ("attention_dropout", 0.0, not shape.dropout),
        ("hidden_dropout", 0.0, not shape.dropout),
    ]


def latent_rows(latent: Latent) -> list[Row]:
    """The rows of latent attention."""
    return [
        ("multi_latent_attention", True, True),
        ("q_lora_rank", latent.query, latent.query is not None),
        ("kv_lora_rank", latent.keys, True),
        ("qk_head_dim", latent.nope, True),
        ("qk_pos_emb_head_dim", latent.rope, True),
        ("v_head_dim", latent.value, True),
    ]


def expert_rows(experts: Experts, layers: int) -> list[Row]:
    """The rows of a mixture of experts. layers: number of blocks."""
    has_experts = []  # [block] 1 with experts, 0 without, as Megatron's `moe_layer_freq` lists it
    for block in range(layers):
        in_turn = (block + 1) % experts.every == 0
        has_experts.append(int(in_turn and block >= experts.dense))
    limited = experts.capacity is not None
    return [
        ("num_experts", experts.count, True),
        ("moe_token_dispatcher_type", "alltoall", True),
        ("moe_router_topk", experts.active, True),
        ("moe_ffn_hidden_size", experts.width, experts.width is not None),
        # 0: there is no shared expert.
        ("moe_shared_expert_intermediate_size", experts.shared, experts.shared),
        ("moe_expert_capacity_factor", experts.capacity, limited),
        ("moe_pad_expert_input_to_capacity", True, limited),
        ("moe_layer_freq", str(has_experts), not all(has_experts)),
    ]


# Megatron's argument -> the fields of Megatron Bridge's ConfigContainer that it sets. An argument
# that is not listed here sets the field of the same name in the section `model`; one with no fields
# here is left out. A field that begins with ! takes the opposite truth value.
BRIDGE: dict[str, tuple[str, ...]] = {
    "num_experts": ("model.num_moe_experts",),
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
            entries[name] = not value if opposite else value
    return sections
