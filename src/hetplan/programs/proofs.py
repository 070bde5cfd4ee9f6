"""Writes an SPMD program into a plan file, and reads it back with a check that it is valid.

A plan's program is valid if it is a proof by the rules of the single-device program (`rules`):
every instruction is one of their steps, each step needs only properties that earlier steps give,
and some step gives the goal. A valid program can be executed and priced.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

from hetplan.errors import InputError, require
from hetplan.plans.plan import Plan
from hetplan.plans.program import SpmdInstruction, SpmdProgram
from hetplan.programs.decided import Decided
from hetplan.programs.forms import Change, Run, Synchronise, form_name, reading_segment
from hetplan.programs.program import SingleProgram
from hetplan.programs.rules import Rules, Step, rules_of
from hetplan.text import grouped

NO_MATCH = "program does not match the model"


def plan_instruction(step: Step) -> SpmdInstruction:
    """A step as an instruction of a plan file."""
    instruction = step.instruction
    if isinstance(instruction, Run):
        return SpmdInstruction(
            do="Run",
            tensor=instruction.node,
            segment=step.segment,
            before=[form_name(form) for form in instruction.rule.inputs],
            after=form_name(instruction.rule.output),
        )
    if isinstance(instruction, Change):
        moves = instruction.how == "Repartition"
        return SpmdInstruction(
            do=instruction.how,
            tensor=instruction.tensor,
            segment=reading_segment(instruction) if moves else step.segment,
            before=[form_name(instruction.source)],
            after=form_name(instruction.target),
        )
    _, _, form = instruction.after.rpartition("|")  # the output's, before and after
    reduces = instruction.how == "All-Reduce"
    return SpmdInstruction(
        do="All-Reduce gradient" if reduces else instruction.how,
        tensor=instruction.node,
        segment=step.segment,
        before=[form],
        after=form,
        parameters=list(instruction.parameters),
    )


def write_program(decided: Decided) -> SpmdProgram:
    """The program of a plan file, from an SPMD program with its ratios."""
    return SpmdProgram(
        instructions=[plan_instruction(step) for step in decided.steps],
        ratios=[list(row) for row in decided.ratios],
    )


def read_program(plan: Plan, program: SingleProgram) -> Decided:
    """The SPMD program in a plan. Raises InputError where it is not valid for the single-device
    program `program`, or has another number of segments."""
    listed = plan.program
    assert listed is not None, "plans with the schedule spmd have a program"
    # a program made from the model alone has one segment; the plan says those of its operators
    if program.segments == 1 and len(listed.ratios) > 1:
        segment_of = {step.tensor: step.segment for step in listed.instructions if step.do == "Run"}
        program = program.in_segments(segment_of)
    require(
        program.segments == len(listed.ratios),
        "program.ratios are not for this model",
        where=plan.name,
        got=f"{len(listed.ratios)} segments",
        expected=f"{program.segments}",
    )
    # all dimensions: a plan that slices what placeholders mark `unsliced` is valid, too
    rules = rules_of(program, len(listed.ratios[0]), all_dimensions=True)
    numbers = proof_of(listed, rules, plan.name)
    return Decided(rules, tuple(rules.steps[n] for n in numbers), listed.ratios)


def proof_of(listed: SpmdProgram, rules: Rules, where: str) -> list[int]:
    """The steps of a plan's program, by their indices in `rules.steps`.

    Raises InputError for an instruction that is no step, and for a program that is no proof. where:
    the plan, for messages.
    """
    steps_of_text = grouped(
        (plan_instruction(step).model_dump_json(), n) for n, step in enumerate(rules.steps)
    )
    choices = []
    for position, instruction in enumerate(listed.instructions):
        text = instruction.model_dump_json()
        if text not in steps_of_text:
            raise refusal(instruction, f"program.instructions[{position}]", rules, where)
        choices.append(steps_of_text[text])
    chosen = told_apart(choices, rules)
    violation = next(violations(chosen, rules), None)
    if violation is not None:
        raise InputError(f"{NO_MATCH}: {violation}", where=where)
    return chosen


def told_apart(choices: Sequence[Sequence[int]], rules: Rules) -> list[int]:
    """The step that each instruction stands for. choices: [instruction] the steps that a plan file
    writes as this instruction.

    Several runs of one operator are written alike if they differ only in the property that waits
    for a synchronisation. The run whose property some synchronisation of the program needs is
    chosen. An instruction that is listed again stands for another step that is written alike, as
    long as there is one that was not chosen.
    """
    synchronised: set[str] = set()  # properties that synchronisations of the program need
    for n in chain.from_iterable(choices):
        instruction = rules.steps[n].instruction
        if isinstance(instruction, Synchronise):
            synchronised.add(instruction.before)
    chosen: list[int] = []
    for choice in choices:
        unused = [n for n in choice if n not in chosen] or choice
        waiting = [n for n in unused if rules.steps[n].instruction.after in synchronised]
        chosen.append((waiting or unused)[0])
    return chosen


def violations(numbers: Sequence[int], rules: Rules) -> Iterator[str]:
    """The reasons why a sequence of steps is no proof: a repeated step, a step that needs a
    property which no earlier step gives, and a goal that no step gives."""
    given: set[str] = set()  # properties
    first_position: dict[int, int] = {}  # step -> where it stands first
    for position, n in enumerate(numbers):
        step = rules.steps[n]
        text = step.instruction.text()
        if n in first_position:
            yield f"instructions[{position}] ({text}) repeats instructions[{first_position[n]}]"
        first_position.setdefault(n, position)
        for needed in step.needs:
            if needed not in given:
                yield (
                    f"instructions[{position}] ({text}) needs {needed!r}, "
                    "which nothing before it gives"
                )
        given.add(step.instruction.after)
    if rules.goal not in given:
        yield f"the program does not establish the goal {rules.goal!r}"


def refusal(instruction: SpmdInstruction, place: str, rules: Rules, where: str) -> InputError:
    """The error for an instruction that is no step of the rules. place: the instruction's, within
    the plan `where`."""
    if instruction.tensor not in {node.name for node in rules.program.nodes}:
        return InputError(
            f"{NO_MATCH}: {place} is about an unknown tensor",
            where=where,
            got=instruction.tensor,
            expected=f"one of {rules.program.name}'s",
        )
    before = ", ".join(instruction.before)
    return InputError(
        f"{NO_MATCH}: no rule allows {place}",
        where=where,
        got=f"{instruction.do} {instruction.tensor} ({before}) -> {instruction.after}",
    )
