"""Hugging Face `config.json` files as models: gpt2, llama, mistral, mixtral, opt and bert families.

Nothing is downloaded and no remote code is loaded. Keys that the `transformers` classes would fill
with the dimensions of one certain model are required here; the others keep the defaults of those
classes (their documentation, "Configuration"), and the model's notes tell which were assumed. All
that does not change a chain's cost is ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from hetplan.errors import InputError
from hetplan.profiling.architecture import Experts, Transformer
from hetplan.profiling.zoo import ModelSpec, text_model
from hetplan.schema import parse

Size = Annotated[int, Field(ge=1, le=10**7)]
Layers = Annotated[int, Field(ge=1, le=4000)]  # a chain has at most 4096 layers

# Required: no default, and said in words where they are missing.
Vocabulary = Annotated[Size, Field(description="number of tokens in the vocabulary")]
Width = Annotated[Size, Field(description="width of the hidden states")]
Inner = Annotated[Size, Field(description="inner width of the feed-forward networks")]
Depth = Annotated[Layers, Field(description="number of blocks")]
Heads = Annotated[Size, Field(description="number of attention heads")]


class Config(BaseModel):
    """A config.json: strict types for the keys that are read, others ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class Gpt2Config(Config):
    """transformers.GPT2Config. n_inner: None is 4 n_embd."""

    vocab_size: Vocabulary
    n_embd: Width
    n_layer: Depth
    n_head: Heads
    n_positions: Size = 1024
    n_inner: Size | None = None
    tie_word_embeddings: bool = True


class RotaryConfig(Config):
    """What Llama, Mistral and Mixtral share. head_dim: None is hidden_size /
    num_attention_heads."""

    vocab_size: Vocabulary
    hidden_size: Width
    intermediate_size: Inner
    num_hidden_layers: Depth
    num_attention_heads: Heads
    head_dim: Size | None = None
    tie_word_embeddings: bool = False


class LlamaConfig(RotaryConfig):
    """transformers.LlamaConfig. num_key_value_heads: None is as many as heads."""

    num_key_value_heads: Size | None = None
    max_position_embeddings: Size = 2048
    attention_bias: bool = False
    mlp_bias: bool = False


class MistralConfig(RotaryConfig):
    """transformers.MistralConfig. sliding_window: None attends to everything, as from version 0.2
    on."""

    num_key_value_heads: Size | None = 8
    max_position_embeddings: Size = 131072
    sliding_window: Size | None = 4096


class MixtralConfig(RotaryConfig):
    """transformers.MixtralConfig."""

    num_local_experts: Annotated[Size, Field(description="number of experts in a block")]
    num_experts_per_tok: Annotated[Size, Field(description="number of experts that a token visits")]
    num_key_value_heads: Size | None = 8
    max_position_embeddings: Size = 131072
    sliding_window: Size | None = None


class OptConfig(Config):
    """transformers.OPTConfig. word_embed_proj_dim: None is hidden_size."""

    vocab_size: Vocabulary
    hidden_size: Width
    num_hidden_layers: Depth
    ffn_dim: Inner
    num_attention_heads: Heads
    max_position_embeddings: Size = 2048
    do_layer_norm_before: bool = True
    word_embed_proj_dim: Size | None = None
    enable_bias: bool = True
    tie_word_embeddings: bool = True


class BertConfig(Config):
    """transformers.BertConfig."""

    vocab_size: Vocabulary
    hidden_size: Width
    num_hidden_layers: Depth
    num_attention_heads: Heads
    intermediate_size: Inner
    max_position_embeddings: Size = 512
    type_vocab_size: Size = 2
    tie_word_embeddings: bool = True


class CalculonConfig(Config):
    """calculon's model description, with a vocabulary, which it leaves out."""

    vocab_size: Vocabulary
    hidden: Width
    feedforward: Inner
    seq_size: Annotated[Size, Field(description="number of tokens of a sample")]
    attn_heads: Heads
    attn_size: Annotated[Size, Field(description="width of one attention head")]
    num_blocks: Depth


