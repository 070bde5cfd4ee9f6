"""A program without search, and a lower bound, for theories of any width: cheapest derivations of
each property.

Knuth's generalisation of Dijkstra: the cost of a property is that of its cheapest triple plus the
sum (for a program) or the maximum (for a bound, and for a second program) of the costs of the
triple's preconditions. Sums count what branches share once per branch, 2^depth times in a chain of
residual blocks, beside which the price of a late triple vanishes in rounding; maxima do not grow
so, but see the dearest branch alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import product

import numpy as np

from hetplan.formulations.hap.problem import Floats, Step
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.formulations.hap.theory import Theory
from hetplan.solvers.run import Run

Price = Callable[[Step], float]
Combine = Callable[[list[float]], float]
COMBINED: tuple[Combine, ...] = (sum, max)
# Prices of all memory together, as multiples of what everything costs at most.
BYTE_PRICES = (1.0, 1e4, 0.1, 10.0, 0.01)


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
    room = float(problem.capacity @ problem.counts)
    seconds = price_at(theory, np.tile(problem.proportional, (problem.g, 1)))
    for price, combine in product(BYTE_PRICES, COMBINED):
        each = price * (problem.most_seconds or 1.0) / (room or 1.0)

        def both(step: Step, each: float = each) -> float:
            held = float(problem.counts.sum()) * step.fixed_bytes + step.shared_bytes
            return seconds(step) + each * held

        program = greedy_program(theory, both, combine)
        best = min(best, (best_ratios(problem, problem.stages(program), run).seconds, program))
        if run.should_stop and np.isfinite(best[0]):
            break
    return best[1], best[0]


def first_program(theory: Theory) -> list[int]:
    """The cheapest of the greedy programs at proportional and at even ratios, by their cost
    there."""
    problem = theory.problem
    found: list[tuple[float, list[int]]] = []
    for row, combine in product((problem.proportional, problem.even), COMBINED):
        ratios = np.tile(row, (problem.g, 1))
        program = greedy_program(theory, price_at(theory, ratios), combine)
        found.append((problem.seconds(problem.stages(program), ratios), program))
    return min(found)[1]
