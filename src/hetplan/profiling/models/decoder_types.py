"""Further decoders of Hugging Face `transformers`: the keys of their configurations, and the fields
that all models of a type share.

Fields that are no fields of `Transformer` state facts from which `derived_fields` computes some:

- `kinds`: the kind of each block's mixer, as transformers lists it; `mlp_kinds`: whether each block
  has a dense network or experts; `dense_blocks`, `moe_blocks`: the numbers of those that have.
- `experts.shared_count`: number of shared experts; `shared_gate`: whether a gate scales them.
- `bare_experts`: whether experts have no biases where other networks have.
- `router_bias`, `sub_norms`: small parameters of a router, and of norms within attention and
  network.
"""

from typing import Annotated, Any

from pydantic import Field

from hetplan.profiling.models.configuration_keys import (
    CONTEXT,
    DEEPSEEK,
    DEPTH,
    EXPERT_WIDTH,
    EXPERTS,
    GEMMA,
    HEADS,
    INNER,
    KINDS,
    LATER,
    NETWORK_KINDS,
    POSITIONS,
    QKV_BIAS,
    SHARED_EXPERTS,
    VISITED,
    VOCABULARY,
    WIDTH,
    WINDOW,
    EveryOrLetters,
    Indices,
    Key,
    Layers,
    Names,
    OneSize,
    Size,
    SizeOrAuto,
    required,
)
from hetplan.profiling.models.zoo import LLAMA
from hetplan.schema import Count

ALL_BIASES = ("attention_bias", "output_bias", "feed_forward_bias")
MLP_BIAS = {"mlp_bias": Key(("feed_forward_bias",), bool, False)}
# biases of queries, keys and values alone
INPUT_BIAS = {"attention_bias": Key(("attention_bias",), bool, False)}
BIAS = {"attention_bias": QKV_BIAS}
# every expert has the width of a dense network
MIXTURE = {
    **LATER,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": VISITED,
}
FINE_MIXTURE = {
    **LATER,
    "intermediate_size": Key(("feed_forward",), Size | None, None),
    "num_experts": EXPERTS,
    "num_experts_per_tok": VISITED,
    "moe_intermediate_size": EXPERT_WIDTH,
}
SHARED_WIDTH = Key(("experts.shared",), Count | None, 0)
# GPT's keys, with rotary or other positions that have no vectors
GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": DEPTH,
    "n_head": HEADS,
    "n_inner": Key(("feed_forward",), Size | None, None),
}
MAMBA_2 = {
    "mamba_n_heads": Key(("mamba.heads",), Size, 128),
    "mamba_d_head": Key(("mamba.head_dim",), SizeOrAuto, None),
    "mamba_n_groups": Key(("mamba.groups",), Size, 1),
    "mamba_d_state": Key(("mamba.state",), Size, 256),
    "mamba_d_conv": Key(("mamba.kernel",), Size, 4),
    "mamba_chunk_size": Key(("mamba.chunk",), Size, 256),
    "mamba_expand": Key(("mamba_expand",), Size, 2),
}
GATED_DELTA = {
    "linear_num_value_heads": Key(("delta.heads",), Size, 32),
    "linear_num_key_heads": Key(("delta.key_heads",), Size, 16),
    "linear_key_head_dim": Key(("delta.key_dim",), Size, 128),
    "linear_value_head_dim": Key(("delta.value_dim",), Size, 128),
    "linear_conv_kernel_dim": Key(("delta.kernel",), Size, 4),
}
SPARSE = {
    **DEEPSEEK,
    "index_n_heads": Key(("latent.index_heads",), Count, 64),
    "index_head_dim": Key(("latent.index_dim",), Count, 128),
    "index_topk": Key(("latent.index_keys",), Count, 2048),
    "indexer_types": Key(("indexers",), Names | None, None),
}
# DeepSeek-V3's experts without its latent attention
ROUTED = {
    **LATER,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": VISITED,
    "moe_intermediate_size": EXPERT_WIDTH,
    "n_shared_experts": SHARED_EXPERTS,
    "first_k_dense_replace": Key(("experts.dense",), Count, 0),
    "mlp_layer_types": NETWORK_KINDS,
}
LATENT = {
    key: DEEPSEEK[key] for key in DEEPSEEK if any("latent" in f for f in DEEPSEEK[key].fields)
}
HYBRID_GRANITE = {
    **MIXTURE,
    **BIAS,
    **MAMBA_2,
    "num_local_experts": Key(("experts.count",), Count, 0),
    "num_experts_per_tok": Key(("experts.active",), Count, 0),
    "shared_intermediate_size": required(
        "inner width of the network that every token visits", "granite_shared"
    ),
    "layer_types": KINDS,
}
LAYER_INPUTS = {
    "hidden_size_per_layer_input": Key(("layer_input",), Count | None, 256),
    "vocab_size_per_layer_input": Key(("layer_vocabulary",), Size, 262144),
    "num_kv_shared_layers": Key(("kv_borrowers",), Count, 0),
}
QWEN_NEXT = {
    **LATER,
    **GATED_DELTA,
    **BIAS,
    "layer_types": KINDS,
    "full_attention_interval": Key(("full_interval",), Size | None, None),
}
QWEN_NEXT_EXPERTS = {
    "intermediate_size": Key(("feed_forward",), Size | None, None),
    "num_experts": EXPERTS,
    "num_experts_per_tok": VISITED,
    "moe_intermediate_size": EXPERT_WIDTH,
    "shared_expert_intermediate_size": required(
        "inner width of the shared expert", "experts.shared", kind=Count
    ),
    "decoder_sparse_step": Key(("experts.every",), Size, 1),
    "mlp_only_layers": Key(("dense_blocks",), Indices | None, None),
}

