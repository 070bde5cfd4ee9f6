"""What devices do under a distributed program: forward in order, backward in the opposite order,
mirrored.

A `Machine` holds the arrays of the devices that are *here*: all of them when one process simulates
them (`execute`), its own when a rank is one of many (the runtime). What devices do together goes
through an `Exchange`; everything else is local and the same in both. What each device holds is said
in `forms`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hetplan.formulations.hap.spmd.axes import Axes
from hetplan.formulations.hap.spmd.exchange import Bounds, Exchange, Manner, Slices, piece
from hetplan.formulations.hap.spmd.forms import PARTIAL, WHOLE, Form, property_name
from hetplan.formulations.hap.spmd.instructions import Change, Instruction, Run, Synchronise
from hetplan.formulations.hap.spmd.operators import operator
from hetplan.formulations.hap.spmd.operators.base import Array, Place
from hetplan.formulations.hap.spmd.program import PARAMETER, PLACEHOLDER, Node, SingleProgram


def bounds_of(axes: Axes, tensor: str, form: Form, ratios: Sequence[float]) -> Bounds:
    """[m] where each device's slice of a tensor begins and ends."""
    lengths = axes.lengths(tensor, form, ratios)
    ends = np.cumsum(lengths)
    return [(int(e - n), int(e)) for n, e in zip(lengths, ends, strict=True)]


