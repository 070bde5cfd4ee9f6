"""Between a theory's decision and the program of a plan file: writing one down, and reading one as
a proof again.

A plan's program is taken only as what the model's background theory allows: every instruction must
be one of its triples, in an order that proves the goal. Whatever passes can be executed and priced.
"""

from hetplan.errors import InputError
from hetplan.formulations import family
from hetplan.formulations.hap.data import Device, HapDecision
from hetplan.formulations.hap.spmd.operators import (
    Change,
    Instruction,
    Run,
    Synchronise,
    form_name,
    reading_segment,
)
from hetplan.formulations.hap.spmd.program import SingleProgram
from hetplan.formulations.hap.spmd.rules import Theory, ring, theory_of
from hetplan.formulations.hap.spmd.whole import Decided
from hetplan.formulations.joint.plan import Plan, SpmdInstruction, SpmdProgram
from hetplan.solvers.registry import evaluate

NO_MATCH = "program does not match the model"


def plan_instruction(instruction: Instruction, segment: int) -> SpmdInstruction:
    """An instruction as plan files have it; segment: the one whose ratios it follows."""
    if isinstance(instruction, Run):
        return SpmdInstruction(
            do="Run", tensor=instruction.node, segment=segment,
            before=[form_name(form) for form in instruction.way.inputs],
            after=form_name(instruction.way.output),
        )  # fmt: skip
    if isinstance(instruction, Change):
        to = reading_segment(instruction) if instruction.how == "Repartition" else segment
        return SpmdInstruction(
            do=instruction.how, tensor=instruction.tensor, segment=to,
            before=[form_name(instruction.source)], after=form_name(instruction.target),
        )  # fmt: skip
    form = instruction.after.rpartition("|")[2]
    return SpmdInstruction(
        do="All-Reduce gradient" if instruction.how == "All-Reduce" else instruction.how,
        tensor=instruction.node, segment=segment, before=[form], after=form,
        parameters=list(instruction.parameters),
    )  # fmt: skip


def write_program(theory: Theory, decision: HapDecision) -> SpmdProgram:
    """A decision as plan files have it."""
    instructions = [
        plan_instruction(theory.instructions[i], theory.data.triples[i].segment)
        for i in decision.program
    ]
    return SpmdProgram(instructions=instructions, ratios=decision.ratios)


def read_program(plan: Plan, program: SingleProgram) -> Decided:
    """The plan's program as a decision about `program`, in the theory of as many devices, whatever
    they are. Raises InputError where it is none."""
    listed = plan.program
    assert listed is not None, "plans with the schedule spmd have a program"
    if program.segments != len(listed.ratios):
        got, expected = f"{len(listed.ratios)} segments", f"{program.segments}"
        raise InputError(
            "program.ratios are not for this model", where=plan.name, got=got, expected=expected
        )
    m = len(listed.ratios[0])
    devices = [Device(name="any", flops_per_second=1.0)] * m
    theory = theory_of(program, devices, ring(m, 1e9), all_dimensions=True)
    return Decided(theory, decision_of(listed, theory, plan.name))


def decision_of(listed: SpmdProgram, theory: Theory, where: str) -> HapDecision:
    """The triples that a plan's instructions stand for. Raises InputError for one that is none, or
    no proof."""
    numbers: dict[str, list[int]] = {}
    for i, instruction in enumerate(theory.instructions):
        key = plan_instruction(instruction, theory.data.triples[i].segment).model_dump_json()
        numbers.setdefault(key, []).append(i)
    choices = []
    for position, step in enumerate(listed.instructions):
        key = step.model_dump_json()
        if key not in numbers:
            raise refusal(step, f"program.instructions[{position}]", theory, where)
        choices.append(numbers[key])
    # several triples are alike where only a synchronisation that follows tells them apart
    chosen = [theory.instructions[i] for choice in choices for i in choice]
    synchronised = {x.before for x in chosen if isinstance(x, Synchronise)}
    taken: list[int] = []
    for choice in choices:
        left = [i for i in choice if i not in taken] or choice
        waiting = [i for i in left if theory.instructions[i].after in synchronised]
        taken.append((waiting or left)[0])
    decision = HapDecision(program=taken, ratios=listed.ratios)
    verdict = evaluate(family("hap"), theory.data, decision)
    if verdict.objective is None:
        raise InputError(f"{NO_MATCH}: {verdict.violations[0]}", where=where)
    return decision


def refusal(step: SpmdInstruction, place: str, theory: Theory, where: str) -> InputError:
    """The error for an instruction that is no triple."""
    if step.tensor not in {node.name for node in theory.program.nodes}:
        what, expected = f"{place} is about an unknown tensor", f"one of {theory.program.name}'s"
        return InputError(f"{NO_MATCH}: {what}", where=where, got=step.tensor, expected=expected)
    got = f"{step.do} {step.tensor} ({', '.join(step.before)}) -> {step.after}"
    return InputError(f"{NO_MATCH}: no rule allows {place}", where=where, got=got)
