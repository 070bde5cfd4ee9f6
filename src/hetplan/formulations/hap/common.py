"""What every method starts and ends with: the reduced theory or an answer that needs no search, a
program without search and a lower bound, the outcome.

The program and the bound are cheapest derivations of each property, for theories of any width, by
Knuth's generalisation of Dijkstra: the cost of a property is that of its cheapest triple plus the
sum (for a program) or the maximum (for a bound, and for a second program) of the costs of the
triple's preconditions. Sums count what branches share once per branch, 2^depth times in a chain of
residual blocks, beside which the price of a late triple vanishes in rounding; maxima do not grow
so, but see the dearest branch alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.problem import (
    Floats,
    HapProblem,
    Step,
    compile_problem,
    infeasible_because,
)
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.formulations.hap.theory import Theory, reduce_theory
from hetplan.solvers.native import stop_reason
from hetplan.solvers.result import OPTIMAL_GAP, Outcome, Stop
from hetplan.solvers.run import Run

NO_RATIOS = "no ratios fit the given program in memory"
NONE_FITS = "no program fits in memory"

Price = Callable[[Step], float]
Combine = Callable[[list[float]], float]
COMBINED: tuple[Combine, ...] = (sum, max)
# What all memory together costs, as multiples of what everything costs at most.
BYTE_PRICES = (1.0, 1e4, 0.1, 10.0, 0.01)


@dataclass(frozen=True)
class Posed:
    """A theory whose goal costs something, and its triples' instructions."""

    theory: Theory
    instructions: tuple[str, ...]

    @property
    def problem(self) -> HapProblem:
        """The problem behind the theory."""
        return self.theory.problem


def pose(data: HapData, run: Run) -> Posed | Outcome[HapDecision]:
    """The reduced theory; or the outcome where there is no program, only one (given), or one for
    nothing."""
    problem = compile_problem(data)
    reason = infeasible_because(data, problem)
    if reason is not None:
        return Outcome(stop=Stop.INFEASIBLE, message=reason)
    if problem.program is not None:
        return ratios_only(problem, problem.program, run)
    theory = reduce_theory(problem)
    if theory.goal is None:
        return ratios_only(problem, theory.program([]), run)
    return Posed(theory, tuple(triple.instruction for triple in data.triples))


def ratios_only(problem: HapProblem, program: Sequence[int], run: Run) -> Outcome[HapDecision]:
    """The best ratios of the only program in question. Source: HAP, Section 5."""
    stages = problem.stages(program)
    best = best_ratios(problem, stages, run)
    stop, message = stop_reason(run), ""
    if best.impossible:
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
        details={"stages": len(stages.F)},
    )


def ended(
    posed: Posed,
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
    bound is at least the empty one."""
    decision = None
    if program is not None:
        kept = posed.theory.program(program)
        best = best_ratios(posed.problem, posed.problem.stages(kept), run)
        if best.fits:
            decision = posed.problem.decision(kept, best.ratios)
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
    theory: Theory, price: Price, combine: Combine = sum, done: frozenset[int] = frozenset()
) -> list[int]:
    """Triple numbers, in order, of the program that derives each property as cheaply as sums tell,
    or maxima. done: triples that cost nothing any more."""
    by = derivations(theory, lambda s: 0.0 if s.index in done else price(s), combine)[1]
    order: list[int] = []
    derived: set[int] = set()
    stack: list[tuple[int, bool]] = [] if theory.goal is None else [(theory.goal, False)]
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


def derivations(
    theory: Theory, price: Price, combine: Combine
) -> tuple[dict[int, float], dict[int, int]]:
    """(property -> cost, property -> position of its triple in theory.steps)."""
    waiting: dict[int, list[int]] = {}
    missing = [len(step.pre) for step in theory.steps]
    heap: list[tuple[float, int, int]] = []
    cost: dict[int, float] = {}
    by: dict[int, int] = {}

    def applies(n: int) -> None:
        step = theory.steps[n]
        value = price(step) + combine([cost[q] for q in step.pre]) if step.pre else price(step)
        for p in step.post:
            heapq.heappush(heap, (value, n, p))

    for n, step in enumerate(theory.steps):
        for q in step.pre:
            waiting.setdefault(q, []).append(n)
        if not step.pre:
            applies(n)
    while heap:
        value, n, p = heapq.heappop(heap)
        if p in cost:
            continue
        cost[p], by[p] = value, n
        for m in waiting.get(p, ()):
            missing[m] -= 1
            if missing[m] == 0:
                applies(m)
    return cost, by


def price_at(theory: Theory, ratios: Floats) -> Price:
    """Seconds of a triple as a stage of its own at ratios [g, K]."""
    problem = theory.problem

    def price(step: Step) -> float:
        row = ratios[step.segment]
        if step.comm:
            return step.fixed + step.shared * float(row.max())
        return float(((step.fixed + step.shared * row) / problem.speeds).max())

    return price


def least_price(theory: Theory) -> Price:
    """A bound of a triple's share of any program's cost, whatever the ratios.

    A stage lasts at least as long as the mean over all devices, where shared work counts 1 / (n v)
    at most favourably on the fastest device; the largest of m ratios is at least 1 / m.
    """
    problem = theory.problem
    devices = float(problem.counts.sum())
    mean = float((problem.counts / problem.speeds).sum()) / devices
    least = 1.0 / (devices * float(problem.speeds[-1]))

    def price(step: Step) -> float:
        if step.comm:
            return step.fixed + step.shared / devices
        return step.fixed * mean + step.shared * least

    return price


def simple_bound(theory: Theory) -> float:
    """A lower bound of every program's cost: the dearest chain of preconditions, each triple at its
    least."""
    cost, _ = derivations(theory, least_price(theory), max)
    assert theory.goal is not None
    return cost[theory.goal] * (1 - 1e-12)


def fitting_program(theory: Theory, run: Run) -> tuple[list[int], float]:
    """(A program, its seconds under its best ratios): the first one; with memory the cheapest that
    fits of those that derive everything by prices of time and of bytes, more or less dear; infinite
    seconds where none fits."""
    problem, program = theory.problem, first_program(theory)
    best = best_ratios(problem, problem.stages(program), run).seconds, program
    if problem.capacity is None:
        return best[1], best[0]
    seconds = price_at(theory, np.tile(problem.proportional, (problem.g, 1)))
    devices = float(problem.counts.sum())
    for each, combine in product(byte_prices(problem), COMBINED):

        def both(step: Step, each: float = each) -> float:
            return seconds(step) + each * (devices * step.fixed_bytes + step.shared_bytes)

        program = greedy_program(theory, both, combine)
        best = min(best, (best_ratios(problem, problem.stages(program), run).seconds, program))
        if run.should_stop and np.isfinite(best[0]):
            break
    return best[1], best[0]


def byte_prices(problem: HapProblem) -> list[float]:
    """Seconds per byte that are tried: all memory together costs what everything costs at most, or
    multiples of that."""
    assert problem.capacity is not None
    room = float(problem.capacity @ problem.counts) or 1.0
    return [times * (problem.most_seconds or 1.0) / room for times in BYTE_PRICES]


def first_program(theory: Theory) -> list[int]:
    """The cheapest of the greedy programs at proportional and at even ratios, by their cost
    there."""
    problem = theory.problem
    candidates: list[tuple[float, list[int]]] = []
    for row, combine in product((problem.proportional, problem.even), COMBINED):
        ratios = np.tile(row, (problem.g, 1))
        program = greedy_program(theory, price_at(theory, ratios), combine)
        candidates.append((problem.seconds(problem.stages(program), ratios), program))
    return min(candidates)[1]
