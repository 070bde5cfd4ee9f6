"""Megatron's own model from a script's flags, with the weights of transformers' model.

Source: megatron-core 0.16, `models/gpt`, and Megatron-LM's `arguments.py`
(`core_transformer_config_from_args`) and `gpt_builders.py`, whose translation of arguments this
module repeats.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

Weights = Mapping[str, Tensor]


@contextlib.contextmanager
def one_process(folder: Path) -> Iterator[None]:
    """A group of one process on the CPU, in which Megatron builds models."""
    from megatron.core import parallel_state
    from megatron.core.fusions import fused_softmax
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.moe import moe_utils

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
    )
    plain = DotProductAttention.__init__

    def without_widths(self: Any, *words: Any, **others: Any) -> None:
        """Megatron's own attention on the CPU takes the widths of keys and values as they come."""
        plain(self, *words, **{k: v for k, v in others.items() if not k.endswith("_channels")})

    try:
        with pytest.MonkeyPatch.context() as patch:
            # On a CPU there is no state of a GPU's random numbers; nothing here draws any.
            patch.setattr(CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext())
            patch.setattr(torch.cuda, "current_device", lambda: "cpu")
            patch.setattr(torch.cuda, "Stream", lambda: None)
            patch.setattr(DotProductAttention, "__init__", without_widths)
            # Names that stand for parts of Transformer Engine, which needs a GPU.
            patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
            patch.setattr(multi_latent_attention, "TELinear", type("TELinear", (), {}))
            patch.setattr(
                multi_latent_attention, "TEColumnParallelLinear", type("TEColumn", (), {})
            )
            patch.setattr(fused_softmax, "get_sliding_window_causal_mask", window_mask)
            parallel_state.initialize_model_parallel()
            yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def window_mask(queries: int, keys: int, window: tuple[int, int]) -> Tensor:
    """`get_sliding_window_causal_mask` (transformer/utils.py), which makes its mask on a GPU."""
    seen = torch.ones(queries, keys, dtype=torch.bool)
    return ~torch.tril(seen, diagonal=window[1]).logical_and(torch.triu(seen, diagonal=-window[0]))


def configuration(flags: Mapping[str, Any]) -> Any:
    """`core_transformer_config_from_args`."""
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    latent = flags["multi_latent_attention"]
    kind = MLATransformerConfig if latent else TransformerConfig
    names = {field.name for field in dataclasses.fields(kind)}
    values = {name: value for name, value in flags.items() if name in names and value is not None}
    values |= {
        "layernorm_epsilon": flags["norm_epsilon"],
        "add_bias_linear": not flags["disable_bias_linear"],
        "num_moe_experts": flags["num_experts"],
        "num_query_groups": flags["num_query_groups"] if flags["group_query_attention"] else None,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "fp16": False,
        "bf16": False,
    }
    if latent:
        values["q_lora_rank"] = flags["q_lora_rank"]
        values["kv_channels"] = flags["v_head_dim"]  # as `without_widths` wants it
    if flags["num_experts"]:
        values["moe_token_dispatcher_type"] = "allgather"  # the other ones need a GPU
    if flags["swiglu"]:
        values |= {"activation_func": functional.silu, "gated_linear_unit": True}
    elif flags["quick_geglu"]:
        values |= {"activation_func": quick_gelu, "gated_linear_unit": True}
    elif flags["squared_relu"]:
        values["activation_func"] = squared_relu
    elif not flags["no_bias_gelu_fusion"]:
        # What the fused kernel computes (fusions/fused_bias_gelu.py), which needs a GPU.
        values["activation_func"] = lambda x: functional.gelu(x, approximate="tanh")
    return kind(**values)


