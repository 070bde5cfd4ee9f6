"""A distributed program on simulated devices: every device's arrays in one process, collectives among them.

Forward in order, backward in the opposite order with every instruction mirrored; what each device holds is said in
`forms`. `reference` is the single device. float64 throughout, so that both agree to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.formulations.hap.data import HapDecision
from hetplan.formulations.hap.spmd.forms import PARTIAL, WHOLE, Form
from hetplan.formulations.hap.spmd.instructions import Change, Run, Synchronise
from hetplan.formulations.hap.spmd.operators import operator
from hetplan.formulations.hap.spmd.operators.base import Array, Place
from hetplan.formulations.hap.spmd.program import PARAMETER, PLACEHOLDER, Node, SingleProgram
from hetplan.formulations.hap.spmd.rules import Theory

Slices = list[Array]


@dataclass(frozen=True)
class Outcome:
    """loss, and the gradient of every parameter (copies added up)."""

    loss: float
    gradients: Mapping[str, Array]


def random_values(program: SingleProgram, seed: int) -> dict[str, Array]:
    """Values of all placeholders and parameters."""
    draw = np.random.default_rng(seed)
    values: dict[str, Array] = {}
    for node in program.nodes:
        if node.kind == PLACEHOLDER and "below" in node.attributes:
            values[node.name] = draw.integers(node.attributes["below"], size=node.shape)
        elif node.kind == PARAMETER and node.name in program.copies:
            values[node.name] = values[program.copies[node.name]]
        elif node.source:
            fan = max(1, int(np.prod(node.shape[1:])))
            scale = 1.0 if node.kind == PLACEHOLDER else 1 / np.sqrt(fan)
            values[node.name] = draw.normal(size=node.shape) * scale
    return values


def reference(program: SingleProgram, values: Mapping[str, Array]) -> Outcome:
    """Loss and gradients on one device."""
    known: dict[str, Array] = dict(values)
    for node in program.computations:
        inputs = [known[name] for name in node.inputs]
        known[node.name] = operator(node.kind).forward(inputs, node.attributes, whole_place(node))
    gradients: dict[str, Array] = {program.loss.name: np.ones(())}
    for node in reversed(program.computations):
        if node.name not in gradients:
            continue
        inputs = [known[name] for name in node.inputs]
        given = operator(node.kind).backward(
            inputs, known[node.name], gradients.pop(node.name), node.attributes, whole_place(node)
        )
        for name, gradient in zip(node.inputs, given, strict=True):
            if gradient is not None:
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return Outcome(float(known[program.loss.name]), _by_parameter(program, gradients))


def whole_place(node: Node) -> Place:
    """The only device."""
    return Place(node.shape, (0,) * len(node.inputs))


def _by_parameter(program: SingleProgram, gradients: Mapping[str, Array]) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for node in program.parameters:
        gradient = gradients.get(node.name, np.zeros(node.shape))
        owner = program.copies.get(node.name, node.name)
        found[owner] = found[owner] + gradient if owner in found else gradient
    return found


def execute(theory: Theory, decision: HapDecision, values: Mapping[str, Array]) -> Outcome:
    """Loss and gradients as the devices get them, put together."""
    machine = _Machine(theory, decision, values)
    order = [theory.instructions[i] for i in decision.program]
    for instruction in order:
        machine.forward(instruction)
    goal = theory.data.goal
    loss = float(sum(machine.values[goal]))
    machine.gradients[goal] = [np.ones(()) for _ in theory.data.devices]
    for instruction in reversed(order):
        machine.backward(instruction)
    return Outcome(loss, _by_parameter(theory.program, machine.parameters))


class _Machine:
    """What the devices hold: per property the values and gradients, per parameter the gradient put together."""

    def __init__(self, theory: Theory, decision: HapDecision, values: Mapping[str, Array]) -> None:
        self.theory, self.program, self.ratios = theory, theory.program, decision.ratios
        self.m = len(theory.data.devices)
        self.data = values
        self.values: dict[str, Slices] = {}
        self.gradients: dict[str, Slices] = {}
        self.parameters: dict[str, Array] = {}

    def bounds(self, tensor: str, form: Form, segment: int) -> list[tuple[int, int]]:
        """[m] where each device's slice begins and ends."""
        lengths = self.theory.axes.lengths(tensor, form, self.ratios[segment])
        ends = np.cumsum(lengths)
        return [(int(e - n), int(e)) for n, e in zip(lengths, ends, strict=True)]

    def cut(self, value: Array, tensor: str, form: Form, segment: int) -> Slices:
        """A whole tensor's slices."""
        return [np.take(value, range(a, b), axis=form) for a, b in self.bounds(tensor, form, segment)]

    def inputs(self, run: Run) -> tuple[Node, list[Slices], list[list[int]]]:
        """The node, and per input the values on every device and where they start."""
        node = self.program.node(run.node)
        found, starts = [], []
        for source, form in zip(self.program.inputs(node), run.way.inputs, strict=True):
            begins = [0] * self.m
            if form >= 0:
                begins = [a for a, _ in self.bounds(source.name, form, node.segment)]
            if not source.source:
                found.append(self.values[self._key(source, node, form)])
            elif form == WHOLE:
                found.append([self.data[source.name]] * self.m)
            else:
                found.append(self.cut(self.data[source.name], source.name, form, node.segment))
            starts.append(begins)
        return node, found, starts

    def _key(self, source: Node, node: Node, form: Form) -> str:
        from hetplan.formulations.hap.spmd.forms import property_name

        name = source.name if source.segment == node.segment else f"{source.name}@{node.segment}"
        return property_name(name, form)

    def place(self, run: Run, node: Node, starts: Sequence[Sequence[int]], j: int) -> Place:
        """Where device j runs the operator."""
        shape = list(node.shape)
        if run.way.output >= 0:
            a, b = self.bounds(node.name, run.way.output, node.segment)[j]
            shape[run.way.output] = b - a
        partial = run.way.output == PARTIAL
        # summands of a sum over replicas are added once; a linear operator maps every summand
        return Place(tuple(shape), tuple(row[j] for row in starts), partial, first=j == 0)

    def forward(self, instruction: Run | Change | Synchronise) -> None:
        """One instruction on all devices."""
        if isinstance(instruction, Synchronise):
            self.values[instruction.after] = self.values[instruction.before]
        elif isinstance(instruction, Run):
            node, inputs, starts = self.inputs(instruction)
            self.values[instruction.after] = [
                operator(node.kind).forward(
                    [row[j] for row in inputs], node.attributes, self.place(instruction, node, starts, j)
                )
                for j in range(self.m)
            ]
        else:
            change = _CHANGES[instruction.how][0]
            self.values[instruction.after] = change(self, instruction, self.values[instruction.before])

    def backward(self, instruction: Run | Change | Synchronise) -> None:
        """Its mirror: from the gradients of what it made to those of what it read."""
        gradient = self.gradients.pop(instruction.after, None)
        if gradient is None:
            return
        if isinstance(instruction, Synchronise):
            self._add(instruction.before, gradient)
        elif isinstance(instruction, Run):
            self._run_back(instruction, gradient)
        else:
            mirror = _CHANGES[instruction.how][1]
            self._add(instruction.before, mirror(self, instruction, gradient))

    def _add(self, key: str, gradient: Slices) -> None:
        old = self.gradients.get(key)
        self.gradients[key] = gradient if old is None else [a + b for a, b in zip(old, gradient, strict=True)]

    def _run_back(self, run: Run, gradient: Slices) -> None:
        node, inputs, starts = self.inputs(run)
        output = self.values[run.after]
        by_device = [
            operator(node.kind).backward(
                [row[j] for row in inputs], output[j], gradient[j], node.attributes,
                self.place(run, node, starts, j),
            )
            for j in range(self.m)
        ]  # fmt: skip
        for number, (source, form) in enumerate(zip(self.program.inputs(node), run.way.inputs, strict=True)):
            parts = [row[number] for row in by_device]
            if source.kind == PLACEHOLDER or any(part is None for part in parts):
                continue
            slices = [part for part in parts if part is not None]
            if source.kind == PARAMETER:
                whole = (
                    self._from_factors(run, node, inputs, gradient, number)
                    if run.factors and form == WHOLE
                    else sum(slices, start=np.zeros(()))
                    if form == WHOLE
                    else np.concatenate(slices, axis=form)
                )
                self.parameters[source.name] = self.parameters.get(source.name, np.zeros(())) + whole
            else:
                self._add(self._key(source, node, form), slices)

    def _from_factors(
        self, run: Run, node: Node, inputs: list[Slices], gradient: Slices, number: int
    ) -> Array:
        """The gradient of a whole parameter from the gathered input and output gradient (as every device has it)."""
        whole = [row[0] for row in inputs]
        whole[0] = np.concatenate(inputs[0], axis=run.way.inputs[0])
        over = np.concatenate(gradient, axis=run.way.output)
        found = operator(node.kind).backward(whole, over, over, node.attributes, whole_place(node))[number]
        assert found is not None, "a parameter of a contraction has a gradient"
        return found


