"""Programs that read every parameter in one way.

An operator may run in several ways (a table of words sliced by rows for one reader, by columns for
another), where changing the form of what it gives costs more than doing it again. The problem
charges a parameter for each of them, but devices hold one that is read in several ways whole. Where
that does not fit, one way stays, and what the others gave is made of what there is. The program
stays a proof, and the problem's bound holds for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product

from hetplan.formulations.hap.data import HapDecision
from hetplan.formulations.hap.problem import HapProblem, Step, compile_problem
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.formulations.hap.spmd.forms import Form
from hetplan.formulations.hap.spmd.instructions import Instruction, Run, Synchronise
from hetplan.formulations.hap.spmd.program import PARAMETER
from hetplan.formulations.hap.spmd.rules import Theory
from hetplan.formulations.hap.theory import reduce_theory
from hetplan.solvers.run import Run as SolverRun

MOST = 16  # choices that are tried


def in_one_way(theory: Theory, decision: HapDecision, run: SolverRun) -> Iterator[HapDecision]:
    """The decision with one way of reading for each parameter that it reads in several, each choice
    under its best ratios; choices that end in no program, or fit in no ratios, are left out."""
    problem = compile_problem(theory.data)
    ways: dict[str, set[Form]] = {}
    for i in decision.program:
        for owner, form in reads(theory, theory.instructions[i]):
            ways.setdefault(owner, set()).add(form)
    several = {owner: sorted(forms) for owner, forms in ways.items() if len(forms) > 1}
    if not several:
        return
    reduced = reduce_theory(problem)
    for choice in islice(product(*several.values()), MOST):
        kept = dict(zip(several, choice, strict=True))
        program = rewritten(theory, problem, decision.program, kept)
        if program is None or run.should_stop:
            continue
        chosen = reduced.program(program)
        best = best_ratios(problem, problem.stages(chosen), run)
        if best.fits:
            yield problem.decision(chosen, best.ratios)


def reads(theory: Theory, instruction: Instruction) -> list[tuple[str, Form]]:
    """(parameter, form) of what an operator reads; copies by the name of what they copy."""
    if not isinstance(instruction, Run):
        return []
    program = theory.program
    inputs = program.inputs(program.node(instruction.node))
    return [
        (program.copies.get(source.name, source.name), form)
        for source, form in zip(inputs, instruction.way.inputs, strict=True)
        if source.kind == PARAMETER
    ]


def rewritten(
    theory: Theory, problem: HapProblem, program: Sequence[int], kept: dict[str, Form]
) -> list[int] | None:
    """The program without other ways of reading than those kept; what they gave is derived anew.
    None: it cannot be."""

    def allowed(i: int) -> bool:
        return all(
            kept.get(owner, form) == form for owner, form in reads(theory, theory.instructions[i])
        )

    makers: dict[str, list[Step]] = {}
    for step in problem.steps:
        for p in step.post:
            makers.setdefault(tensor_of(problem, p), []).append(step)
    known: set[int] = set()
    kept_program: list[int] = []
    for i in filter(allowed, program):
        step, before = problem.steps[i], list[Step]()
        for p in sorted(step.pre - known):
            others = [s for s in makers.get(tensor_of(problem, p), []) if allowed(s.index)]
            way = derivation(problem, p, known, others)
            if way is None:
                break
            before += way
        else:
            for each in (*before, step):
                if not each.post <= known:
                    kept_program.append(each.index)
                    known |= each.post
            continue
        if not isinstance(theory.instructions[i], Synchronise):
            return None  # a gradient that nothing computes any more needs no joining
    return kept_program if problem.goal in known else None


def tensor_of(problem: HapProblem, p: int) -> str:
    """A property's tensor, whatever has been joined of its gradients."""
    return problem.properties[p].rpartition("|")[0].partition("~")[0]


def derivation(
    problem: HapProblem, goal: int, known: set[int], steps: Sequence[Step]
) -> list[Step] | None:
    """The cheapest of `steps`, in order, by which `goal` follows from what is known; None where it
    does not."""
    row = problem.proportional

    def seconds(step: Step) -> float:
        if step.comm:
            return step.fixed + step.shared * float(row.max())
        return float(((step.fixed + step.shared * row) / problem.speeds).max())

    cost: dict[int, float] = dict.fromkeys(known, 0.0)
    by: dict[int, Step] = {}
    better = True
    while better:
        better = False
        for step in steps:
            if not all(p in cost for p in step.pre):
                continue
            value = seconds(step) + sum(cost[p] for p in step.pre)
            for p in step.post:
                if value < cost.get(p, float("inf")):
                    cost[p], by[p], better = value, step, True
    if goal not in cost:
        return None
    order: list[Step] = []

    def settle(p: int) -> None:
        if p in known or any(p in step.post for step in order):
            return
        for q in sorted(by[p].pre):
            settle(q)
        order.append(by[p])

    settle(goal)
    return order
