"""What every method starts and ends with: the reduced theory, or an answer that needs no search; a
first program and a lower bound found without search; the outcome.

The program and the bound are cheapest derivations of each property, for theories of any width, by
Knuth's generalisation of Dijkstra: the cost of a property is that of its cheapest triple plus the
sum (for a program) or the maximum (for a bound, and for a second program) of the costs of the
triple's preconditions. Sums count a shared branch once for each of its users. In a chain of
residual blocks that grows as 2^depth, until the cost of a late triple is lost in rounding. Maxima
do not grow so, but see only the dearest branch. So both are tried.
"""

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np

from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.problem import (
    NOTHING,
    Combine,
    Floats,
    HapProblem,
    ReducedTheory,
    Step,
    TripleSeconds,
    compile_problem,
    derivations,
    infeasible_because,
    reduce_theory,
)
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.solvers.run import OPTIMAL_GAP, Outcome, Run, Stop, stop_reason

NO_RATIOS = "no ratios fit the given program in memory"
NONE_FITS = "no program fits in memory"

COMBINED: tuple[Combine, ...] = (sum, max)
# What all memory together costs, in multiples of the seconds of all triples.
TRIED_MULTIPLES = (1.0, 1e4, 0.1, 10.0, 0.01)


def reduced_or_answered(data: HapData, run: Run) -> ReducedTheory | Outcome[HapDecision]:
    """The reduced theory; or the outcome where there is no program, or where the program is given
    or costs nothing."""
    problem = compile_problem(data)
    reason = infeasible_because(data, problem)
    if reason is not None:
        return Outcome(stop=Stop.INFEASIBLE, message=reason)
    if problem.program is not None:
        return ratios_only(problem, problem.program, run)
    theory = reduce_theory(problem)
    return ratios_only(problem, theory.program([]), run) if theory.goal == NOTHING else theory


def ratios_only(problem: HapProblem, program: Sequence[int], run: Run) -> Outcome[HapDecision]:
    """The best ratios of the only program in question. Source: HAP, Section 5."""
    cost = problem.cost_of(program)
    best = best_ratios(problem, cost, run)
    stop, message = stop_reason(run), ""
    if best.proven_unfit:
        stop, message = Stop.INFEASIBLE, NO_RATIOS
    elif not best.fits:
        message = "no ratios found that fit"
    elif best.bound is not None and best.seconds - best.bound <= OPTIMAL_GAP * best.seconds:
        stop = Stop.OPTIMAL
    return Outcome(
        stop=stop,
        decision=problem.decision(program, best.ratios) if best.fits else None,
        bound=best.bound if best.fits else None,
        message=message,
        details={"stages": len(cost.F)},
    )


def outcome_of(
    theory: ReducedTheory,
    program: Sequence[int] | None,
    *,
    run: Run,
    stop: Stop,
    bound: float | None,
    build_seconds: float = 0.0,
    solver: str = "hetplan",
    message: str = "",
    details: Mapping[str, object] | None = None,
) -> Outcome[HapDecision]:
    """The outcome with `program` (triple numbers) under its best ratios, if any fit in memory. A
    bound is never below 0."""
    decision = None
    if program is not None:
        kept, problem = theory.program(program), theory.problem
        best = best_ratios(problem, problem.cost_of(kept), run)
        if best.fits:
            decision = problem.decision(kept, best.ratios)
    if bound is not None and not np.isfinite(bound):
        bound = None
    return Outcome(
        stop=stop,
        decision=decision,
        bound=None if bound is None else max(float(bound), 0.0),
        build_seconds=build_seconds,
        solver=solver,
        message=message,
        details=details or {},
    )


