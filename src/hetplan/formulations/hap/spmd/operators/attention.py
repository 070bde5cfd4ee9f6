"""Attention over heads, and rotary positions: samples and heads can be sliced, tokens cannot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetplan.formulations.hap.spmd.forms import PARTIAL, Way, along
from hetplan.formulations.hap.spmd.operators.base import (
    ELEMENT_FLOPS,
    Array,
    Attributes,
    Operator,
    Place,
    Shape,
    size,
)
from hetplan.formulations.hap.spmd.operators.norms import softmax, softmax_gradient


class Attention(Operator):
    """softmax(q k^T / sqrt(d)) v for q, k, v [samples, heads, tokens, d], or all three in one
    tensor [samples, heads, tokens, 3 d]. `causal` hides later tokens, `rotary` turns q and k first.
    With `queries` = r in one tensor, a group of r query heads shares keys and values: [samples,
    groups, tokens, (r + 2) d] gives [samples, groups, tokens, r d] (Ainslie et al. 2023)."""

    kind = "attention"

    def shape(self, whole: Sequence[Shape], attributes: Attributes) -> Shape:
        if len(whole) == 1:
            r = attributes.get("queries", 1)
            return (*whole[0][:3], whole[0][3] // (r + 2) * r)
        return (*whole[0][:3], whole[2][3])

    def ways(self, whole: Sequence[Shape], attributes: Attributes) -> list[Way]:
        return [along(letter, ("bnqd", "bnkd", "bnke")[: len(whole)], "bnqe") for letter in "bn"]

    def _split(self, inputs: Sequence[Array], attributes: Attributes) -> tuple[Array, Array, Array]:
        """q, k, v, turned where asked."""
        q, k, v = apart(inputs[0], attributes) if len(inputs) == 1 else inputs
        if attributes.get("rotary", False):
            q, k = turned(q, 1.0), turned(k, 1.0)
        return q, k, v

    def _weights(self, q: Array, k: Array, attributes: Attributes) -> Array:
        scores = np.einsum("bnqd,bnkd->bnqk", q, k, optimize=True) / np.sqrt(q.shape[3])
        if attributes.get("causal", False):
            later = np.triu(
                np.ones(scores.shape[2:], dtype=bool), 1 + scores.shape[3] - scores.shape[2]
            )
            scores = np.where(later, -np.inf, scores)
        return softmax(scores)

    def forward(self, inputs: Sequence[Array], attributes: Attributes, place: Place) -> Array:
        q, k, v = self._split(inputs, attributes)
        result: Array = np.einsum(
            "bnqk,bnke->bnqe", self._weights(q, k, attributes), v, optimize=True
        )
        return grouped(result, attributes)

    def backward(
        self,
        inputs: Sequence[Array],
        output: Array,
        gradient: Array,
        attributes: Attributes,
        place: Place,
    ) -> list[Array | None]:
        q, k, v = self._split(inputs, attributes)
        weights, gradient = self._weights(q, k, attributes), by_head(gradient, attributes)
        dv = np.einsum("bnqk,bnqe->bnke", weights, gradient, optimize=True)
        scores = softmax_gradient(weights, np.einsum("bnqe,bnke->bnqk", gradient, v, optimize=True))
        scores = scores / np.sqrt(q.shape[3])
        dq = np.einsum("bnqk,bnkd->bnqd", scores, k, optimize=True)
        dk = np.einsum("bnqk,bnqd->bnkd", scores, q, optimize=True)
        if attributes.get("rotary", False):
            dq, dk = turned(dq, -1.0), turned(dk, -1.0)
        if len(inputs) > 1:
            return [dq, dk, dv]
        r = attributes.get("queries", 1)
        dk, dv = (x.reshape(len(x), x.shape[1] // r, r, *x.shape[2:]).sum(axis=2) for x in (dk, dv))
        return [np.concatenate([grouped(dq, attributes), dk, dv], axis=3)]

    def work(
        self, whole: Sequence[Shape], output: Shape, attributes: Attributes
    ) -> tuple[float, list[float]]:
        (b, n, q, e), k = output, whole[-1][2]
        if len(whole) == 1:
            r = attributes.get("queries", 1)
            n, e = n * r, e // r
        d = e if len(whole) == 1 else whole[0][3]
        scores = float(b * n * q * k)
        forward = 2 * scores * (d + e) + 4 * ELEMENT_FLOPS * scores
        # dv; dP = dO v^T and the softmax, shared by dq and dk
        through = scores * e + 3 * ELEMENT_FLOPS * scores
        parts = [through + 2 * scores * d, through + 2 * scores * d, 2 * scores * e]
        return forward, [sum(parts)] if len(whole) == 1 else parts


def apart(x: Array, attributes: Attributes) -> tuple[Array, Array, Array]:
    """q, k, v [b, heads, tokens, d] from one tensor, keys and values repeated for each query of
    their group."""
    r = attributes.get("queries", 1)
    d = x.shape[3] // (r + 2)
    k, v = (np.repeat(x[..., (r + i) * d : (r + i + 1) * d], r, axis=1) for i in range(2))
    return by_head(x[..., : r * d], attributes), k, v


def by_head(x: Array, attributes: Attributes) -> Array:
    """[b, groups, tokens, r d] -> [b, groups r, tokens, d]."""
    r = attributes.get("queries", 1)
    b, g, s, width = x.shape
    found: Array = (
        x.reshape(b, g, s, r, width // r).transpose(0, 1, 3, 2, 4).reshape(b, g * r, s, width // r)
    )
    return found


def grouped(x: Array, attributes: Attributes) -> Array:
    """[b, groups r, tokens, d] -> [b, groups, tokens, r d]."""
    r = attributes.get("queries", 1)
    b, n, s, d = x.shape
    found: Array = (
        x.reshape(b, n // r, r, s, d).transpose(0, 1, 3, 2, 4).reshape(b, n // r, s, r * d)
    )
    return found


def turned(x: Array, sign: float, base: float = 10_000.0) -> Array:
    """Pairs of entries of x [b, n, tokens, d] rotated by an angle that grows with the token (Su et
    al. 2021)."""
    half = x.shape[3] // 2
    angle = np.arange(x.shape[2])[:, None] * base ** (-np.arange(half) / half)
    cos, sin = np.cos(angle), sign * np.sin(angle)
    one, other = x[..., :half], x[..., half:]
    return np.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)


class Rotary(Operator):
    """`turned` as an operator of its own."""

    kind = "rotary"

    def shape(self, whole: Sequence[Shape], attributes: Attributes) -> Shape:
        return whole[0]

    def ways(self, whole: Sequence[Shape], attributes: Attributes) -> list[Way]:
        return [*(along(letter, ("bnsd",), "bnsd") for letter in "bn"), Way((PARTIAL,), PARTIAL)]

    def forward(self, inputs: Sequence[Array], attributes: Attributes, place: Place) -> Array:
        return turned(inputs[0], 1.0)

    def backward(
        self,
        inputs: Sequence[Array],
        output: Array,
        gradient: Array,
        attributes: Attributes,
        place: Place,
    ) -> list[Array | None]:
        return [turned(gradient, -1.0)]

    def work(
        self, whole: Sequence[Shape], output: Shape, attributes: Attributes
    ) -> tuple[float, list[float]]:
        moved = 2 * ELEMENT_FLOPS * size(output)
        return moved, [moved]


OPERATORS = (Attention(), Rotary())
