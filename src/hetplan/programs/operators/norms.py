"""Norms and softmax.

A batch norm consists of two operators. `batch-moments` gives the means of x and x^2 over samples
and pixels, [2, channels]. `batch-norm` reads (x, moments, scale, shift). A slice of the samples
gives summands of the moments; their All-Reduce synchronises the statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetplan.programs.forms import PARTIAL, WHOLE, ShardingRule
from hetplan.programs.operators.operator import (
    Attributes,
    Operator,
    Place,
    Shape,
    Shapes,
    all_but_the_last,
    unchanged,
)

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-5  # torch's own default for layer norms


def layer_norm(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """Layer norm over the last dimension, of the inputs (x, scale, shift)."""
    from torch.nn.functional import layer_norm

    x, scale, shift = inputs
    return layer_norm(x, x.shape[-1:], scale, shift, attributes.get("epsilon", EPSILON))


def rms_norm(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """RMS norm over the last dimension, of the inputs (x, scale)."""
    from torch.nn.functional import rms_norm

    x, scale = inputs
    return rms_norm(x, x.shape[-1:], scale, attributes.get("epsilon", EPSILON))


def batch_moments_shape(whole: Shapes, attributes: Attributes) -> Shape:
    """The output's shape: [2, channels]."""
    return (2, whole[0][1])


def batch_moments_rules(whole: Shapes, attributes: Attributes) -> list[ShardingRule]:
    """Any dimension can be sliced. Slices of the channels give slices of the moments; slices of all
    other dimensions give summands."""
    return [ShardingRule((d,), d if d == 1 else PARTIAL) for d in range(len(whole[0]))]


def batch_moments(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """The summands of this slice in the means of x and x^2 over the `count` entries of a channel.
    They are in fp64, because the variance is a difference of both."""
    import torch

    x = inputs[0].transpose(0, 1).flatten(1)
    sums = [y.sum(1, dtype=torch.float64) for y in (x, x.square())]
    return torch.stack(sums) / attributes["count"]


def batch_norm_rules(whole: Shapes, attributes: Attributes) -> list[ShardingRule]:
    """The channels of all inputs can be sliced, or any other dimension of x alone."""
    sharding_rules = [ShardingRule((d, WHOLE, WHOLE, WHOLE), d) for d in range(len(whole[0]))]
    # channels are dimension 1 of x and of the moments, 0 of scale and shift
    sharding_rules[1] = ShardingRule((1, 1, 0, 0), 1)
    return sharding_rules


def batch_norm(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """Every channel minus its mean, divided by its standard deviation, scaled and shifted (Ioffe
    and Szegedy 2015)."""
    x, (mean, square), scale, shift = inputs
    deviation = (square - mean.square() + attributes["epsilon"]).sqrt()
    factor = (scale / deviation).to(x.dtype)
    mean = mean.to(x.dtype)
    by_channel = (-1, *[1] * (x.dim() - 2))  # to be broadcast over samples and pixels
    return (x - mean.view(by_channel)) * factor.view(by_channel) + shift.view(by_channel)


NORMS: dict[str, Operator] = {
    "layer-norm": Operator(unchanged, all_but_the_last, layer_norm),
    "rms-norm": Operator(unchanged, all_but_the_last, rms_norm),
    "softmax": Operator(unchanged, all_but_the_last, lambda x, a, p: x[0].softmax(-1)),
    "log-softmax": Operator(unchanged, all_but_the_last, lambda x, a, p: x[0].log_softmax(-1)),
    # the moments of no samples are zeros in fp64, as all moments are
    "batch-moments": Operator(batch_moments_shape, batch_moments_rules, batch_moments, empty=True),
    "batch-norm": Operator(unchanged, batch_norm_rules, batch_norm),
}
