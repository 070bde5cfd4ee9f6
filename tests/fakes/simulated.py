"""A single-device program run on one device, and a distributed one on simulated devices, which are
threads of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier, BrokenBarrierError
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hetplan.formulations.hap.data import HapDecision
from hetplan.formulations.hap.pricing import Theory
from hetplan.programs.decided import Decided
from hetplan.programs.operators.operator import Place
from hetplan.programs.program import PARAMETER, PLACEHOLDER, Node, SingleProgram
from hetplan.runtime.spmd.machine import Machine, copied, piece

Values = Mapping[str, Tensor]


def whole_place(node: Node) -> Place:
    """Where one device runs a node of the whole program."""
    return Place(node.shape, (0,) * len(node.inputs))


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
        inputs = [known[name] for name in node.inputs]
        known[node.name] = node.compute(inputs, whole_place(node))
    loss = known[program.loss.name]
    loss.backward()
    return Outcome(float(loss.detach()), gradients(program, known))


class Member:
    """One of some threads, with the collectives of `transport.Group`."""

    def __init__(self, barrier: Barrier, slots: list[Any], rank: int) -> None:
        self.barrier, self.slots, self.rank = barrier, slots, rank

    def everyones(self, value: Any) -> list[Any]:
        """What every member brings."""
        self.slots[self.rank] = value
        self.barrier.wait()
        brought = list(self.slots)
        self.barrier.wait()
        return brought

    def reduced(self, x: Tensor) -> Tensor:
        """The sum."""
        return torch.stack(self.everyones(x.detach().clone())).sum(0)

    def broadcast(self, x: Tensor, owner: int) -> None:
        """One member's values."""
        x.copy_(self.everyones(x.clone())[owner])

    def reduce(self, x: Tensor, owner: int) -> None:
        """The sum, for one member."""
        parts = self.everyones(x.clone())
        if self.rank == owner:
            x.copy_(torch.stack(parts).sum(0))

    def gather(self, own: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Every member's rows."""
        parts = self.everyones(own)
        assert [len(part) for part in parts] == list(lengths)
        return parts

    def swap(self, sent: Tensor, leaving: Sequence[int], coming: Sequence[int]) -> Tensor:
        """A part from each to each."""
        parts = [parts[self.rank] for parts in self.everyones(sent.split(list(leaving)))]
        assert [len(part) for part in parts] == list(coming)
        return torch.cat(parts)


def on_devices(decided: Decided, values: Values, act: Callable[[Machine], Any]) -> list[Any]:
    """[m] what `act` makes of every device's machine, on all of them at once."""
    barrier, slots = Barrier(decided.m, timeout=600), [None] * decided.m

    def one(rank: int) -> Any:
        parameters = {
            name: nn.Parameter(
                copied(
                    values[name]
                    if shard.dimension is None
                    else piece(values[name], shard.dimension, shard.bounds[rank])
                )
            )
            for name, shard in decided.shards.items()
        }
        group: Any = Member(barrier, slots, rank)
        machine = Machine(decided, group, rank, parameters)
        machine.begin(0, values)
        try:
            return act(machine)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(decided.m) as pool:
        futures = [pool.submit(one, rank) for rank in range(decided.m)]
    for error in [future.exception() for future in futures]:
        if error is not None and not isinstance(error, BrokenBarrierError):
            raise error
    return [future.result() for future in futures]


def joined(dimension: int | None, parts: Sequence[Tensor]) -> Tensor:
    """A gradient from all devices' parts; whole ones are the same everywhere."""
    if dimension is not None:
        return torch.cat(list(parts), dim=dimension)
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


def execute(theory: Theory, decision: HapDecision, values: Values) -> Outcome:
    """Loss and gradients as the devices get them, put together."""
    decided = theory.decided(decision)

    def train(machine: Machine) -> tuple[float, dict[str, Tensor]]:
        loss = machine.run()
        held = machine.parameters.items()
        return loss, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in held}

    found = on_devices(decided, values, train)
    gradients = {
        name: joined(shard.dimension, [own[name] for _, own in found])
        for name, shard in decided.shards.items()
    }
    return Outcome(sum(loss for loss, _ in found), gradients)
