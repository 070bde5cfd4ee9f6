"""A distributed program on simulated devices: every device's arrays in one process (`machine`), put
together.

`reference` is the single device. float64 throughout, so that both agree to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hetplan.formulations.hap.data import HapDecision
from hetplan.formulations.hap.spmd.exchange import Simulated, Slices, added
from hetplan.formulations.hap.spmd.forms import WHOLE, Form
from hetplan.formulations.hap.spmd.machine import Machine
from hetplan.formulations.hap.spmd.operators import operator
from hetplan.formulations.hap.spmd.operators.base import Array, Place
from hetplan.formulations.hap.spmd.program import PARAMETER, PLACEHOLDER, Node, SingleProgram
from hetplan.formulations.hap.spmd.rules import Theory


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
    machine = Together(theory, decision, values)
    loss = machine.run([theory.instructions[i] for i in decision.program], theory.data.goal)
    return Outcome(float(added(loss)), _by_parameter(theory.program, machine.parameters))


class Together(Machine):
    """All devices, reading slices of whole tensors; parameters: gradients put together."""

    def __init__(self, theory: Theory, decision: HapDecision, values: Mapping[str, Array]) -> None:
        super().__init__(
            theory.program, theory.axes, decision.ratios, Simulated(len(theory.data.devices))
        )
        self.data = values
        self.parameters: dict[str, Array] = {}

    def source(self, node: Node, form: Form, segment: int) -> Slices:
        """The whole for everyone, or slices."""
        value = self.data[node.name]
        return [value] * self.m if form == WHOLE else self.cut(value, node.name, form, segment)

    def given(
        self, node: Node, form: Form, segment: int, slices: Slices, *, complete: bool
    ) -> None:
        """Added up, or side by side."""
        side_by_side = form != WHOLE
        whole = (
            np.concatenate(slices, axis=form)
            if side_by_side
            else slices[0]
            if complete
            else added(slices)
        )
        self.parameters[node.name] = self.parameters.get(node.name, np.zeros(())) + whole
