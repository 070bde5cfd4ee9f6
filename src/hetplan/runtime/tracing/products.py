"""ATen's products: linear layers, matrix products, einsum, convolution, attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hetplan.runtime.tracing.walk import MissingRule, Rule, Tensor, Walker

BATCH = "abcdefg"  # leading dimensions; x, y, z are those of the product


def linear(w: Walker, x: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
    """x [..., i] weight [o, i] bias [o]."""
    lead = BATCH[: len(x.shape) - 1]
    if bias is None:
        return w.apply("contract", x, weight, label="linear", equation=f"{lead}x,yx->{lead}y")
    return w.apply("contract", x, weight, bias, label="linear", equation=f"{lead}x,yx,y->{lead}y")


def matmul(w: Walker, left: Tensor, right: Tensor) -> Tensor:
    """[..., i, j] @ [..., j, k], equal leading dimensions, or a matrix on the right."""
    left, right = w.tensor(left), w.tensor(right)
    if len(left.shape) < 2 or len(right.shape) < 2:
        raise MissingRule("a product with a vector")
    lead = BATCH[: len(left.shape) - 2]
    if len(right.shape) == 2:
        return w.apply("contract", left, right, label="matmul", equation=f"{lead}xy,yz->{lead}xz")
    if left.shape[:-2] != right.shape[:-2]:
        raise MissingRule(
            f"a product that repeats leading dimensions ({left.shape} and {right.shape})"
        )
    return w.apply("contract", left, right, label="matmul", equation=f"{lead}xy,{lead}yz->{lead}xz")


def addmm(
    w: Walker, bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """bias + left @ right."""
    if beta != 1 or alpha != 1:
        raise MissingRule("addmm with factors")
    if len(bias.shape) != 1:
        return w.apply("add", matmul(w, left, right), bias)
    return w.apply("contract", left, right, bias, label="addmm", equation="xy,yz,z->xz")


def einsum(w: Walker, equation: str, tensors: Sequence[Any], *, path: Any = None) -> Tensor:
    """Two tensors, every letter once in each."""
    equation = equation.replace(" ", "")
    left, _, output = equation.partition("->")
    terms = left.split(",")
    if len(terms) != 2 or "." in equation or not equation.count("->"):
        raise MissingRule(f"einsum {equation} (two tensors, all letters written out)")
    if any(len(set(term)) < len(term) for term in (*terms, output)):
        raise MissingRule(f"einsum {equation} (a letter twice in one tensor)")
    if any(x not in left for x in output) or any(
        x not in output and x not in other for term, other in (terms, terms[::-1]) for x in term
    ):
        raise MissingRule(f"einsum {equation} (a sum over one tensor alone)")
    return w.apply("contract", *tensors, label="einsum", equation=equation)


def alike(value: Any) -> int:
    """The one number that a list repeats."""
    numbers = [value] if isinstance(value, int) else list(value)
    if len(set(numbers)) != 1:
        raise MissingRule(f"different figures for the two directions ({numbers})")
    return int(numbers[0])


def conv2d(
    w: Walker, x: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """A convolution without dilation and groups."""
    if isinstance(padding, str) or alike(dilation) != 1 or groups != 1 or len(x.shape) != 4:
        raise MissingRule("convolution with dilation, groups or padding by name")
    inputs = [x, weight] if bias is None else [x, weight, bias]
    return w.apply(
        "convolve", *inputs, label="conv2d", padding=alike(padding), stride=alike(stride)
    )


def attention(
    w: Walker, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """scaled_dot_product_attention of [samples, heads, tokens, d], with grouped queries too."""
    if attn_mask is not None:
        raise MissingRule("attention with a mask (only is_causal has a rule)")
    if len(q.shape) != 4:
        raise MissingRule(f"attention over {len(q.shape)} dimensions (expected 4)")
    if dropout_p:
        w.same(q, "dropout in attention")
    if scale is not None and not math.isclose(scale * math.sqrt(q.shape[3]), 1.0, rel_tol=1e-12):
        q = w.apply("scale", q, factor=scale * math.sqrt(q.shape[3]))
    if k.shape[1] != q.shape[1]:
        k, v = repeated_heads(w, k, q.shape[1]), repeated_heads(w, v, q.shape[1])
    return w.apply("attention", q, k, v, causal=bool(is_causal))


def repeated_heads(w: Walker, x: Tensor, heads: int) -> Tensor:
    """[b, g, s, d] -> [b, heads, s, d], each head repeated for its group of queries."""
    b, g, s, d = x.shape
    x = w.reshape(x, (b, g, 1, s, d))
    return w.reshape(w.apply("repeat", x, shape=(b, g, heads // g, s, d)), (b, heads, s, d))


def route(w: Walker, gates: Tensor, active: int, capacity: int) -> Tensor:
    """hetplan's own operator for mixtures of experts (see `models.modules`)."""
    return w.apply("route", gates, active=int(active), capacity=int(capacity))


RULES: dict[str, Rule] = {
    "aten.linear": linear,
    "aten.matmul": matmul,
    "aten.mm": matmul,
    "aten.bmm": matmul,
    "aten.addmm": addmm,
    "aten.einsum": einsum,
    "aten.conv2d": conv2d,
    "aten.scaled_dot_product_attention": attention,
    "hetplan.route": route,
}
