"""A run of an SPMD program in time: stages of computing, each ended by a collective that all join.

Theories price each instruction together with its mirror; here both stand where they happen, in the
forward and in the backward pass. Slices are whole units, and collectives of slices take as long as
the longest. Gradients of whole parameters are all-reduced behind the operator's backward pass, in
the last run of an iteration.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hetplan.programs.axes import Floats
from hetplan.programs.decided import Decided
from hetplan.programs.forms import WHOLE, Change, Run, Synchronise, is_free
from hetplan.programs.links import OPPOSITE, Links
from hetplan.programs.program import Node
from hetplan.programs.rules import Step
from hetplan.programs.work import Work, work_of


@dataclass(frozen=True)
class Prices:
    """What seconds are computed from."""

    speeds: Floats
    """[m] FLOP/s of each device."""
    weights: Mapping[str, float]
    """Node -> factor on its FLOP; 1 where left out."""
    links: Links
    element_bytes: int


@dataclass
class Stage:
    """Computing until a collective that all devices join."""

    compute: Floats
    """[m] seconds of each device."""
    backward: bool
    collective: str = ""
    """The collective that ends the stage; empty: none, at the end of a pass."""
    seconds: float = 0.0
    """Of the collective."""


class Timed:
    """Runs of a program in time."""

    def __init__(self, decided: Decided, prices: Prices) -> None:
        self.decided, self.program, self.prices = decided, decided.program, prices
        self.gradients = self.program.needs_gradient()
        # property that waits for gathered factors -> the collective that gathers them
        self.gathers: dict[str, str] = {}
        for instruction in decided.order:
            if isinstance(instruction, Synchronise) and instruction.how != "All-Reduce":
                self.gathers[instruction.before] = instruction.how

    def run(self, *, last: bool) -> list[Stage]:
        """The stages of one run. last: it is the last run of an iteration, which joins the
        gradients."""
        self.stages = [self._stage(backward=False)]
        for step in self.decided.steps:
            if isinstance(step.instruction, Run):
                self._forward(step, step.instruction)
            elif isinstance(step.instruction, Change):
                self._change(step, step.instruction, backward=False)
        self.stages.append(self._stage(backward=True))
        for step in reversed(self.decided.steps):
            instruction = step.instruction
            if isinstance(instruction, Run) and instruction.node in self.gradients:
                self._backward(step, instruction)
                if last:
                    self._join_gradients(step, instruction)
            elif isinstance(instruction, Change) and instruction.tensor in self.gradients:
                self._change(step, instruction, backward=True)
        return self.stages

    def _stage(self, *, backward: bool) -> Stage:
        return Stage(np.zeros(self.decided.m), backward)

    def _join(self, how: str, what: str, part: float, *nodes: Node) -> None:
        """End the stage by a collective on tensors. part: the largest part of them on a device."""
        size = float(sum(node.elements for node in nodes) * self.prices.element_bytes)
        price = self.prices.links.price(how, size)
        stage = self.stages[-1]
        stage.collective, stage.seconds = f"{how}{what}", price.fixed + price.shared * part
        self.stages.append(self._stage(backward=stage.backward))

    def _change(self, step: Step, change: Change, *, backward: bool) -> None:
        """A collective, in the backward pass its mirror; free changes of form take no time."""
        if is_free(change):
            return
        node = self.program.node(change.tensor)
        how = OPPOSITE.get(change.how, change.how) if backward else change.how
        self._join(how, f"({node.name})", float(self.decided.shared_by(step).max()), node)

    def _work(self, run: Run) -> Work:
        weight = self.prices.weights.get(run.node, 1.0)
        return work_of(self.program, self.program.node(run.node), self.gradients, weight)

    def _part(self, step: Step, run: Run) -> Floats | float:
        """[m] each device's part of an operator's work; 1 where each does all of it."""
        return self.decided.shared_by(step) if run.way.shared else 1.0

    def _forward(self, step: Step, run: Run) -> None:
        """An operator's forward pass."""
        flops = self._work(run).forward * self._part(step, run)
        self.stages[-1].compute += flops / self.prices.speeds

    def _backward(self, step: Step, run: Run) -> None:
        """An operator's backward pass; by factors, each device computes the parameters' gradients
        behind the gathering."""
        work, part, speeds = self._work(run), self._part(step, run), self.prices.speeds
        divided = work.gradients[0] if run.factors else work.backward
        self.stages[-1].compute += divided * part / speeds
        if run.factors:
            node, largest = self.program.node(run.node), float(np.max(part))
            for tensor in (self.program.inputs(node)[0], node):
                self._join(self.gathers[run.after], f"({tensor.name})", largest, tensor)
            self.stages[-1].compute += sum(work.gradients[1:]) / speeds

    def _join_gradients(self, step: Step, run: Run) -> None:
        """Join the gradients that the backward pass of an operator leaves in parts."""
        reads = self.decided.reads(run)
        whole = [source for source, _, form in reads if form == WHOLE]
        if whole and not run.factors:
            names = ", ".join(source.name for source in whole)
            self._join("All-Reduce", f" gradient({names})", 1.0, *whole)
        for source, owner, form in reads:
            if form != WHOLE and self.decided.shards[owner].joined_apart:
                part = float(self.decided.part(source.name, form, step.segment).max())
                self._join("All-Gather", f" gradient({source.name})", part, source)
