"""Hugging Face `config.json` files as models: gpt2, llama, mistral, mixtral, opt and bert families.

Only the keys that change a chain's cost are read, with the defaults of the `transformers` configuration
classes; all others are ignored. Nothing is downloaded and no remote code is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from hetplan.errors import InputError
from hetplan.files import read_json
from hetplan.profiling.architecture import Experts, Transformer
from hetplan.profiling.zoo import ModelSpec, text_model
from hetplan.schema import parse

# Contexts of 32k and more are for inference; pre-training runs at a few thousand tokens.
LONGEST_DEFAULT_SEQUENCE = 4096

Size = Annotated[int, Field(ge=1, le=10**7)]
Layers = Annotated[int, Field(ge=1, le=4000)]  # a chain has at most 4096 layers


class Config(BaseModel):
    """A config.json: strict types for the keys that are read, others ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class Gpt2Config(Config):
    """transformers.GPT2Config."""

    vocab_size: Size = 50257
    n_positions: Size = 1024
    n_embd: Size = 768
    n_layer: Layers = 12
    n_head: Size = 12
    n_inner: Size | None = None
    tie_word_embeddings: bool = True


class LlamaConfig(Config):
    """transformers.LlamaConfig, MistralConfig and MixtralConfig (the experts' keys)."""

    vocab_size: Size = 32000
    hidden_size: Size = 4096
    intermediate_size: Size = 11008
    num_hidden_layers: Layers = 32
    num_attention_heads: Size = 32
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    max_position_embeddings: Size = 2048
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_window: Size | None = None
    num_local_experts: Size = 8
    num_experts_per_tok: Size = 2


class MistralConfig(LlamaConfig):
    """The defaults in which Mistral and Mixtral differ."""

    intermediate_size: Size = 14336
    num_key_value_heads: Size | None = 8
    max_position_embeddings: Size = 131072


class OptConfig(Config):
    """transformers.OPTConfig."""

    vocab_size: Size = 50272
    hidden_size: Size = 768
    num_hidden_layers: Layers = 12
    ffn_dim: Size = 3072
    max_position_embeddings: Size = 2048
    num_attention_heads: Size = 12
    do_layer_norm_before: bool = True
    word_embed_proj_dim: Size | None = None
    enable_bias: bool = True
    tie_word_embeddings: bool = True


class BertConfig(Config):
    """transformers.BertConfig."""

    vocab_size: Size = 30522
    hidden_size: Size = 768
    num_hidden_layers: Layers = 12
    num_attention_heads: Size = 12
    intermediate_size: Size = 3072
    max_position_embeddings: Size = 512
    type_vocab_size: Size = 2
    tie_word_embeddings: bool = True


def from_gpt2(c: Gpt2Config) -> tuple[Transformer, int]:
    """GPT-2: learned positions, biases."""
    inner = c.n_inner or 4 * c.n_embd
    shape = Transformer(
        vocabulary=c.vocab_size, hidden=c.n_embd, layers=c.n_layer, heads=c.n_head, feed_forward=inner,
        kv_heads=c.n_head, head_dim=c.n_embd // c.n_head, positions=c.n_positions, tied=c.tie_word_embeddings,
    )  # fmt: skip
    return shape, c.n_positions


def from_llama(c: LlamaConfig, experts: Experts | None = None) -> tuple[Transformer, int]:
    """Llama and Mistral: RMSNorm, SwiGLU, rotary positions, grouped queries."""
    shape = Transformer(
        vocabulary=c.vocab_size, hidden=c.hidden_size, layers=c.num_hidden_layers,
        heads=c.num_attention_heads, feed_forward=c.intermediate_size, kv_heads=c.num_key_value_heads or
        c.num_attention_heads, head_dim=c.head_dim or c.hidden_size // c.num_attention_heads, rotary=True,
        gated=True, norm="rms", attention_bias=c.attention_bias, output_bias=c.attention_bias,
        feed_forward_bias=c.mlp_bias, tied=c.tie_word_embeddings, dropout=False, attention="fused",
        window=c.sliding_window, experts=experts,
    )  # fmt: skip
    return shape, c.max_position_embeddings


