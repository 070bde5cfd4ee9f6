"""A plan in the arguments of Megatron-LM (their names with underscores), which FlagScale takes as
they are and Megatron Bridge under other names.

A setting of True is a bare flag; what is Megatron's default is left out.
"""

from typing import Any

from hetplan.formulations.joint.plan import Degrees
from hetplan.profiling.transformer import Transformer
from hetplan.runtime.export.balancing import runs_text
from hetplan.runtime.export.grid import Grid

Settings = dict[str, Any]

# Of Megatron-LM, and so of FlagScale.
RECOMPUTATION: dict[str, dict[str, str | int]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}

# `Degrees.overlap` as Megatron has it.
OVERLAP = {
    "tensor": "tp_comm_overlap",
    "gradients": "overlap_grad_reduce",
    "weights": "overlap_param_gather",
    "offload": "overlap_cpu_optimizer_d2h_h2d",
}
# Of Megatron's FSDP, by ZeRO level.
SHARDED = {2: "optim_grads", 3: "optim_grads_params"}


def settings(grid: Grid) -> Settings:
    """Degrees, batch, stages, recomputation and the optimizer's sharding."""
    plan, degrees = grid.plan, grid.plan.degrees or Degrees()
    tensor, hybrid = grid.equal_width(), degrees.shard_groups > 1
    grid.refuse(
        degrees.expert > 1 and tensor > 1 and not degrees.sequence_parallel,
        "expert parallelism beside tensor ranks that are not sequence parallel",
        "the division of what lies between matrix products",
    )
    again = dict(RECOMPUTATION[plan.recomputation])
    if degrees.recompute_layers is not None:
        again["recompute_method"] = degrees.recompute_method or "uniform"
        again["recompute_num_layers"] = degrees.recompute_layers
    optional: Settings = {
        "fp8_format": "hybrid" if plan.workload.stack == "fp8" else None,
        "fp4_format": "e2m1" if plan.workload.stack == "fp4" else None,
        "context_parallel_size": degrees.context if degrees.context > 1 else None,
        "cp_comm_type": "a2a" if degrees.exchange == "all-to-all" else None,
        "expert_model_parallel_size": degrees.expert if degrees.expert > 1 else None,
        "expert_tensor_parallel_size": degrees.expert_tensor if degrees.expert > 1 else None,
        "sequence_parallel": degrees.sequence_parallel,
        **{flag: name in degrees.overlap for name, flag in OVERLAP.items()},
        "no_overlap_p2p_communication": plan.degrees is not None
        and grid.chunks > 1
        and "messages" not in degrees.overlap,
        "use_distributed_optimizer": plan.zero > 0,
        "use_megatron_fsdp": plan.zero in SHARDED,
        "data_parallel_sharding_strategy": SHARDED.get(plan.zero),
        "num_distributed_optimizer_instances": degrees.shard_groups if hybrid else None,
        "outer_dp_sharding_strategy": "no_shard" if hybrid else None,
        "ckpt_format": "fsdp_dtensor" if plan.zero in SHARDED else None,
        "optimizer_cpu_offload": degrees.offloaded > 0,
        "optimizer_offload_fraction": round(degrees.offloaded, 4) or None,
    }
    return {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": grid.pipeline,
        "micro_batch_size": grid.micro_batch,
        "global_batch_size": plan.workload.global_batch,
        "num_layers": grid.blocks(),
        "seq_length": plan.workload.sequence,
        **({plan.workload.precision: True} if plan.workload.precision != "fp32" else {}),
        **stage_settings(grid),
        **again,
        **stated(optional),
        **(model_settings(grid.shape, plan.workload.sequence or 0) if grid.shape else {}),
    }


def stated(values: Settings) -> Settings:
    """Those that are set."""
    return {k: v for k, v in values.items() if v is not None and v is not False}


def stage_settings(grid: Grid) -> Settings:
    """How the blocks divide: nothing where that is Megatron's own even cut, which divides what the
    first and the last stage leave evenly over the others."""
    counts = grid.blocks_by_stage()
    if len(counts) == 1:
        return {}
    if all(counts) and len(set(counts)) == 1:
        return {"num_layers_per_virtual_pipeline_stage": counts[0]} if grid.chunks > 1 else {}
    first, *middle, last = counts
    if all(counts) and grid.chunks == 1 and len(set(middle)) == 1:
        return {
            f"decoder_{end}_pipeline_num_layers": count
            for end, count in (("first", first), ("last", last))
            if count != middle[0]
        }
    kinds = ["E", *["t"] * grid.blocks(), "L"]
    stages = (runs_text(kinds[first:last]) for first, last in grid.virtual_stages)
    return {"pipeline_model_parallel_layout": "|".join(stages)}  # `Et*5|t*6|t*5L`


def model_settings(t: Transformer, sequence: int) -> Settings:
    """A text model's own figures. Megatron pads the vocabulary itself."""
    experts, latent = t.experts, t.latent
    values: Settings = {
        "hidden_size": t.hidden,
        "ffn_hidden_size": t.feed_forward,
        "num_attention_heads": t.heads,
        "kv_channels": t.head_dim,
        "group_query_attention": t.kv_heads < t.heads,
        "num_query_groups": t.kv_heads if t.kv_heads < t.heads else None,
        "vocab_size": t.vocabulary,
        "max_position_embeddings": max(sequence, t.positions),
        "position_embedding_type": "rope" if t.rotary else None if t.positions else "none",
        "normalization": "RMSNorm" if t.norm == "rms" else None,
        "swiglu": t.gated,
        "disable_bias_linear": not t.feed_forward_bias,
        "add_qkv_bias": t.attention_bias and not t.feed_forward_bias,
        "qk_layernorm": t.qk_norm != "none",
        "untie_embeddings_and_output_weights": not t.tied,
        "window_size": f"({t.window - 1},0)" if t.window else None,
        "window_attn_skip_freq": t.full_every or None,
    }
    values |= {} if t.dropout else {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    if latent:
        values |= {
            "multi_latent_attention": True,
            "q_lora_rank": latent.query,
            "kv_lora_rank": latent.keys,
            "qk_head_dim": latent.nope,
            "qk_pos_emb_head_dim": latent.rope,
            "v_head_dim": latent.value,
        }
    if experts:
        visited = [(i + 1) % experts.every == 0 and i >= experts.dense for i in range(t.layers)]
        values |= {
            "num_experts": experts.count,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_topk": experts.active,
            "moe_ffn_hidden_size": experts.width,
            "moe_shared_expert_intermediate_size": experts.shared or None,
            "moe_expert_capacity_factor": experts.capacity,
            "moe_pad_expert_input_to_capacity": experts.capacity is not None,
            "moe_layer_freq": None if all(visited) else str([int(one) for one in visited]),
        }
    return stated(values)


# Megatron's arguments -> the places in Megatron Bridge's ConfigContainer, where that is not `model`
# and the same name; those that begin with ! hold the opposite.
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
    """Sections of Bridge's configuration."""
    values, document = settings(grid), dict[str, Any]()
    values.pop(grid.plan.workload.precision, None)
    if values.pop("num_layers_per_virtual_pipeline_stage", None):
        values["virtual_pipeline_model_parallel_size"] = grid.chunks
    for name, value in values.items():
        for place in BRIDGE.get(name, (f"model.{name}",)):
            section, _, key = place.removeprefix("!").partition(".")
            document.setdefault(section, {})[key] = not value if place[0] == "!" else value
    return document