def _total(machine: _Machine, change: Change, slices: Slices) -> Slices:
    """All-Reduce: everyone has the sum."""
    return [sum(slices, start=np.zeros(()))] * machine.m


def _joined(machine: _Machine, change: Change, slices: Slices, form: Form) -> Array:
    return np.concatenate(slices, axis=form)


def _cut(machine: _Machine, change: Change, value: Array, form: Form) -> Slices:
    return machine.cut(value, change.tensor, form, machine.program.node(change.tensor).segment)


def _padded(machine: _Machine, change: Change, slices: Slices) -> Slices:
    """Each device's slice among zeros: summands of the whole."""
    node, found = machine.program.node(change.tensor), []
    for (a, b), part in zip(machine.bounds(node.name, change.target, node.segment), slices, strict=True):
        whole = np.zeros(node.shape)
        whole[(*[slice(None)] * change.target, slice(a, b))] = part
        found.append(whole)
    return found


def _weights(machine: _Machine) -> list[float]:
    return [1.0 / machine.m] * machine.m


def _repartition(machine: _Machine, change: Change, slices: Slices, *, back: bool) -> Slices:
    if change.source < 0:
        return slices
    here = machine.program.node(change.tensor).segment
    there = int(change.after.rpartition("|")[0].rpartition("@")[2])
    return machine.cut(
        _joined(machine, change, slices, change.source), change.tensor, change.source, here if back else there
    )


