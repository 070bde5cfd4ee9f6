"""The course of one run of an SPMD program: stages in which every device computes, each ended by a
collective that all devices join.

HAP's theories price an instruction together with its mirror. Here each stands where it happens, in
the forward or in the backward pass. Slices have whole units, and a collective of slices takes as
long as the longest slice. In the last run of an iteration, gradients of whole parameters are
all-reduced after the operator's backward pass.
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
    """Speeds and bandwidths by which FLOP and bytes become seconds."""

    speeds: Floats
    """[m] FLOP/s of each device."""
    weights: Mapping[str, float]
    """Node -> factor on its FLOP; 1 for a node that is missing."""
    links: Links
    element_bytes: int
    """Bytes of a tensor's entry."""


@dataclass
class Stage:
    """A part of a run in which the devices compute until a collective that all of them join."""

    compute: Floats
    """[m] seconds that each device computes."""
    backward: bool
    """Whether the stage is in the backward pass."""
    collective: str = ""
    """The collective that ends the stage; empty at the end of a pass."""
    seconds: float = 0.0
    """Seconds of the collective."""


class Timed:
    """Divides runs of a program into stages; `run` returns them."""

    def __init__(self, decided: Decided, prices: Prices) -> None:
        self.decided, self.program, self.prices = decided, decided.program, prices
        self.gradients = self.program.needs_gradient()  # tensors with gradients
        # property that waits for gathered factors -> the collective that gathers them
        self.gathers: dict[str, str] = {}
        for instruction in decided.order:
            if isinstance(instruction, Synchronise) and instruction.how != "All-Reduce":
                self.gathers[instruction.before] = instruction.how

    def run(self, *, last: bool) -> list[Stage]:
        """The stages of one run. last: whether it is the last run of an iteration, which
        synchronises the gradients."""
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
        """A stage in which no device computes yet."""
        return Stage(np.zeros(self.decided.m), backward)

    def _end_stage(self, how: str, what: str, largest: float, *nodes: Node) -> None:
        """End the last stage by a collective on the tensors of `nodes`, and begin the next one.

        how: the collective. what: its tensors, for people. largest: the largest share of the
        tensors on a device.
        """
        size = float(sum(node.elements for node in nodes) * self.prices.element_bytes)
        price = self.prices.links.price(how, size)
        stage = self.stages[-1]
        stage.collective = f"{how}{what}"
        stage.seconds = price.fixed + price.shared * largest
        self.stages.append(self._stage(backward=stage.backward))

    def _change(self, step: Step, change: Change, *, backward: bool) -> None:
        """End the stage by the collective of a change of form, or in the backward pass by the
        collective's mirror. Free changes of form take no time."""
        if is_free(change):
            return
        node = self.program.node(change.tensor)
        how = OPPOSITE.get(change.how, change.how) if backward else change.how
        largest = float(self.decided.shared_by(step).max())
        self._end_stage(how, f"({node.name})", largest, node)

    def _work(self, run: Run) -> Work:
        """The weighted FLOP of an operator."""
        weight = self.prices.weights.get(run.node, 1.0)
        return work_of(self.program, self.program.node(run.node), self.gradients, weight)

    def _part(self, step: Step, run: Run) -> Floats | float:
        """[m] each device's share of an operator's work; 1 if each device does all of it."""
        return self.decided.shared_by(step) if run.rule.shared else 1.0

    def _forward(self, step: Step, run: Run) -> None:
        """Add an operator's forward pass to the last stage."""
        flops = self._work(run).forward * self._part(step, run)
        self.stages[-1].compute += flops / self.prices.speeds

    def _backward(self, step: Step, run: Run) -> None:
        """Add an operator's backward pass to the last stage. By factors, the stage ends by the
        gathering, and every device then computes the whole gradients of the parameters."""
        work = self._work(run)
        part = self._part(step, run)
        speeds = self.prices.speeds
        # by factors, only the gradient of the first input is divided: the others are parameters
        divided = work.gradients[0] if run.factors else work.backward
        self.stages[-1].compute += divided * part / speeds
        if run.factors:
            node = self.program.node(run.node)
            largest = float(np.max(part))
            first_input = self.program.inputs(node)[0]
            # the factors are the input and the gradient of the output, as large as the output
            for tensor in (first_input, node):
                self._end_stage(self.gathers[run.after], f"({tensor.name})", largest, tensor)
            self.stages[-1].compute += sum(work.gradients[1:]) / speeds

    def _join_gradients(self, step: Step, run: Run) -> None:
        """Add the collectives that join the gradients of an operator's parameters: an all-reduce of
        summands, and an all-gather of slices of parameters that every device has whole."""
        reads = self.decided.reads(run)
        whole = [source for source, _, form in reads if form == WHOLE]
        if whole and not run.factors:
            names = ", ".join(source.name for source in whole)
            self._end_stage("All-Reduce", f" gradient({names})", 1.0, *whole)
        for source, original, form in reads:
            if form != WHOLE and self.decided.shards[original].gathers_gradient:
                part = float(self.decided.part(source.name, form, step.segment).max())
                self._end_stage("All-Gather", f" gradient({source.name})", part, source)
