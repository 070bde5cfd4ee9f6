"""The class of an operator, `Operator`: the shape of its output, its sharding rules
(`forms.ShardingRule`), its work and its kernel. Beside it, the shapes, sharding rules and work of
more than one operator.

Work is in FLOP. Elementwise operators wait for memory, not for arithmetic: each element read or
written counts as `ELEMENT_FLOPS`, the FLOP that a device computes in the time of moving it.

A kernel computes one device's part of the output from torch tensors, and torch derives the
gradients. torch is imported only when a kernel runs, since planning needs the shapes, sharding
rules and work alone. A kernel runs on slices of any length. A device whose slice of a tensor is
empty still takes part in the backward pass, with gradients of zeros, so that all ranks join the
same collectives.

Sources of the sharding rules: HAP, Fig. 9 and its released rules. Any dimension of an elementwise
operator can be sliced. Slicing a dimension that the output of a product has is batch or output
parallelism. Slicing a dimension that a product sums over is reduction parallelism, which HAP's
released code lacks: the devices' results are summands of the output. An operator that is linear in
its inputs maps summands of the inputs to summands of its output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hetplan.programs.forms import WHOLE, ShardingRule, summands

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
Shapes = Sequence[Shape]
Attributes = Mapping[str, Any]
Work = tuple[float, list[float]]
"""FLOP of the forward pass, and FLOP of the backward pass for the gradient of each input."""

# FLOP per element moved, between those of HAP's two devices. A V100 computes 3.9e12 FLOP/s
# (measured, HAP's artefact) and moves 0.9e12 bytes/s: 17 FLOP per element of 4 bytes. A P100
# computes 2.15e12 FLOP/s and moves 0.73e12 bytes/s: 12 FLOP per element.
ELEMENT_FLOPS = 16.0


@dataclass(frozen=True)
class Place:
    """The part of an operator's output that one device computes."""

    shape: Shape
    """The output's shape on this device."""
    starts: tuple[int, ...]
    """The index at which each input's slice begins along its sliced dimension; 0 for a whole
    input."""
    partial: bool = False
    """Whether the devices' outputs are summands of the whole output."""
    first: bool = True
    """Whether this is the device that adds the terms which only one summand may contain."""

    @property
    def once(self) -> float:
        """The factor, 1 or 0, of a term that only one summand of the output may contain.

        The other devices multiply the term, a bias, by 0 rather than leave it out: so the bias has
        a gradient, of zeros, on every device.
        """
        in_this_output = self.first or not self.partial
        return 1.0 if in_this_output else 0.0


Kernel = Callable[["Sequence[Tensor]", Attributes, Place], "Tensor"]


def size(shape: Shape) -> int:
    """Number of elements of a tensor of this shape."""
    return math.prod(shape)


def elementwise_work(whole: Shapes, output: Shape, attributes: Attributes) -> Work:
    """Work of an operator that reads each element of its inputs once and writes its output.

    The gradient of an input takes reading the output's gradient and the input, and writing as many
    elements as the input has.
    """
    elements = sum(size(shape) for shape in whole) + size(output)
    backward = [ELEMENT_FLOPS * (size(output) + 2 * size(shape)) for shape in whole]
    return ELEMENT_FLOPS * elements, backward


def no_work(whole: Shapes, output: Shape, attributes: Attributes) -> Work:
    """No FLOP in either pass."""
    return 0.0, [0.0] * len(whole)


def output_sized_work(whole: Shapes, output: Shape, attributes: Attributes) -> Work:
    """Work of an operator that reads and writes as many elements as its output has, in each pass.

    Only the last input has a gradient; the inputs before it are integers.
    """
    flops = 2 * ELEMENT_FLOPS * size(output)
    return flops, [0.0] * (len(whole) - 1) + [flops]


@dataclass(frozen=True)
class Operator:
    """One kind of operator; `table.OPERATORS` lists all. In the comments, `whole` stands for the
    undivided shapes of its inputs, and `output` for the undivided shape of its output."""

    shape: Callable[[Shapes, Attributes], Shape]
    """(whole, attributes) -> output. Raises InputError where the inputs do not fit."""
    sharding_rules: Callable[[Shapes, Attributes], list[ShardingRule]]
    """(whole, attributes) -> the sharding rules that slice a tensor."""
    kernel: Kernel
    """(inputs, attributes, place) -> one device's part of the output."""
    work: Callable[[Shapes, Shape, Attributes], Work] = elementwise_work
    """(whole, output, attributes) -> FLOP, elements moved included."""
    products: Callable[[Shapes, Shape, Attributes], Work] = no_work
    """(whole, output, attributes) -> FLOP of the matrix products alone, which counters of FLOP
    count."""
    differentiable: bool = True
    """Whether the inputs have gradients."""
    linear: bool = False
    """Whether the operator maps summands of its inputs to summands of its output. Its gradients do
    not depend on the values of its inputs."""
    empty: bool = False
    """Whether the kernel also runs where this device's part of the output has no elements. The
    kernels of other operators do not."""

    def all_sharding_rules(self, whole: Shapes, attributes: Attributes) -> list[ShardingRule]:
        """All sharding rules but the replicated one: those that slice a tensor, and for a linear
        operator the one that maps summands to summands."""
        sharding_rules = self.sharding_rules(whole, attributes)
        if self.linear:
            return [*sharding_rules, summands(len(whole))]
        return sharding_rules

    def compute(self, inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
        """One device's part of the output."""
        no_elements = 0 in place.shape
        if not no_elements or self.empty:
            return self.kernel(inputs, attributes, place)
        if not self.differentiable:
            inputs = [x.detach() for x in inputs]
        return zeros(place.shape, inputs)


def zeros(shape: Shape, inputs: Sequence[Tensor]) -> Tensor:
    """Zeros that depend on the inputs in autograd's graph, so that the inputs get gradients of
    zeros. The sum of no elements is zero whatever the inputs hold, inf and nan included."""
    floating = [x for x in inputs if x.is_floating_point()]
    result = floating[0].new_zeros(shape)
    for x in floating:
        if x.requires_grad:
            result = result + x.flatten()[:0].sum()
    return result


# Shapes and sharding rules that several kinds of operators have.


def unchanged(whole: Shapes, attributes: Attributes) -> Shape:
    """The first input's shape."""
    return whole[0]


def each_dimension(whole: Shapes, attributes: Attributes) -> list[ShardingRule]:
    """The operator has one input, any dimension of which can be sliced."""
    return [ShardingRule((d,), d) for d in range(len(whole[0]))]


def all_but_the_last(whole: Shapes, attributes: Attributes) -> list[ShardingRule]:
    """Any dimension of the first input but the last can be sliced; the other inputs are whole."""
    other_inputs = (WHOLE,) * (len(whole) - 1)
    return [ShardingRule((d, *other_inputs), d) for d in range(len(whole[0]) - 1)]


def first_two(whole: Shapes, attributes: Attributes) -> list[ShardingRule]:
    """The first dimension (samples) of all inputs can be sliced, or the second (channels or heads)
    of all inputs."""
    return [ShardingRule((d,) * len(whole), d) for d in range(2)]
