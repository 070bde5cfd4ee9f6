"""Translates a model into Megatron's arguments, and lists its features that no argument expresses.

Source: Megatron-LM core 0.16, `megatron/training/arguments.py`, and megatron-core 0.16.1,
`transformer/transformer_config.py`, `transformer/moe/moe_utils.py` (routing),
`models/common/embeddings/rotary_pos_embedding.py` (scaling of rotary positions) and
`fusions/fused_bias_gelu.py`.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from math import gcd
from typing import Any

from hetplan.profiling.models.function import Function, Rope, Router
from hetplan.profiling.models.transformer import Experts, Latent, Transformer

Settings = dict[str, Any]
"""Argument -> its value. True stands for a flag without a value. An argument whose value is False
or None is left out of a command line. It is listed nevertheless, since another value, such as a
recipe's, would change the model."""

# The sizes by which Llama 3.1 scales its rotary positions. Megatron has no other ones.
LLAMA3_SCALING = {"original": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# What Megatron's latent attention takes for YaRN and has no arguments for (MLATransformerConfig).
LATENT_YARN = {"original": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
# GELU by the hyperbolic tangent: Megatron's kernel that adds the bias computes it in this way.
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
# Activations of gated networks, and of others, that an argument or its absence expresses.
GATED = ("silu", "swish", "quick_gelu")
UNGATED = (*TANH_GELU, "gelu", "relu2")
# Which of (queries, keys and values; attention's output; feed-forward network) have biases, in the
# combinations that arguments express.
BIASES = ((True, True, True), (True, False, False), (False, False, False))


# The fields that `model_settings` writes, that `inexpressible` judges, or that change nothing of
# what the model computes. Every other field is a feature that Megatron's arguments do not have.
EXPRESSED: dict[type[Any], frozenset[str]] = {
    Transformer: frozenset({
        "vocabulary", "hidden", "layers", "heads", "feed_forward", "kv_heads", "head_dim",
        "positions", "gated", "norm", "attention_bias", "output_bias", "feed_forward_bias", "tied",
        "dropout", "attention", "window", "full_every", "latent", "qk_norm", "block_norms",
        "rotary", "embedding_norm", "embedding_width", "final_norm", "head", "experts", "pattern",
        "mamba", "function", "cut", "input_bytes", "mixers",
        "sinks",  # as `Function.sinks`
    }),
    Experts: frozenset({
        "count", "active", "every", "dense", "width", "shared", "latent", "early", "capacity",
        "blocks", "bare",
        "further",  # parameters that `Router` describes
    }),
    Latent: frozenset({"query", "keys", "rope", "nope", "value"}),
}  # fmt: skip


def model_settings(shape: Transformer, sequence: int, tensor: int = 1) -> Settings:
    """The arguments that describe a text model.

    sequence: tokens of a sample, the number of positions of a model without learned positions.
    tensor: the tensor degree, by a multiple of which Megatron pads the vocabulary.
    """
    function = known_function(shape)
    arguments: Settings = {
        **width_settings(shape, tensor),
        **position_settings(shape, function, sequence),
        **block_settings(shape, function),
        **activation_settings(shape, function),
        "multi_latent_attention": False,
        "num_experts": None,
    }
    if shape.latent is not None:
        arguments |= latent_settings(shape.latent, function.rope)
    if shape.experts is not None:
        arguments |= expert_settings(shape.experts, shape.layers)
        arguments |= router_settings(function.router or Router())
    return arguments


def known_function(shape: Transformer) -> Function:
    """The function of a shape; callers have checked that it is known."""
    assert shape.function is not None
    return shape.function


def width_settings(shape: Transformer, tensor: int) -> Settings:
    """The arguments of widths, heads and the vocabulary."""
    grouped_queries = shape.kv_heads < shape.heads
    return {
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.feed_forward,
        "num_attention_heads": shape.heads,
        "kv_channels": shape.head_dim,
        "group_query_attention": grouped_queries,
        "num_query_groups": shape.kv_heads if grouped_queries else None,
        "vocab_size": shape.vocabulary,
        "make_vocab_size_divisible_by": vocabulary_multiple(shape.vocabulary, tensor),
        "untie_embeddings_and_output_weights": not shape.tied,
    }


def vocabulary_multiple(vocabulary: int, tensor: int) -> int:
    """The argument `make_vocab_size_divisible_by`: Megatron pads the vocabulary to a multiple of
    this number times the tensor degree.

    It is the largest divisor of Megatron's default, 128, with which nothing is padded. Where the
    tensor degree does not divide the vocabulary it is 1, which pads the least.
    """
    per_rank, rest = divmod(vocabulary, tensor)
    return 1 if rest else gcd(per_rank, 128)


def position_settings(shape: Transformer, function: Function, sequence: int) -> Settings:
    """The arguments of positions. A model without any kind of positions has `none`."""
    rope = function.rope
    kind = "learned_absolute" if shape.positions > 0 else "none"
    arguments: Settings = {
        "max_position_embeddings": max(sequence, shape.positions),
        "position_embedding_type": kind if rope is None else "rope",
    }
    if rope is not None:
        linear = rope.kind == "linear"
        llama3 = rope.kind == "llama3"
        arguments |= {
            "rotary_base": whole(rope.theta),
            "rotary_percent": rope.partial,
            # Latent attention always turns neighbours together.
            "rotary_interleaved": rope.interleaved and shape.latent is None,
            "rotary_seq_len_interpolation_factor": whole(rope.factor) if linear else None,
            "use_rope_scaling": llama3,
            "rope_scaling_factor": rope.factor if llama3 else None,
            "no_rope_freq": per_block(rope.skipped),
        }
    return arguments


def whole(number: float) -> int | float:
    """The number without a fraction of zero, as arguments for whole numbers want it."""
    return int(number) if number == int(number) else number


def per_block(digits: str) -> list[int] | None:
    """[block] the digits of a choice for each block; None for an empty one."""
    return [int(digit) for digit in digits] or None


def block_settings(shape: Transformer, function: Function) -> Settings:
    """The arguments of how blocks are built: norms, biases, windows and dropout."""
    window = function.window
    # A model whose blocks all have the window needs no list of the blocks that have it.
    some_without_window = window is not None and "0" in function.windowed
    windowed = function.windowed if some_without_window else ""
    return {
        "normalization": "RMSNorm" if shape.norm == "rms" else "LayerNorm",
        "norm_epsilon": function.norm_epsilon,
        # Megatron norms the latent vectors of latent attention by the same argument.
        "qk_layernorm": shape.qk_norm == "head" or shape.latent is not None,
        "disable_bias_linear": not shape.feed_forward_bias,
        # Without `disable_bias_linear`, the products of attention have biases already.
        "add_qkv_bias": shape.attention_bias and not shape.feed_forward_bias,
        # Megatron counts the tokens before and after a token, hetplan the token itself as well.
        "window_size": None if window is None else (window - 1, 0),
        "window_attn_skip_freq": per_block(windowed),
        "softmax_type": "learnable" if function.sinks else "vanilla",
        "attention_dropout": function.attention_dropout,
        "hidden_dropout": function.hidden_dropout,
        "init_method_std": function.initializer_range,
    }


def activation_settings(shape: Transformer, function: Function) -> Settings:
    """The arguments of the activation in feed-forward networks."""
    quick = shape.gated and function.activation == "quick_gelu"
    return {
        "swiglu": shape.gated and not quick,
        "quick_geglu": quick,
        "squared_relu": function.activation == "relu2",
        # The fused kernel computes GELU by the hyperbolic tangent, not by the error function.
        "no_bias_gelu_fusion": function.activation == "gelu" and not shape.gated,
        "glu_linear_offset": function.linear_offset,
        "activation_func_clamp_value": function.clamp,
    }


def latent_settings(latent: Latent, rope: Rope | None) -> Settings:
    """The arguments of latent attention. Megatron's own default is YaRN."""
    yarn = rope is not None and rope.kind == "yarn"
    arguments: Settings = {
        "multi_latent_attention": True,
        "q_lora_rank": latent.query,
        "kv_lora_rank": latent.keys,
        "qk_head_dim": latent.nope,
        "qk_pos_emb_head_dim": latent.rope,
        "v_head_dim": latent.value,
        "rope_type": "yarn" if yarn else "rope",
        "rotary_scaling_factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    }
    if rope is not None and yarn:
        arguments |= {
            "rotary_scaling_factor": rope.factor,
            "mscale": 1.0 if rope.mscale is None else rope.mscale,
            "mscale_all_dim": rope.mscale_all_dim or 0.0,
        }
    return arguments


def expert_settings(experts: Experts, layers: int) -> Settings:
    """The arguments of a mixture of experts. layers: number of blocks."""
    # [block] 1 with experts, 0 without, as Megatron's `moe_layer_freq` lists it
    has_experts = [int(experts.in_block(block)) for block in range(layers)]
    return {
        "num_experts": experts.count,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_topk": experts.active,
        "moe_ffn_hidden_size": experts.width,
        "moe_shared_expert_intermediate_size": experts.shared or None,  # 0: no shared expert
        "moe_expert_capacity_factor": experts.capacity,
        "moe_pad_expert_input_to_capacity": experts.capacity is not None,
        "moe_layer_freq": 1 if all(has_experts) else has_experts,
    }


def router_settings(router: Router) -> Settings:
    """The arguments of the router."""
    return {
        "moe_router_score_function": router.scoring,
        # By default Megatron takes the softmax over the chosen experts alone: normalized weights.
        "moe_router_pre_softmax": router.scoring == "softmax" and not router.normalized,
        "moe_router_topk_scaling_factor": router.scaling if router.scaling != 1 else None,
        "moe_router_num_groups": router.groups or None,
        "moe_router_group_topk": router.group_topk or None,
        "moe_router_enable_expert_bias": router.expert_bias,
        "moe_router_dtype": "fp32" if router.float32 else None,
        "moe_shared_expert_gate": router.shared_gate,
    }


def yarn_settings(rope: Rope) -> Settings:
    """The fields of YaRN that Megatron Bridge's GPTOSSProvider has, and no argument sets."""
    return {
        "position_embedding_type": "yarn",
        "yarn_rotary_scaling_factor": rope.factor,
        "yarn_original_max_position_embeddings": rope.original,
        "yarn_beta_fast": 32.0 if rope.beta_fast is None else rope.beta_fast,
        "yarn_beta_slow": 1.0 if rope.beta_slow is None else rope.beta_slow,
        "yarn_mscale": rope.mscale,
        "yarn_mscale_all_dim": rope.mscale_all_dim,
        "yarn_correction_range_round_to_int": rope.truncate,
    }


def inexpressible(shape: Transformer, *, yarn: bool = False) -> list[str]:
    """The names of all features of the model that Megatron's arguments cannot express; empty where
    the arguments describe the whole model. yarn: whether `yarn_settings` are written as well."""
    function = known_function(shape)
    rope = function.rope
    if yarn and rope is not None and rope.kind == "yarn" and rope.attention_factor is None:
        # `yarn_settings` express the scaling, so that only the other features are left to judge
        rope = replace(rope, kind="default")
    names = [
        *other_fields(shape, EXPRESSED[Transformer]),
        *inexpressible_parts(shape, function),
        *inexpressible_activation(shape, function),
        *inexpressible_positions(shape, rope),
    ]
    if shape.latent is not None:
        names += other_fields(shape.latent, EXPRESSED[Latent])
    if shape.experts is not None:
        names += other_fields(shape.experts, EXPRESSED[Experts])
        names += inexpressible_routing(shape, shape.experts, function.router)
    if function.others:
        names.append(function.others)
    return names


def other_fields(part: Any, expressed: frozenset[str]) -> Iterator[str]:
    """Every field of a shape, or of a part of it, that Megatron's arguments do not have and that
    differs from its default. expressed: the names of all other fields."""
    for field in fields(part):
        value = getattr(part, field.name)
        if field.name not in expressed and value != field.default:
            yield f"{field.name} {value}"


def inexpressible_parts(shape: Transformer, function: Function) -> Iterator[str]:
    """The features of embedding, head, blocks, norms and biases for which there is no argument."""
    if shape.head != "lm":
        yield f"heads of {shape.head}"
    if shape.embedding_norm:
        yield "a norm behind the embedding"
    if shape.embedding_width is not None:
        yield f"an embedding of width {shape.embedding_width} with projections"
    if not shape.final_norm:
        yield "no norm before the head"
    if shape.pattern:
        yield "blocks of different kinds"
    if set(shape.mixers) - {"*", "w"}:  # windows stand in `Function.windowed`
        yield "blocks with other mixers than attention"
    if shape.experts is not None and shape.experts.bare and shape.feed_forward_bias:
        yield "experts without the biases of other networks"
    if shape.block_norms != 2:
        yield f"{shape.block_norms} norm(s) in a block"
    if function.norms != "before":
        places = {"behind": "behind the sublayers", "both": "before and behind the sublayers"}
        yield f"norms {places[function.norms]}"
    if shape.norm == "pixel":
        yield "norms without parameters"
    if shape.norm == "scale":
        yield "LayerNorm without biases"
    if shape.qk_norm == "all":
        yield "norms of queries and keys over all heads"
    biases = (shape.attention_bias, shape.output_bias, shape.feed_forward_bias)
    if biases not in BIASES:
        parts = ("queries, keys and values", "attention's output", "feed-forward networks")
        with_bias = [part for part, has_bias in zip(parts, biases, strict=True) if has_bias]
        yield f"biases of {' and '.join(with_bias)} alone"
    if shape.latent is not None and any(biases):
        yield "biases beside latent attention"


def inexpressible_activation(shape: Transformer, function: Function) -> Iterator[str]:
    """The features of the feed-forward network's activation for which there is no argument."""
    activation = function.activation
    known = GATED if shape.gated else UNGATED
    if activation not in known:
        yield f"{'gated ' if shape.gated else ''}activation {activation}"
    elif not shape.gated and activation in TANH_GELU and not shape.feed_forward_bias:
        yield f"activation {activation} without biases"
    if function.clamp is not None and activation != "quick_gelu":
        yield f"clamped activations ({function.clamp:g})"


def inexpressible_positions(shape: Transformer, rope: Rope | None) -> Iterator[str]:
    """The features of the rotary positions for which there is no argument."""
    if rope is None:
        return
    latent = shape.latent is not None
    scaling = f"rotary positions scaled by {rope.kind}"
    if rope.theta != int(rope.theta):
        yield f"rotary base {rope.theta!r}, no whole number"
    if latent and not rope.interleaved:
        yield "latent attention whose rotary positions turn halves"
    if latent and rope.skipped:
        yield "latent attention without positions in some blocks"
    if rope.kind in ("default", ""):
        return
    if rope.kind == "yarn" and latent:
        differing = unlike(rope, LATENT_YARN)
        if rope.attention_factor is not None:
            differing.append(f"attention_factor {rope.attention_factor:g}")
        if not rope.truncate:
            differing.append("truncate false")
        if differing:
            yield f"{scaling} with {', '.join(differing)}"
    elif rope.kind == "llama3" and not latent:
        differing = unlike(rope, LLAMA3_SCALING)
        if differing:
            yield f"{scaling} with {', '.join(differing)}"
    elif rope.kind != "linear" or latent:
        yield scaling
    elif rope.factor != int(rope.factor):
        yield f"{scaling} with factor {rope.factor:g}, no whole number"


def unlike(rope: Rope, fixed: dict[str, float]) -> list[str]:
    """The given fields of rotary positions that differ from fixed values, with their values."""
    return [
        f"{name} {getattr(rope, name):g}"
        for name, value in fixed.items()
        if getattr(rope, name) not in (None, value)
    ]


def inexpressible_routing(
    shape: Transformer, experts: Experts, router: Router | None
) -> Iterator[str]:
    """The features of the choice of experts for which there is no argument."""
    if experts.latent is not None:
        yield f"experts on {experts.latent} projected numbers"
    if router is None:
        yield "a router that hetplan does not know"
        return
    several = experts.active > 1
    if router.scoring == "sigmoid" and several and not router.normalized:
        yield "sigmoid weights of experts that are not normalized"
    if router.scoring == "sigmoid" and not several and router.normalized:
        yield "the weight 1 of one sigmoid expert"
    if router.scoring == "softmax" and not several and router.normalized:
        yield "the weight 1 of one softmax expert"
    if router.scoring == "softmax" and router.expert_bias:
        yield "a bias for balance beside softmax"
    # A group's score is the sum over its best active / group_topk experts.
    if router.groups and experts.active // router.group_topk != router.group_score_topk:
        yield f"groups scored by their best {router.group_score_topk} expert(s)"
    if router.linear_bias != shape.feed_forward_bias:
        yield "a bias of the router alone" if router.linear_bias else "experts' biases alone"
