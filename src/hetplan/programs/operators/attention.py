"""Attention and rotary position embeddings.

The operator `attention` reads queries, keys and values: as three tensors [samples, heads, tokens,
d], or as one tensor [samples, groups, tokens, (r + 2) d]. In one tensor, each group of r query
heads (attribute `queries`) shares a key-value head (Ainslie et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from hetplan.programs.operators.operator import (
    ELEMENT_FLOPS,
    Attributes,
    Operator,
    Place,
    Shape,
    Shapes,
    Work,
    first_two,
    output_sized_work,
    unchanged,
)

if TYPE_CHECKING:
    from torch import Tensor


def attention_shape(whole: Shapes, attributes: Attributes) -> Shape:
    """The output's shape: [samples, heads, tokens, width of a value]; if the operator reads one
    tensor, [samples, groups, tokens, r d]."""
    samples, heads, tokens, width = whole[0]
    if len(whole) > 1:
        return samples, heads, tokens, whole[2][3]
    r = attributes.get("queries", 1)
    return samples, heads, tokens, width // (r + 2) * r


class ScoreSizes(NamedTuple):
    """Sizes of the products with the attention scores, which have an entry for each query and
    key."""

    entries: float  # entries of the scores of all samples and heads
    query_width: int  # entries of a head's query, and of its key
    value_width: int  # entries of a head's value


def score_sizes(whole: Shapes, output: Shape, attributes: Attributes) -> ScoreSizes:
    """The sizes of the scores of an attention operator."""
    samples, heads, query_tokens, output_width = output
    key_tokens = whole[-1][2]
    if len(whole) > 1:
        entries = float(samples * heads * query_tokens * key_tokens)
        return ScoreSizes(entries, query_width=whole[0][3], value_width=output_width)
    groups, r = heads, attributes.get("queries", 1)
    entries = float(samples * groups * r * query_tokens * key_tokens)
    return ScoreSizes(entries, query_width=output_width // r, value_width=output_width // r)


def attention_products(whole: Shapes, output: Shape, attributes: Attributes) -> Work:
    """FLOP of the matrix products: two in the forward pass; four in the backward pass, which give
    the gradients of the scores, queries, keys and values."""
    entries, d, e = score_sizes(whole, output, attributes)  # d, e: width of a query, of a value
    forward = 2 * entries * (d + e)
    # The gradients of queries and of keys both need the gradient of the scores, a product of
    # 2 * entries * e FLOP. Half of it counts for the queries and half for the keys.
    of_queries = entries * e + 2 * entries * d
    of_keys = of_queries
    of_values = 2 * entries * e
    if len(whole) == 1:
        return forward, [of_queries + of_keys + of_values]
    return forward, [of_queries, of_keys, of_values]


def attention_work(whole: Shapes, output: Shape, attributes: Attributes) -> Work:
    """FLOP of the matrix products and of the softmax between them.

    The softmax moves four elements per entry of the scores in the forward pass, and six in the
    backward pass, of which the gradients of queries and of keys count half each.
    """
    entries, _, _ = score_sizes(whole, output, attributes)
    moved = ELEMENT_FLOPS * entries  # one element for each entry of the scores
    forward, of_inputs = attention_products(whole, output, attributes)
    softmax = [6 * moved] if len(whole) == 1 else [3 * moved, 3 * moved, 0.0]
    backward = [product + more for product, more in zip(of_inputs, softmax, strict=True)]
    return forward + 4 * moved, backward


def attention(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """softmax(q k^T / sqrt(d)) v. The attribute `causal` hides later tokens; `rotary` applies
    rotary position embeddings to q and k first."""
    from torch.nn.functional import scaled_dot_product_attention

    r = attributes.get("queries", 1)
    q, k, v = inputs if len(inputs) == 3 else split_heads(inputs[0], r)
    if attributes.get("rotary", False):
        q, k = rotated(q), rotated(k)
    heads = scaled_dot_product_attention(q, k, v, is_causal=attributes.get("causal", False))
    # [b, groups r, tokens, d] -> [b, groups, tokens, r d]; unchanged for three inputs, where r is 1
    return heads.unflatten(1, (-1, r)).transpose(2, 3).flatten(3)


def split_heads(x: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [b, groups r, tokens, d] from one tensor [b, groups, tokens,
    (r + 2) d]. Keys and values are repeated for each of a group's r query heads."""
    d = x.shape[3] // (r + 2)
    q, k, v = x.split([r * d, d, d], dim=3)
    queries = q.unflatten(3, (r, d)).transpose(2, 3).flatten(1, 2)
    return queries, k.repeat_interleave(r, dim=1), v.repeat_interleave(r, dim=1)


def rotated(x: Tensor, base: float = 10_000.0) -> Tensor:
    """x [b, heads, tokens, d] with rotary position embeddings: pairs of entries are rotated by
    angles that are proportional to the token's position.

    Entry i is paired with entry i + d // 2; the last entry of an odd d stays. Pair i rotates by
    base^(-i / (d // 2)) per token. Source: Su et al. 2021.
    """
    import torch

    half = x.shape[3] // 2
    pairs = torch.arange(half, dtype=torch.float64, device=x.device)
    positions = torch.arange(x.shape[2], dtype=torch.float64, device=x.device)
    # [tokens, half]; where half is 0 there are no angles, and 1 replaces the divisor 0
    angle = positions[:, None] * base ** (-pairs / max(half, 1))
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second, last = x.split((half, half, x.shape[3] % 2), dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, last], dim=-1)


ATTENTION: dict[str, Operator] = {
    "attention": Operator(
        attention_shape, first_two, attention, attention_work, attention_products
    ),
    "rotary": Operator(
        unchanged, first_two, lambda x, a, p: rotated(x[0]), output_sized_work, linear=True
    ),
}
