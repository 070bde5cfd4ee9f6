"""A program in time: what every device computes between collectives, forward and then backward.

Where theories price each instruction together with its mirror, here both stand where they happen: a
stage is what the devices compute until a collective that all join. Slices are whole units,
collectives of slices as long as the longest.
Gradients of whole parameters are all-reduced behind the operator's backward pass, in the last run
of an iteration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.formulations.hap.problem import Floats
from hetplan.formulations.hap.spmd.forms import WHOLE
from hetplan.formulations.hap.spmd.instructions import Change, Instruction, Run, Synchronise
from hetplan.formulations.hap.spmd.links import OPPOSITE, Links, Price
from hetplan.formulations.hap.spmd.program import PARAMETER, Node
from hetplan.formulations.hap.spmd.rules import Theory
from hetplan.formulations.hap.spmd.whole import Parts
from hetplan.formulations.hap.spmd.work import Work, work_of

FREE = ("Slice", "Share")


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
    """Stages of one run. joined_apart: parameters held whole of which some operator has slices of
    the gradient."""

    def __init__(
        self,
        theory: Theory,
        order: Sequence[Instruction],
        ratios: Sequence[Sequence[float]],
        prices: Prices,
        joined_apart: frozenset[str] = frozenset(),
    ) -> None:
        self.program, self.prices, self.order = theory.program, prices, list(order)
        self.parts = Parts(theory, ratios)
        self.gradients = theory.program.needs_gradient()
        self.joined_apart = joined_apart
        self.gathers = {
            i.before: i.how for i in order if isinstance(i, Synchronise) and i.how != "All-Reduce"
        }
        self.stages: list[Stage] = []

    def run(self, *, last: bool) -> list[Stage]:
        """One run; last: of the iteration, which joins the gradients."""
        self.stages = [self._stage(False)]
        for instruction in self.order:
            if isinstance(instruction, Run):
                self.stages[-1].compute += self._seconds(instruction, backward=False)
            elif isinstance(instruction, Change):
                self._change(instruction, backward=False)
        self.stages.append(self._stage(True))
        for instruction in reversed(self.order):
            if isinstance(instruction, Run):
                self._back(instruction, last=last)
            elif isinstance(instruction, Change) and instruction.tensor in self.gradients:
                self._change(instruction, backward=True)
        return self.stages

    def _stage(self, backward: bool) -> Stage:
        return Stage(np.zeros(self.parts.m), backward)

    def _join(self, what: str, price: Price, part: float = 1.0) -> None:
        """A collective ends the stage."""
        stage = self.stages[-1]
        stage.collective, stage.seconds = what, price.fixed + price.shared * part
        self.stages.append(self._stage(stage.backward))

    def _size(self, *nodes: Node) -> float:
        return float(sum(node.elements for node in nodes) * self.prices.element_bytes)

    def _change(self, change: Change, *, backward: bool) -> None:
        if change.how in FREE or (change.how == "Repartition" and change.source < 0):
            return
        node = self.program.node(change.tensor)
        how = OPPOSITE.get(change.how, change.how) if backward else change.how
        part = float(self.parts.shared_by(change, node.segment).max())
        price = self.prices.links.price(how, self._size(node))
        self._join(f"{how}({node.name})", price, part)

    def _work(self, node: Node) -> Work:
        weight = self.prices.weights.get(node.name, 1.0)
        return work_of(self.program, node, self.gradients, weight)

    def _seconds(self, run: Run, *, backward: bool) -> Floats:
        """[m] of one pass of an operator, without what is computed from gathered factors."""
        node = self.program.node(run.node)
        work = self._work(node)
        back = work.gradients[0] if run.factors else work.backward
        flops = back if backward else work.forward
        share = self.parts.shared_by(run, node.segment) if run.way.shared else 1.0
        return np.asarray(flops * share / self.prices.speeds)

    def _back(self, run: Run, *, last: bool) -> None:
        """The operator's backward pass, and the joining of gradients that it leaves in parts."""
        node = self.program.node(run.node)
        if node.name not in self.gradients:
            return
        self.stages[-1].compute += self._seconds(run, backward=True)
        inputs = self.program.inputs(node)
        pairs = list(zip(inputs, run.way.inputs, strict=True))
        price = self.prices.links.price
        if run.factors:
            how, part = self.gathers[run.after], self.parts.shared_by(run, node.segment).max()
            for tensor in (inputs[0], node):
                self._join(f"{how}({tensor.name})", price(how, self._size(tensor)), float(part))
            self.stages[-1].compute += sum(self._work(node).gradients[1:]) / self.prices.speeds
        elif last:
            whole = [s for s, form in pairs if s.kind == PARAMETER and form == WHOLE]
            if whole:
                names = ", ".join(s.name for s in whole)
                self._join(f"All-Reduce gradient({names})", price("All-Reduce", self._size(*whole)))
        for source, form in pairs if last else ():
            owner = self.program.copies.get(source.name, source.name)
            if source.kind == PARAMETER and form != WHOLE and owner in self.joined_apart:
                part = self.parts.of(source.name, form, node.segment).max()
                gather = price("All-Gather", self._size(source))
                self._join(f"All-Gather gradient({source.name})", gather, float(part))
