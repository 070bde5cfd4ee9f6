"""The keys of Hugging Face configurations: by model type, the sizes that each key gives.

Some keys have a default in `transformers` that is the size of one certain model; these keys are
required here. All other keys have the defaults of the configuration classes in `transformers`.
"""

from typing import Annotated, Any, NamedTuple

from pydantic import Field

from hetplan.profiling.models.zoo import BERT, LLAMA
from hetplan.schema import Count

Size = Annotated[int, Field(ge=1, le=10**7)]
Pattern = Annotated[str, Field(pattern=r"^[M*E-]+$", max_length=4000)]
Layers = Annotated[int, Field(ge=1, le=4000)]  # a chain has at most 4096 layers


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
    "max_position_embeddings": Key(("context",), Size, 32768),
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
    "n_shared_experts": Key(("experts.shared",), Size | None, None),
    "first_k_dense_replace": Key(("experts.dense",), Count, 0),
    "moe_layer_freq": Key(("experts.every",), Size, 1),
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
        "max_position_embeddings": Key(("context",), Size, 2048),
        "attention_bias": Key(("attention_bias", "output_bias"), bool, False),
        "mlp_bias": Key(("feed_forward_bias",), bool, False),
    },
    "mistral": {
        **ROTARY,
        "num_key_value_heads": Key(("kv_heads",), Size | None, 8),
        "max_position_embeddings": Key(("context",), Size, 131072),
        # None: attention reaches all keys, as from version 0.2 on
        "sliding_window": Key(("window",), Size | None, 4096),
    },
    "mixtral": {
        **ROTARY,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": VISITED,
        "num_key_value_heads": Key(("kv_heads",), Size | None, 8),
        "max_position_embeddings": Key(("context",), Size, 131072),
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
    "qwen2": LATER,
    "qwen2_moe": {
        **LATER,
        **QWEN_EXPERTS,
        "shared_expert_intermediate_size": Key(("experts.shared",), Count, 5632),
    },
    "qwen3": {**LATER, "head_dim": head_width(128), "attention_bias": QKV_BIAS},
    "qwen3_moe": {**LATER, **QWEN_EXPERTS, "attention_bias": QKV_BIAS},
    "gemma2": GEMMA,
    "gemma3_text": {**GEMMA, "sliding_window_pattern": Key(("full_every",), Size, 6)},
    "phi3": {**LATER, "sliding_window": Key(("window",), Size | None, None)},
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "gpt_oss": {
        **LATER,
        "head_dim": head_width(64),
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": VISITED,
        "sliding_window": Key(("window",), Size | None, 128),
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
        "max_position_embeddings": Key(("context",), Size, 2048),
        "bias": Key(("attention_bias", "output_bias", "feed_forward_bias"), bool, False),
        "new_decoder_architecture": Key(("grouped",), bool, False),
        "multi_query": Key(("single",), bool, True),
        "parallel_attn": Key(("parallel",), bool, True),
        "tie_word_embeddings": Key(("tied",), bool, True),
    },
    "nemotron_h": {
        **LATER,
        "head_dim": head_width(128),
        "hybrid_override_pattern": required(
            "kind of each block, as M, *, - or E", "pattern", kind=Pattern
        ),
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
        **{tower: Key((tower,), dict[str, Any], {}) for tower in TOWERS},
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
for keys in KEYS.values():
    if any("experts.count" in key.fields for key in keys.values()):
        keys["moe_expert_capacity_factor"] = CAPACITY
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
    "qwen2_moe": {**LLAMA, "attention_bias": True},
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
    },
    "llama4_text": {**LLAMA, "full_every": 4},
    "olmo": {**LLAMA, "norm": "pixel"},  # its LayerNorm has no parameters
    "olmo2": {**LLAMA, "qk_norm": "all"},
    "starcoder2": {"rotary": True, "dropout": False},
    "falcon": {"rotary": True, "dropout": False},
    "nemotron_h": {**LLAMA, "gated": False, "rotary": False},  # squared ReLU
    "vit": IMAGES,
    "t5": {**LLAMA, "gated": False, "rotary": False, "dropout": True},
    "vision_config": IMAGES,
    "text_config": {"dropout": False},
}
# type of a text model with an encoder of images -> type of the text model alone, which is planned
WRAPPERS = {"gemma3": "gemma3_text", "llama4": "llama4_text"}
