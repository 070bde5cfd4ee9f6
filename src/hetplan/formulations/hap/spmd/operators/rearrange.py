"""Operators that only move entries: they cost nothing, are linear, and any dimension that survives
can be sliced."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetplan.errors import InputError
from hetplan.formulations.hap.spmd.forms import PARTIAL, WHOLE, Way
from hetplan.formulations.hap.spmd.operators.base import (
    Array,
    Attributes,
    Operator,
    Place,
    Shape,
    size,
)

SUMMANDS = Way((PARTIAL,), PARTIAL)


class _Free(Operator):
    """No work."""

    def work(
        self, whole: Sequence[Shape], output: Shape, attributes: Attributes
    ) -> tuple[float, list[float]]:
        return 0.0, [0.0] * len(whole)


class Permute(_Free):
    """Dimensions in the order `order`."""

    kind = "permute"

    def shape(self, whole: Sequence[Shape], attributes: Attributes) -> Shape:
        return tuple(whole[0][d] for d in attributes["order"])

    def ways(self, whole: Sequence[Shape], attributes: Attributes) -> list[Way]:
        return [*(Way((d,), i) for i, d in enumerate(attributes["order"])), SUMMANDS]

    def forward(self, inputs: Sequence[Array], attributes: Attributes, place: Place) -> Array:
        return inputs[0].transpose(attributes["order"])

    def backward(
        self,
        inputs: Sequence[Array],
        output: Array,
        gradient: Array,
        attributes: Attributes,
        place: Place,
    ) -> list[Array | None]:
        return [gradient.transpose(np.argsort(attributes["order"]))]


def groups(before: Shape, after: Shape) -> list[tuple[range, range]]:
    """The shortest runs of dimensions of equal size of two shapes of one tensor; ones join the run
    before."""
    found: list[tuple[range, range]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        i0, j0 = i, j
        here, there = 1, 1
        while True:
            if here == there and i > i0 and j > j0:
                break
            if (here <= there and i < len(before)) or j == len(after):
                here, i = here * before[i], i + 1
            else:
                there, j = there * after[j], j + 1
        while i < len(before) and before[i] == 1 and not (j < len(after) and after[j] == 1):
            i += 1
        while j < len(after) and after[j] == 1 and not (i < len(before) and before[i] == 1):
            j += 1
        found.append((range(i0, i), range(j0, j)))
    return found


class Reshape(_Free):
    """The same entries in `shape`: of each run of dimensions the first (longer than 1) can be
    sliced."""

    kind = "reshape"

    def shape(self, whole: Sequence[Shape], attributes: Attributes) -> Shape:
        shape: Shape = tuple(attributes["shape"])
        if size(shape) != size(whole[0]):
            raise InputError(
                "number of entries", where="reshape", got=shape, expected=f"{size(whole[0])} in all"
            )
        return shape

    def ways(self, whole: Sequence[Shape], attributes: Attributes) -> list[Way]:
        ways = [SUMMANDS]
        after: Shape = tuple(attributes["shape"])
        for run, other in groups(whole[0], after):
            d = next((d for d in run if whole[0][d] > 1), None)
            e = next((e for e in other if after[e] > 1), None)
            if d is not None and e is not None:
                ways.append(Way((d,), e))
        return ways

    def forward(self, inputs: Sequence[Array], attributes: Attributes, place: Place) -> Array:
        return inputs[0].reshape(place.shape)

    def backward(
        self,
        inputs: Sequence[Array],
        output: Array,
        gradient: Array,
        attributes: Attributes,
        place: Place,
    ) -> list[Array | None]:
        return [gradient.reshape(inputs[0].shape)]


class Select(_Free):
    """The range [start, stop) of the dimension `dimension`."""

    kind = "select"

    def shape(self, whole: Sequence[Shape], attributes: Attributes) -> Shape:
        d = attributes["dimension"]
        return (*whole[0][:d], attributes["stop"] - attributes["start"], *whole[0][d + 1 :])

    def ways(self, whole: Sequence[Shape], attributes: Attributes) -> list[Way]:
        kept = [Way((d,), d) for d in range(len(whole[0])) if d != attributes["dimension"]]
        return [*kept, SUMMANDS]

    def _where(self, attributes: Attributes) -> tuple[slice, ...]:
        range_ = slice(attributes["start"], attributes["stop"])
        return (*[slice(None)] * attributes["dimension"], range_)

    def forward(self, inputs: Sequence[Array], attributes: Attributes, place: Place) -> Array:
        return inputs[0][self._where(attributes)]

    def backward(
        self,
        inputs: Sequence[Array],
        output: Array,
        gradient: Array,
        attributes: Attributes,
        place: Place,
    ) -> list[Array | None]:
        found = np.zeros_like(inputs[0])
        found[self._where(attributes)] = gradient
        return [found]


class Repeat(_Free):
    """Dimensions of length 1 repeated to `shape`."""

    kind = "repeat"

    def shape(self, whole: Sequence[Shape], attributes: Attributes) -> Shape:
        return tuple(attributes["shape"])

    def ways(self, whole: Sequence[Shape], attributes: Attributes) -> list[Way]:
        after = attributes["shape"]
        ways = [Way((d if n == after[d] else WHOLE,), d) for d, n in enumerate(whole[0])]
        return [*ways, SUMMANDS]

    def forward(self, inputs: Sequence[Array], attributes: Attributes, place: Place) -> Array:
        return np.broadcast_to(inputs[0], place.shape).copy()

    def backward(
        self,
        inputs: Sequence[Array],
        output: Array,
        gradient: Array,
        attributes: Attributes,
        place: Place,
    ) -> list[Array | None]:
        axes = tuple(
            d for d, n in enumerate(inputs[0].shape) if n == 1 and attributes["shape"][d] != 1
        )
        return [gradient.sum(axis=axes, keepdims=True)]


class Join(_Free):
    """Tensors one after the other along `dimension`."""

    kind = "join"

    def shape(self, whole: Sequence[Shape], attributes: Attributes) -> Shape:
        d = attributes["dimension"]
        return (*whole[0][:d], sum(shape[d] for shape in whole), *whole[0][d + 1 :])

    def ways(self, whole: Sequence[Shape], attributes: Attributes) -> list[Way]:
        kept = [d for d in range(len(whole[0])) if d != attributes["dimension"]]
        n = len(whole)
        return [*(Way((d,) * n, d) for d in kept), Way((PARTIAL,) * n, PARTIAL)]

    def forward(self, inputs: Sequence[Array], attributes: Attributes, place: Place) -> Array:
        return np.concatenate(list(inputs), axis=attributes["dimension"])

    def backward(
        self,
        inputs: Sequence[Array],
        output: Array,
        gradient: Array,
        attributes: Attributes,
        place: Place,
    ) -> list[Array | None]:
        d = attributes["dimension"]
        cuts = np.cumsum([x.shape[d] for x in inputs])[:-1]
        return list(np.split(gradient, cuts, axis=d))


OPERATORS = (Permute(), Reshape(), Select(), Repeat(), Join())
