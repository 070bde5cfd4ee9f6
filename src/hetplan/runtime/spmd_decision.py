"""Between a theory's decision and the program of a plan file: writing one down, reading one as a
proof again, and how its ranks hold the parameters.

A plan's program is taken only as what the model's background theory allows: every instruction must
be one of its triples, in an order that proves the goal. Whatever passes can be executed and priced.
Parameters are held as the operators that read them want them. One that operators read in different
ways (a tied embedding, sliced in one place and whole in another) is held whole.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NoReturn

from hetplan.errors import InputError
from hetplan.formulations import family
from hetplan.formulations.hap.data import Device, HapDecision
from hetplan.formulations.hap.spmd.axes import Bounds
from hetplan.formulations.hap.spmd.forms import WHOLE, Form, form_name
from hetplan.formulations.hap.spmd.instructions import (
    Change,
    Instruction,
    Run,
    Synchronise,
    reading_segment,
)
from hetplan.formulations.hap.spmd.links import ring
from hetplan.formulations.hap.spmd.operators import size
from hetplan.formulations.hap.spmd.program import PARAMETER, SingleProgram
from hetplan.formulations.hap.spmd.rules import Theory, theory_of
from hetplan.runtime.plan import Plan
from hetplan.runtime.spmd_program import SpmdInstruction, SpmdProgram, Step
from hetplan.solvers.registry import evaluate

# do, tensor, before, after, segment, parameters: the fields of `SpmdInstruction`
Key = tuple[Step, str, tuple[str, ...], str, int, tuple[str, ...]]
NO_MATCH = "program does not match the model"


@dataclass(frozen=True)
class Reading:
    """A plan's program read: the theory, the decision in its triples, and their instructions in
    order."""

    theory: Theory
    decision: HapDecision

    @property
    def order(self) -> list[Instruction]:
        """The instructions."""
        return [self.theory.instructions[i] for i in self.decision.program]


def key_of(instruction: Instruction, segment: int) -> Key:
    """An instruction's fields as plan files have them; segment: the one whose ratios it follows."""
    if isinstance(instruction, Run):
        before = tuple(form_name(form) for form in instruction.way.inputs)
        return "Run", instruction.node, before, form_name(instruction.way.output), segment, ()
    if isinstance(instruction, Change):
        held, after = form_name(instruction.source), form_name(instruction.target)
        to = reading_segment(instruction) if instruction.how == "Repartition" else segment
        return instruction.how, instruction.tensor, (held,), after, to, ()
    do = "All-Reduce gradient" if instruction.how == "All-Reduce" else instruction.how
    form = instruction.after.rpartition("|")[2]
    return do, instruction.node, (form,), form, segment, instruction.parameters


def write_program(theory: Theory, decision: HapDecision) -> SpmdProgram:
    """A decision as plan files have it."""
    pairs = ((theory.instructions[i], theory.data.triples[i].segment) for i in decision.program)
    instructions = [
        SpmdInstruction(
            do=do, tensor=tensor, before=list(before), after=after, segment=segment,
            parameters=list(parameters),
        )
        for do, tensor, before, after, segment, parameters in (key_of(*pair) for pair in pairs)
    ]  # fmt: skip
    return SpmdProgram(instructions=instructions, ratios=decision.ratios)


# The theories made last, by program and number of devices.
_RECENT: deque[tuple[SingleProgram, int, Theory]] = deque(maxlen=4)


def read_program(plan: Plan, program: SingleProgram) -> Reading:
    """The plan's program as a decision about `program`. Raises InputError where it is none."""
    written = plan.program
    assert written is not None, "plans with the schedule spmd have a program"
    if program.segments != len(written.ratios):
        got, expected = f"{len(written.ratios)} segments", f"{program.segments}"
        what = "program.ratios are not for this model"
        raise InputError(what, where=plan.name, got=got, expected=expected)
    theory = structure_of(program, len(written.ratios[0]))
    return Reading(theory, decision_of(written, theory, plan.name))


