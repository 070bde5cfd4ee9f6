"""The background theory of a single-device program: its rules (`programs.rules`) as priced triples.

An instruction is priced together with its mirror in the backward pass, as HAP's released program
does: the operator with the gradients of all inputs that have one, the collective with the opposite
one. Operators cost FLOP, collectives cost seconds (`programs.links`), and both leave bytes on the
devices (`programs.holding`). Where a program runs several times per iteration, only the last run
all-reduces the gradients of whole parameters, and each run is charged an equal part of its seconds.
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
    """The theory of a program as an instance. `theory_of` makes it."""

    rules: Rules
    data: HapData  # the instance; its triples are the rules' steps, in their order
    holding: Holding | None = None  # the bytes that are counted; None without memory

    @property
    def program(self) -> SingleProgram:
        """The single-device program."""
        return self.rules.program

    @property
    def instructions(self) -> list[Instruction]:
        """The instruction of each triple."""
        return [step.instruction for step in self.rules.steps]

    def decided(self, decision: HapDecision) -> Decided:
        """The program of a decision, with every slice in whole units."""
        steps = tuple(self.rules.steps[i] for i in decision.program)
        return Decided(self.rules, steps, decision.ratios)

    def seconds_in_whole_units(self, decision: HapDecision) -> float:
        """Seconds of a decision as the evaluator counts them, but with every slice in whole units.

        Source: HAP, Section 5.1.
        """
        decided = self.decided(decision)
        speeds = np.array([device.flops_per_second for device in self.data.devices])
        total = 0.0  # seconds up to the last collective
        busy = np.zeros(decided.m)  # seconds that each device computes after it
        for i, step in zip(decision.program, decided.steps, strict=True):
            triple = self.data.triples[i]
            share = decided.shared_by(step)
            if isinstance(triple, Communication):
                shared_seconds = triple.shared_seconds * float(share.max())
                total += float(busy.max()) + triple.fixed_seconds + shared_seconds
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

    element_bytes: bytes of one entry of a tensor. all_dimensions: whether tensors are also sliced
    along dimensions that placeholders mark `unsliced`. weights: node -> factor on its FLOP, 1 where
    left out. runs: number of runs of the program per iteration. holding: the bytes that are
    counted; memory is then a constraint, with `device_bytes` of each device. slices: number of
    slices of a tensor, where a device stands for several GPUs; None: one per device. check: called
    again and again; it raises an exception where the construction should stop.
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
    """Prices the steps of a program's rules."""

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
        """The step as a computation. fixed: FLOP on every device. shared: FLOP that the ratios
        divide."""
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
        """The step as a collective of this price."""
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
        """The fields for the bytes that an instruction adds: those of more than 0 bytes, and none
        without memory."""
        if self.holding is None:
            return {}
        fixed, shared = self.holding.of(self.program, instruction)
        sizes = {"fixed_bytes": fixed, "shared_bytes": shared}
        return {key: size for key, size in sizes.items() if size > 0}

    def flops(self, run: Run) -> tuple[float, float]:
        """(FLOP on every device, FLOP that the ratios divide) of an operator in both passes."""
        node = self.program.node(run.node)
        work = work_of(self.program, node, self.gradients, self.weights.get(node.name, 1.0))
        # Every device computes the gradients of the parameters, the inputs but the first, from the
        # gathered factors.
        if run.factors:
            return sum(work.gradients[1:]), work.forward + work.gradients[0]
        if run.rule.shared:
            return 0.0, work.total
        return work.total, 0.0

    def synchronised(self, synchronise: Synchronise) -> Price:
        """Seconds of the collective that synchronises the gradients of whole parameters, or the
        factors of these gradients."""
        if synchronise.how == "All-Reduce":
            price = self.links.price("All-Reduce", self.size(*synchronise.parameters))
            return Price(price.fixed / self.runs)  # no part of an all-reduce depends on ratios
        # the factors of a gradient of parameters: the input and the gradient of the output
        input_name, *_ = self.program.node(synchronise.node).inputs
        of_input = self.links.price(synchronise.how, self.size(input_name))
        of_output = self.links.price(synchronise.how, self.size(synchronise.node))
        return of_input + of_output

    def both_passes(self, change: Change) -> Price:
        """Seconds of a collective on a tensor, and of its mirror on the gradient if there is
        one."""
        size = self.size(change.tensor)
        forward = self.links.price(change.how, size)
        if change.tensor not in self.gradients:
            return forward
        backward = self.links.price(OPPOSITE.get(change.how, change.how), size)
        return forward + backward

    def size(self, *names: str) -> float:
        """Bytes of these tensors together, each whole."""
        elements = sum(self.program.node(name).elements for name in names)
        return float(elements * self.element_bytes)