def greedy_program(
    theory: ReducedTheory, seconds_of: TripleSeconds, combine: Combine = sum
) -> list[int]:
    """Triple numbers, in order, of the program that derives each property by its cheapest triple,
    where the preconditions of a triple cost their total (`combine` is sum) or the dearest of them
    (max)."""
    by = derivations(theory.steps, seconds_of, combine)[1]
    order: list[int] = []
    derived: set[int] = set()
    stack: list[tuple[int, bool]] = [] if theory.goal == NOTHING else [(theory.goal, False)]
    while stack:
        p, ready = stack.pop()
        if p in derived:
            continue
        if ready:
            derived.add(p)
            order.append(theory.steps[by[p]].index)
            continue
        stack.append((p, True))
        stack += [(q, False) for q in theory.steps[by[p]].pre if q not in derived]
    return theory.program(order)


def seconds_at(theory: ReducedTheory, ratios: Floats) -> TripleSeconds:
    """Seconds of a triple as a stage of its own at ratios [g, K]."""
    problem = theory.problem

    def seconds_of(step: Step) -> float:
        row = ratios[step.segment]
        if step.comm:
            return step.fixed + step.shared * float(row.max())
        return float(((step.fixed + step.shared * row) / problem.speeds).max())

    return seconds_of


def least_seconds(theory: ReducedTheory) -> TripleSeconds:
    """A bound of a triple's share of any program's cost, whatever the ratios.

    A stage lasts at least as long as the mean over all devices. In it shared work counts at least
    1 / (n v), with the speed v of the fastest device. The largest of n ratios is at least 1 / n.
    """
    problem = theory.problem
    devices = float(problem.counts.sum())
    mean = float((problem.counts / problem.speeds).sum()) / devices
    least = 1.0 / (devices * float(problem.speeds[-1]))

    def seconds_of(step: Step) -> float:
        computing = step.fixed * mean + step.shared * least
        return step.fixed + step.shared / devices if step.comm else computing

    return seconds_of


def chain_bound(theory: ReducedTheory) -> float:
    """A lower bound of every program's cost: the dearest chain of preconditions, with the least
    seconds of each triple."""
    cost = derivations(theory.steps, least_seconds(theory), max)[0]
    return cost[theory.goal] * (1 - 1e-12)


def fitting_program(theory: ReducedTheory, run: Run) -> tuple[list[int], float]:
    """(A program, its seconds under its best ratios; infinite where it does not fit).

    Without memory it is the first program. With memory, programs are derived with every byte at a
    price in seconds, for several prices. The cheapest of these and of the first one that fits is
    taken."""
    problem, program = theory.problem, first_program(theory)
    best = best_ratios(problem, problem.cost_of(program), run).seconds, program
    if problem.capacity is None:
        return best[1], best[0]
    seconds = seconds_at(theory, np.tile(problem.proportional, (problem.g, 1)))
    devices = float(problem.counts.sum())
    for byte_price, combine in product(tried_byte_prices(problem), COMBINED):

        def both(step: Step, byte_price: float = byte_price) -> float:
            return seconds(step) + byte_price * (devices * step.fixed_bytes + step.shared_bytes)

        program = greedy_program(theory, both, combine)
        best = min(best, (best_ratios(problem, problem.cost_of(program), run).seconds, program))
        if run.should_stop and np.isfinite(best[0]):
            break
    return best[1], best[0]


def tried_byte_prices(problem: HapProblem) -> list[float]:
    """Seconds per byte that are tried: all memory together then costs the seconds of all triples,
    or multiples of that."""
    assert problem.capacity is not None
    room = float(problem.capacity @ problem.counts) or 1.0
    return [times * (problem.seconds_of_all or 1.0) / room for times in TRIED_MULTIPLES]


def first_program(theory: ReducedTheory) -> list[int]:
    """The cheapest of the greedy programs at proportional and at even ratios, by their cost
    there."""
    problem = theory.problem
    candidates: list[tuple[float, list[int]]] = []
    for row, combine in product((problem.proportional, problem.even), COMBINED):
        ratios = np.tile(row, (problem.g, 1))
        program = greedy_program(theory, seconds_at(theory, ratios), combine)
        candidates.append((problem.seconds(problem.cost_of(program), ratios), program))
    return min(candidates)[1]
