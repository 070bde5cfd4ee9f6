"""What devices do under a distributed program, on torch tensors.

A `Machine` holds the tensors of the devices that are *here*: its own when a rank is one of many
(`distributed`), all of them when one process simulates them (`simulated`). What devices do together
goes through an `Exchange`; everything else is local and the same in both.

The backward pass is torch's. Collectives are autograd functions whose backward pass is the opposite
collective (`formulations.hap.spmd.forms` says in which form a gradient is). torch runs the backward
pass of what was done last first, so that every rank mirrors the instructions in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from hetplan.formulations.hap.spmd.axes import Axes, Bounds
from hetplan.formulations.hap.spmd.forms import PARTIAL, WHOLE, Form, property_name
from hetplan.formulations.hap.spmd.instructions import (
    Change,
    Instruction,
    Run,
    Synchronise,
    reading_segment,
)
from hetplan.formulations.hap.spmd.operators import parsed
from hetplan.formulations.hap.spmd.program import Node, SingleProgram
from hetplan.runtime.execution.spmd.kernels import Place, compute

Slices = list[Tensor]  # one tensor for each device here
# one collective of slices padded to the largest, or one per slice
Manner = Literal["padded", "grouped"]
Step = Callable[[Slices], Sequence[Tensor | None]]


class Exchange(ABC):
    """What devices do together. Results are new tensors."""

    here: Sequence[int]
    """Numbers of the devices whose tensors are given and returned."""

    @abstractmethod
    def total(self, slices: Slices) -> Slices:
        """Everyone gets the sum."""

    @abstractmethod
    def gather(self, slices: Slices, dimension: int, bounds: Bounds, manner: Manner) -> Slices:
        """Everyone gets the slices side by side."""

    @abstractmethod
    def scatter(self, slices: Slices, dimension: int, bounds: Bounds, manner: Manner) -> Slices:
        """Everyone gets its slice of the sum."""

    @abstractmethod
    def swap(
        self, slices: Slices, source: int, before: Bounds, target: int, after: Bounds
    ) -> Slices:
        """From slices along one dimension to slices along another, or to others along the same."""


def piece(value: Tensor, dimension: int, bounds: tuple[int, int]) -> Tensor:
    """A slice; a view."""
    first, last = bounds
    return value.narrow(dimension, first, last - first)


class _Mirrored(torch.autograd.Function):
    """A step whose backward pass is given. Both take and return lists of tensors."""

    @staticmethod
    def forward(ctx: Any, forward: Step, backward: Step, *slices: Tensor) -> Any:
        ctx.mirror = backward
        return tuple(forward(list(slices)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *ctx.mirror(list(gradients))


def mirrored(forward: Step, backward: Step, slices: Sequence[Tensor]) -> Slices:
    """What `forward` makes of the slices, with `backward` from its gradients to theirs."""
    return list(_Mirrored.apply(forward, backward, *slices))


class Machine(ABC):
    """One run of a program."""

    def __init__(
        self,
        program: SingleProgram,
        axes: Axes,
        ratios: Sequence[Sequence[float]],
        exchange: Exchange,
    ) -> None:
        self.program, self.axes, self.ratios, self.exchange = program, axes, ratios, exchange
        self.values: dict[str, Slices] = {}
        """Property -> what the devices here hold of it."""
        self._gathers: dict[str, Manner] = {}
        self._bounds: dict[tuple[str, Form, int], Bounds] = {}

    @abstractmethod
    def source(self, node: Node, form: Form, segment: int, *, complete: bool) -> Slices:
        """Data or a parameter as the devices here hold it.

        complete: the gradient of a whole parameter comes the same on every device, not in summands.
        """

    def turn(self) -> None:  # noqa: B027 (a hook that may do nothing)
        """Called between the passes."""

    def run(self, order: Sequence[Instruction], goal: str, weight: float = 1.0) -> Slices:
        """Both passes; the summands of the loss on the devices here.

        weight: of the loss in the gradients.
        """
        order = useful(order)
        for instruction in order:  # only the backward pass gathers factors
            if isinstance(instruction, Synchronise) and instruction.how != "All-Reduce":
                grouped = instruction.how.startswith("Grouped")
                self._gathers[instruction.before] = "grouped" if grouped else "padded"
        for instruction in order:
            self.forward(instruction)
        loss = self.values[goal]
        self.values = {}  # autograd keeps what the backward pass needs
        self.turn()
        torch.autograd.backward(loss, [torch.full_like(part, weight) for part in loss])
        return [part.detach() for part in loss]

    def forward(self, instruction: Instruction) -> None:
        """One instruction on all devices here."""
        if isinstance(instruction, Run):
            made = self._run(instruction)
        elif isinstance(instruction, Change):
            made = self._change(instruction, self.values[instruction.before])
        else:
            made = self.values[instruction.before]
        self.values[instruction.after] = made

    def bounds(self, tensor: str, form: Form, segment: int) -> Bounds:
        """[m] where each device's slice begins and ends."""
        key = (tensor, form, segment)
        if key not in self._bounds:
            self._bounds[key] = self.axes.bounds(tensor, form, self.ratios[segment])
        return self._bounds[key]

    def _run(self, run: Run) -> Slices:
        node, segment = self.program.node(run.node), self.program.node(run.node).segment
        inputs: list[Slices] = []
        starts: list[list[int]] = []
        for source, form in zip(self.program.inputs(node), run.way.inputs, strict=True):
            if source.source:
                complete = run.factors and form == WHOLE
                inputs.append(self.source(source, form, segment, complete=complete))
            else:
                moved = source.segment != segment
                name = f"{source.name}@{segment}" if moved else source.name
                inputs.append(self.values[property_name(name, form)])
            cuts = self.bounds(source.name, form, segment) if form >= 0 else None
            starts.append([cuts[j][0] if cuts else 0 for j in self.exchange.here])
        if run.factors:
            return self._by_factors(run, node, inputs)
        places = [self._place(run, node, [row[i] for row in starts], i) for i in self._here]
        return [compute(node, [row[i] for row in inputs], places[i]) for i in self._here]

    @property
    def _here(self) -> range:
        return range(len(self.exchange.here))

    def _place(self, run: Run, node: Node, starts: Sequence[int], i: int) -> Place:
        """Where the i-th device here runs the operator."""
        shape, j, form = list(node.shape), self.exchange.here[i], run.way.output
        if form >= 0:
            first, last = self.bounds(node.name, form, node.segment)[j]
            shape[form] = last - first
        # summands of a sum over replicas are added once; a linear operator maps every summand
        return Place(tuple(shape), tuple(starts), form == PARTIAL, first=j == 0)

    def _by_factors(self, run: Run, node: Node, inputs: list[Slices]) -> Slices:
        """A product of a slice of the batch with a whole weight (and bias).

        The parameters' gradients are computed on every device, from the gathered input and the
        gathered gradient of the output (HAP, Section 2.5.2).
        """
        (left, right, *bias), out = parsed(node.attributes["equation"])
        devices = len(self._here)
        fixed = [[p.detach() for p in row] for row in inputs[1:]]
        places = [self._place(run, node, [0] * len(inputs), i) for i in self._here]
        local = [
            compute(node, [x, *(row[i] for row in fixed)], places[i])
            for i, x in enumerate(inputs[0])
        ]
        factors = [x.detach() for x in inputs[0]]
        form, segment = run.way.inputs[0], node.segment

        def whole(slices: Slices, tensor: str, form: Form) -> Slices:
            manner = self._gathers[run.after]
            return self.exchange.gather(slices, form, self.bounds(tensor, form, segment), manner)

        def backward(gradients: Slices) -> list[Tensor | None]:
            read = whole(factors, node.inputs[0], form)
            over = whole(gradients, node.name, run.way.output)
            pairs = list(zip(read, over, strict=True))
            needed: list[Tensor | None] = [*gradients]
            needed += [torch.einsum(f"{left},{out}->{right}", x, g) for x, g in pairs]
            for letters in bias:
                needed += [torch.einsum(f"{out}->{letters}", g) for g in over]
            return needed

        parameters = [p for row in inputs[1:] for p in row]
        return mirrored(
            lambda slices: [y.view_as(y) for y in slices[:devices]], backward, [*local, *parameters]
        )

    def _change(self, change: Change, slices: Slices) -> Slices:
        """A tensor from one form to another."""
        name, how, together = change.tensor, change.how, self.exchange
        segment = self.program.node(name).segment
        if how == "Share":
            return [value / len(self.ratios[0]) for value in slices]
        if how == "All-Reduce":
            return mirrored(together.total, together.total, slices)
        if how == "Repartition" and change.source < 0:
            return slices
        if how == "Slice":
            cuts = self.bounds(name, change.target, segment)
            pairs = zip(slices, together.here, strict=True)
            return [piece(value, change.target, cuts[j]) for value, j in pairs]
        if how in ("All-To-All", "Repartition"):
            source, target = change.source, change.target
            there = reading_segment(change) if how == "Repartition" else segment
            before, after = self.bounds(name, source, segment), self.bounds(name, target, there)
            return mirrored(
                lambda s: together.swap(s, source, before, target, after),
                lambda g: together.swap(g, target, after, source, before),
                slices,
            )
        form = change.target if how == "Reduce-Scatter" else change.source
        bounds = self.bounds(name, form, segment)
        manner: Manner = "grouped" if how == "Grouped-Broadcast" else "padded"
        both: tuple[Step, Step] = (
            lambda s: together.gather(s, form, bounds, manner),
            lambda s: together.scatter(s, form, bounds, manner),
        )
        forward, backward = both[::-1] if how == "Reduce-Scatter" else both
        return mirrored(forward, backward, slices)


def useful(order: Sequence[Instruction]) -> list[Instruction]:
    """The instructions that give something new."""
    first: dict[str, Instruction] = {}
    for instruction in order:
        first.setdefault(instruction.after, instruction)
    return list(first.values())