Step = Callable[[_Machine, Change, Slices], Slices]
_CHANGES: dict[str, tuple[Step, Step]] = {
    "All-Reduce": (_total, _total),
    "Reduce-Scatter": (
        lambda m, c, s: _cut(m, c, sum(s, start=np.zeros(())), c.target),
        lambda m, c, s: [_joined(m, c, s, c.target)] * m.m,
    ),
    "All-Gather": (
        lambda m, c, s: [_joined(m, c, s, c.source)] * m.m,
        lambda m, c, s: _cut(m, c, sum(s, start=np.zeros(())), c.source),
    ),
    "All-To-All": (
        lambda m, c, s: _cut(m, c, _joined(m, c, s, c.source), c.target),
        lambda m, c, s: _cut(m, c, _joined(m, c, s, c.target), c.source),
    ),
    "Slice": (lambda m, c, s: [part[j] for j, part in enumerate(_cut_each(m, c, s))], _padded),
    "Share": (
        lambda m, c, s: [w * x for w, x in zip(_weights(m), s, strict=True)],
        lambda m, c, s: [w * x for w, x in zip(_weights(m), s, strict=True)],
    ),
    "Repartition": (
        lambda m, c, s: _repartition(m, c, s, back=False),
        lambda m, c, s: _repartition(m, c, s, back=True),
    ),
}
_CHANGES["Grouped-Broadcast"] = _CHANGES["All-Gather"]


def _cut_each(machine: _Machine, change: Change, slices: Slices) -> list[Slices]:
    return [_cut(machine, change, value, change.target) for value in slices]
