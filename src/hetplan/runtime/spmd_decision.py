"""Between a theory's decision and the program of a plan file: writing one down, reading one as a
proof again, and how its ranks hold the parameters.

A plan's program is taken only as what the model's background theory allows: every instruction must
be one of its triples, in an order that proves the goal. Whatever passes can be executed and priced.
Parameters are held as the operators that read them want them. One that operators read in different
ways (a tied embedding, sliced in one place and whole in another) is held whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

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
from hetplan.runtime.spmd_program import SpmdInstruction, SpmdProgram
from hetplan.solvers.registry import evaluate

Key = tuple[str, str, tuple[str, ...], str, int, tuple[str, ...]]


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


def written(instruction: Instruction, segment: int) -> SpmdInstruction:
    """An instruction as plan files have it; segment: the one whose ratios it follows."""
    if isinstance(instruction, Run):
        before = [form_name(form) for form in instruction.way.inputs]
        return SpmdInstruction(
            do="Run",
            tensor=instruction.node,
            before=before,
            after=form_name(instruction.way.output),
            segment=segment,
        )
    if isinstance(instruction, Change):
        held, after = form_name(instruction.source), form_name(instruction.target)
        to = reading_segment(instruction) if instruction.how == "Repartition" else segment
        return SpmdInstruction(
            do=instruction.how, tensor=instruction.tensor, before=[held], after=after, segment=to
        )
    assert isinstance(instruction, Synchronise), "an instruction is one of three"
    form = instruction.after.rpartition("|")[2]
    return SpmdInstruction(
        do="All-Reduce gradient" if instruction.how == "All-Reduce" else instruction.how,
        tensor=instruction.node, before=[form], after=form, segment=segment, parameters=list(instruction.parameters),
    )  # fmt: skip


def write_program(theory: Theory, decision: HapDecision) -> SpmdProgram:
    """A decision as plan files have it."""
    triples = theory.data.triples
    return SpmdProgram(
        instructions=[
            written(theory.instructions[i], triples[i].segment) for i in decision.program
        ],
        ratios=decision.ratios,
    )


# The theories made last, by program and number of devices.
_RECENT: deque[tuple[SingleProgram, int, Theory]] = deque(maxlen=4)


def read_program(plan: Plan, program: SingleProgram) -> Reading:
    """The plan's program as a decision about `program`. Raises InputError where it is none."""
    assert plan.program is not None, "plans with the schedule spmd have a program"
    m, told = len(plan.program.ratios[0]), plan.program
    if program.segments != len(told.ratios):
        raise InputError(
            "program.ratios are not for this model", where=plan.name, got=f"{len(told.ratios)} segments",
            expected=f"{program.segments}",
        )  # fmt: skip
    theory = structure_of(program, m)
    return Reading(theory, decision_of(told, theory, plan.name))


def structure_of(program: SingleProgram, m: int) -> Theory:
    """The theory of a program on m devices, whatever they are: plans of one model ask for it again
    and again."""
    for known, devices, theory in list(_RECENT):
        if devices == m and known == program:
            return theory
    structure = [Device(name="any", flops_per_second=1.0)] * m
    found = theory_of(program, structure, ring(m, 1e9), all_dimensions=True)
    _RECENT.append((program, m, found))
    return found


def decision_of(told: SpmdProgram, theory: Theory, where: str) -> HapDecision:
    """The triples that a plan's instructions stand for. Raises InputError for one that is none, or
    no proof."""
    numbers: dict[Key, list[int]] = {}
    for i, (instruction, triple) in enumerate(
        zip(theory.instructions, theory.data.triples, strict=True)
    ):
        numbers.setdefault(key_of(written(instruction, triple.segment)), []).append(i)
    choices = [
        candidates(told.instructions, p, numbers, theory, where)
        for p in range(len(told.instructions))
    ]
    synchronised = {
        theory.instructions[i].before  # type: ignore[union-attr]
        for found in choices
        for i in found
        if isinstance(theory.instructions[i], Synchronise)
    }
    taken: list[int] = []
    for found in choices:
        left = [i for i in found if i not in taken] or found
        waiting = [i for i in left if theory.instructions[i].after in synchronised]
        taken.append((waiting or left)[0])
    decision = HapDecision(program=taken, ratios=told.ratios)
    verdict = evaluate(family("hap"), theory.data, decision)
    if verdict.objective is None:
        raise InputError(f"program does not match the model: {verdict.violations[0]}", where=where)
    return decision


def candidates(
    told: Sequence[SpmdInstruction],
    position: int,
    numbers: dict[Key, list[int]],
    theory: Theory,
    where: str,
) -> list[int]:
    """The triples that an instruction may stand for: several where only what follows tells them
    apart."""
    instruction = told[position]
    found = numbers.get(key_of(instruction))
    if found:
        return found
    place = f"program.instructions[{position}]"
    if instruction.tensor not in {node.name for node in theory.program.nodes}:
        expected = f"one of {theory.program.name}'s"
        raise InputError(
            f"program does not match the model: {place} is about an unknown tensor", where=where,
            got=instruction.tensor, expected=expected,
        )  # fmt: skip
    forms = f"{instruction.do} {instruction.tensor} ({', '.join(instruction.before)}) -> {instruction.after}"
    raise InputError(
        f"program does not match the model: no rule allows {place}", where=where, got=forms
    )


def key_of(instruction: SpmdInstruction) -> Key:
    """What identifies an instruction."""
    return (
        instruction.do, instruction.tensor, tuple(instruction.before), instruction.after, instruction.segment,
        tuple(instruction.parameters),
    )  # fmt: skip


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
    found: dict[str, Shard] = {}
    for node in program.parameters:
        read = ways.get(node.name, set())
        form, cut = next(iter(read), (WHOLE, ()))
        if node.name in program.copies:
            continue
        if len(read) == 1 and form != WHOLE:
            found[node.name] = Shard(node.name, node.shape, form, cut)
        else:
            apart = any(form != WHOLE for form, _ in read)
            found[node.name] = Shard(node.name, node.shape, joined_apart=apart)
    return found
