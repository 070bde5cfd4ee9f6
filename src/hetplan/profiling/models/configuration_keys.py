"""The keys of Hugging Face configurations: by model type, the sizes that each key gives.
`decoder_types` has further types.

Some keys have a default in `transformers` that is the size of one certain model; these keys are
required here. All other keys have the defaults of the configuration classes in `transformers`.
"""

from collections.abc import Callable
from types import NoneType
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, Field

from hetplan.errors import short_repr
from hetplan.profiling.models.zoo import BERT, LLAMA
from hetplan.schema import Count

Size = Annotated[int, Field(ge=1, le=10**7)]
CONTEXT = Annotated[int, Field(ge=1, le=10**40)]  # tokens; some files have 10^30 for no limit
Pattern = Annotated[str, Field(max_length=4000)]
Layers = Annotated[int, Field(ge=1, le=4000)]  # a chain has at most 4096 layers
# entries of lists with one for each block, or with numbers of blocks
Names = Annotated[list[str], Field(max_length=4000)]
Indices = Annotated[list[int], Field(max_length=4000)]


def one_value(value: Any) -> Any:
    """The value that all entries of a list have; any other value itself.

    A validator of pydantic: it raises ValueError where entries differ.
    """
    if not isinstance(value, list) or not value:
        return value
    if any(entry != value[0] for entry in value):
        raise ValueError("entries differ, expected one size for all blocks")
    return value[0]


def number_or(words: str, kind: type[Any]) -> Callable[[Any], Any]:
    """A validator of pydantic for whole numbers >= 1 and for values of class `kind` with at most
    4000 entries. words: their meaning, for messages."""

    def check(value: Any) -> Any:
        whole = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 10**7
        if not whole and not (isinstance(value, kind) and len(value) <= 4000):
            raise ValueError(f"is {short_repr(value)}, expected a number of blocks or {words}")
        return value

    return check


def nothing_for_auto(value: Any) -> Any:
    """None for the text `auto`, as some classes write a size that follows from others; any other
    value itself. A validator of pydantic."""
    return None if value == "auto" else value


# A size, or a list that has the same size for each block.
OneSize = Annotated[Size, BeforeValidator(one_value)]
SizeOrAuto = Annotated[Size | None, BeforeValidator(nothing_for_auto)]
# every how many blocks experts are, or a flag for each block
EveryOrFlags = Annotated[Any, AfterValidator(number_or("a list of 0 and 1", list))]
# every how many blocks attention reaches all keys, or such as LLLG
EveryOrLetters = Annotated[Any, AfterValidator(number_or("letters L and G", str))]


class Key(NamedTuple):
    """A key of a configuration."""

    # The fields of `Transformer` that it gives. `experts.count` is a field of the shape's experts.
    # Names that are no field, such as `context` (the longest sequence), are used by
    # `configurations`.
    fields: tuple[str, ...]
    type: Any  # type of the value, with its limits
    default: Any = ...  # the default in transformers; without one the key is required


def required(words: str, *fields: str, kind: Any = Size) -> Key:
    """A key without a default. words: its description, for messages."""
    return Key(fields, Annotated[kind, Field(description=words)])


def head_width(default: int) -> Key:
    """The width of a head, which the class of the model type does not derive from other sizes."""
    return Key(("head_dim",), Size | None, default)


