"""Problem `astra` to proven optimality: a greedy where it is exact, else the counted model of
`model` through CP-SAT.

With theta the time of the slowest stage, T = (K - 1) theta + f(theta), f(theta) the least total
work with no stage above theta. Where stages of one type may differ, and faster types are at least
as good in everything (`AstraProblem.ordered`), f comes from filling the fastest types first, for
all of the M N stage times that theta can be at once. Proof: docs/method-astra.md. Source: hetplan,
for Astra eq. 22-23.
"""

import time
from dataclasses import replace

import numpy as np

from hetplan.formulations.astra.data import AstraData, AstraDecision
from hetplan.formulations.astra.model import formulate
from hetplan.formulations.astra.problem import (
    AstraProblem,
    Floats,
    Ints,
    compile_problem,
    decision_of,
    infeasible_because,
)
from hetplan.solvers.general import solve_with
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run


def solve(data: AstraData, run: Run) -> Outcome[AstraDecision]:
    """Proven optimum, or with the time limit the best found so far and a proven bound."""
    begun = time.perf_counter()
    problem = compile_problem(data)
    reason = infeasible_because(problem)
    if reason is not None:
        return Outcome(stop=Stop.INFEASIBLE, message=reason)
    if problem.equal or not problem.ordered:
        own = replace(run, options=replace(run.options, native={}))  # another method's options
        return solve_with("cp-sat", formulate, data, own)
    built = time.perf_counter() - begun
    thetas = problem.thresholds
    work, stages, layers = greedy(problem, thetas)
    total = (problem.K - 1) * thetas + work
    best = int(np.argmin(total))
    chosen = [
        (i, x)
        for i in range(problem.M)
        for x in even_split(int(stages[i, best]), int(layers[i, best]))
    ]
    return Outcome(
        stop=Stop.OPTIMAL,
        decision=decision_of(problem, chosen),
        bound=float(total[best]),
        build_seconds=built,
        details={"thresholds": len(thetas)},
    )


def greedy(problem: AstraProblem, thetas: Floats) -> tuple[Floats, Ints, Ints]:
    """f for all `thetas` [R] at once, for `problem.ordered`: (f [R], +inf where infeasible; m, n
    [M, R]).

    m: stages, n: layers per type.
    """
    caps = np.stack(
        [
            np.searchsorted(row[1 : most + 1], thetas, side="right")
            for row, most in zip(problem.stage_seconds, problem.most_layers, strict=True)
        ]
    )
    stages = np.zeros_like(caps)
    left = np.full(len(thetas), problem.P)
    for i in range(problem.M):
        stages[i] = np.where(caps[i] > 0, np.minimum(left, problem.most_stages[i]), 0)
        left = left - stages[i]
    layers = stages.copy()
    extra = np.full(len(thetas), problem.N - problem.P)
    for i in range(problem.M):
        taken = np.minimum(extra, stages[i] * np.maximum(caps[i] - 1, 0))
        layers[i] += taken
        extra = extra - taken
    work = (problem.c[:, None] * layers + problem.h[:, None] * stages).sum(axis=0)
    return np.where((left == 0) & (extra == 0), work, np.inf), stages, layers


def even_split(stages: int, layers: int) -> list[int]:
    """`layers` on so many stages, as evenly as possible (never beyond a cap that admits them)."""
    base, more = divmod(layers, max(1, stages))
    return [base + 1] * more + [base] * (stages - more)