CALCULON_KEYS = tuple(key for key in CalculonConfig.model_fields if key != "vocab_size")


def from_gpt2(c: Gpt2Config) -> tuple[Transformer, int]:
    """GPT-2: learned positions, biases."""
    inner = c.n_inner or 4 * c.n_embd
    shape = Transformer(
        vocabulary=c.vocab_size,
        hidden=c.n_embd,
        layers=c.n_layer,
        heads=c.n_head,
        feed_forward=inner,
        kv_heads=c.n_head,
        head_dim=c.n_embd // c.n_head,
        positions=c.n_positions,
        tied=c.tie_word_embeddings,
    )
    return shape, c.n_positions


def rotary(
    c: LlamaConfig | MistralConfig | MixtralConfig, **changes: Any
) -> tuple[Transformer, int]:
    """RMSNorm, SwiGLU, rotary positions, grouped queries; no biases unless the changes say so."""
    shape: dict[str, Any] = {
        "attention_bias": False,
        "output_bias": False,
        "feed_forward_bias": False,
    }
    heads = c.num_attention_heads
    return Transformer(
        vocabulary=c.vocab_size, hidden=c.hidden_size, layers=c.num_hidden_layers, heads=heads,
        feed_forward=c.intermediate_size, kv_heads=c.num_key_value_heads or heads,
        head_dim=c.head_dim or c.hidden_size // heads, rotary=True, gated=True, norm="rms",
        tied=c.tie_word_embeddings, dropout=False, attention="fused", **(shape | changes),
    ), c.max_position_embeddings  # fmt: skip


def from_llama(c: LlamaConfig) -> tuple[Transformer, int]:
    """Llama 1 to 3: biases where the configuration has them."""
    return rotary(
        c,
        attention_bias=c.attention_bias,
        output_bias=c.attention_bias,
        feed_forward_bias=c.mlp_bias,
    )


def from_mistral(c: MistralConfig) -> tuple[Transformer, int]:
    """Mistral: attention in a sliding window."""
    return rotary(c, window=c.sliding_window)


def from_mixtral(c: MixtralConfig) -> tuple[Transformer, int]:
    """Mixtral: Mistral with experts in every block."""
    return rotary(
        c, window=c.sliding_window, experts=Experts(c.num_local_experts, c.num_experts_per_tok)
    )


def from_opt(c: OptConfig) -> tuple[Transformer, int]:
    """OPT: learned positions with an offset of two; post-norm models have no final norm."""
    width = c.word_embed_proj_dim
    shape = Transformer(
        vocabulary=c.vocab_size,
        hidden=c.hidden_size,
        layers=c.num_hidden_layers,
        heads=c.num_attention_heads,
        feed_forward=c.ffn_dim,
        kv_heads=c.num_attention_heads,
        head_dim=c.hidden_size // c.num_attention_heads,
        positions=c.max_position_embeddings,
        position_offset=2,
        attention_bias=c.enable_bias,
        output_bias=c.enable_bias,
        feed_forward_bias=c.enable_bias,
        tied=c.tie_word_embeddings,
        embedding_width=width if width != c.hidden_size else None,
        final_norm=c.do_layer_norm_before,
    )
    return shape, c.max_position_embeddings


def from_bert(c: BertConfig) -> tuple[Transformer, int]:
    """BERT with its pre-training heads."""
    shape = Transformer(
        vocabulary=c.vocab_size,
        hidden=c.hidden_size,
        layers=c.num_hidden_layers,
        heads=c.num_attention_heads,
        feed_forward=c.intermediate_size,
        kv_heads=c.num_attention_heads,
        head_dim=c.hidden_size // c.num_attention_heads,
        positions=c.max_position_embeddings,
        types=c.type_vocab_size,
        tied=c.tie_word_embeddings,
        embedding_norm=True,
        final_norm=False,
        head="bert",
    )
    return shape, c.max_position_embeddings


