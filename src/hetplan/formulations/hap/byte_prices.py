"""Prices of bytes for a cell, with the means over types beside them, by cutting planes.

For any multipliers (module `means`) the least of their bound over a cell is at a vertex, where the
best program is a shortest path. Each path met bounds from above what any multipliers can prove at
every vertex. A linear programme finds those for which the least of these bounds is largest. One
mean serves for all stages here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.formulations.hap.graph import Graph
from hetplan.formulations.hap.means import Means, Multipliers
from hetplan.formulations.hap.paths import path, shortest
from hetplan.formulations.hap.problem import Floats, HapProblem
from hetplan.solvers.general import minimise
from hetplan.solvers.model import SMALLEST, Model, Totals
from hetplan.solvers.run import Run

# All memory of a device costs at most so many times the seconds of all triples.
DEAREST = 1e5
# Cutting planes per cell; what a further one must still promise, as a share of the bound.
ROUNDS, PROMISE = 40, 1e-7
# Rounding in sums of thousands of terms.
CUT_ROUNDING = 1e-12


@dataclass(frozen=True)
class ProgramTotals:
    """What a program, a path of the graph, adds up to."""

    program: tuple[int, ...]  # triple numbers in order of execution
    fixed_comm: float  # seconds of collectives
    shared_comm: Floats  # [g] and per largest ratio
    fixed_computing: Floats  # [K] seconds of computing fixed work on each type
    shared_computing: Floats  # [g, K] and per ratio
    fixed_bytes: float
    shared_bytes: Floats  # [g]


def first_multipliers(problem: HapProblem) -> Multipliers:
    """Means that make every ratio cost the same; bytes cost nothing."""
    w = problem.speeds * problem.counts
    return Multipliers(
        w / w.sum(),
        np.tile(problem.counts / problem.counts.sum(), (problem.g, 1)),
        np.zeros(problem.K),
    )


def _totals(problem: HapProblem, graph: Graph, arcs: list[int]) -> ProgramTotals:
    work = graph.work[np.array(arcs, dtype=np.int64)]
    comm, slow = work.comm, problem.speeds[-1] / problem.speeds
    return ProgramTotals(
        program=tuple(graph.program(arcs)),
        fixed_comm=float(work.fixed_seconds[comm].sum()),
        shared_comm=work.shared_seconds[comm].sum(axis=0),
        fixed_computing=work.fixed_seconds[~comm].sum() * slow,
        shared_computing=work.shared_seconds[~comm].sum(axis=0)[:, None] * slow,
        fixed_bytes=float(work.fixed_bytes.sum()),
        shared_bytes=work.shared_bytes.sum(axis=0),
    )


def best_multipliers(
    graph: Graph,
    means: Means,
    start: Multipliers,
    threshold: float,
    run: Run,
) -> tuple[float, Multipliers, list[ProgramTotals]]:
    """(Bound of the cell, the multipliers that prove it, the paths met). It begins with multipliers
    of a larger cell, and ends at the threshold."""
    problem, multipliers = means.problem, start
    paths: dict[tuple[int, ...], ProgramTotals] = {}
    best, chosen = -np.inf, start
    for _ in range(ROUNDS):
        means.set_multipliers(multipliers)
        cost = means.costs(graph.work, multipliers.type_weights[None])[:, 0]
        length, arc = shortest(graph, cost)
        least = float(length[graph.start].min())
        value = least - means.memory_seconds - CUT_ROUNDING * (least + means.memory_seconds)
        if value > best:
            best, chosen = value, multipliers
        if best >= threshold or run.should_stop:
            break
        for v in range(len(means.x)):
            totals = _totals(problem, graph, path(graph, arc[:, v]))
            paths[totals.program] = totals
        answer = _best_by_cuts(problem, means.x, list(paths.values()), run)
        if answer is None:
            break
        hoped, multipliers = answer
        if hoped - best <= PROMISE * max(abs(hoped), SMALLEST * problem.seconds_of_all):
            break
    means.set_multipliers(chosen)
    return best, chosen, list(paths.values())


def _best_by_cuts(
    problem: HapProblem, x: Floats, paths: Sequence[ProgramTotals], run: Run
) -> tuple[float, Multipliers] | None:
    """(An upper bound of what any multipliers can prove, as far as the paths met limit it; the
    multipliers that reach it)."""
    assert problem.capacity is not None
    most = problem.seconds_of_all or 1.0
    room = np.where(problem.capacity > 0, problem.capacity, 1.0)
    model = Model("hap-prices", totals=Totals(least=most, largest=most))
    level = model.seconds("level", lower=None)
    w = model.continuous("w", problem.K)
    u = model.continuous("u", (problem.g, problem.K))
    # of the whole memory of a device, in units of `most`
    price = model.continuous("price", problem.K, 0.0, DEAREST)
    model.minimize(level, -1.0)
    model.equal("mean", w, to=1.0)
    for k in range(problem.g):
        model.equal("mean", u[k], to=1.0)
    columns = np.concatenate([[level], w, u.ravel(), price])
    for p in paths:
        for at in x:
            busy = p.fixed_computing + (p.shared_computing * at).sum(axis=0)
            top = (p.shared_comm[:, None] * at).ravel()
            over = (p.fixed_bytes + p.shared_bytes @ at - problem.capacity) / room * most
            values = np.concatenate([-busy, -top, np.clip(-over, -1e9 * most, 1e9 * most)])
            model.row("cut", columns, np.append(1.0, values), upper=p.fixed_comm)
    answer = minimise("milp", model, run.part(), report=lambda i, b: None)
    if answer.x is None or answer.objective is None:
        return None
    mean, top_weights = np.maximum(answer.values(w), 0.0), np.maximum(answer.values(u), 0.0)
    multipliers = Multipliers(
        mean / mean.sum(),
        top_weights / top_weights.sum(axis=1, keepdims=True),
        np.maximum(answer.values(price), 0.0) * most / room,
    )
    return -answer.objective, multipliers
