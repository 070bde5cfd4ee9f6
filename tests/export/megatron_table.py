"""Megatron-LM's arguments of a model: how its parser reads them, and which field they set.

Source: Megatron-LM core 0.16, `megatron/training/arguments.py` (`_add_network_size_args`,
`_add_moe_args`, `_add_mla_args`, `core_transformer_config_from_args`) and the fields of
megatron-core 0.16.1's `TransformerConfig` and `MLATransformerConfig`, from which the parser makes
the other arguments.
"""

from __future__ import annotations

import argparse
import re
from typing import Any, NamedTuple


def pair(text: str) -> tuple[int, ...]:
    """Megatron's `tuple_type`."""
    return tuple(int(i) for i in text.strip("()").split(","))


def pattern(text: str) -> int | list[int]:
    """Megatron's `moe_freq_type` and `no_rope_freq_type`: a number, or a list in which it allows no
    other characters."""
    if "[" not in text:
        return int(text)
    assert not re.search(r"[^,\d\[\]\(\)\+\*]", text), f"Invalid pattern: {text}"
    return [int(digit) for digit in text.strip("[]").split(",")]


class Argument(NamedTuple):
    """How an argument is read. kind None: a flag."""

    kind: Any
    default: Any
    field: str | None = None  # of the configuration; None: the argument's own name


FLAG = Argument(None, False)
ARGUMENTS: dict[str, Argument] = {
    "hidden_size": Argument(int, None),
    "ffn_hidden_size": Argument(int, None),
    "num_attention_heads": Argument(int, None),
    "kv_channels": Argument(int, None),
    "group_query_attention": FLAG,
    "num_query_groups": Argument(int, 1),
    "vocab_size": Argument(int, None),
    "make_vocab_size_divisible_by": Argument(int, 128),
    "untie_embeddings_and_output_weights": FLAG,
    "max_position_embeddings": Argument(int, None),
    "position_embedding_type": Argument(
        ("learned_absolute", "rope", "mrope", "relative", "none"), "learned_absolute"
    ),
    "rotary_base": Argument(int, 10000),
    "rotary_percent": Argument(float, 1.0),
    "rotary_interleaved": FLAG,
    "rotary_seq_len_interpolation_factor": Argument(int, None),
    "use_rope_scaling": FLAG,
    "rope_scaling_factor": Argument(float, 8.0),
    "no_rope_freq": Argument(pattern, None),
    "normalization": Argument(("LayerNorm", "RMSNorm"), "LayerNorm"),
    "norm_epsilon": Argument(float, 1e-5, "layernorm_epsilon"),
    "qk_layernorm": FLAG,
    "disable_bias_linear": FLAG,
    "add_qkv_bias": FLAG,
    "window_size": Argument(pair, None),
    "window_attn_skip_freq": Argument(pattern, None),
    "softmax_type": Argument(("learnable", "vanilla", "off-by-one"), "vanilla"),
    "attention_dropout": Argument(float, 0.1),
    "hidden_dropout": Argument(float, 0.1),
    "init_method_std": Argument(float, 0.02),
    "swiglu": Argument(None, False, "gated_linear_unit"),
    "quick_geglu": FLAG,
    "squared_relu": FLAG,
    "no_bias_gelu_fusion": FLAG,
    "glu_linear_offset": Argument(float, 0.0),
    "activation_func_clamp_value": Argument(float, None),
    "multi_latent_attention": FLAG,
    "q_lora_rank": Argument(int, None),
    "kv_lora_rank": Argument(int, 32),
    "qk_head_dim": Argument(int, 128),
    "qk_pos_emb_head_dim": Argument(int, 64),
    "v_head_dim": Argument(int, 128),
    "rope_type": Argument(("rope", "yarn"), None),
    "rotary_scaling_factor": Argument(float, 1.0),
    "mscale": Argument(float, 1.0),
    "mscale_all_dim": Argument(float, 0.0),
    "num_experts": Argument(int, None, "num_moe_experts"),
    "moe_token_dispatcher_type": Argument(("allgather", "alltoall", "flex"), "allgather"),
    "moe_router_topk": Argument(int, 2),
    "moe_ffn_hidden_size": Argument(int, None),
    "moe_shared_expert_intermediate_size": Argument(int, None),
    "moe_expert_capacity_factor": Argument(float, None),
    "moe_pad_expert_input_to_capacity": FLAG,
    "moe_layer_freq": Argument(pattern, 1),
    "moe_router_score_function": Argument(("softmax", "sigmoid"), "softmax"),
    "moe_router_pre_softmax": FLAG,
    "moe_router_topk_scaling_factor": Argument(float, None),
    "moe_router_num_groups": Argument(int, None),
    "moe_router_group_topk": Argument(int, None),
    "moe_router_enable_expert_bias": FLAG,
    "moe_router_dtype": Argument(("fp32", "fp64"), None),
    "moe_shared_expert_gate": FLAG,
}
# Arguments of the plan, which come first in a script.
PLAN = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size",
        "global_batch_size", "num_layers", "seq_length")  # fmt: skip


def parsed(words: list[str]) -> dict[str, Any]:
    """The words of a command line as Megatron's parser reads them; defaults where they say
    nothing. Unknown words end in SystemExit."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in PLAN:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--bf16", action="store_true")
    for name, argument in ARGUMENTS.items():
        flag = f"--{name.replace('_', '-')}"
        if argument.kind is None:
            parser.add_argument(flag, action="store_true")
        elif isinstance(argument.kind, tuple):
            parser.add_argument(flag, choices=argument.kind, default=argument.default)
        else:
            parser.add_argument(flag, type=argument.kind, default=argument.default)
    return vars(parser.parse_args(words))
