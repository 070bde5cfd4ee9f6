"""The background theory of a single-device program: its rules (`programs.rules`) as priced triples.

An instruction is priced together with its mirror in the backward pass, as HAP's released program
does: the operator with the gradients of all inputs that have one, the collective with the opposite
one. Operators cost FLOP, collectives cost seconds (`programs.links`), and both leave bytes on the
devices (`programs.holding`). Only the last run of an iteration all-reduces the gradients of whole
parameters, so that each run is charged with its part.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.formulations.hap.data import (
    Communication,
    Compute,
    Device,
    HapData,
    HapDecision,
    Memory,
    Triple,
)
from hetplan.programs.decided import Decided
from hetplan.programs.forms import Change, Instruction, Run, Synchronise, is_free
from hetplan.programs.holding import Holding
from hetplan.programs.links import OPPOSITE, Links, Price
from hetplan.programs.program import SingleProgram
from hetplan.programs.rules import Rules, Step, rules_of
from hetplan.programs.work import work_of

ELEMENT_BYTES = 4


@dataclass(frozen=True)
class Theory:
    """The theory of a program as an instance."""

    rules: Rules
    data: HapData
    """The instance; its triples are the rules' steps, in their order."""
    holding: Holding | None = None
    """The bytes that are counted; None without memory."""

    @property
    def program(self) -> SingleProgram:
        """The single-device program."""
        return self.rules.program

    @property
    def instructions(self) -> list[Instruction]:
        """The instruction of each triple."""
        return [step.instruction for step in self.rules.steps]

    def decided(self, decision: HapDecision) -> Decided:
        """The program of a decision, in whole units."""
        steps = tuple(self.rules.steps[i] for i in decision.program)
        return Decided(self.rules, steps, decision.ratios)

    def seconds_in_whole_units(self, decision: HapDecision) -> float:
        """Seconds of a decision as the evaluator counts them, but with every slice in whole units.

        Source: HAP, Section 5.1.
        """
        decided = self.decided(decision)
        speeds = np.array([device.flops_per_second for device in self.data.devices])
        total, busy = 0.0, np.zeros(decided.m)
        for i, step in zip(decision.program, decided.steps, strict=True):
            triple, share = self.data.triples[i], decided.shared_by(step)
            if isinstance(triple, Communication):
                largest = triple.shared_seconds * float(share.max())
                total += float(busy.max()) + triple.fixed_seconds + largest
                busy = np.zeros(decided.m)
            else:
                busy += (triple.fixed_flops + triple.shared_flops * share) / speeds
        return total + float(busy.max())


def theory_of(
    program: SingleProgram,
    devices: Sequence[Device],
    links: Links,
    *,
    element_bytes: int = ELEMENT_BYTES,
    all_dimensions: bool = False,
    weights: Mapping[str, float] | None = None,
    runs: int = 1,
    holding: Holding | None = None,
    device_bytes: Sequence[float] = (),
    slices: int | None = None,
    check: Callable[[], None] | None = None,
) -> Theory:
    """The theory of `program` on `devices`.

    all_dimensions: also slices along dimensions that placeholders mark `unsliced`. weights: node ->
    factor on its FLOP (1 where left out). runs: how often the program runs before parameters
    change. holding: makes memory a constraint; each device then has its `device_bytes`. slices:
    number of slices of a tensor, where a device stands for several. check: called again and again;
    it ends a long run by an exception.
    """
    slices = len(devices) if slices is None else slices
    rules = rules_of(program, slices, all_dimensions=all_dimensions, check=check)
    prices = _Prices(program, links, element_bytes, weights or {}, runs, holding)
    triples = []
    for step in rules.steps:
        if check is not None:
            check()
        triples.append(prices.triple(step))
    data = HapData(
        devices=list(devices),
        segments=program.segments,
        triples=triples,
        goal=rules.goal,
        memory=None if holding is None else Memory(device_bytes=list(device_bytes)),
    )
    return Theory(rules, data, holding)


class _Prices:
    """What each step costs."""

    def __init__(
        self,
        program: SingleProgram,
        links: Links,
        element_bytes: int,
        weights: Mapping[str, float],
        runs: int,
        holding: Holding | None,
    ) -> None:
        self.program, self.links, self.element_bytes = program, links, element_bytes
        self.weights, self.runs, self.holding = weights, runs, holding
        self.gradients = program.needs_gradient()

    def triple(self, step: Step) -> Triple:
        """The step as a priced triple."""
        instruction = step.instruction
        if isinstance(instruction, Run):
            fixed, shared = self.flops(instruction)
            return self.compute(step, fixed, shared)
        if isinstance(instruction, Synchronise):
            return self.communicate(step, self.synchronised(instruction))
        if is_free(instruction):
            return self.compute(step, 0.0, 0.0)
        return self.communicate(step, self.both_passes(instruction))

    def compute(self, step: Step, fixed: float, shared: float) -> Compute:
        """A computation: FLOP of every device, and FLOP that the ratios divide."""
        return Compute(
            kind="compute",
            instruction=step.instruction.text(),
            pre=list(step.needs),
            post=[step.instruction.after],
            segment=step.segment,
            fixed_flops=fixed,
            shared_flops=shared,
            **self.bytes_of(step.instruction),
        )

    def communicate(self, step: Step, price: Price) -> Communication:
        """A collective."""
        return Communication(
            kind="comm",
            instruction=step.instruction.text(),
            pre=list(step.needs),
            post=[step.instruction.after],
            segment=step.segment,
            fixed_seconds=price.fixed,
            shared_seconds=price.shared,
            **self.bytes_of(step.instruction),
        )

    def bytes_of(self, instruction: Instruction) -> dict[str, float]:
        """The bytes that it adds, where memory is limited and they are more than 0."""
        if self.holding is None:
            return {}
        fixed, shared = self.holding.of(self.program, instruction)
        sizes = {"fixed_bytes": fixed, "shared_bytes": shared}
        return {key: size for key, size in sizes.items() if size > 0}

    def flops(self, run: Run) -> tuple[float, float]:
        """(FLOP of every device, FLOP that the ratios divide) of an operator in both passes."""
        node = self.program.node(run.node)
        work = work_of(self.program, node, self.gradients, self.weights.get(node.name, 1.0))
        if run.factors:  # every device computes the parameters' gradients
            return sum(work.gradients[1:]), work.forward + work.gradients[0]
        return (0.0, work.total) if run.way.shared else (work.total, 0.0)

    def synchronised(self, synchronise: Synchronise) -> Price:
        """Seconds of the collective that the gradients of whole parameters need."""
        if synchronise.how == "All-Reduce":
            price = self.links.price("All-Reduce", self.size(*synchronise.parameters))
            return Price(price.fixed / self.runs)
        read, *_ = self.program.node(synchronise.node).inputs
        of_input = self.links.price(synchronise.how, self.size(read))
        return of_input + self.links.price(synchronise.how, self.size(synchronise.node))

    def both_passes(self, change: Change) -> Price:
        """Seconds of a collective on a tensor, and of its mirror on the gradient if there is
        one."""
        size = self.size(change.tensor)
        forward = self.links.price(change.how, size)
        if change.tensor not in self.gradients:
            return forward
        return forward + self.links.price(OPPOSITE.get(change.how, change.how), size)

    def size(self, *names: str) -> float:
        """Bytes of tensors."""
        elements = sum(self.program.node(name).elements for name in names)
        return float(elements * self.element_bytes)
