"""Attention and rotary positions.

`attention` reads q, k and v [samples, heads, tokens, d], or all three in one tensor [samples,
groups, tokens, (r + 2) d], where each group of r = `queries` query heads shares a key-value head
(Ainslie et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetplan.programs.operators.operator import (
    ELEMENT_FLOPS,
    Attributes,
    Operator,
    Place,
    Shape,
    Shapes,
    Work,
    first_two,
    output_moved,
    unchanged,
)

if TYPE_CHECKING:
    from torch import Tensor


def attention_shape(whole: Shapes, attributes: Attributes) -> Shape:
    """The width of the values; of one tensor, r widths of a head."""
    if len(whole) > 1:
        return (*whole[0][:3], whole[2][3])
    r = attributes.get("queries", 1)
    return (*whole[0][:3], whole[0][3] // (r + 2) * r)


def scores_of(whole: Shapes, output: Shape, attributes: Attributes) -> tuple[float, int, int]:
    """(Entries of the scores of all heads, width of a query, width of a value)."""
    (b, n, q, e), k = output, whole[-1][2]
    if len(whole) > 1:
        return float(b * n * q * k), whole[0][3], e
    r = attributes.get("queries", 1)
    return float(b * n * r * q * k), e // r, e // r


def attention_products(whole: Shapes, output: Shape, attributes: Attributes) -> Work:
    """Two products in the forward pass; five in the backward pass, which computes the scores
    again."""
    scores, d, e = scores_of(whole, output, attributes)
    forward = 2 * scores * (d + e)
    # dP = dO v^T serves dq and dk alike, and so do the scores
    of_queries = scores * e + 2 * scores * d
    of_keys, of_values = of_queries, 2 * scores * e
    each = [of_queries, of_keys, of_values]
    return forward, [sum(each)] if len(whole) == 1 else each


def attention_work(whole: Shapes, output: Shape, attributes: Attributes) -> Work:
    """The products, and the softmax between them."""
    scores, _, _ = scores_of(whole, output, attributes)
    softmax = ELEMENT_FLOPS * scores
    forward, backward = attention_products(whole, output, attributes)
    # the gradients of queries and of keys both pass the softmax
    passed = [6 * softmax] if len(whole) == 1 else [3 * softmax, 3 * softmax, 0.0]
    return forward + 4 * softmax, [a + b for a, b in zip(backward, passed, strict=True)]


def attention(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """softmax(q k^T / sqrt(d)) v; `causal` hides later tokens, `rotary` turns q and k first."""
    from torch.nn.functional import scaled_dot_product_attention

    r = attributes.get("queries", 1)
    q, k, v = inputs if len(inputs) == 3 else by_query(inputs[0], r)
    if attributes.get("rotary", False):
        q, k = turned(q), turned(k)
    mixed = scaled_dot_product_attention(q, k, v, is_causal=attributes.get("causal", False))
    return mixed.unflatten(1, (-1, r)).transpose(2, 3).flatten(3)


def by_query(x: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [b, groups r, tokens, d] of one tensor [b, groups, tokens, (r + 2) d]."""
    d = x.shape[3] // (r + 2)
    q, k, v = x.split([r * d, d, d], dim=3)
    queries = q.unflatten(3, (r, d)).transpose(2, 3).flatten(1, 2)
    return queries, k.repeat_interleave(r, dim=1), v.repeat_interleave(r, dim=1)


def turned(x: Tensor, base: float = 10_000.0) -> Tensor:
    """Pairs of entries of x [b, n, tokens, d] turned by angles that grow with the token. Entry i
    pairs with entry i + d // 2; of an odd d the last entry stays.

    Source: Su et al. 2021.
    """
    import torch

    half = x.shape[3] // 2
    steps = torch.arange(half, dtype=torch.float64, device=x.device)
    places = torch.arange(x.shape[2], dtype=torch.float64, device=x.device)
    angle = places[:, None] * base ** (-steps / max(half, 1))
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    one, other, last = x.split((half, half, x.shape[3] % 2), dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin, last], dim=-1)


ATTENTION: dict[str, Operator] = {
    "attention": Operator(
        attention_shape, first_two, attention, attention_work, attention_products
    ),
    "rotary": Operator(
        unchanged, first_two, lambda x, a, p: turned(x[0]), output_moved, linear=True
    ),
}