# model type -> keys of its configuration
DECODER_KEYS: dict[str, dict[str, Key]] = {
    "afmoe": {
        **FINE_MIXTURE,
        "num_shared_experts": SHARED_EXPERTS,
        "num_dense_layers": Key(("experts.dense",), Count, 1),
        "layer_types": KINDS,
        "sliding_window": WINDOW,
        "global_attn_every_n_layers": Key(("full_every",), Count, 4),
    },
    "apertus": {**LATER, **BIAS},
    "arcee": {**LATER, **BIAS, **MLP_BIAS},
    "aria_text": {
        **LATER,
        **BIAS,
        **MLP_BIAS,
        "intermediate_size": required("inner width of one expert", "feed_forward", "experts.width"),
        "moe_num_experts": EXPERTS,
        "moe_topk": VISITED,
        "moe_num_shared_experts": SHARED_EXPERTS,
    },
    "bamba": {
        **LATER,
        **MAMBA_2,
        **BIAS,
        **MLP_BIAS,
        "attn_layer_indices": Key(("attention_blocks",), Indices | None, None),
        "layer_types": KINDS,
    },
    "beam": {
        **FINE_MIXTURE,
        **BIAS,
        "layer_types": KINDS,
        "mlp_layer_types": NETWORK_KINDS,
        "sliding_window": WINDOW,
    },
    "biogpt": {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
        "max_position_embeddings": Key(POSITIONS, Size, 1024),
        "tie_word_embeddings": Key(("tied",), bool, True),
    },
    "bitnet": {**LATER, **BIAS, "tie_word_embeddings": Key(("tied",), bool, False)},
    "bloom": {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "n_layer": DEPTH,
        "n_head": HEADS,
        "tie_word_embeddings": Key(("tied",), bool, True),
    },
    "codegen": {
        **GPT,
        "n_positions": Key(("context",), CONTEXT, 2048),
        "tie_word_embeddings": Key(("tied",), bool, False),
    },
    "cohere": {**LATER, **BIAS, "use_qk_norm": Key(("wide_qk_norm",), bool, False)},
    "cohere2": {
        **LATER,
        **BIAS,
        "layer_types": KINDS,
        "sliding_window": WINDOW,
        "sliding_window_pattern": Key(("full_every",), Count, 4),
    },
    "cwm": {**LATER, "layer_types": KINDS, "sliding_window": WINDOW},
    "deepseek_v32": SPARSE,
    "dots1": {**ROUTED, **BIAS, "layer_types": KINDS, "sliding_window": WINDOW},
    "ernie4_5": {**LATER, "use_bias": Key(ALL_BIASES, bool, False)},
    "ernie4_5_moe": {
        **LATER,
        "use_bias": Key((*ALL_BIASES, "head_bias"), bool, False),
        "moe_num_experts": EXPERTS,
        "moe_k": VISITED,
        "moe_intermediate_size": EXPERT_WIDTH,
        "moe_num_shared_experts": SHARED_EXPERTS,
        "moe_layer_start_index": Key(("moe_from",), Count, 1),
        "moe_layer_end_index": Key(("moe_to",), int | None, None),
        "moe_layer_interval": Key(("experts.every",), Size, 1),
    },
    "exaone4": {
        **LATER,
        "layer_types": KINDS,
        "sliding_window": WINDOW,
        "sliding_window_pattern": Key(("window_pattern",), EveryOrLetters | None, 4),
    },
    "exaone_moe": {
        **FINE_MIXTURE,
        "num_shared_experts": SHARED_EXPERTS,
        "mlp_layer_types": NETWORK_KINDS,
        "is_moe_layer": Key(("moe_flags",), list[bool] | None, None),
        "first_k_dense_replace": Key(("experts.dense",), Count, 1),
        "layer_types": KINDS,
        "sliding_window": WINDOW,
        "sliding_window_pattern": Key(("window_pattern",), EveryOrLetters | None, 4),
    },
    "flex_olmo": {**LATER, **BIAS, "num_experts": EXPERTS, "num_experts_per_tok": VISITED},
    "gemma": {**GEMMA, "sliding_window": Key(("window",), Size | None, None)},
    "gemma3n_text": {
        **GEMMA,
        **LAYER_INPUTS,
        "layer_types": KINDS,
        "intermediate_size": required(
            "inner width of the feed-forward networks", "feed_forward", kind=OneSize
        ),
        "altup_num_inputs": Key(("streams",), Size, 4),
        "laurel_rank": Key(("laurel",), Size, 64),
    },
    "gemma4_text": {
        **GEMMA,
        **LAYER_INPUTS,
        "layer_types": KINDS,
        "num_global_key_value_heads": Key(("reaching.kv_heads",), Size | None, None),
        "global_head_dim": Key(("reaching.head_dim",), Size | None, None),
        "per_layer_config": Key(("per_layer",), dict[str, dict[str, int]] | None, None),
        "attention_k_eq_v": Key(("reaching.shared",), bool, False),
        "use_double_wide_mlp": Key(("double_wide",), bool, False),
        "enable_moe_block": Key(("has_experts",), bool, False),
        "num_experts": Key(("experts.count",), Count | None, None),
        "top_k_experts": Key(("experts.active",), Count | None, None),
        "moe_intermediate_size": Key(("experts.width",), Count | None, None),
    },
    "glm": {**LATER, **INPUT_BIAS},
    "glm4": {**LATER, **INPUT_BIAS},
    "glm4_moe": {**ROUTED, **INPUT_BIAS, "use_qk_norm": Key(("head_qk_norm",), bool, False)},
    "glm4_moe_lite": {
        **ROUTED,
        **BIAS,
        **LATENT,
        "first_k_dense_replace": Key(("experts.dense",), Count, 1),
    },
    "glm_moe_dsa": SPARSE,
    "gpt_bigcode": {
        **GPT,
        "n_positions": Key(POSITIONS, Size, 1024),
        "multi_query": Key(("single",), bool, True),
        "tie_word_embeddings": Key(("tied",), bool, True),
    },
    "gpt_neo": {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_layers": DEPTH,
        "num_heads": HEADS,
        "intermediate_size": Key(("feed_forward",), Size | None, None),
        "max_position_embeddings": Key(POSITIONS, Size, 2048),
        "window_size": WINDOW,
        "attention_layers": KINDS,
        "tie_word_embeddings": Key(("tied",), bool, True),
    },
    "gpt_neox": {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
        "max_position_embeddings": Key(("context",), CONTEXT, 2048),
        "attention_bias": Key(("attention_bias", "output_bias"), bool, True),
        "tie_word_embeddings": Key(("tied",), bool, False),
    },
    "gptj": {
        **GPT,
        "n_positions": Key(("context",), CONTEXT, 2048),
        "tie_word_embeddings": Key(("tied",), bool, False),
    },
    "granite": {**LATER, **BIAS, **MLP_BIAS},
    "granite_swa": {
        **LATER,
        **BIAS,
        **MLP_BIAS,
        "layer_types": KINDS,
        "sliding_window": WINDOW,
    },
    "granitemoe": {**MIXTURE, **BIAS},
    "granitemoe_swa": {
        **MIXTURE,
        **BIAS,
        "shared_intermediate_size": SHARED_WIDTH,
        "layer_types": KINDS,
        "sliding_window": WINDOW,
    },
    "granitemoeshared": {**MIXTURE, **BIAS, "shared_intermediate_size": SHARED_WIDTH},
    "granitemoehybrid": HYBRID_GRANITE,
    "helium": {**LATER, **INPUT_BIAS, **MLP_BIAS},
    "hunyuan_v1_dense": {**LATER, **BIAS},
    "hunyuan_v1_moe": {
        **LATER,
        **BIAS,
        "num_experts": required("number of experts in a block", "experts.count", kind=OneSize),
        "moe_topk": required(
            "number of experts that a token visits", "experts.active", kind=OneSize
        ),
        "moe_intermediate_size": Key(("experts.width",), OneSize | None, None),
        "num_shared_expert": Key(("experts.shared_count",), OneSize, 1),
    },
    "hy_v3": {
        **FINE_MIXTURE,
        **BIAS,
        **MLP_BIAS,
        "num_shared_experts": SHARED_EXPERTS,
        "mlp_layer_types": NETWORK_KINDS,
        "first_k_dense_replace": Key(("experts.dense",), Count, 1),
    },
    "hyperclovax": {**LATER, **BIAS, **MLP_BIAS, "use_post_norm": Key(("post_norms",), bool, True)},
    "jais2": {
        **LATER,
        "attention_bias": Key(("attention_bias", "output_bias"), bool, True),
        "mlp_bias": Key(("feed_forward_bias",), bool, True),
    },
    "kolibri1": {
        **FINE_MIXTURE,
        **BIAS,
        "shared_expert_intermediate_size": SHARED_WIDTH,
        "layer_types": KINDS,
        "sliding_window": WINDOW,
    },
    "laguna": {
        **FINE_MIXTURE,
        **BIAS,
        "shared_expert_intermediate_size": SHARED_WIDTH,
        "mlp_layer_types": NETWORK_KINDS,
        "layer_types": KINDS,
        "sliding_window": WINDOW,
        "num_attention_heads_per_layer": Key(("heads_by_block",), Indices | None, None),
    },
    "mellum": {
        **FINE_MIXTURE,
        **BIAS,
        "mlp_layer_types": NETWORK_KINDS,
        "layer_types": KINDS,
        "sliding_window": WINDOW,
    },
    "minicpm3": {**LATER, **BIAS, **LATENT},
    "minimax_m2": MIXTURE,
    "ministral": {**LATER, "layer_types": KINDS, "sliding_window": WINDOW},
    "ministral3": {**LATER, "sliding_window": WINDOW},
    "mpt": {
        "vocab_size": VOCABULARY,
        "d_model": WIDTH,
        "n_layers": DEPTH,
        "n_heads": HEADS,
        "expansion_ratio": Key(("expansion",), Size, 4),
        "max_seq_len": Key(("context",), CONTEXT, 2048),
        "tie_word_embeddings": Key(("tied",), bool, True),
    },
    "nanochat": {**LATER, **BIAS},
    "nemotron": {**LATER, **BIAS, **MLP_BIAS},
    "olmo3": {**LATER, **BIAS, "layer_types": KINDS, "sliding_window": WINDOW},
    "olmo_hybrid": {**LATER, **BIAS, **GATED_DELTA, "layer_types": KINDS},
    "olmoe": {**LATER, **BIAS, "num_experts": EXPERTS, "num_experts_per_tok": VISITED},
    "openai-gpt": {
        "vocab_size": VOCABULARY,
        "n_embd": WIDTH,
        "n_layer": DEPTH,
        "n_head": HEADS,
        "n_positions": Key(POSITIONS, Size, 512),
        "tie_word_embeddings": Key(("tied",), bool, True),
    },
    "persimmon": {**LATER, "qk_layernorm": Key(("head_qk_norm",), bool, True)},
    "phi": {**LATER, "qk_layernorm": Key(("head_qk_norm",), bool, False)},
    "orion": {**LATER, **BIAS},
    # Phi as Microsoft's own code has it, with GPT's keys
    "phi-msft": {
        **GPT,
        "n_head_kv": Key(("kv_heads",), Size | None, None),
        "n_positions": Key(("context",), CONTEXT, 2048),
        "tie_word_embeddings": Key(("tied",), bool, False),
    },
    "phi4_multimodal": {**LATER, "sliding_window": WINDOW},
    "phimoe": {
        **MIXTURE,
        **BIAS,
        "lm_head_bias": Key(("head_bias",), bool, False),
        "sliding_window": WINDOW,
    },
    # Qwen of 2023, whose intermediate_size counts both matrices before the activation
    "qwen": {**LATER, "intermediate_size": required("width of both gated halves", "both_halves")},
    "qwen3_next": {**QWEN_NEXT, **QWEN_NEXT_EXPERTS},
    "qwen3_5_text": QWEN_NEXT,
    "qwen3_5_moe_text": {**QWEN_NEXT, **QWEN_NEXT_EXPERTS},
    "seed_oss": {
        **LATER,
        **INPUT_BIAS,
        "attention_out_bias": Key(("output_bias",), bool, False),
        **MLP_BIAS,
    },
    "smollm3": {**LATER, **BIAS, **MLP_BIAS, "layer_types": KINDS, "sliding_window": WINDOW},
    "solar_open": {
        **ROUTED,
        **INPUT_BIAS,
        "intermediate_size": Key(("feed_forward",), Size | None, None),
        "use_qk_norm": Key(("head_qk_norm",), bool, False),
    },
    "stablelm": {
        **LATER,
        "use_qkv_bias": Key(("attention_bias",), bool, False),
        "qk_layernorm": Key(("wide_qk_norm",), bool, False),
        "use_parallel_residual": Key(("parallel_residual",), bool, False),
    },
    "vaultgemma": {**GEMMA, "layer_types": KINDS},
    "xglm": {
        "vocab_size": VOCABULARY,
        "d_model": WIDTH,
        "num_layers": Key(("layers",), Annotated[Layers, Field(description="number of blocks")]),
        "attention_heads": HEADS,
        "ffn_dim": INNER,
        "max_position_embeddings": Key(("context",), CONTEXT, 2048),
        "tie_word_embeddings": Key(("tied",), bool, True),
    },
    "youtu": {**LATER, **BIAS, **MLP_BIAS, **LATENT},
}
# Types that transformers does not have, with the keys and blocks of Llama
DECODER_KEYS |= {kind: {**LATER, **BIAS, **MLP_BIAS} for kind in ("baichuan", "exaone")}
DECODER_KEYS["gemma4_unified_text"] = DECODER_KEYS["gemma4_text"] | {
    key: Key(entry.fields, entry.type, 0)
    for key, entry in LAYER_INPUTS.items()
    if key != "vocab_size_per_layer_input"
}