class Machine(ABC):
    """One run of a program. values, gradients: property -> what the devices here hold of it."""

    def __init__(
        self,
        program: SingleProgram,
        axes: Axes,
        ratios: Sequence[Sequence[float]],
        exchange: Exchange,
        dtype: Any = np.float64,
    ) -> None:
        self.program, self.axes, self.ratios, self.exchange = program, axes, ratios, exchange
        self.here, self.m = list(exchange.here), len(ratios[0])
        self.dtype = np.dtype(dtype)
        self.values: dict[str, Slices] = {}
        self.gradients: dict[str, Slices] = {}
        self._factors: dict[str, Manner] = {}
        self._bounds: dict[tuple[str, Form, int], Bounds] = {}

    @abstractmethod
    def source(self, node: Node, form: Form, segment: int) -> Slices:
        """Data or a parameter as the devices here hold it."""

    @abstractmethod
    def given(
        self, node: Node, form: Form, segment: int, slices: Slices, *, complete: bool
    ) -> None:
        """The gradient of a parameter on the devices here: slices, or of a whole one summands;
        complete: no summands, the same on every device."""

    def turn(self) -> None:  # noqa: B027 (a hook that may do nothing)
        """Called between the passes."""

    def run(self, order: Sequence[Instruction], goal: str, weight: float = 1.0) -> Slices:
        """Both passes; the summands of the loss on the devices here. weight: of the loss in the
        gradients."""
        order = useful(order)
        self.prepare(order)
        for instruction in order:
            self.forward(instruction)
        loss = self.values[goal]
        self.turn()
        self.gradients[goal] = [np.full((), weight, self.dtype) for _ in self.here]
        for instruction in reversed(order):
            self.backward(instruction)
            self.values.pop(instruction.after)  # whoever read it has been mirrored already
        return loss

    def prepare(self, order: Sequence[Instruction]) -> None:
        """Note how factors are gathered, which only the backward pass does."""
        for instruction in order:
            if isinstance(instruction, Synchronise) and instruction.how != "All-Reduce":
                grouped = instruction.how.startswith("Grouped")
                self._factors[instruction.before] = "grouped" if grouped else "padded"

    def bounds(self, tensor: str, form: Form, segment: int) -> Bounds:
        """[m] where each device's slice begins and ends."""
        key = (tensor, form, segment)
        if key not in self._bounds:
            self._bounds[key] = bounds_of(self.axes, tensor, form, self.ratios[segment])
        return self._bounds[key]

    def cut(self, value: Array, tensor: str, form: Form, segment: int) -> Slices:
        """A whole tensor's slices on the devices here."""
        bounds = self.bounds(tensor, form, segment)
        return [piece(value, form, bounds[j]) for j in self.here]

    def inputs(self, run: Run) -> tuple[Node, list[Slices], list[list[int]]]:
        """The node, and per input the values on every device here and where they start."""
        node = self.program.node(run.node)
        found, starts = [], []
        for source, form in zip(self.program.inputs(node), run.way.inputs, strict=True):
            begins = [0] * len(self.here)
            if form >= 0:
                bounds = self.bounds(source.name, form, node.segment)
                begins = [bounds[j][0] for j in self.here]
            if source.source:
                found.append(self.source(source, form, node.segment))
            else:
                found.append(self.values[self._key(source, node, form)])
            starts.append(begins)
        return node, found, starts

    def _key(self, source: Node, node: Node, form: Form) -> str:
        name = source.name if source.segment == node.segment else f"{source.name}@{node.segment}"
        return property_name(name, form)

    def place(self, run: Run, node: Node, starts: Sequence[Sequence[int]], i: int) -> Place:
        """Where the i-th device here runs the operator."""
        shape, j = list(node.shape), self.here[i]
        if run.way.output >= 0:
            a, b = self.bounds(node.name, run.way.output, node.segment)[j]
            shape[run.way.output] = b - a
        partial = run.way.output == PARTIAL
        # summands of a sum over replicas are added once; a linear operator maps every summand
        return Place(tuple(shape), tuple(row[i] for row in starts), partial, first=j == 0)

    def forward(self, instruction: Instruction) -> None:
        """One instruction on all devices here."""
        if isinstance(instruction, Synchronise):
            self.values[instruction.after] = self.values[instruction.before]
        elif isinstance(instruction, Run):
            node, inputs, starts = self.inputs(instruction)
            of = operator(node.kind)
            self.values[instruction.after] = [
                self.typed(
                    of.forward(
                        [row[i] for row in inputs],
                        node.attributes,
                        self.place(instruction, node, starts, i),
                    )
                )
                for i in range(len(self.here))
            ]
        else:
            change = CHANGES[instruction.how][0]
            self.values[instruction.after] = change(
                self, instruction, self.values[instruction.before]
            )

    def backward(self, instruction: Instruction) -> None:
        """Its mirror: from the gradients of what it made to those of what it read."""
        gradient = self.gradients.pop(instruction.after, None)
        if gradient is None:
            return
        if isinstance(instruction, Synchronise):
            self._add(instruction.before, gradient)
        elif isinstance(instruction, Run):
            self._run_back(instruction, gradient)
        else:
            mirror = CHANGES[instruction.how][1]
            self._add(instruction.before, mirror(self, instruction, gradient))

    def typed(self, value: Array) -> Array:
        """In the machine's precision, where it is no whole number."""
        value = np.asarray(value)
        return value.astype(self.dtype, copy=False) if value.dtype.kind == "f" else value

    def _add(self, key: str, gradient: Slices) -> None:
        old = self.gradients.get(key)
        self.gradients[key] = (
            gradient if old is None else [a + b for a, b in zip(old, gradient, strict=True)]
        )

    def _run_back(self, run: Run, gradient: Slices) -> None:
        node, inputs, starts = self.inputs(run)
        output, of = self.values[run.after], operator(node.kind)
        by_device = [
            of.backward(
                [row[i] for row in inputs], output[i], gradient[i], node.attributes,
                self.place(run, node, starts, i),
            )
            for i in range(len(self.here))
        ]  # fmt: skip
        by_factors = self._by_factors(run, node, inputs, gradient) if run.factors else None
        for number, (source, form) in enumerate(
            zip(self.program.inputs(node), run.way.inputs, strict=True)
        ):
            parts = [row[number] for row in by_device]
            if source.kind == PLACEHOLDER or any(part is None for part in parts):
                continue
            slices = [self.typed(part) for part in parts if part is not None]
            if source.kind != PARAMETER:
                self._add(self._key(source, node, form), slices)
            elif by_factors is not None and form == WHOLE:
                self.given(source, form, node.segment, by_factors[number], complete=True)
            else:
                self.given(source, form, node.segment, slices, complete=False)

    def _by_factors(
        self, run: Run, node: Node, inputs: list[Slices], gradient: Slices
    ) -> Mapping[int, Slices]:
        """Gradients of whole parameters, by input: from the gathered input and output gradient, on
        every device."""
        manner, (first, *_), segment = self._factors[run.after], run.way.inputs, node.segment
        whole = self.exchange.gather(
            inputs[0], first, self.bounds(node.inputs[0], first, segment), manner
        )
        over = self.exchange.gather(
            gradient, run.way.output, self.bounds(node.name, run.way.output, segment), manner
        )
        place, of = Place(node.shape, (0,) * len(node.inputs)), operator(node.kind)
        found: dict[int, Slices] = {}
        for i in range(len(self.here)):
            read = [whole[i], *(row[i] for row in inputs[1:])]
            for number, value in enumerate(
                of.backward(read, over[i], over[i], node.attributes, place)
            ):
                if value is not None:
                    found.setdefault(number, []).append(self.typed(value))
        return found


