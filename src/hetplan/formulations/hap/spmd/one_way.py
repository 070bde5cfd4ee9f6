"""Programs that read every parameter in one way.

An operator may run in several ways (a table of words sliced by rows for one reader, by columns for
another), where changing the form of what it gives costs more than doing it again. The problem
charges a parameter for each of them, but devices hold one that is read in several ways whole. Where
that does not fit, one way stays, and what the others gave is made of what there is. The program
stays a proof, and the problem's bound holds for it.
"""

from collections.abc import Iterator
from itertools import islice, product

import numpy as np

from hetplan.formulations.hap.common import greedy_program, seconds_at
from hetplan.formulations.hap.data import HapDecision
from hetplan.formulations.hap.problem import Step, compile_problem
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.formulations.hap.spmd.forms import Form
from hetplan.formulations.hap.spmd.rules import Theory
from hetplan.formulations.hap.theory import reduce_theory
from hetplan.solvers.run import Run

CHOICES = 16


def in_one_way(theory: Theory, decision: HapDecision, run: Run) -> Iterator[HapDecision]:
    """The decision with one way of reading for each parameter that it reads in several, each of the
    first `CHOICES` choices under its best ratios; choices that end in no program, or fit in no
    ratios, are left out.

    The program is derived anew, with what the decision does already at no cost.
    """
    several = {owner: ways for owner, ways in ways_read(theory, decision).items() if len(ways) > 1}
    if not several:
        return
    problem = compile_problem(theory.data)
    reduced = reduce_theory(problem)
    seconds = seconds_at(reduced, np.tile(problem.proportional, (problem.g, 1)))
    done = frozenset(decision.program)
    for choice in islice(product(*several.values()), CHOICES):
        if run.should_stop:
            return
        kept = dict(zip(several, choice, strict=True))

        def allowed(i: int, kept: dict[str, Form] = kept) -> bool:
            reads = theory.reads(theory.instructions[i])
            return all(kept.get(owner, form) == form for _, owner, form in reads)

        def seconds_of(step: Step) -> float:
            if not allowed(step.index):
                return float("inf")
            return 0.0 if step.index in done else seconds(step)

        program = greedy_program(reduced, seconds_of)
        best = best_ratios(problem, problem.cost_of(program), run)
        if best.fits and all(map(allowed, program)):
            yield problem.decision(program, best.ratios)


def ways_read(theory: Theory, decision: HapDecision) -> dict[str, list[Form]]:
    """Parameter -> the forms in which the decision's operators read it, in order."""
    ways: dict[str, set[Form]] = {}
    for i in decision.program:
        for _, owner, form in theory.reads(theory.instructions[i]):
            ways.setdefault(owner, set()).add(form)
    return {owner: sorted(forms) for owner, forms in ways.items()}
