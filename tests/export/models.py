"""Small models of many types, as Hugging Face configurations with published values of what costs
nothing: rotary bases, epsilons, routers."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "max_position_embeddings": 512,
}  # fmt: skip
WHOLE_HEADS = {key: size for key, size in SIZES.items() if key != "head_dim"}
MLA = {
    **SIZES, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "moe_intermediate_size": 32,
    "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip
del MLA["head_dim"]
YARN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 257, "n_embd": 64, "n_layer": 4, "n_head": 4,
        "n_positions": 512,
    },
    "llama": {
        "model_type": "llama", **SIZES, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "rope_scaling": LLAMA3,
    },
    "llama of transformers 5": {
        "model_type": "llama", **SIZES, "rms_norm_eps": 1e-6,
        "rope_parameters": {**LLAMA3, "rope_theta": 500000.0},
    },
    "llama, stretched": {
        "model_type": "llama", **SIZES, "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "mistral": {"model_type": "mistral", **SIZES, "sliding_window": 128},
    "mixtral": {
        "model_type": "mixtral", **SIZES, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "qwen2": {
        "model_type": "qwen2", **WHOLE_HEADS, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "use_sliding_window": False, "sliding_window": 131072,
    },
    "qwen2, last blocks in windows": {
        "model_type": "qwen2", **WHOLE_HEADS, "use_sliding_window": True, "sliding_window": 128,
        "max_window_layers": 2,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe", **WHOLE_HEADS, "num_experts": 8, "num_experts_per_tok": 4,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
        "norm_topk_prob": False,
    },
    "qwen3": {"model_type": "qwen3", **SIZES, "rope_theta": 1000000},
    "qwen3_moe": {
        "model_type": "qwen3_moe", **SIZES, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "norm_topk_prob": True, "rope_theta": 1000000.0,
    },
    "qwen3_moe, a dense block": {
        "model_type": "qwen3_moe", **SIZES, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "norm_topk_prob": True, "mlp_only_layers": [1],
    },
    "phi3": {"model_type": "phi3", **WHOLE_HEADS, "partial_rotary_factor": 0.5},
    "deepseek_v2": {
        "model_type": "deepseek_v2", **MLA, "q_lora_rank": None, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
        "norm_topk_prob": False, "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3", **MLA, "n_routed_experts": 16, "num_experts_per_tok": 4,
        "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
        "scoring_func": "sigmoid", "rope_scaling": YARN, "num_nextn_predict_layers": 1,
    },
    "deepseek_v3, unscaled": {
        "model_type": "deepseek_v3", **MLA, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
    },
    "starcoder2": {
        "model_type": "starcoder2", **WHOLE_HEADS, "norm_epsilon": 1e-5, "rope_theta": 100000.0,
        "sliding_window": 128, "residual_dropout": 0.1, "attention_dropout": 0.1,
        "embedding_dropout": 0.1,
    },
    "smollm3": {"model_type": "smollm3", **WHOLE_HEADS},
    "arcee": {"model_type": "arcee", **SIZES},
    "ernie4_5": {"model_type": "ernie4_5", **SIZES},
    "seed_oss": {"model_type": "seed_oss", **SIZES, "attention_out_bias": False},
    "glm": {"model_type": "glm", **SIZES},
    "stablelm": {"model_type": "stablelm", **WHOLE_HEADS},
    "granite": {"model_type": "granite", **SIZES, "attention_multiplier": 0.25},
    "glm4_moe": {
        "model_type": "glm4_moe", **SIZES, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "attention_bias": True,
    },
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", **SIZES, "num_local_experts": 8, "num_experts_per_tok": 2,
    "sliding_window": 128,
}  # fmt: skip
# Models that Megatron-LM's arguments cannot describe -> words by which the refusal names it.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gpt_oss": (GPT_OSS, "rotary positions scaled by yarn"),
    "gemma2": (
        {"model_type": "gemma2", **SIZES},
        "norms before and behind the sublayers; gated activation gelu_pytorch_tanh; "
        "scaled embeddings, norms of 1 + weight, attn_logit_softcapping 50.0",
    ),
    "gemma3": ({"model_type": "gemma3_text", **SIZES}, "another rotary base"),
    "olmo": ({"model_type": "olmo", **WHOLE_HEADS}, "norms without parameters"),
    "olmo, clipped": ({"model_type": "olmo", **WHOLE_HEADS, "clip_qkv": 8.0}, "clip_qkv 8.0"),
    "olmo2": (
        {"model_type": "olmo2", **WHOLE_HEADS},
        "norms behind the sublayers; norms of queries and keys over all heads",
    ),
    "opt": (
        {
            "model_type": "opt", "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 4,
            "num_attention_heads": 4, "vocab_size": 256,
        },
        "activation relu",
    ),
    "bert": ({"model_type": "bert", **WHOLE_HEADS}, "heads of bert"),
    "falcon": ({"model_type": "falcon", **WHOLE_HEADS}, "parallel_attn True"),
    "falcon, alibi": (
        {"model_type": "falcon", **WHOLE_HEADS, "parallel_attn": False, "alibi": True},
        "alibi True",
    ),
    "llama4": (
        {
            "model_type": "llama4_text", **SIZES, "intermediate_size_mlp": 128,
            "num_local_experts": 4, "num_experts_per_tok": 1,
        },
        "attention_chunk_size 8192",
    ),
    "nemotron_h": (
        {"model_type": "nemotron_h", **SIZES, "hybrid_override_pattern": "M-M*"},
        "blocks of different kinds",
    ),
    "llama, biases of attention": (
        {"model_type": "llama", **SIZES, "attention_bias": True},
        "biases of queries, keys and values and attention's output alone",
    ),
    "llama, another length before scaling": (
        {
            **MODELS["llama"],
            "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 4096},
        },
        "rotary positions scaled by llama3 with original 4096",
    ),
    "llama, gelu": ({"model_type": "llama", **SIZES, "hidden_act": "gelu"}, "gated activation"),
    "llama, stretched by a fraction": (
        {"model_type": "llama", **SIZES, "rope_scaling": {"type": "linear", "factor": 2.5}},
        "factor 2.5, no whole number",
    ),
    "phi3, longrope": (
        {"model_type": "phi3", **WHOLE_HEADS, "rope_scaling": {"type": "longrope"}},
        "rotary positions scaled by longrope",
    ),
    "qwen3, yarn": (
        {"model_type": "qwen3", **SIZES, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rotary positions scaled by yarn",
    ),
    "llama, no number": (
        {"model_type": "llama", **SIZES, "rope_theta": "large"},
        "rope_theta 'large'",
    ),
    "deepseek_v2 in groups": (
        {
            **MODELS["deepseek_v2"], "n_routed_experts": 16, "num_experts_per_tok": 6,
            "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3,
        },
        "groups scored by their best 1 expert(s)",
    ),
    "deepseek_v3, sums": (
        {**MODELS["deepseek_v3"], "norm_topk_prob": False},
        "sigmoid weights of experts that are not normalized",
    ),
    "mixtral, one expert": (
        {**MODELS["mixtral"], "num_experts_per_tok": 1},
        "the weight 1 of one softmax expert",
    ),
}  # fmt: skip