def built(flags: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> Any:
    """`gpt_builder`: the model of the flags. extra: fields that Megatron Bridge's provider has."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    config = configuration(flags)
    for name, value in (extra or {}).items():
        setattr(config, name, value)
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization
    )
    multiple = flags["make_vocab_size_divisible_by"]
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=-(-flags["vocab_size"] // multiple) * multiple,
        max_sequence_length=flags["max_position_embeddings"],
        position_embedding_type=(extra or flags).get(
            "position_embedding_type", flags["position_embedding_type"]
        ),
        rotary_percent=flags["rotary_percent"],
        rotary_base=flags["rotary_base"],
        rope_scaling=flags["use_rope_scaling"],
        rope_scaling_factor=flags["rope_scaling_factor"],
        seq_len_interpolation_factor=flags["rotary_seq_len_interpolation_factor"],
        share_embeddings_and_output_weights=not flags["untie_embeddings_and_output_weights"],
    ).eval()


def logits(model: Any, tokens: Tensor) -> Tensor:
    """[samples, tokens, vocabulary] the logits of Megatron's model."""
    length = tokens.shape[1]
    positions = torch.arange(length)[None].expand_as(tokens)
    hidden = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    with torch.no_grad():
        found: Tensor = model(tokens, positions, hidden)
    return found


def joined_heads(query: Tensor, key: Tensor, value: Tensor, groups: int, width: int) -> Tensor:
    """Megatron's order of queries, keys and values: the heads of one group after those of
    another."""
    parts = [part.reshape(groups, -1, *part.shape[1:]) for part in (query, key, value)]
    assert parts[1].shape[1] == width
    return torch.cat(parts, 1).flatten(0, 1)


def renamed(weights: Weights, config: Any, flags: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of a transformers model under Megatron's names."""
    found = dict(weights)
    if config.model_type == "gpt2":
        found = of_gpt2(found)
    groups = flags["num_query_groups"] if flags["group_query_attention"] else None
    groups = groups or flags["num_attention_heads"]
    width = flags["kv_channels"]
    out: dict[str, Tensor] = {
        "embedding.word_embeddings.weight": found.pop("model.embed_tokens.weight"),
        "decoder.final_layernorm.weight": found.pop("model.norm.weight"),
    }
    for name, other in (
        ("model.embed_positions.weight", "embedding.position_embeddings.weight"),
        ("model.norm.bias", "decoder.final_layernorm.bias"),
        ("lm_head.weight", "output_layer.weight"),
    ):
        if name in found:
            out[other] = found.pop(name)
    if not flags["untie_embeddings_and_output_weights"]:
        out.pop("output_layer.weight", None)
    for block in range(flags["num_layers"]):
        begin, other = f"model.layers.{block}.", f"decoder.layers.{block}."
        here = {k.removeprefix(begin): found.pop(k) for k in [*found] if k.startswith(begin)}
        for name, tensor in of_block(here, groups, width).items():
            out[other + name] = tensor
    assert not found, [*found]
    return out


def of_gpt2(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """GPT-2's weights under the names of later models; its products are transposed."""
    names = {
        "transformer.wte.weight": "model.embed_tokens.weight",
        "transformer.wpe.weight": "model.embed_positions.weight",
        "transformer.ln_f.weight": "model.norm.weight",
        "transformer.ln_f.bias": "model.norm.bias",
        "lm_head.weight": "lm_head.weight",
    }
    parts = {
        "ln_1": "input_layernorm", "ln_2": "post_attention_layernorm",
        "attn.c_proj": "self_attn.o_proj", "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj",
    }  # fmt: skip
    out = {}
    for name, tensor in weights.items():
        if name in names:
            out[names[name]] = tensor
            continue
        _, _, block, rest = name.split(".", 3)
        part, _, kind = rest.rpartition(".")
        turned = tensor.T if kind == "weight" and not part.startswith("ln") else tensor
        if part == "attn.c_attn":
            for letter, piece in zip("qkv", turned.chunk(3), strict=True):
                out[f"model.layers.{block}.self_attn.{letter}_proj.{kind}"] = piece
        else:
            out[f"model.layers.{block}.{parts[part]}.{kind}"] = turned
    return out


SAME = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "self_attn.o_proj": "self_attention.linear_proj",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
    "self_attn.q_a_proj": "self_attention.linear_q_down_proj",
    "self_attn.q_b_proj": "self_attention.linear_q_up_proj",
    "self_attn.q_a_layernorm": "self_attention.q_layernorm",
    "self_attn.kv_a_proj_with_mqa": "self_attention.linear_kv_down_proj",
    "self_attn.kv_a_layernorm": "self_attention.kv_layernorm",
    "self_attn.kv_b_proj": "self_attention.linear_kv_up_proj",
    "mlp.down_proj": "mlp.linear_fc2",
    "mlp.c_proj": "mlp.linear_fc2",
    "mlp.c_fc": "mlp.linear_fc1",
    "mlp.gate": "mlp.router",
    "mlp.router": "mlp.router",
    "mlp.shared_expert.down_proj": "mlp.shared_experts.linear_fc2",
    "mlp.shared_experts.down_proj": "mlp.shared_experts.linear_fc2",
}


def of_block(here: dict[str, Tensor], groups: int, width: int) -> dict[str, Tensor]:
    """The weights of one block under Megatron's names."""
    out: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        heads = [f"self_attn.{letter}_proj.{kind}" for letter in "qkv"]
        if f"self_attn.qkv_proj.{kind}" in here:  # Phi-3 keeps them together
            whole = here.pop(f"self_attn.qkv_proj.{kind}")
            keys = groups * width
            sizes = [len(whole) - 2 * keys, keys, keys]
            here |= dict(zip(heads, whole.split(sizes), strict=True))
        if heads[1] in here:
            query, key, value = (here.pop(name) for name in heads)
            joined = joined_heads(query, key, value, groups, width)
            out[f"self_attention.linear_qkv.{kind}"] = joined
        elif heads[0] in here:  # latent attention without a low rank of queries
            out[f"self_attention.linear_q_proj.{kind}"] = here.pop(heads[0])
        for part in ("mlp", "mlp.shared_expert", "mlp.shared_experts"):
            gate, up = (here.pop(f"{part}.{name}_proj.{kind}", None) for name in ("gate", "up"))
            place = "mlp" if part == "mlp" else "mlp.shared_experts"
            if up is not None:
                both = up if gate is None else torch.cat([gate, up])
                out[f"{place}.linear_fc1.{kind}"] = both
    if "mlp.gate_up_proj.weight" in here:
        out["mlp.linear_fc1.weight"] = here.pop("mlp.gate_up_proj.weight")
    if "mlp.shared_expert_gate.weight" in here:
        out["mlp.shared_experts.gate_weight"] = here.pop("mlp.shared_expert_gate.weight")
    if "self_attn.sinks" in here:
        out["self_attention.core_attention.softmax_offset"] = here.pop("self_attn.sinks")
    if "mlp.gate.e_score_correction_bias" in here:
        out["mlp.router.expert_bias"] = here.pop("mlp.gate.e_score_correction_bias")
    out |= of_experts(here)
    for name in [*here]:
        part, _, kind = name.rpartition(".")
        out[f"{SAME[part]}.{kind}"] = here.pop(name)
    return out


def of_experts(here: dict[str, Tensor]) -> dict[str, Tensor]:
    """The experts of one block. transformers 5 keeps them in one tensor, [expert, out, in]; those
    of gpt-oss are turned, and their gate and linear rows alternate."""
    out = {}
    alternating = "mlp.experts.gate_up_proj_bias" in here
    for name, product in (("gate_up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            tensors = here.pop(f"mlp.experts.{name}{suffix}", None)
            for expert, tensor in enumerate([] if tensors is None else tensors):
                if alternating and kind == "weight":
                    tensor = tensor.T
                if alternating and name == "gate_up_proj":
                    tensor = torch.cat([tensor[0::2], tensor[1::2]])
                out[f"mlp.experts.local_experts.{expert}.{product}.{kind}"] = tensor
    return out
