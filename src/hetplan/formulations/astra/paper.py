"""Astra's own search of the segments: enumerate all (m_i) and, for each, all (n_i). Source: Astra,
Section
3.4.

The numbers of stages m_i run over all compositions of P, the layers n_i of the used types but the
last over everything that leaves the last one a whole number, O(P^(M-1) N^(M-1)). All stages of a
type hold n_i layers, so the enumeration is complete (and proves its answer) only where the instance
asks for equal layers per type.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.astra.data import AstraData, AstraDecision
from hetplan.formulations.astra.problem import (
    AstraProblem,
    Floats,
    Ints,
    compile_problem,
    decision_of,
    infeasible_because,
)
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run

# Steps of the odometer after which the enumeration looks at the clock.
PATIENCE = 1_000_000


@kernel
def cheapest_layers(
    c: Floats,
    h: Floats,
    most: Ints,
    m: Ints,
    N: int,
    K: int,
    best: float,
    chosen: Ints,
    x: Ints,
    patience: int,
) -> tuple[float, int, bool]:
    """The best n for stage counts m: (cost, tried, whether that is all); `chosen` [M] receives n
    when the cost is below `best`.

    An odometer over x for all used types but the last, whose number follows from the sum: from all
    zeros on, or from where it stood after the `patience` steps of a call before.
    """
    M = len(c)
    last, fresh = -1, True
    for i in range(M):
        if m[i] > 0:
            last = i
        if x[i] > 0:
            fresh = False
    for i in range(M):
        if fresh and m[i] > 0:
            x[i] = 1
    tried = 0
    while patience > 0:
        patience -= 1
        rest = N
        for i in range(last):
            rest -= m[i] * x[i]
        if rest >= m[last] and rest % m[last] == 0 and rest // m[last] <= most[last]:
            x[last] = rest // m[last]
            tried += 1
            total, slowest = 0.0, 0.0
            for i in range(last + 1):
                if m[i] > 0:
                    stage = c[i] * x[i] + h[i]
                    total += m[i] * stage
                    slowest = max(slowest, stage)
            total += (K - 1) * slowest
            if total < best:
                best = total
                for i in range(M):
                    chosen[i] = x[i]
        place = last - 1
        while place >= 0:
            if m[place] > 0:
                # when nothing is left for the last type, growing this digit further is useless
                if x[place] < most[place] and rest > m[last]:
                    x[place] += 1
                    break
                rest += m[place] * (x[place] - 1)
                x[place] = 1
            place -= 1
        if place < 0:
            return best, tried, True
    return best, tried, False


def stage_counts(limit: Ints, total: int) -> Iterator[list[int]]:
    """All (m_i) with 0 <= m_i <= limit_i and sum `total`, in lexicographic order."""
    if len(limit) == 1:
        if total <= limit[0]:
            yield [total]
        return
    for m in range(min(int(limit[0]), total) + 1):
        for rest in stage_counts(limit[1:], total - m):
            yield [m, *rest]


def solve(data: AstraData, run: Run) -> Outcome[AstraDecision]:
    """The best segments by complete enumeration; a bound only where the paper's restriction is the
    instance's."""
    begun = time.perf_counter()
    problem = compile_problem(data)
    reason = infeasible_because(problem)
    if reason is not None:
        return Outcome(
            stop=Stop.INFEASIBLE, message=reason, solve_seconds=time.perf_counter() - begun
        )
    best, stages, tried, finished = _enumerate(problem, run)
    if not finished:
        stop = Stop.INTERRUPTED if run.cancelled else Stop.LIMIT
    elif not problem.equal:
        stop = Stop.DONE
    else:
        stop = Stop.OPTIMAL if stages else Stop.INFEASIBLE
    return Outcome(
        stop=stop,
        decision=decision_of(problem, stages) if stages else None,
        bound=best if stop is Stop.OPTIMAL else None,
        solve_seconds=time.perf_counter() - begun,
        message=""
        if stages or not finished
        else "no numbers of layers, one per type, add up to all layers",
        details={"candidates": tried},
    )


def _enumerate(problem: AstraProblem, run: Run) -> tuple[float, list[tuple[int, int]], int, bool]:
    """(best cost, its stages, candidates tried, whether the enumeration was completed)."""
    best, tried = np.inf, 0
    stages: list[tuple[int, int]] = []
    chosen, x = np.zeros(problem.M, np.int64), np.zeros(problem.M, np.int64)
    for counts in stage_counts(problem.most_stages, problem.P):
        m, whole = np.array(counts, np.int64), False
        x[:] = 0
        while not whole:
            if run.should_stop:
                return float(best), stages, tried, False
            cost, more, whole = cheapest_layers(
                problem.c,
                problem.h,
                problem.most_layers,
                m,
                problem.N,
                problem.K,
                best,
                chosen,
                x,
                PATIENCE,
            )
            tried += int(more)
            if cost < best:
                best = float(cost)
                stages = [(i, int(chosen[i])) for i in range(problem.M) for _ in range(counts[i])]
    return float(best), stages, tried, True
