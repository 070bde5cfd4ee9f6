"""ATen's elementwise operators, normalisations, softmax, pooling, means, embedding and loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hetplan.runtime.tracing.walk import (
    MissingRule,
    Rule,
    Tensor,
    Walker,
    positive,
    scalar,
)


def add(w: Walker, left: Any, right: Any, *, alpha: float = 1) -> Tensor:
    """Tensors or numbers."""
    if scalar(left) is not None and not isinstance(left, Tensor):
        left, right = right, left
        if alpha != 1:
            raise MissingRule("a number plus a multiple of a tensor")
    number = scalar(right)
    if number is not None:
        return w.apply("offset", left, number=alpha * number) if number else left
    if alpha != 1:
        right = w.apply("scale", right, factor=float(alpha))
    return w.apply("add", left, right)


def sub(w: Walker, left: Any, right: Any, *, alpha: float = 1) -> Tensor:
    """A sum with the negative."""
    if scalar(left) is not None and not isinstance(left, Tensor):
        return add(w, w.apply("scale", right, factor=-float(alpha)), left)
    return add(w, left, right, alpha=-alpha)


def mul(w: Walker, left: Any, right: Any) -> Tensor:
    """A product of entries, or with a number."""
    for one, other in ((left, right), (right, left)):
        number = scalar(other)
        if number is not None and isinstance(one, Tensor):
            return w.apply("scale", one, factor=number)
    return w.apply("multiply", left, right)


def div(w: Walker, left: Any, right: Any, *, rounding_mode: Any = None) -> Tensor:
    """A quotient."""
    if rounding_mode is not None:
        raise MissingRule("division with rounding")
    number = scalar(right)
    if number is not None:
        return w.apply("scale", left, factor=1 / number)
    return mul(w, left, w.apply("power", right, exponent=-1.0))


def neg(w: Walker, x: Tensor) -> Tensor:
    """The negative."""
    return w.apply("scale", x, factor=-1.0)


def power(w: Walker, x: Any, exponent: Any) -> Tensor:
    """x to a number."""
    number = scalar(exponent)
    if number is None or not isinstance(x, Tensor):
        raise MissingRule("a power with a tensor as exponent")
    return w.apply("power", x, exponent=number)


def fixed_power(exponent: float) -> Rule:
    """rsqrt, sqrt, reciprocal, square."""

    def rule(w: Walker, x: Tensor) -> Tensor:
        return w.apply("power", x, exponent=exponent)

    return rule


def gelu(w: Walker, x: Tensor, *, approximate: str = "none") -> Tensor:
    """Both forms."""
    return w.apply("gelu" if approximate == "tanh" else "gelu-erf", x)


def mapped(kind: str) -> Rule:
    """An operator of one tensor that exists under that kind."""

    def rule(w: Walker, x: Tensor) -> Tensor:
        return w.apply(kind, x)

    return rule


def greater(w: Walker, x: Tensor, other: Any) -> Tensor:
    """1 where an entry is more than 0."""
    if scalar(other) != 0:
        raise MissingRule("a comparison with anything but 0")
    return w.apply("positive", x)


def masked_fill(w: Walker, x: Tensor, mask: Any, value: Any) -> Tensor:
    """Minus infinity where a constant mask says so: a sum with a constant."""
    number = scalar(value)
    if isinstance(mask, Tensor) or number is None or number > -1e30:
        raise MissingRule("masked_fill (only a constant mask with minus infinity has a rule)")
    hidden = mask.double().masked_fill(mask, -math.inf).masked_fill(~mask, 0.0)
    return w.apply("add", x, hidden)


def over_the_last(kind: str) -> Rule:
    """softmax, log_softmax."""

    def rule(w: Walker, x: Tensor, dim: int, dtype: Any = None) -> Tensor:
        if positive(dim, len(x.shape)) != len(x.shape) - 1:
            raise MissingRule(f"{kind} over another dimension than the last")
        return w.apply(kind, x)

    return rule


def layer_norm(
    w: Walker, x: Tensor, shape: Sequence[int], weight: Any = None, bias: Any = None,
    eps: float = 1e-5, cudnn_enable: bool = True,
) -> Tensor:  # fmt: skip
    """Over the last dimension, with scale and shift."""
    if len(shape) != 1 or weight is None or bias is None:
        raise MissingRule("layer norm over several dimensions, or without scale or shift")
    return w.apply("layer-norm", x, weight, bias, epsilon=float(eps))


def rms_norm(
    w: Walker, x: Tensor, shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Tensor:
    """Over the last dimension, with scale."""
    if len(shape) != 1 or weight is None or eps is None:
        raise MissingRule("RMS norm over several dimensions, without scale, or without eps")
    return w.apply("rms-norm", x, weight, epsilon=float(eps))


def embedding(
    w: Walker, table: Tensor, ids: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:  # fmt: skip
    """Rows of a table."""
    if padding_idx >= 0 or scale_grad_by_freq:
        raise MissingRule("embedding with a padding index or gradients by frequency")
    return w.apply("embed", ids, table)


def cross_entropy(
    w: Walker, logits: Tensor, labels: Any, weight: Any = None, reduction: int = 1,
    ignore_index: int = -100, label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """The mean over rows of [rows, classes]."""
    labels = w.tensor(labels)
    if weight is not None or reduction != 1 or label_smoothing != 0 or ignore_index >= 0:
        raise MissingRule("cross-entropy with weights, smoothing, an index to ignore, or no mean")
    if len(logits.shape) != 2 or len(labels.shape) != 1:
        raise MissingRule(
            "cross-entropy of more than two dimensions, or with probabilities as labels"
        )
    return w.apply("cross-entropy", logits, labels, count=labels.shape[0])


def nll_loss(
    w: Walker,
    x: Tensor,
    labels: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
) -> Tensor:
    """Of log_softmax: both together are the cross-entropy."""
    behind = w.writer.node(x.name)
    if behind.kind != "log-softmax":
        raise MissingRule("nll_loss of anything but log_softmax")
    return cross_entropy(
        w, Tensor(behind.inputs[0], x.shape), labels, weight, reduction, ignore_index
    )


def mean(
    w: Walker,
    x: Tensor,
    dim: Sequence[int] | int | None = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Tensor:
    """Over some dimensions, one after the other."""
    rank, whole = len(x.shape), x.shape
    dims = range(rank) if dim is None else [dim] if isinstance(dim, int) else dim
    found = sorted({positive(d, rank) for d in dims}, reverse=True)
    for d in found:
        x = w.apply("mean", x, dimension=d, length=whole[d])
    return w.reshape(x, [1 if d in found else n for d, n in enumerate(whole)]) if keepdim else x


def total(
    w: Walker,
    x: Tensor,
    dim: Sequence[int] | int | None = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Tensor:
    """A sum as a multiple of the mean."""
    found = mean(w, x, dim, keepdim)
    factor = math.prod(x.shape) / max(1, math.prod(found.shape))
    return w.apply("scale", found, factor=factor)


def max_pool2d(
    w: Walker, x: Tensor, window: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> Tensor:  # fmt: skip
    """Squares side by side."""
    from hetplan.runtime.tracing.products import alike

    size = alike(window)
    if (
        (stride and alike(stride) != size)
        or alike(padding) != 0
        or alike(dilation) != 1
        or ceil_mode
    ):
        raise MissingRule("pooling whose windows overlap, are padded or dilated")
    return w.apply("max-pool", x, window=size)


def adaptive_avg_pool2d(w: Walker, x: Tensor, size: Sequence[int]) -> Tensor:
    """To one value per channel, to the size that is there, or from one value to many."""
    height, width = (int(n) for n in size)
    if (height, width) == x.shape[2:]:
        return x
    if x.shape[2:] == (1, 1):
        return w.apply("repeat", x, shape=(*x.shape[:2], height, width))
    if (height, width) != (1, 1):
        raise MissingRule(f"pooling of {x.shape[2:]} to {(height, width)}")
    return w.reshape(w.apply("mean-pool", x), (*x.shape[:2], 1, 1))


def native_dropout(w: Walker, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, None]:
    """Left out: it costs a pass over memory, and changes no shape. No mask is made."""
    return w.same(x, "dropout" if p and train else None), None


RULES: dict[str, Rule] = {
    "aten.add": add,
    "aten.sub": sub,
    "aten.mul": mul,
    "aten.div": div,
    "aten.neg": neg,
    "aten.pow": power,
    "aten.rsqrt": fixed_power(-0.5),
    "aten.sqrt": fixed_power(0.5),
    "aten.reciprocal": fixed_power(-1.0),
    "aten.relu": mapped("relu"),
    "aten.silu": mapped("silu"),
    "aten.tanh": mapped("tanh"),
    "aten.sigmoid": mapped("sigmoid"),
    "aten.gelu": gelu,
    "aten.gt": greater,
    "aten.masked_fill": masked_fill,
    "aten.softmax": over_the_last("softmax"),
    "aten._softmax": lambda w, x, dim, half: over_the_last("softmax")(w, x, dim),
    "aten.log_softmax": over_the_last("log-softmax"),
    "aten.layer_norm": layer_norm,
    "aten.rms_norm": rms_norm,
    "aten.embedding": embedding,
    "aten.cross_entropy_loss": cross_entropy,
    "aten.nll_loss_nd": nll_loss,
    "aten.mean": mean,
    "aten.sum": total,
    "aten.max_pool2d": max_pool2d,
    "aten.adaptive_avg_pool2d": adaptive_avg_pool2d,
    "aten.native_dropout": native_dropout,
}
