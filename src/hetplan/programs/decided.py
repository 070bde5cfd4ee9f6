"""An SPMD program with its ratios, rounded to whole units: the part of each tensor on each device.

A decision of HAP's problem has one ratio per device and segment. A real tensor is cut only between
units (`Axes`), such as samples, heads and experts, and each axis is rounded on its own: no device
can get 2.3 samples. A device has a parameter in the form in which operators read it. If operators
read a parameter in different forms (a tied embedding, sliced by one and whole by another), every
device has it whole.
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
    """The parts of one parameter on the ranks: the whole on each, or a slice of one dimension."""

    name: str
    shape: tuple[int, ...]
    """The shape of the whole parameter."""
    dimension: int | None = None
    """The dimension that is sliced; None: every rank has the whole parameter."""
    bounds: Bounds = ()
    """[rank] where each slice begins and ends."""
    gathers_gradient: bool = False
    """Whether every rank has the whole parameter, but some operator only a slice of its gradient,
    so that the slices have to be gathered."""

    def interval(self, rank: int) -> tuple[float, float]:
        """The part of the sliced dimension that a rank has, as an interval within [0, 1]."""
        if self.dimension is None:
            return 0.0, 1.0
        first, last = self.bounds[rank]
        length = self.shape[self.dimension]
        return first / length, last / length

    def entries(self, m: int) -> Floats:
        """[m] the number of the parameter's entries on each of `m` ranks."""
        all_entries = math.prod(self.shape)
        if self.dimension is None:
            return np.full(m, float(all_entries))
        lengths = np.array([last - first for first, last in self.bounds], dtype=float)
        entries_per_row = all_entries // self.shape[self.dimension]  # without remainder
        return entries_per_row * lengths


@dataclass(frozen=True)
class Decided:
    """An SPMD program with its ratios: a decision of HAP's problem, or the program of a plan."""

    rules: Rules
    steps: tuple[Step, ...]
    """The steps in order of execution."""
    ratios: Sequence[Sequence[float]]
    """[segment][device] share of each sliced dimension, before rounding."""

    @property
    def program(self) -> SingleProgram:
        """The single-device program."""
        return self.rules.program

    @property
    def order(self) -> list[Instruction]:
        """The instructions of the steps."""
        return [step.instruction for step in self.steps]

    @property
    def m(self) -> int:
        """Number of devices."""
        return len(self.ratios[0])

    def bounds(self, tensor: str, d: int, segment: int) -> Bounds:
        """[m] where each device's slice of dimension d begins and ends."""
        return self.rules.axes.bounds(tensor, d, self.ratios[segment])

    def part(self, tensor: str, form: Form, segment: int) -> Floats:
        """[m] the share of the tensor's entries on each device: that of its slice; 1 for a whole
        tensor and for a summand."""
        if form < 0:
            return np.ones(self.m)
        return self.rules.axes.shares(tensor, form, self.ratios[segment])

    def shared_by(self, step: Step) -> Floats:
        """[m] each device's share of the work of an operator, or of the tensor that a collective
        moves.

        An operator's share is that of its first sliced tensor, the output before the inputs; by the
        sharding rules its other sliced tensors are of the same axis. A change from one sliced
        dimension to another has the larger of both shares. A tensor in no slices has the share 1.

        A `Synchronise` has the ratio itself as its share, before rounding, because factors that it
        gathers are slices of the batch. For an all-reduce, which it may also be, the share has no
        effect: no part of its seconds depends on ratios.
        """
        instruction = step.instruction
        if isinstance(instruction, Synchronise):
            return np.array(self.ratios[step.segment])
        if isinstance(instruction, Run):
            node = self.program.node(instruction.node)
            rule = instruction.rule
            tensors = zip((node.name, *node.inputs), (rule.output, *rule.inputs), strict=True)
            sliced = [(name, form) for name, form in tensors if form >= 0][:1]
        else:
            forms = [form for form in (instruction.source, instruction.target) if form >= 0]
            sliced = [(instruction.tensor, form) for form in forms]
        if not sliced:
            return np.ones(self.m)
        parts = [self.part(tensor, form, step.segment) for tensor, form in sliced]
        return np.asarray(np.max(parts, axis=0))

    def reads(self, instruction: Instruction) -> list[tuple[Node, str, Form]]:
        """(parameter node, name of its original, form) of each parameter that an operator reads.
        The original is the parameter that a copy stands for, and the parameter itself if it is no
        copy."""
        if not isinstance(instruction, Run):
            return []
        read = []
        inputs = self.program.inputs(self.program.node(instruction.node))
        for source, form in zip(inputs, instruction.rule.inputs, strict=True):
            if source.kind == PARAMETER:
                original = self.program.copies.get(source.name, source.name)
                read.append((source, original, form))
        return read

    @cached_property
    def readings(self) -> dict[str, set[tuple[Form, Bounds]]]:
        """Parameter -> the set of (form, bounds of the slices) in which operators read it or a copy
        of it. A whole parameter has no bounds."""
        readings: dict[str, set[tuple[Form, Bounds]]] = {}
        for step in self.steps:
            for source, original, form in self.reads(step.instruction):
                bounds = () if form == WHOLE else self.bounds(source.name, form, step.segment)
                readings.setdefault(original, set()).add((form, bounds))
        return readings

    @cached_property
    def shards(self) -> dict[str, Shard]:
        """Parameter -> its parts on the devices; whole on each if no operator reads it. Copies are
        left out."""
        shards: dict[str, Shard] = {}
        for node in self.program.parameters:
            if node.name in self.program.copies:
                continue
            readings = self.readings.get(node.name, {(WHOLE, ())})
            if len(readings) > 1:
                # at most one reading is of the whole, so that another one is of slices
                shards[node.name] = Shard(node.name, node.shape, gathers_gradient=True)
                continue
            [(form, bounds)] = readings
            if form == WHOLE:
                shards[node.name] = Shard(node.name, node.shape)
            else:
                shards[node.name] = Shard(node.name, node.shape, form, bounds)
        return shards

    def entries(self) -> Floats:
        """[m] number of entries of parameters on each device."""
        total = np.zeros(self.m)
        for shard in self.shards.values():
            total += shard.entries(self.m)
        return total

    def saved(self, saved: Mapping[str, float]) -> Floats:
        """[m] bytes of the tensors that each device keeps for the backward pass.

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
        """[m] bytes of parameters with their gradients and optimizer states, and of kept tensors,
        on each device."""
        total = holding.state_bytes * self.entries() + self.saved(holding.saved)
        return tuple(float(size) for size in total)
