"""What a decision takes in whole units: bytes, seconds, and stages in time.

An instance knows one ratio per device and segment; a real tensor is cut between units (`Axes`):
rows, heads and experts, each axis on its own. A batch of 32 over 16 devices leaves little of a
ratio of 2.3 samples. Parameters are held as the operators that read them want them. One that
operators read in different ways (a tied embedding, sliced in one place and whole in another) is
held whole.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hetplan.formulations.hap.data import Communication, HapDecision
from hetplan.formulations.hap.problem import Floats
from hetplan.formulations.hap.spmd.rules import (
    OPPOSITE,
    Holding,
    Links,
    Theory,
    form_kept,
    work_of,
)
from hetplan.programs.operators import (
    WHOLE,
    Change,
    Form,
    Instruction,
    Run,
    Synchronise,
)
from hetplan.programs.program import Bounds, Node


@dataclass(frozen=True)
class Shard:
    """How a parameter is held: whole (dimension None), or each rank its range of a dimension.

    joined_apart: held whole, while some operator has a slice of its gradient.
    """

    name: str
    shape: tuple[int, ...]
    dimension: int | None = None
    bounds: Bounds = ()
    joined_apart: bool = False

    def entries(self, m: int) -> Floats:
        """[m] how many of them each of `m` ranks holds."""
        if self.dimension is None:
            return np.full(m, float(math.prod(self.shape)))
        slices = np.diff(np.array(self.bounds))[:, 0]
        return np.asarray(math.prod(self.shape) // self.shape[self.dimension] * slices, dtype=float)


@dataclass(frozen=True)
class Decided:
    """A theory and a decision in its triples."""

    theory: Theory
    decision: HapDecision

    @property
    def order(self) -> list[Instruction]:
        """The program's instructions."""
        return [self.theory.instructions[i] for i in self.decision.program]

    @property
    def m(self) -> int:
        """Number of devices."""
        return len(self.decision.ratios[0])

    def bounds(self, tensor: str, d: int, segment: int) -> Bounds:
        """[m] where each device's slice of dimension d begins and ends."""
        return self.theory.axes.bounds(tensor, d, self.decision.ratios[segment])

    def part(self, tensor: str, form: Form, segment: int) -> Floats:
        """[m] of the tensor on each device: slices, or 1 where it is whole or a summand."""
        return (
            np.ones(self.m)
            if form < 0
            else self.theory.axes.shares(tensor, form, self.decision.ratios[segment])
        )

    def shared_by(self, instruction: Instruction, segment: int) -> Floats:
        """[m] of an instruction's shared work, or of the tensor that a collective moves."""
        if isinstance(instruction, Synchronise):  # gathered factors: slices of the batch
            return np.array(self.decision.ratios[segment])
        if isinstance(instruction, Change):
            pairs = [(instruction.tensor, f) for f in (instruction.source, instruction.target)]
        else:
            node, way = self.theory.program.node(instruction.node), instruction.way
            pairs = [(node.name, way.output), *zip(node.inputs, way.inputs, strict=True)]
        rows = [self.part(tensor, form, segment) for tensor, form in pairs if form >= 0]
        if isinstance(instruction, Run):
            rows = rows[:1]
        return np.asarray(np.max(rows, axis=0)) if rows else np.ones(self.m)

    @cached_property
    def ways(self) -> dict[str, set[tuple[Form, Bounds]]]:
        """Parameter (copies by the name of what they copy) -> the forms in which operators read
        it."""
        ways: dict[str, set[tuple[Form, Bounds]]] = {}
        for i, instruction in zip(self.decision.program, self.order, strict=True):
            segment = self.theory.data.triples[i].segment
            for source, owner, form in self.theory.reads(instruction):
                cut = () if form == WHOLE else self.bounds(source.name, form, segment)
                ways.setdefault(owner, set()).add((form, cut))
        return ways

    @cached_property
    def shards(self) -> dict[str, Shard]:
        """How every parameter is held."""
        program, shards = self.theory.program, dict[str, Shard]()
        for node in program.parameters:
            if node.name in program.copies:
                continue
            forms = self.ways.get(node.name, {(WHOLE, ())})
            form, cut = min(forms)
            apart = any(form != WHOLE for form, _ in forms)
            shards[node.name] = (
                Shard(node.name, node.shape, joined_apart=apart)
                if len(forms) > 1 or form == WHOLE
                else Shard(node.name, node.shape, form, cut)
            )
        return shards

    def entries(self) -> Floats:
        """[m] entries of parameters that each device holds."""
        total = np.zeros(self.m)
        for shard in self.shards.values():
            total += shard.entries(self.m)
        return total

    def saved(self, saved: Mapping[str, float]) -> Floats:
        """[m] bytes of tensors kept for the backward pass; saved: node -> bytes of its tensor."""
        total = np.zeros(self.m)
        for i, instruction in zip(self.decision.program, self.order, strict=True):
            if (kept := form_kept(instruction)) is not None:
                part = self.part(*kept, self.theory.data.triples[i].segment)
                total += saved.get(kept[0], 0.0) * part
        return total

    def bytes(self, holding: Holding) -> tuple[float, ...]:
        """[m] what each device holds of parameters with their states, and of kept tensors."""
        held = holding.state_bytes * self.entries() + self.saved(holding.saved)
        return tuple(float(x) for x in held)

    def seconds(self) -> float:
        """The program's cost as the evaluator has it, with every slice in whole units. Source: HAP,
        Section 5.1."""
        data = self.theory.data
        speeds = np.array([device.flops_per_second for device in data.devices])
        total, busy = 0.0, np.zeros(self.m)
        for i, instruction in zip(self.decision.program, self.order, strict=True):
            triple = data.triples[i]
            share = self.shared_by(instruction, triple.segment)
            if isinstance(triple, Communication):
                largest = triple.shared_seconds * float(share.max())
                total += float(busy.max()) + triple.fixed_seconds + largest
                busy = np.zeros(self.m)
            else:
                busy += (triple.fixed_flops + triple.shared_flops * share) / speeds
        return total + float(busy.max())


