"""Operators that compute each entry of the output from the entries of the inputs in the same place:
activations, sums and products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hetplan.errors import InputError, require
from hetplan.programs.forms import PARTIAL, WHOLE, Form, ShardingRule
from hetplan.programs.operators.operator import (
    Attributes,
    Operator,
    Place,
    Shape,
    Shapes,
    all_but_the_last,
    each_dimension,
    unchanged,
)

if TYPE_CHECKING:
    from torch import Tensor


def gelu(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """GELU, in the approximation by tanh."""
    from torch.nn.functional import gelu

    return gelu(inputs[0], approximate="tanh")


def gelu_erf(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """GELU, the exact function."""
    from torch.nn.functional import gelu

    return gelu(inputs[0])


def silu(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """SiLU: x times the sigmoid of x."""
    from torch.nn.functional import silu

    return silu(inputs[0])


def positive(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """1 where an entry is more than 0, else 0."""
    x = inputs[0]
    return (x > 0).to(x.dtype)


def offset(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """Every entry plus the attribute `number`. If the input comes in summands, only one device adds
    it."""
    return inputs[0] + attributes["number"] * place.once


def broadcast(whole: Shapes, attributes: Attributes) -> Shape:
    """The output's shape, by numpy's rule of broadcasting."""
    try:
        return tuple(int(n) for n in np.broadcast_shapes(*whole))
    except ValueError:
        shapes = " and ".join(map(str, whole))
        raise InputError("shapes do not fit", where="add or multiply", got=shapes) from None


def broadcast_rules(whole: Shapes, attributes: Attributes) -> list[ShardingRule]:
    """Any dimension of the output can be sliced. Inputs that lack the dimension, or have length 1
    there, are whole."""
    output = broadcast(whole, attributes)

    def form(shape: Shape, d: int) -> Form:
        """The form of an input of this shape if the output is sliced along d."""
        same = d - len(output) + len(shape)  # number of the same dimension in the input
        return same if same >= 0 and shape[same] == output[d] else WHOLE

    return [ShardingRule(tuple(form(shape, d) for shape in whole), d) for d in range(len(output))]


def add(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """The sum of all inputs."""
    return sum(inputs[1:], start=inputs[0])


def multiply_rules(whole: Shapes, attributes: Attributes) -> list[ShardingRule]:
    """Any dimension of the output can be sliced. Summands of one factor times the whole other
    factor give summands of the output."""
    of_summands = [ShardingRule((PARTIAL, WHOLE), PARTIAL), ShardingRule((WHOLE, PARTIAL), PARTIAL)]
    return [*broadcast_rules(whole, attributes), *of_summands]


def gated_shape(whole: Shapes, attributes: Attributes) -> Shape:
    """The output's shape: the input's without the last dimension, a pair of gate and value."""
    require(whole[0][-1] == 2, "last dimension", where="gated", got=whole[0][-1], expected="2")
    return whole[0][:-1]


def gated(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """silu(x[..., 0]) * x[..., 1] (Shazeer 2020)."""
    from torch.nn.functional import silu

    gate, value = inputs[0].unbind(-1)
    return silu(gate) * value


ENTRYWISE: dict[str, Operator] = {
    "relu": Operator(unchanged, each_dimension, lambda x, a, p: x[0].relu()),
    "gelu": Operator(unchanged, each_dimension, gelu),
    "gelu-erf": Operator(unchanged, each_dimension, gelu_erf),
    "silu": Operator(unchanged, each_dimension, silu),
    "tanh": Operator(unchanged, each_dimension, lambda x, a, p: x[0].tanh()),
    "sigmoid": Operator(unchanged, each_dimension, lambda x, a, p: x[0].sigmoid()),
    "power": Operator(unchanged, each_dimension, lambda x, a, p: x[0] ** a["exponent"]),
    "positive": Operator(unchanged, each_dimension, positive, differentiable=False),
    "scale": Operator(unchanged, each_dimension, lambda x, a, p: x[0] * a["factor"], linear=True),
    "offset": Operator(unchanged, each_dimension, offset, linear=True),
    "add": Operator(broadcast, broadcast_rules, add, linear=True),
    "multiply": Operator(broadcast, multiply_rules, lambda x, a, p: x[0] * x[1]),
    "gated": Operator(gated_shape, all_but_the_last, gated),
}
