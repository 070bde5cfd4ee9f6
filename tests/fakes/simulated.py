"""A single-device program run on one device, and a distributed one on simulated devices in one
process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetplan.formulations.hap.data import HapDecision
from hetplan.formulations.hap.spmd.axes import Bounds
from hetplan.formulations.hap.spmd.forms import WHOLE, Form
from hetplan.formulations.hap.spmd.program import PARAMETER, PLACEHOLDER, Node, SingleProgram
from hetplan.formulations.hap.spmd.rules import Theory
from hetplan.runtime.execution.spmd.kernels import compute, whole_place
from hetplan.runtime.execution.spmd.machine import (
    Exchange,
    Machine,
    Manner,
    Slices,
    mirrored,
    piece,
)

Values = Mapping[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """loss, and the gradient of every parameter (copies added up)."""

    loss: float
    gradients: Values


def agree(found: Outcome, expected: Outcome, tolerance: float = 1e-10) -> None:
    """Loss and all gradients, relative to the largest gradient."""
    assert abs(found.loss - expected.loss) <= tolerance * abs(expected.loss)
    assert set(found.gradients) == set(expected.gradients)
    largest = max(float(g.abs().max()) for g in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        assert found.gradients[name].shape == gradient.shape, name
        assert float((found.gradients[name] - gradient).abs().max()) <= tolerance * largest, name


def random_values(program: SingleProgram, seed: int) -> dict[str, Tensor]:
    """Values of all placeholders and parameters, in double precision."""
    draw = np.random.default_rng(seed)
    values: dict[str, Any] = {}
    for node in program.nodes:
        if node.kind == PLACEHOLDER and "below" in node.attributes:
            values[node.name] = draw.integers(node.attributes["below"], size=node.shape)
        elif node.kind == PARAMETER and node.name in program.copies:
            values[node.name] = values[program.copies[node.name]]
        elif node.source:
            fan = max(1, int(np.prod(node.shape[1:])))
            scale = 1.0 if node.kind == PLACEHOLDER else 1 / np.sqrt(fan)
            values[node.name] = draw.normal(size=node.shape) * scale
    return {name: torch.as_tensor(value) for name, value in values.items()}


def leaves(program: SingleProgram, values: Values) -> dict[str, Tensor]:
    """The values, with gradients of parameters; copies are what they copy."""
    known = dict(values)
    for node in program.parameters:
        if node.name not in program.copies:
            known[node.name] = values[node.name].detach().clone().requires_grad_()
    return known | {copy: known[owner] for copy, owner in program.copies.items()}


def gradients(program: SingleProgram, known: Values) -> dict[str, Tensor]:
    """Of the parameters, zeros where nothing depends on one."""
    owners = [n.name for n in program.parameters if n.name not in program.copies]
    return {
        name: torch.zeros_like(known[name]) if known[name].grad is None else known[name].grad
        for name in owners
    }


def reference(program: SingleProgram, values: Values) -> Outcome:
    """Loss and gradients on one device."""
    known = leaves(program, values)
    for node in program.computations:
        known[node.name] = compute(node, [known[name] for name in node.inputs], whole_place(node))
    loss = known[program.loss.name]
    loss.backward()
    return Outcome(float(loss.detach()), gradients(program, known))


def execute(theory: Theory, decision: HapDecision, values: Values) -> Outcome:
    """Loss and gradients as the devices get them, put together."""
    machine = Together(theory, decision, values)
    loss = machine.run([theory.instructions[i] for i in decision.program], theory.data.goal)
    return Outcome(float(added(loss)), gradients(theory.program, machine.known))


class Together(Machine):
    """All devices, reading slices of whole tensors."""

    def __init__(self, theory: Theory, decision: HapDecision, values: Values) -> None:
        together = Simulated(len(theory.data.devices))
        super().__init__(theory.program, theory.axes, decision.ratios, together)
        self.known = leaves(theory.program, values)

    def source(self, node: Node, form: Form, segment: int, *, complete: bool) -> Slices:
        """The whole for everyone, or slices."""
        value, devices = self.known[node.name], self.exchange.here

        def read(slices: Slices) -> Slices:
            if form == WHOLE:
                return [value.view_as(value) for _ in devices]
            return pieces(value, form, self.bounds(node.name, form, segment))

        def joined(slices: Slices) -> Slices:
            if form != WHOLE:
                return [torch.cat(slices, dim=form)]
            return [slices[0] if complete else added(slices)]

        return read([value]) if node.kind == PLACEHOLDER else mirrored(read, joined, [value])


class Simulated(Exchange):
    """All devices in one process."""

    def __init__(self, devices: int) -> None:
        self.here = range(devices)

    def total(self, slices: Slices) -> Slices:
        """The sum, m times."""
        return [added(slices) for _ in slices]

    def gather(self, slices: Slices, dimension: int, bounds: Bounds, manner: Manner) -> Slices:
        """Put together, m times."""
        return [torch.cat(slices, dim=dimension) for _ in slices]

    def scatter(self, slices: Slices, dimension: int, bounds: Bounds, manner: Manner) -> Slices:
        """The sum, cut."""
        return [part.clone() for part in pieces(added(slices), dimension, bounds)]

    def swap(
        self, slices: Slices, source: int, before: Bounds, target: int, after: Bounds
    ) -> Slices:
        """Put together, cut again."""
        return [part.clone() for part in pieces(torch.cat(slices, dim=source), target, after)]


def added(slices: Slices) -> Tensor:
    """The sum."""
    return torch.stack(list(slices)).sum(dim=0)


def pieces(value: Tensor, dimension: int, bounds: Bounds) -> Slices:
    """All slices."""
    return [piece(value, dimension, pair) for pair in bounds]
