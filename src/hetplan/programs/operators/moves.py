"""Operators that only move entries, without work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetplan.errors import require
from hetplan.programs.forms import WHOLE, ShardingRule, summands
from hetplan.programs.operators.operator import (
    Attributes,
    Operator,
    Place,
    Shape,
    Shapes,
    no_work,
    size,
)

if TYPE_CHECKING:
    from torch import Tensor


def other_lengths(shape: Shape, d: int, *lengths: int) -> Shape:
    """The shape with `lengths` in the place of dimension d; without lengths, d is left out."""
    return (*shape[:d], *lengths, *shape[d + 1 :])


def other_dimensions(whole: Shapes, attributes: Attributes) -> list[ShardingRule]:
    """All inputs can be sliced along the same dimension, any but the attribute `dimension`."""
    kept = [d for d in range(len(whole[0])) if d != attributes["dimension"]]
    return [ShardingRule((d,) * len(whole), d) for d in kept]


def permute_shape(whole: Shapes, attributes: Attributes) -> Shape:
    """The output's shape: the input's dimensions in the order of the attribute `order`."""
    return tuple(whole[0][d] for d in attributes["order"])


def permute_rules(whole: Shapes, attributes: Attributes) -> list[ShardingRule]:
    """Any dimension can be sliced."""
    return [ShardingRule((d,), place) for place, d in enumerate(attributes["order"])]


def reshape_shape(whole: Shapes, attributes: Attributes) -> Shape:
    """The output's shape: the attribute `shape`, which has as many entries as the input."""
    shape: Shape = tuple(attributes["shape"])
    require(
        size(shape) == size(whole[0]),
        "number of entries",
        where="reshape",
        got=shape,
        expected=f"{size(whole[0])} in all",
    )
    return shape


def reshape_rules(whole: Shapes, attributes: Attributes) -> list[ShardingRule]:
    """A dimension can be sliced if the new shape has a dimension in front of which stand equally
    many entries: the product of the lengths in front is the same. Slices in whole units of their
    common axis (`axes`) then have the same entries."""
    before, after = whole[0], attributes["shape"]
    # product of the lengths in front -> dimension of the new shape; dimensions of length 1, in
    # front of which stands the same product as of the next one, are left out
    new_dimension = {size(after[:e]): e for e, length in enumerate(after) if length > 1}
    sharding_rules = [summands()]  # stays first: packaged decisions refer to steps by number
    for d, length in enumerate(before):
        in_front = size(before[:d])
        if length > 1 and in_front in new_dimension:
            sharding_rules.append(ShardingRule((d,), new_dimension[in_front]))
    return sharding_rules


def select_shape(whole: Shapes, attributes: Attributes) -> Shape:
    """The output's shape: `dimension` has the length stop - start."""
    length = attributes["stop"] - attributes["start"]
    return other_lengths(whole[0], attributes["dimension"], length)


def select(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """Entries [start, stop) of `dimension`."""
    start, stop = attributes["start"], attributes["stop"]
    return inputs[0].narrow(attributes["dimension"], start, stop - start)


def repeat_shape(whole: Shapes, attributes: Attributes) -> Shape:
    """The output's shape: the attribute `shape`, to which dimensions of length 1 are repeated."""
    return tuple(attributes["shape"])


def repeat_rules(whole: Shapes, attributes: Attributes) -> list[ShardingRule]:
    """Any dimension can be sliced; one of length 1 that is repeated is read whole."""
    after = attributes["shape"]
    return [ShardingRule((d if n == after[d] else WHOLE,), d) for d, n in enumerate(whole[0])]


def join_shape(whole: Shapes, attributes: Attributes) -> Shape:
    """The output's shape: the lengths of all inputs are added up along `dimension`."""
    d = attributes["dimension"]
    return other_lengths(whole[0], d, sum(shape[d] for shape in whole))


def join(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """The inputs, concatenated along `dimension`."""
    import torch

    return torch.cat(list(inputs), attributes["dimension"])


MOVES: dict[str, Operator] = {
    "permute": Operator(
        permute_shape, permute_rules, lambda x, a, p: x[0].permute(a["order"]), no_work, linear=True
    ),
    "reshape": Operator(
        reshape_shape, reshape_rules, lambda x, a, p: x[0].reshape(p.shape), no_work, linear=True
    ),
    "select": Operator(select_shape, other_dimensions, select, no_work, linear=True),
    "repeat": Operator(
        repeat_shape, repeat_rules, lambda x, a, p: x[0].expand(p.shape), no_work, linear=True
    ),
    "join": Operator(join_shape, other_dimensions, join, no_work, linear=True),
}
