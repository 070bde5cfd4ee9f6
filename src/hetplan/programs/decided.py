"""An SPMD program with its ratios, in whole units: how each device holds each tensor.

An instance of HAP's problem knows one ratio per device and segment; a real tensor is cut between
units (`Axes`): rows, heads and experts, each axis on its own. A batch of 32 over 16 devices leaves
little of a ratio of 2.3 samples. Parameters are held as the operators that read them want them. A
parameter that operators read in different ways (a tied embedding, sliced in one place and whole in
another) is held whole.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hetplan.programs.axes import Bounds, Floats
from hetplan.programs.forms import WHOLE, Form, Instruction, Run, Synchronise
from hetplan.programs.holding import Holding, form_kept
from hetplan.programs.program import PARAMETER, Node, SingleProgram
from hetplan.programs.rules import Rules, Step


@dataclass(frozen=True)
class Shard:
    """How a parameter is held: whole, or each rank its slice of one dimension."""

    name: str
    shape: tuple[int, ...]
    dimension: int | None = None
    """The dimension that is sliced; None: the parameter is held whole."""
    bounds: Bounds = ()
    """[rank] where each slice begins and ends."""
    joined_apart: bool = False
    """Whether it is held whole, while some operator has a slice of its gradient."""

    def interval(self, rank: int) -> tuple[float, float]:
        """The part of the sliced dimension that a rank holds, within [0, 1]."""
        if self.dimension is None:
            return 0.0, 1.0
        first, last = self.bounds[rank]
        length = self.shape[self.dimension]
        return first / length, last / length

    def entries(self, m: int) -> Floats:
        """[m] how many of its entries each of `m` ranks holds."""
        whole = math.prod(self.shape)
        if self.dimension is None:
            return np.full(m, float(whole))
        lengths = np.array([last - first for first, last in self.bounds], dtype=float)
        return whole // self.shape[self.dimension] * lengths


@dataclass(frozen=True)
class Decided:
    """An SPMD program: steps of a program's rules, and ratios."""

    rules: Rules
    steps: tuple[Step, ...]
    """In order of execution."""
    ratios: Sequence[Sequence[float]]
    """[segment][device] part of each sliced dimension."""

    @property
    def program(self) -> SingleProgram:
        """The single-device program."""
        return self.rules.program

    @property
    def order(self) -> list[Instruction]:
        """The instructions."""
        return [step.instruction for step in self.steps]

    @property
    def m(self) -> int:
        """Number of devices."""
        return len(self.ratios[0])

    def bounds(self, tensor: str, d: int, segment: int) -> Bounds:
        """[m] where each device's slice of dimension d begins and ends."""
        return self.rules.axes.bounds(tensor, d, self.ratios[segment])

    def part(self, tensor: str, form: Form, segment: int) -> Floats:
        """[m] the part of the tensor on each device: of a slice, or 1 where each has the whole or a
        summand."""
        if form < 0:
            return np.ones(self.m)
        return self.rules.axes.shares(tensor, form, self.ratios[segment])

    def shared_by(self, step: Step) -> Floats:
        """[m] each device's part of a step's shared work, or of the tensor that a collective
        moves."""
        instruction = step.instruction
        if isinstance(instruction, Synchronise):  # gathered factors are slices of the batch
            return np.array(self.ratios[step.segment])
        if isinstance(instruction, Run):
            node, way = self.program.node(instruction.node), instruction.way
            tensors = zip((node.name, *node.inputs), (way.output, *way.inputs), strict=True)
            sliced = [(name, form) for name, form in tensors if form >= 0][:1]
        else:
            forms = [form for form in (instruction.source, instruction.target) if form >= 0]
            sliced = [(instruction.tensor, form) for form in forms]
        if not sliced:
            return np.ones(self.m)
        parts = [self.part(tensor, form, step.segment) for tensor, form in sliced]
        return np.asarray(np.max(parts, axis=0))

    def reads(self, instruction: Instruction) -> list[tuple[Node, str, Form]]:
        """(Parameter, the one that it is a copy of or itself, form) of each that an operator
        reads."""
        if not isinstance(instruction, Run):
            return []
        read = []
        inputs = self.program.inputs(self.program.node(instruction.node))
        for source, form in zip(inputs, instruction.way.inputs, strict=True):
            if source.kind == PARAMETER:
                owner = self.program.copies.get(source.name, source.name)
                read.append((source, owner, form))
        return read

    @cached_property
    def ways(self) -> dict[str, set[tuple[Form, Bounds]]]:
        """Parameter -> the forms in which operators read it or a copy of it, with the bounds of the
        slices."""
        ways: dict[str, set[tuple[Form, Bounds]]] = {}
        for step in self.steps:
            for source, owner, form in self.reads(step.instruction):
                cut = () if form == WHOLE else self.bounds(source.name, form, step.segment)
                ways.setdefault(owner, set()).add((form, cut))
        return ways

    @cached_property
    def shards(self) -> dict[str, Shard]:
        """How every parameter is held."""
        shards: dict[str, Shard] = {}
        for node in self.program.parameters:
            if node.name in self.program.copies:
                continue
            forms = self.ways.get(node.name, {(WHOLE, ())})
            form, cut = min(forms)
            if len(forms) == 1 and form != WHOLE:
                shards[node.name] = Shard(node.name, node.shape, form, cut)
            else:
                apart = any(form != WHOLE for form, _ in forms)
                shards[node.name] = Shard(node.name, node.shape, joined_apart=apart)
        return shards

    def entries(self) -> Floats:
        """[m] entries of parameters that each device holds."""
        total = np.zeros(self.m)
        for shard in self.shards.values():
            total += shard.entries(self.m)
        return total

    def saved(self, saved: Mapping[str, float]) -> Floats:
        """[m] bytes of tensors kept for the backward pass.

        saved: node -> bytes of its whole tensor.
        """
        total = np.zeros(self.m)
        for step in self.steps:
            kept = form_kept(step.instruction)
            if kept is not None:
                tensor, form = kept
                part = self.part(tensor, form, step.segment)
                total += saved.get(tensor, 0.0) * part
        return total

    def bytes(self, holding: Holding) -> tuple[float, ...]:
        """[m] bytes of parameters with their states, and of kept tensors, on each device."""
        held = holding.state_bytes * self.entries() + self.saved(holding.saved)
        return tuple(float(x) for x in held)