# GPT's block with LayerNorm, biases and two matrices in the network, but rotary positions
ROTARY_GPT: dict[str, Any] = {"rotary": True, "dropout": False}
# model type -> the fields that all its models share and that differ from GPT-2's
DECODER_ALWAYS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            *("baichuan", "exaone"),
            *("bamba", "cwm", "deepseek_v32", "ernie4_5", "gemma", "glm4_moe"),
            *("glm4_moe_lite", "glm_moe_dsa", "granite", "granitemoe", "granitemoeshared"),
            *("granitemoehybrid", "helium", "hyperclovax", "minicpm3", "ministral", "ministral3"),
            *("phi4_multimodal", "seed_oss", "smollm3", "solar_open", "vaultgemma", "youtu"),
        ),
        LLAMA,
    ),
    "afmoe": {
        **LLAMA, "qk_norm": "head", "output_gate": "all", "block_norms": 4, "router_bias": True,
    },
    "aria_text": {**LLAMA, "bare_experts": True},
    "apertus": {**LLAMA, "gated": False, "qk_norm": "head", "block_params": 2},
    "arcee": {**LLAMA, "gated": False},
    "beam": {
        **LLAMA, "qk_norm": "head", "output_gate": "all", "block_norms": 4, "sinks": True,
        "experts.dense": 3,
    },
    "biogpt": {"position_offset": 2},
    "bitnet": {**LLAMA, "gated": True, "sub_norms": True},
    "bloom": {"embedding_norm": True, "dropout": False},
    "codegen": {
        **ROTARY_GPT, "block_norms": 1, "attention_bias": False, "output_bias": False,
        "head_bias": True,
    },
    "cohere": {**LLAMA, "norm": "scale", "block_norms": 1},
    "cohere2": {**LLAMA, "norm": "scale", "block_norms": 1},
    "dots1": {**LLAMA, "qk_norm": "head"},
    "ernie4_5_moe": {**LLAMA, "router_bias": True, "bare_experts": True},
    "exaone4": {**LLAMA, "qk_norm": "head"},
    "exaone_moe": {**LLAMA, "qk_norm": "head"},
    "flex_olmo": {**LLAMA, "qk_norm": "all"},
    "gemma3n_text": {**LLAMA, "block_norms": 4, "qk_norm": "head", "full_every": 5},
    "gemma4_text": {**LLAMA, "block_norms": 4, "qk_norm": "head", "full_every": 6},
    "gemma4_unified_text": {**LLAMA, "block_norms": 4, "qk_norm": "head", "full_every": 6},
    "glm": {**LLAMA},
    "glm4": {**LLAMA, "block_norms": 4},
    "gpt_bigcode": {},
    "gpt_neo": {"attention_bias": False},
    "gpt_neox": ROTARY_GPT,
    "gptj": {
        **ROTARY_GPT, "block_norms": 1, "attention_bias": False, "output_bias": False,
        "head_bias": True,
    },
    "granite_swa": {**LLAMA, "sinks": True},
    "granitemoe_swa": {**LLAMA, "sinks": True},
    "hunyuan_v1_dense": {**LLAMA, "qk_norm": "head"},
    "hunyuan_v1_moe": {**LLAMA, "qk_norm": "head"},
    "hy_v3": {**LLAMA, "qk_norm": "head", "bare_experts": True},
    "jais2": {**ROTARY_GPT},
    "kolibri1": {**LLAMA, "qk_norm": "head", "block_norms": 4},
    "laguna": {
        **LLAMA, "qk_norm": "head", "output_gate": "head", "router_bias": True, "experts.dense": 1,
    },
    "mellum": {**LLAMA, "qk_norm": "head"},
    "minimax_m2": {**LLAMA, "qk_norm": "all"},
    "mpt": {
        "norm": "scale", "attention_bias": False, "output_bias": False,
        "feed_forward_bias": False, "dropout": False,
    },
    "nanochat": {**LLAMA, "norm": "pixel", "gated": False},
    "nemotron": {**LLAMA, "norm": "layer", "gated": False},
    "olmo3": {**LLAMA, "qk_norm": "all", "full_every": 4},
    "olmo_hybrid": {**LLAMA, "qk_norm": "all"},
    "olmoe": {**LLAMA, "qk_norm": "all"},
    "openai-gpt": {"final_norm": False},
    "persimmon": ROTARY_GPT,
    "phi": {**ROTARY_GPT, "block_norms": 1, "head_bias": True},
    "orion": {**LLAMA, "norm": "layer"},
    "phi-msft": {**ROTARY_GPT, "block_norms": 1, "head_bias": True},
    "phimoe": {**LLAMA, "norm": "layer"},
    "qwen": {**LLAMA, "attention_bias": True},
    "qwen3_next": {**LLAMA, "qk_norm": "head", "output_gate": "all", "shared_gate": True},
    "qwen3_5_text": {**LLAMA, "qk_norm": "head", "output_gate": "all"},
    "qwen3_5_moe_text": {**LLAMA, "qk_norm": "head", "output_gate": "all", "shared_gate": True},
    "stablelm": {**LLAMA, "norm": "layer"},
    "xglm": {},
}  # fmt: skip
