"""The shape of a transformer: what distinguishes GPT-2, BERT, Llama, OPT, Mixtral, GLM; its
parameter counts.

Symbols (Korthikanti et al. 2022): s tokens, h hidden size, a heads, f feed-forward size, V
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Attention = Literal["standard", "fused"]
Norm = Literal["layer", "rms", "pixel"]


@dataclass(frozen=True)
class Experts:
    """Mixture of experts in every `every`-th block, counted from 1: `active` of `count` per
    token."""

    count: int
    active: int
    every: int = 1


@dataclass(frozen=True)
class Transformer:
    """A transformer's shape.

    kv_heads: < heads with grouped queries. head_dim: usually hidden / heads. gated: SwiGLU or GeGLU
    (three matrices). norm: LayerNorm, RMSNorm (scale only) or pixel norm (no parameters).
    positions: learned position vectors, 0 for none; position_offset: further ones that no token
    uses (OPT). rotary: rotary positions. types: token types (BERT). tied: the head shares the
    embedding. head: language model, BERT's pre-training heads, or a classifier. attention:
    "standard" writes the s x s scores to memory and keeps them, "fused" (FlashAttention, Dao et al.
    2022) does neither. window: attention reaches this many keys back. embedding_norm: LayerNorm
    behind the embedding (BERT). embedding_width: narrower embedding with projections (OPT-350m).
    final_norm: norm before the head.
    """

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    feed_forward: int
    kv_heads: int
    head_dim: int
    positions: int = 0
    position_offset: int = 0
    types: int = 0
    gated: bool = False
    norm: Norm = "layer"
    attention_bias: bool = True
    output_bias: bool = True
    feed_forward_bias: bool = True
    tied: bool = True
    dropout: bool = True
    attention: Attention = "standard"
    window: int | None = None
    rotary: bool = False
    embedding_norm: bool = False
    embedding_width: int | None = None
    final_norm: bool = True
    head: Literal["lm", "bert"] = "lm"
    experts: Experts | None = None

    @property
    def query_width(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key (or value) heads."""
        return self.kv_heads * self.head_dim

    @property
    def norm_params(self) -> int:
        """Parameters of one norm over the hidden size."""
        return {"layer": 2, "rms": 1, "pixel": 0}[self.norm] * self.hidden

    def tensor_degree_fits(self, tensor: int) -> bool:
        """Whether Megatron's split works: heads, key-value heads and feed-forward size divide
        evenly."""
        return all(size % tensor == 0 for size in (self.heads, self.kv_heads, self.feed_forward))


def bert_head_params(t: Transformer) -> int:
    """Pooler, next-sentence classifier, MLM transform with norm, vocabulary bias (Devlin et al.
    2019)."""
    dense = t.hidden * t.hidden + t.hidden
    return dense + (2 * t.hidden + 2) + (dense + 2 * t.hidden) + t.vocabulary


def attention_params(t: Transformer) -> int:
    """Query, key, value and output projections."""
    inner = t.query_width + 2 * t.kv_width
    biases = inner * t.attention_bias + t.hidden * t.output_bias
    return t.hidden * inner + t.query_width * t.hidden + biases


def feed_forward_params(t: Transformer) -> int:
    """One feed-forward network: two matrices, three if gated."""
    up = 2 if t.gated else 1
    return (up + 1) * t.hidden * t.feed_forward + (
        up * t.feed_forward + t.hidden
    ) * t.feed_forward_bias
