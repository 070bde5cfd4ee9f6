"""What an operator is: its shape, the ways in which devices can run it, its work, and its numbers.

Work is in FLOP. Elementwise operators wait for memory, not for arithmetic: an element moved counts
as `ELEMENT_FLOPS`, what a device could compute meanwhile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.hap.spmd import program
from hetplan.formulations.hap.spmd.forms import Way, along

Array = NDArray[Any]
Attributes = Mapping[str, Any]
Shape = program.Shape
# A V100 computes 3.9e12 FLOP/s (measured, HAP's artefact) while it moves 0.9e12 bytes/s: 17 FLOP
# per element of 4 bytes; a P100 2.15e12 and 0.73e12: 12.
ELEMENT_FLOPS = 16.0


@dataclass(frozen=True)
class Place:
    """Where an operator runs: shape: of its output on this device; starts: where each input's slice
    begins along the dimension that it is sliced on (0 for whole ones); partial: whether its output
    is one summand of several; first: whether this device adds what must be added once."""

    shape: Shape
    starts: tuple[int, ...]
    partial: bool = False
    first: bool = True


class Operator(ABC):
    """One kind of operator; stateless. `whole`: the inputs' and the output's undivided shapes.

    differentiable: whether gradients pass it.
    """

    kind: ClassVar[str]
    differentiable: bool = True

    @abstractmethod
    def shape(self, whole: Sequence[Shape], attributes: Attributes) -> Shape:
        """The output's shape; raises InputError where the inputs do not fit."""

    @abstractmethod
    def ways(self, whole: Sequence[Shape], attributes: Attributes) -> list[Way]:
        """The ways to run it other than replicated."""

    @abstractmethod
    def forward(self, inputs: Sequence[Array], attributes: Attributes, place: Place) -> Array:
        """The output of one device."""

    @abstractmethod
    def backward(
        self,
        inputs: Sequence[Array],
        output: Array,
        gradient: Array,
        attributes: Attributes,
        place: Place,
    ) -> list[Array | None]:
        """Gradients of the inputs on one device; None where an input has none."""

    def work(
        self, whole: Sequence[Shape], output: Shape, attributes: Attributes
    ) -> tuple[float, list[float]]:
        """(FLOP forward, FLOP backward for each input's gradient); by default moved elements, read
        and written."""
        moved = ELEMENT_FLOPS * (sum(size(s) for s in whole) + size(output))
        return moved, [ELEMENT_FLOPS * (size(output) + 2 * size(s)) for s in whole]


def size(shape: Shape) -> int:
    """Entries of a tensor of that shape."""
    return int(np.prod(shape, dtype=np.int64)) if shape else 1


def letters(count: int) -> str:
    """Names for `count` dimensions."""
    return "abcdefghijklmnop"[:count]


def same_dimensions(rank: int, inputs: int, blocked: Sequence[int] = ()) -> list[Way]:
    """Ways of an operator whose inputs and output have the same dimensions, slicing any but
    `blocked`."""
    name = letters(rank)
    return [along(name[d], (name,) * inputs, name) for d in range(rank) if d not in blocked]