def from_calculon(c: CalculonConfig) -> tuple[Transformer, int]:
    """calculon (Isaev et al. 2023): GPT blocks whose heads may be wider than hidden / heads."""
    shape = Transformer(
        vocabulary=c.vocab_size,
        hidden=c.hidden,
        layers=c.num_blocks,
        heads=c.attn_heads,
        feed_forward=c.feedforward,
        kv_heads=c.attn_heads,
        head_dim=c.attn_size,
        positions=c.seq_size,
    )
    return shape, c.seq_size


# model_type -> its configuration, and how that becomes a shape and the longest sequence.
FAMILIES: dict[str, tuple[type[Config], Callable[[Any], tuple[Transformer, int]]]] = {
    "gpt2": (Gpt2Config, from_gpt2),
    "llama": (LlamaConfig, from_llama),
    "mistral": (MistralConfig, from_mistral),
    "mixtral": (MixtralConfig, from_mixtral),
    "opt": (OptConfig, from_opt),
    "bert": (BertConfig, from_bert),
    "calculon": (CalculonConfig, from_calculon),
}

# Keys whose default None stands for a size that follows from the others.
DERIVED: dict[str, Callable[[Transformer], int]] = {
    "n_inner": lambda t: t.feed_forward,
    "head_dim": lambda t: t.head_dim,
    "num_key_value_heads": lambda t: t.kv_heads,
    "word_embed_proj_dim": lambda t: t.embedding_width or t.hidden,
}


# Contexts of 32k and more are for inference; pre-training runs at a few thousand tokens.
LONGEST_DEFAULT_SEQUENCE = 4096


def name_of(path: str | os.PathLike[str]) -> str:
    """The file's name, or its folder's for one called config.json."""
    stem = Path(path).stem
    name = Path(path).resolve().parent.name if stem == "config" else stem
    return name or "model"


def from_config(value: Any, *, name: str, where: str = "config") -> ModelSpec:
    """The model that a parsed config.json describes."""
    if not isinstance(value, dict):
        raise InputError(
            "not an object", where=where, got=value, expected="a Hugging Face configuration"
        )
    kind = value.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        supported = f"one of {', '.join(FAMILIES)}"
        place = f"{where}: model_type"
        raise InputError("model type is not supported", where=place, got=kind, expected=supported)
    schema, convert = FAMILIES[kind]
    check_keys(schema, value, kind, where)
    config = parse(schema, value, where=where)
    shape, context = convert(config)
    check_shape(shape, value, where)
    source = f"Hugging Face {kind} configuration"
    sequence = min(context, LONGEST_DEFAULT_SEQUENCE)
    return text_model(name[:200], source, sequence, shape, notes=assumptions(config, shape, where))


def check_keys(schema: type[Config], value: dict[str, Any], kind: str, where: str) -> None:
    """Raise InputError where an essential dimension is missing: a default would plan another
    model."""
    missing = [
        key
        for key, field in schema.model_fields.items()
        if field.is_required() and key not in value
    ]
    if not missing:
        return
    first, *others = missing
    also = f"; {', '.join(others)} missing too" if others else ""
    meaning = schema.model_fields[first].description
    expected = f"the {meaning}, which every {kind} configuration gives{also}"
    raise InputError("key is missing", where=f"{where}: {first}", expected=expected)


def assumptions(config: Config, shape: Transformer, where: str) -> tuple[str, ...]:
    """One line with the keys that the file leaves out and the values that stand in; none where it
    has all."""
    parts = []
    for key in type(config).model_fields:
        if key not in config.model_fields_set:
            value = getattr(config, key)
            if value is None and key in DERIVED:
                value = DERIVED[key](shape)
            parts.append(f"{key} = {json.dumps(value)}")
    return (f"{where}: assumed, as transformers does: {', '.join(parts)}",) if parts else ()


def check_shape(shape: Transformer, value: dict[str, Any], where: str) -> None:
    """Raise InputError where heads do not divide what they split, or more experts work than there
    are."""
    if (
        shape.head_dim * shape.heads != shape.hidden
        and value.get("head_dim", value.get("attn_size")) is None
    ):
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