@dataclass(frozen=True)
class Prices:
    """speeds [m] FLOP/s; weights: node -> factor on its FLOP; links: of collectives; element_bytes:
    of an entry."""

    speeds: Floats
    weights: Mapping[str, float]
    links: Links
    element_bytes: int


@dataclass
class Stage:
    """compute [m]: seconds of each device; then a collective (empty: none at the end of a pass),
    seconds."""

    compute: Floats
    backward: bool
    collective: str = ""
    seconds: float = 0.0


class Timed:
    """A run of a program as stages: what every device computes until a collective that all join.

    Where theories price each instruction together with its mirror, here both stand where they
    happen, forward and then backward. Slices are whole units, collectives of slices as long as the
    longest. Gradients of whole parameters are all-reduced behind the operator's backward pass, in
    the last run of an iteration.
    """

    def __init__(self, decided: Decided, prices: Prices) -> None:
        self.decided, self.program, self.prices = decided, decided.theory.program, prices
        self.gradients = self.program.needs_gradient()
        self.gathers = {
            i.before: i.how
            for i in decided.order
            if isinstance(i, Synchronise) and i.how != "All-Reduce"
        }

    def run(self, *, last: bool) -> list[Stage]:
        """One run; last: of the iteration, which joins the gradients."""
        order = self.decided.order
        self.stages = [self._stage(False)]
        for instruction in order:
            if isinstance(instruction, Run):
                self._compute(instruction, backward=False)
            elif isinstance(instruction, Change):
                self._change(instruction, backward=False)
        self.stages.append(self._stage(True))
        for instruction in reversed(order):
            if isinstance(instruction, Run) and instruction.node in self.gradients:
                self._compute(instruction, backward=True)
                self._join_gradients(instruction, last=last)
            elif isinstance(instruction, Change) and instruction.tensor in self.gradients:
                self._change(instruction, backward=True)
        return self.stages

    def _stage(self, backward: bool) -> Stage:
        return Stage(np.zeros(self.decided.m), backward)

    def _join(self, how: str, what: str, part: float, *nodes: Node) -> None:
        """A collective on tensors ends the stage; part: the largest of them that a device has."""
        size = float(sum(node.elements for node in nodes) * self.prices.element_bytes)
        price = self.prices.links.price(how, size)
        stage = self.stages[-1]
        stage.collective, stage.seconds = f"{how}{what}", price.fixed + price.shared * part
        self.stages.append(self._stage(stage.backward))

    def _change(self, change: Change, *, backward: bool) -> None:
        if change.how in ("Slice", "Share") or (change.how == "Repartition" and change.source < 0):
            return
        node = self.program.node(change.tensor)
        how = OPPOSITE.get(change.how, change.how) if backward else change.how
        part = float(self.decided.shared_by(change, node.segment).max())
        self._join(how, f"({node.name})", part, node)

    def _compute(self, run: Run, *, backward: bool) -> None:
        """One pass of an operator, in the end what is computed from gathered factors."""
        node, speeds = self.program.node(run.node), self.prices.speeds
        work = work_of(self.program, node, self.gradients, self.prices.weights.get(node.name, 1.0))
        part = self.decided.shared_by(run, node.segment)
        back = work.gradients[0] if run.factors else work.backward
        flops = back if backward else work.forward
        self.stages[-1].compute += flops * (part if run.way.shared else 1.0) / speeds
        if backward and run.factors:
            for tensor in (self.program.inputs(node)[0], node):
                self._join(self.gathers[run.after], f"({tensor.name})", float(part.max()), tensor)
            self.stages[-1].compute += sum(work.gradients[1:]) / speeds

    def _join_gradients(self, run: Run, *, last: bool) -> None:
        """The joining of gradients that the backward pass leaves in parts."""
        if not last:
            return
        reads, segment = self.decided.theory.reads(run), self.program.node(run.node).segment
        whole = [source for source, _, form in reads if form == WHOLE]
        if whole and not run.factors:
            names = ", ".join(source.name for source in whole)
            self._join("All-Reduce", f" gradient({names})", 1.0, *whole)
        for source, owner, form in reads:
            if form != WHOLE and self.decided.shards[owner].joined_apart:
                part = float(self.decided.part(source.name, form, segment).max())
                self._join("All-Gather", f" gradient({source.name})", part, source)