VOCABULARY = required("number of tokens in the vocabulary", "vocabulary")
WIDTH = required("width of the hidden states", "hidden")
INNER = required("inner width of the feed-forward networks", "feed_forward")
DEPTH = required("number of blocks", "layers", kind=Layers)
HEADS = required("number of attention heads", "heads")
# The keys that Llama, Mistral and Mixtral share. A size of None follows from others
# (`configurations.fill_sizes`).
ROTARY = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "head_dim": Key(("head_dim",), Size | None, None),
    "tie_word_embeddings": Key(("tied",), bool, False),
}
# The number of learned positions is also the longest sequence.
POSITIONS = ("positions", "context")
# The keys that Qwen, Gemma, Phi, OLMo and later models share with Llama.
LATER = {
    **ROTARY,
    "num_key_value_heads": Key(("kv_heads",), Size | None, None),
    "max_position_embeddings": Key(("context",), CONTEXT, 32768),
}
# The kind of each block's mixer, such as full_attention; None: as the class of the type has it.
KINDS = Key(("kinds",), Names | None, None)
# Whether each block has a dense network or experts; None: other keys say so.
NETWORK_KINDS = Key(("mlp_kinds",), Names | None, None)
WINDOW = Key(("window",), Count | None, None)  # 0: as null, none
SHARED_EXPERTS = Key(("experts.shared_count",), Count | None, 0)
WINDOWED = {
    "sliding_window": WINDOW,
    "use_sliding_window": Key(("window_used",), bool, False),
    "max_window_layers": Key(("reaching_first",), Count, 28),
    "layer_types": KINDS,
}
QKV_BIAS = Key(("attention_bias", "output_bias"), bool, False)
EXPERTS = required("number of experts in a block", "experts.count")
VISITED = required("number of experts that a token visits", "experts.active")
EXPERT_WIDTH = required("inner width of one expert", "experts.width")
QWEN_EXPERTS = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": VISITED,
    "moe_intermediate_size": EXPERT_WIDTH,
    "decoder_sparse_step": Key(("experts.every",), Size, 1),
    "mlp_only_layers": Key(("dense_blocks",), Indices | None, None),
}
GEMMA = {
    **LATER,
    "head_dim": Key(("head_dim",), Size, 256),
    "num_key_value_heads": Key(("kv_heads",), Size, 4),
    "sliding_window": Key(("window",), Size | None, 4096),
    "attention_bias": QKV_BIAS,
    "tie_word_embeddings": Key(("tied",), bool, True),
}
DEEPSEEK = {
    **LATER,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": VISITED,
    "moe_intermediate_size": EXPERT_WIDTH,
    "n_shared_experts": Key(("experts.shared_count",), Count | None, None),
    "first_k_dense_replace": Key(("experts.dense",), Count, 0),
    "moe_layer_freq": Key(("experts.every",), EveryOrFlags, 1),
    "mlp_layer_types": NETWORK_KINDS,
    "attention_bias": QKV_BIAS,
    "q_lora_rank": Key(("latent.query",), Size | None, None),
    "kv_lora_rank": required("rank of the latent keys and values", "latent.keys"),
    "qk_rope_head_dim": required("rotated width of a key", "latent.rope"),
    "qk_nope_head_dim": required("width of a key that is not rotated", "latent.nope"),
    "v_head_dim": required("width of a head's values", "latent.value"),
}

LABELS = Key(("labels",), dict[str, str], {"0": "LABEL_0", "1": "LABEL_1"})
VISION = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "image_size": Key(("image",), Size, 224),
    "patch_size": Key(("patch",), Size, 16),
}
# CLIP's two encoders: the key that holds the configuration of each -> the keys of that one.
TOWERS: dict[str, dict[str, Key]] = {
    "vision_config": VISION | {"patch_size": Key(("patch",), Size, 32)},
    "text_config": {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": HEADS,
        "max_position_embeddings": Key(("positions",), Size, 77),
    },
}