def structure_of(program: SingleProgram, m: int) -> Theory:
    """The theory of a program on m devices, whatever they are: plans of one model ask for it again
    and again."""
    for known, devices, theory in list(_RECENT):
        if devices == m and known == program:
            return theory
    structure = [Device(name="any", flops_per_second=1.0)] * m
    theory = theory_of(program, structure, ring(m, 1e9), all_dimensions=True)
    _RECENT.append((program, m, theory))
    return theory


def decision_of(written: SpmdProgram, theory: Theory, where: str) -> HapDecision:
    """The triples that a plan's instructions stand for. Raises InputError for one that is none, or
    no proof."""
    numbers: dict[Key, list[int]] = {}
    for i, instruction in enumerate(theory.instructions):
        key = key_of(instruction, theory.data.triples[i].segment)
        numbers.setdefault(key, []).append(i)
    choices = []
    for position, step in enumerate(written.instructions):
        key = (
            step.do, step.tensor, tuple(step.before), step.after, step.segment,
            tuple(step.parameters),
        )  # fmt: skip
        if key not in numbers:
            refuse(step, f"program.instructions[{position}]", theory, where)
        choices.append(numbers[key])
    # several triples are alike where only a synchronisation that follows tells them apart
    chosen = [theory.instructions[i] for choice in choices for i in choice]
    synchronised = {x.before for x in chosen if isinstance(x, Synchronise)}
    taken: list[int] = []
    for choice in choices:
        left = [i for i in choice if i not in taken] or choice
        waiting = [i for i in left if theory.instructions[i].after in synchronised]
        taken.append((waiting or left)[0])
    decision = HapDecision(program=taken, ratios=written.ratios)
    verdict = evaluate(family("hap"), theory.data, decision)
    if verdict.objective is None:
        raise InputError(f"{NO_MATCH}: {verdict.violations[0]}", where=where)
    return decision


def refuse(step: SpmdInstruction, place: str, theory: Theory, where: str) -> NoReturn:
    """Raise InputError for an instruction that is no triple."""
    if step.tensor not in {node.name for node in theory.program.nodes}:
        what, expected = f"{place} is about an unknown tensor", f"one of {theory.program.name}'s"
        raise InputError(f"{NO_MATCH}: {what}", where=where, got=step.tensor, expected=expected)
    got = f"{step.do} {step.tensor} ({', '.join(step.before)}) -> {step.after}"
    raise InputError(f"{NO_MATCH}: no rule allows {place}", where=where, got=got)


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

    def entries(self, rank: int) -> int:
        """How many of them a rank holds."""
        if self.dimension is None:
            return size(self.shape)
        first, last = self.bounds[rank]
        return size(self.shape) // self.shape[self.dimension] * (last - first)


def shards_of(reading: Reading) -> dict[str, Shard]:
    """How every parameter (copies by the name of what they copy) is held."""
    program, axes, ratios = reading.theory.program, reading.theory.axes, reading.decision.ratios
    ways: dict[str, set[tuple[Form, Bounds]]] = {}
    for instruction in reading.order:
        if not isinstance(instruction, Run):
            continue
        node = program.node(instruction.node)
        for source, form in zip(program.inputs(node), instruction.way.inputs, strict=True):
            if source.kind == PARAMETER:
                row = ratios[node.segment]
                cut = () if form == WHOLE else axes.bounds(source.name, form, row)
                owner = program.copies.get(source.name, source.name)
                ways.setdefault(owner, set()).add((form, cut))
    shards: dict[str, Shard] = {}
    for node in program.parameters:
        read = ways.get(node.name, set())
        form, cut = next(iter(read), (WHOLE, ()))
        if node.name in program.copies:
            continue
        if len(read) == 1 and form != WHOLE:
            shards[node.name] = Shard(node.name, node.shape, form, cut)
        else:
            apart = any(form != WHOLE for form, _ in read)
            shards[node.name] = Shard(node.name, node.shape, joined_apart=apart)
    return shards
