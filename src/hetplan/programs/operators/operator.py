"""One kind of operator: shape, ways, work, kernel; and the rules that many kinds share.

Work is in FLOP. Elementwise operators wait for memory, not for arithmetic: an element moved counts
as `ELEMENT_FLOPS`, the FLOP that a device could compute meanwhile.

A kernel computes one device's part of the output from torch tensors. torch is imported only when a
kernel runs, since planning needs the shapes, ways and work without it; torch derives the gradients.
A kernel runs on slices of any length. A device that has nothing of a tensor still takes part in the
backward pass, with gradients of zeros, so that all ranks join the same collectives.

Sources of the ways: HAP, Fig. 9 and its released rules. Any dimension of an elementwise operator
can be sliced. Of a product, a dimension of the output is batch or output parallelism; a dimension
that is summed over is reduction parallelism, whose results are summands (HAP's released code lacks
it). An operator that is linear in its inputs maps their summands to summands of its output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hetplan.programs.forms import WHOLE, Way, summands

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
Shapes = Sequence[Shape]
Attributes = Mapping[str, Any]
Work = tuple[float, list[float]]
"""FLOP of the forward pass, and of the backward pass for each input's gradient."""

# A V100 computes 3.9e12 FLOP/s (measured, HAP's artefact) while it moves 0.9e12 bytes/s: 17 FLOP
# per element of 4 bytes; a P100 2.15e12 and 0.73e12: 12.
ELEMENT_FLOPS = 16.0


@dataclass(frozen=True)
class Place:
    """Where a kernel runs."""

    shape: Shape
    """The output's shape on this device."""
    starts: tuple[int, ...]
    """Where each input's slice begins along its sliced dimension; 0 for an input that is whole."""
    partial: bool = False
    """Whether the output is one summand of several."""
    first: bool = True
    """Whether this device adds what only one of the devices may add."""

    @property
    def once(self) -> float:
        """The factor of a term that must be added once. It is 0, not left out, on the other
        devices: a bias keeps its gradient, of zeros."""
        return 1.0 if self.first or not self.partial else 0.0


Kernel = Callable[["Sequence[Tensor]", Attributes, Place], "Tensor"]


def size(shape: Shape) -> int:
    """Entries of a tensor of that shape."""
    return math.prod(shape)


def moved(whole: Shapes, output: Shape, attributes: Attributes) -> Work:
    """Work of an elementwise operator: it reads its inputs and writes its output; each input's
    gradient reads the output's and the input, and is written."""
    forward = ELEMENT_FLOPS * (sum(size(s) for s in whole) + size(output))
    return forward, [ELEMENT_FLOPS * (size(output) + 2 * size(s)) for s in whole]


def no_work(whole: Shapes, output: Shape, attributes: Attributes) -> Work:
    """Work of an operator that makes a view, and the products of one that is no product."""
    return 0.0, [0.0] * len(whole)


def output_moved(whole: Shapes, output: Shape, attributes: Attributes) -> Work:
    """Work of an operator that reads and writes as many entries as its output has, in each pass.
    The last input has the gradient; the others are whole numbers."""
    moved = 2 * ELEMENT_FLOPS * size(output)
    return moved, [0.0] * (len(whole) - 1) + [moved]


@dataclass(frozen=True)
class Operator:
    """One kind of operator. `whole` are the undivided shapes of its inputs."""

    shape: Callable[[Shapes, Attributes], Shape]
    """(whole, attributes) -> the output's shape. Raises InputError where the inputs do not fit."""
    ways: Callable[[Shapes, Attributes], list[Way]]
    """(whole, attributes) -> the ways to run it on slices."""
    kernel: Kernel
    """(inputs, attributes, place) -> the output on one device."""
    work: Callable[[Shapes, Shape, Attributes], Work] = moved
    """(whole, output, attributes) -> its work."""
    products: Callable[[Shapes, Shape, Attributes], Work] = no_work
    """(whole, output, attributes) -> the part of its work that is products of matrices, as counters
    of FLOP see it."""
    differentiable: bool = True
    """Whether gradients pass it."""
    linear: bool = False
    """Whether it maps summands of its inputs to summands of its output; its gradients do not depend
    on its inputs' values."""
    empty: bool = False
    """Whether its kernel also runs where this device's part of the output is empty. Other outputs
    are then zeros, without the kernel."""

    def all_ways(self, whole: Shapes, attributes: Attributes) -> list[Way]:
        """The ways to run it other than replicated, on summands too where it is linear."""
        ways = self.ways(whole, attributes)
        return [*ways, summands(len(whole))] if self.linear else ways

    def compute(self, inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
        """The output on one device."""
        if 0 not in place.shape or self.empty:
            return self.kernel(inputs, attributes, place)
        if not self.differentiable:
            inputs = [x.detach() for x in inputs]
        return zeros(place.shape, inputs)


def zeros(shape: Shape, inputs: Sequence[Tensor]) -> Tensor:
    """Zeros that depend on the inputs, whose gradients are zeros."""
    real = [x for x in inputs if x.is_floating_point()]
    result = real[0].new_zeros(shape)
    for x in real:
        if x.requires_grad:
            result = result + 0 * x.sum()
    return result


# Shapes and ways that several operators have.


def unchanged(whole: Shapes, attributes: Attributes) -> Shape:
    """The first input's shape."""
    return whole[0]


def each_dimension(whole: Shapes, attributes: Attributes) -> list[Way]:
    """Any dimension of the only input can be sliced."""
    return [Way((d,), d) for d in range(len(whole[0]))]


def all_but_the_last(whole: Shapes, attributes: Attributes) -> list[Way]:
    """Any dimension of the first input but the last can be sliced; the other inputs are whole."""
    rest = (WHOLE,) * (len(whole) - 1)
    return [Way((d, *rest), d) for d in range(len(whole[0]) - 1)]


def first_two(whole: Shapes, attributes: Attributes) -> list[Way]:
    """Samples and channels, or samples and heads, of all inputs alike can be sliced."""
    return [Way((d,) * len(whole), d) for d in range(2)]
