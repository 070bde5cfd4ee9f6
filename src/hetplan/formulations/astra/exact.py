"""Problem `astra` to proven optimality: the least T = (K - 1) theta + f(theta) over the time theta
of the slowest stage.

f(theta), the least total work with no stage above theta, is a non-increasing step function that
jumps only at the M N possible stage times. With unequal layers and types ordered in everything, all
values of f come from one vectorised greedy; else each takes a dynamic programme, and an interval
[a, b] of thresholds is dropped when (K - 1) theta_a + f(theta_b) reaches the incumbent or f is
equal at both ends. Source: hetplan, for Astra eq.
22-23.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hetplan.errors import UnsupportedError
from hetplan.formulations.astra.data import AstraData, AstraDecision
from hetplan.formulations.astra.equal import Halves
from hetplan.formulations.astra.problem import (
    AstraProblem,
    Ints,
    compile_problem,
    decision_of,
    even_decision,
    even_stages,
    infeasible_because,
    least_total,
)
from hetplan.formulations.astra.unequal import (
    even_split,
    greedy,
    least_work,
    scratch,
    stages_behind,
)
from hetplan.solvers.bottleneck import Grid, Probe, minimise
from hetplan.solvers.result import OPTIMAL_GAP, Outcome, Stop
from hetplan.solvers.run import Run

Stages = list[tuple[int, int]]
# Bounds are sums in another order than the evaluator's.
ROUNDING = 1e-12
MOST_TABLE_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Found:
    """What the search over thresholds ends with; `stages` None: no threshold is feasible (when
    `finished`)."""

    stages: Stages | None
    bound: float | None
    evaluations: int
    finished: bool


def solve(data: AstraData, run: Run) -> Outcome[AstraDecision]:
    """Proven optimum, or with the time limit the best found so far and a proven bound.

    Raises UnsupportedError where the tables of the dynamic programme would take more than 2 GiB.
    """
    begun = time.perf_counter()
    problem = compile_problem(data)
    reason = infeasible_because(problem)
    if reason is not None:
        return Outcome(
            stop=Stop.INFEASIBLE, message=reason, solve_seconds=time.perf_counter() - begun
        )
    check_tables(problem)
    built = time.perf_counter()
    found = optimum(problem, run)
    if not found.finished:
        stop = Stop.INTERRUPTED if run.cancelled else Stop.LIMIT
    else:
        stop = Stop.OPTIMAL if found.stages is not None else Stop.INFEASIBLE
    no_division = (
        "no numbers of layers, one per type, add up to all layers within the limits of the devices"
    )
    return Outcome(
        stop=stop,
        decision=None if found.stages is None else decision_of(problem, found.stages),
        bound=found.bound,
        build_seconds=built - begun,
        solve_seconds=time.perf_counter() - built,
        message=no_division if stop is Stop.INFEASIBLE else "",
        details={"evaluations": found.evaluations, "thresholds": len(problem.thresholds)},
    )


def check_tables(problem: AstraProblem) -> None:
    """Raises UnsupportedError where `optimum` would need tables larger than MOST_TABLE_BYTES."""
    if not problem.equal and problem.ordered:
        return
    tables = problem.M + (2 if problem.equal else 0)
    size = 8 * tables * (problem.P + 1) * (problem.N + 1)
    if size > MOST_TABLE_BYTES:
        raise UnsupportedError(
            f"{problem.P} stages and {problem.N} layers on {problem.M} types need tables of {size / 2**30:.1f} GiB",
            expected=f"at most {MOST_TABLE_BYTES / 2**30:g} GiB; fewer stages or layers, or --method cp-sat or milp",
        )


def optimum(problem: AstraProblem, run: Run) -> Found:
    """The best decision of a problem that `infeasible_because` has no objection to."""
    if not problem.equal and problem.ordered:
        return _by_greedy(problem)
    if problem.equal:
        halves = Halves(problem)
        return _by_intervals(
            problem, lambda cap: halves.least_work(cap, run), halves.stages_behind, run
        )
    room = scratch(problem)
    table, _, at = room
    return _by_intervals(
        problem,
        lambda cap: least_work(problem, cap, room, run),
        lambda cap: stages_behind(problem, cap, table, at),
        run,
    )


def _by_greedy(problem: AstraProblem) -> Found:
    """All thresholds at once (Section 3.4's problem with unequal layers and types ordered in
    everything)."""
    thetas = problem.thresholds
    work, stages, layers = greedy(problem, thetas)
    total = (problem.K - 1) * thetas + work
    best = int(np.argmin(total))
    chosen: Stages = []
    for i in range(problem.M):
        chosen += even_split(i, int(stages[i, best]), int(layers[i, best]))
    return Found(chosen, float(total[best]), len(thetas), True)


def _by_intervals(
    problem: AstraProblem, work: Callable[[Ints], float], trace: Callable[[Ints], Stages], run: Run
) -> Found:
    """Branch and bound over intervals of thresholds; `trace` explains the latest call of `work`.

    Where time runs out before the first value of f, the simplest decision and the least work stand.
    """
    thetas = problem.thresholds
    # A gap below "optimal" is not worth stopping for: the remaining evaluations are few.
    gap = run.options.gap if run.options.gap > OPTIMAL_GAP else 0.0

    slope, least = float(problem.K - 1), math.inf

    def probe(theta: float) -> Probe[Stages] | None:
        nonlocal least
        caps = problem.caps(theta)
        value = work(caps)
        if value == math.inf:
            return None
        better = slope * theta + value < least
        least = min(least, slope * theta + value)
        return Probe(value, theta, trace(caps) if better else [])

    known = even_decision(problem)
    # The optimum's slowest stage takes at most its share of a known objective: sum >= theta, so K
    # theta <= T.
    longest = float(thetas[-1]) if known is None else known * (1 + 1e-9) / problem.K
    interval = (float(thetas[0]), min(float(thetas[-1]), longest))
    found = minimise(slope, probe, Grid(thetas), interval, run, gap=gap)
    stages, bound = found.decision, found.bound
    if not found.finished:
        stages = even_stages(problem) if stages is None else stages
        bound = max(bound or 0.0, least_total(problem) * (1 - ROUNDING))
    return Found(stages, bound, found.evaluations, found.finished)