# model type -> keys of its configuration.
KEYS: dict[str, dict[str, Key]] = {
    "gpt2": {
        "vocab_size": VOCABULARY,
        "n_embd": WIDTH,
        "n_layer": DEPTH,
        "n_head": HEADS,
        "n_positions": Key(POSITIONS, Size, 1024),
        "n_inner": Key(("feed_forward",), Size | None, None),
        "tie_word_embeddings": Key(("tied",), bool, True),
    },
    "llama": {
        **ROTARY,
        "num_key_value_heads": Key(("kv_heads",), Size | None, None),
        "max_position_embeddings": Key(("context",), CONTEXT, 2048),
        "attention_bias": Key(("attention_bias", "output_bias"), bool, False),
        "mlp_bias": Key(("feed_forward_bias",), bool, False),
    },
    "mistral": {
        **ROTARY,
        "num_key_value_heads": Key(("kv_heads",), Size | None, 8),
        "max_position_embeddings": Key(("context",), CONTEXT, 131072),
        # None: attention reaches all keys, as from version 0.2 on
        "sliding_window": Key(("window",), Size | None, 4096),
    },
    "mixtral": {
        **ROTARY,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": VISITED,
        "num_key_value_heads": Key(("kv_heads",), Size | None, 8),
        "max_position_embeddings": Key(("context",), CONTEXT, 131072),
        "sliding_window": Key(("window",), Size | None, None),
    },
    "opt": {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": DEPTH,
        "ffn_dim": INNER,
        "num_attention_heads": HEADS,
        "max_position_embeddings": Key(POSITIONS, Size, 2048),
        # post-norm models have no final norm
        "do_layer_norm_before": Key(("final_norm",), bool, True),
        "word_embed_proj_dim": Key(("embedding_width",), Size | None, None),
        "enable_bias": Key(("attention_bias", "output_bias", "feed_forward_bias"), bool, True),
        "tie_word_embeddings": Key(("tied",), bool, True),
    },
    "bert": {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
        "max_position_embeddings": Key(POSITIONS, Size, 512),
        "type_vocab_size": Key(("types",), Size, 2),
        "tie_word_embeddings": Key(("tied",), bool, True),
    },
    "qwen2": {**LATER, **WINDOWED},
    "qwen2_moe": {
        **LATER,
        **WINDOWED,
        "qkv_bias": Key(("attention_bias",), bool, True),
        **QWEN_EXPERTS,
        "shared_expert_intermediate_size": Key(("experts.shared",), Count, 5632),
    },
    "qwen3": {**LATER, **WINDOWED, "head_dim": head_width(128), "attention_bias": QKV_BIAS},
    "qwen3_moe": {**LATER, **WINDOWED, **QWEN_EXPERTS, "attention_bias": QKV_BIAS},
    "gemma2": {**GEMMA, "layer_types": KINDS},
    "gemma3_text": {
        **GEMMA,
        "layer_types": KINDS,
        "sliding_window_pattern": Key(("full_every",), Size, 6),
    },
    "phi3": {**LATER, "sliding_window": Key(("window",), Size | None, None)},
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "gpt_oss": {
        **LATER,
        "head_dim": head_width(64),
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": VISITED,
        "sliding_window": Key(("window",), Size | None, 128),
        "layer_types": KINDS,
        "attention_bias": Key(("attention_bias", "output_bias"), bool, True),
    },
    "llama4_text": {
        **LATER,
        "head_dim": head_width(128),
        "intermediate_size": required(
            "inner width of one expert", "experts.width", "experts.shared"
        ),
        "intermediate_size_mlp": required("inner width of a dense network", "feed_forward"),
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": VISITED,
        "interleave_moe_layer_step": Key(("experts.every",), Size, 1),
        "moe_layers": Key(("moe_blocks",), Indices | None, None),
        "layer_types": KINDS,
        "attention_bias": QKV_BIAS,
        "attention_chunk_size": Key(("window",), Size | None, 8192),
    },
    "olmo": {**LATER, "attention_bias": QKV_BIAS},
    "olmo2": {**LATER, "attention_bias": QKV_BIAS},
    "starcoder2": {
        **LATER,
        "sliding_window": Key(("window",), Size | None, None),
        "use_bias": Key(("attention_bias", "output_bias", "feed_forward_bias"), bool, True),
        "tie_word_embeddings": Key(("tied",), bool, True),
    },
    "falcon": {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": HEADS,
        "ffn_hidden_size": Key(("feed_forward",), Size | None, None),
        "num_kv_heads": Key(("kv_heads",), Size | None, None),
        "max_position_embeddings": Key(("context",), CONTEXT, 2048),
        "bias": Key(("attention_bias", "output_bias", "feed_forward_bias"), bool, False),
        "new_decoder_architecture": Key(("grouped",), bool, False),
        "multi_query": Key(("single",), bool, True),
        "parallel_attn": Key(("parallel",), bool, True),
        "tie_word_embeddings": Key(("tied",), bool, True),
    },
    "nemotron_h": {
        **LATER,
        "head_dim": head_width(128),
        # Files of NVIDIA's leave out the depth, which is the length of the pattern.
        "num_hidden_layers": Key(("layers",), Layers | None, None),
        "hybrid_override_pattern": required(
            "kind of each block, as M, *, - or E", "pattern", kind=Pattern | Names
        ),
        "mlp_bias": Key(("feed_forward_bias",), bool, False),
        "mamba_num_heads": Key(("mamba.heads",), Size, 128),
        "mamba_head_dim": Key(("mamba.head_dim",), Size, 64),
        "n_groups": Key(("mamba.groups",), Size, 8),
        "ssm_state_size": Key(("mamba.state",), Size, 128),
        "conv_kernel": Key(("mamba.kernel",), Size, 4),
        "chunk_size": Key(("mamba.chunk",), Size, 128),
        "n_routed_experts": Key(("experts.count",), Size, 8),
        "num_experts_per_tok": Key(("experts.active",), Size, 2),
        "moe_intermediate_size": Key(("experts.width",), Size, 7688),
        "moe_shared_expert_intermediate_size": Key(("experts.shared",), Count, 7688),
        "moe_latent_size": Key(("experts.latent",), Size | None, None),
    },
    "vit": VISION | {"id2label": LABELS},
    "t5": {
        "vocab_size": VOCABULARY,
        "d_model": WIDTH,
        "d_kv": required("width of one attention head", "head_dim"),
        "d_ff": INNER,
        "num_layers": DEPTH,
        "num_heads": HEADS,
        "num_decoder_layers": Key(("decoders",), Layers | None, None),
        "relative_attention_num_buckets": Key(("buckets",), Size, 32),
        "feed_forward_proj": Key(("activation",), str, "relu"),
        "tie_word_embeddings": Key(("tied",), bool, True),
    },
    "clip": {
        "projection_dim": Key(("width",), Size, 512),
        **{tower: required("encoder", tower, kind=dict[str, Any]) for tower in TOWERS},
    },
    # calculon's description of a model (Isaev et al. 2023) with a vocabulary, which calculon leaves
    # out. Its blocks are GPT's, but heads may be wider than hidden / heads.
    "calculon": {
        "vocab_size": VOCABULARY,
        "hidden": WIDTH,
        "feedforward": INNER,
        "seq_size": Key(
            POSITIONS, Annotated[Size, Field(description="number of tokens of a sample")]
        ),
        "attn_heads": HEADS,
        "attn_size": required("width of one attention head", "head_dim"),
        "num_blocks": DEPTH,
    },
}
# Megatron-LM's key, which transformers does not have.
CAPACITY = Key(("experts.capacity",), Annotated[float, Field(gt=0, le=1000)] | None, None)
CALCULON_KEYS = tuple(key for key in KEYS["calculon"] if key != "vocab_size")