def useful(order: Sequence[Instruction]) -> list[Instruction]:
    """The instructions that give something new."""
    known: set[str] = set()
    found = []
    for instruction in order:
        if instruction.after not in known:
            known.add(instruction.after)
            found.append(instruction)
    return found


def _segment(machine: Machine, change: Change) -> int:
    return machine.program.node(change.tensor).segment


def _gathered(
    machine: Machine, change: Change, slices: Slices, form: Form, manner: Manner
) -> Slices:
    bounds = machine.bounds(change.tensor, form, _segment(machine, change))
    return machine.exchange.gather(slices, form, bounds, manner)


def _scattered(
    machine: Machine, change: Change, slices: Slices, form: Form, manner: Manner
) -> Slices:
    bounds = machine.bounds(change.tensor, form, _segment(machine, change))
    return machine.exchange.scatter(slices, form, bounds, manner)


def _swapped(
    machine: Machine, change: Change, slices: Slices, source: Form, target: Form
) -> Slices:
    here, name = _segment(machine, change), change.tensor
    return machine.exchange.swap(
        slices,
        source,
        machine.bounds(name, source, here),
        target,
        machine.bounds(name, target, here),
    )


def _moved(machine: Machine, change: Change, slices: Slices, *, back: bool) -> Slices:
    """Repartition: the same dimension under another segment's ratios."""
    form, name = change.source, change.tensor
    if form < 0:
        return slices
    here, there = _segment(machine, change), reading_segment(change)
    ends = machine.bounds(name, form, here), machine.bounds(name, form, there)
    before, after = ends[::-1] if back else ends
    return machine.exchange.swap(slices, form, before, form, after)


def reading_segment(change: Change) -> int:
    """The segment that a repartitioned tensor moves to."""
    return int(change.after.rpartition("|")[0].rpartition("@")[2])


def _padded(machine: Machine, change: Change, slices: Slices) -> Slices:
    """Each device's slice among zeros: summands of the whole."""
    node, found = machine.program.node(change.tensor), []
    bounds = machine.bounds(node.name, change.target, node.segment)
    for j, part in zip(machine.here, slices, strict=True):
        whole = np.zeros(node.shape, part.dtype)
        piece(whole, change.target, bounds[j])[...] = part
        found.append(whole)
    return found


def _cut_each(machine: Machine, change: Change, slices: Slices) -> Slices:
    bounds = machine.bounds(change.tensor, change.target, _segment(machine, change))
    return [
        piece(value, change.target, bounds[j])
        for j, value in zip(machine.here, slices, strict=True)
    ]


def _shared(machine: Machine, change: Change, slices: Slices) -> Slices:
    return [machine.typed(value / machine.m) for value in slices]


def _total(machine: Machine, change: Change, slices: Slices) -> Slices:
    return machine.exchange.total(slices)


Step = Callable[[Machine, Change, Slices], Slices]
CHANGES: dict[str, tuple[Step, Step]] = {
    "All-Reduce": (_total, _total),
    "Reduce-Scatter": (
        lambda m, c, s: _scattered(m, c, s, c.target, "padded"),
        lambda m, c, s: _gathered(m, c, s, c.target, "padded"),
    ),
    "All-Gather": (
        lambda m, c, s: _gathered(m, c, s, c.source, "padded"),
        lambda m, c, s: _scattered(m, c, s, c.source, "padded"),
    ),
    "Grouped-Broadcast": (
        lambda m, c, s: _gathered(m, c, s, c.source, "grouped"),
        lambda m, c, s: _scattered(m, c, s, c.source, "grouped"),
    ),
    "All-To-All": (
        lambda m, c, s: _swapped(m, c, s, c.source, c.target),
        lambda m, c, s: _swapped(m, c, s, c.target, c.source),
    ),
    "Slice": (_cut_each, _padded),
    "Share": (_shared, _shared),
    "Repartition": (
        lambda m, c, s: _moved(m, c, s, back=False),
        lambda m, c, s: _moved(m, c, s, back=True),
    ),
}  # fmt: skip