def from_mixtral(c: MistralConfig) -> tuple[Transformer, int]:
    """Mixtral: Mistral with experts in every block."""
    return from_llama(c, Experts(c.num_local_experts, c.num_experts_per_tok))


def from_opt(c: OptConfig) -> tuple[Transformer, int]:
    """OPT: learned positions with an offset of two; post-norm models have no final norm."""
    width = c.word_embed_proj_dim
    shape = Transformer(
        vocabulary=c.vocab_size, hidden=c.hidden_size, layers=c.num_hidden_layers,
        heads=c.num_attention_heads, feed_forward=c.ffn_dim, kv_heads=c.num_attention_heads,
        head_dim=c.hidden_size // c.num_attention_heads, positions=c.max_position_embeddings,
        position_offset=2, attention_bias=c.enable_bias, output_bias=c.enable_bias,
        feed_forward_bias=c.enable_bias, tied=c.tie_word_embeddings, embedding_width=width if width !=
        c.hidden_size else None, final_norm=c.do_layer_norm_before,
    )  # fmt: skip
    return shape, c.max_position_embeddings


def from_bert(c: BertConfig) -> tuple[Transformer, int]:
    """BERT with its pre-training heads."""
    shape = Transformer(
        vocabulary=c.vocab_size, hidden=c.hidden_size, layers=c.num_hidden_layers,
        heads=c.num_attention_heads, feed_forward=c.intermediate_size, kv_heads=c.num_attention_heads,
        head_dim=c.hidden_size // c.num_attention_heads, positions=c.max_position_embeddings,
        types=c.type_vocab_size, tied=c.tie_word_embeddings, embedding_norm=True, final_norm=False,
        head="bert",
    )  # fmt: skip
    return shape, c.max_position_embeddings


FAMILIES: dict[str, tuple[type[Config], Callable[[Any], tuple[Transformer, int]]]] = {
    "gpt2": (Gpt2Config, from_gpt2),
    "llama": (LlamaConfig, from_llama),
    "mistral": (MistralConfig, from_llama),
    "mixtral": (MistralConfig, from_mixtral),
    "opt": (OptConfig, from_opt),
    "bert": (BertConfig, from_bert),
}


def load_config(path: str | os.PathLike[str]) -> ModelSpec:
    """The model of a config.json; its name is the file's, or its folder's for one called config.json.

    Raises InputError for an unreadable file, an unsupported model_type or sizes that do not fit together.
    """
    where = os.fspath(path)
    stem = Path(where).stem
    name = Path(where).resolve().parent.name if stem == "config" else stem
    return from_config(read_json(path), name=name or "model", where=where)


def from_config(value: Any, *, name: str, where: str = "config") -> ModelSpec:
    """The model that a parsed config.json describes."""
    if not isinstance(value, dict):
        raise InputError("not an object", where=where, got=value, expected="a Hugging Face configuration")
    kind = value.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        supported = f"one of {', '.join(FAMILIES)}"
        place = f"{where}: model_type"
        raise InputError("model type is not supported", where=place, got=kind, expected=supported)
    schema, convert = FAMILIES[kind]
    shape, context = convert(parse(schema, value, where=where))
    check_shape(shape, value, where)
    source = f"Hugging Face {kind} configuration"
    return text_model(name[:200], source, min(context, LONGEST_DEFAULT_SEQUENCE), shape)


def check_shape(shape: Transformer, value: dict[str, Any], where: str) -> None:
    """Raise InputError where heads do not divide what they split, or more experts work than there are."""
    if value.get("head_dim") is None and shape.hidden % shape.heads:
        raise InputError(
            "hidden size is not a multiple of the number of heads",
            where=where,
            got=shape.hidden,
            expected=f"a multiple of {shape.heads}",
        )
    if shape.heads % shape.kv_heads:
        raise InputError(
            "number of heads is not a multiple of num_key_value_heads",
            where=where,
            got=shape.heads,
            expected=f"a multiple of {shape.kv_heads}",
        )
    if shape.experts and shape.experts.active > shape.experts.count:
        raise InputError(
            "num_experts_per_tok is too large",
            where=where,
            got=shape.experts.active,
            expected=f"at most num_local_experts ({shape.experts.count})",
        )