IMAGES: dict[str, Any] = {"vocabulary": 0, "dropout": False}
# model type -> the fields of the shape that all its models share and that differ from GPT-2's.
ALWAYS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": LLAMA,
    "opt": {"position_offset": 2},
    "bert": BERT,
    "qwen2": {**LLAMA, "attention_bias": True},
    "qwen2_moe": {**LLAMA, "attention_bias": True, "shared_gate": True},
    "qwen3": {**LLAMA, "qk_norm": "head"},
    "qwen3_moe": {**LLAMA, "qk_norm": "head"},
    "gemma2": {**LLAMA, "block_norms": 4, "full_every": 2},
    "gemma3_text": {**LLAMA, "block_norms": 4, "qk_norm": "head"},
    "phi3": LLAMA,
    "deepseek_v2": LLAMA,
    "deepseek_v3": LLAMA,
    "gpt_oss": {
        **LLAMA,
        "attention_bias": True,
        "output_bias": True,
        "feed_forward_bias": True,
        "full_every": 2,
        "router_bias": True,
        "sinks": True,
    },
    "llama4_text": {**LLAMA, "full_every": 4},
    "olmo": {**LLAMA, "norm": "pixel"},  # its LayerNorm has no parameters
    "olmo2": {**LLAMA, "qk_norm": "all"},
    "starcoder2": {"rotary": True, "dropout": False},
    "falcon": {"rotary": True, "dropout": False},
    # squared ReLU
    "nemotron_h": {**LLAMA, "gated": False, "rotary": False, "bare_experts": True},
    "vit": IMAGES,
    "t5": {**LLAMA, "gated": False, "rotary": False, "dropout": True},
    "vision_config": IMAGES,
    "text_config": {"dropout": False},
}
# Sets of keys of one meaning: different classes, and versions 4 and 5 of transformers, have
# different names. Where a file has several names, the one of the type's own class counts.
SAME_MEANING = (
    ("vocab_size", "padded_vocab_size"),
    ("hidden_size", "n_embd", "n_embed", "d_model"),
    ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", "d_ff", "mlp_hidden_size"),
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    ("num_key_value_heads", "n_kv_heads", "num_query_groups"),
    ("tie_word_embeddings", "weight_tying", "tie_embeddings"),
    ("head_dim", "kv_channels", "attention_head_dim"),
    ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    ("max_position_embeddings", "model_max_length", "max_sequence_length"),
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k"),
    ("num_experts_per_tok", "top_k_experts"),
    ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size"),
    ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    ("shared_expert_intermediate_size", "shared_intermediate_size"),
    ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    ("hybrid_override_pattern", "layers_block_type", "block_types"),
    ("layer_types", "layers_block_type", "block_types", "attention_layers"),
    ("sliding_window_pattern", "_sliding_window_pattern"),
    ("sliding_window", "sliding_window_size", "window_size"),
    ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "rms_norm_eps"),
)


def takes_nothing(key: Key) -> bool:
    """Whether null is a value of the key."""
    kind = get_args(key.type)[0] if get_origin(key.type) is Annotated else key.type
    return NoneType in get_args(kind)


def names_of(key: str) -> list[str]:
    """The names that may stand for a key: its own, then those of the same meaning."""
    names = [key]
    for group in SAME_MEANING:
        if key in group:
            names += [name for name in group if name not in names]
    return names
