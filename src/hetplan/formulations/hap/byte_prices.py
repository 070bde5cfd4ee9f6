"""Prices of bytes for a cell of ratios, by cutting planes.

For any weights and prices (module `means`) the least of the right side over a cell is at a vertex,
where the best program is a shortest path. Each path met bounds what any weights and prices can
reach at every vertex, and a linear programme finds those that these bounds allow most. One mean
prices all stages here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.formulations.hap.graph import Graph, lengths, path
from hetplan.formulations.hap.means import Means, Prices
from hetplan.formulations.hap.problem import Floats, HapProblem
from hetplan.solvers.general import minimise
from hetplan.solvers.model import SMALLEST, Model, Totals
from hetplan.solvers.run import Run

# All memory of a device costs at most so many times what everything costs at most.
DEAREST = 1e5
# Cutting planes per cell; what a further one must still promise, as a share of the bound.
ROUNDS, PROMISE = 40, 1e-7
# Rounding in sums of thousands of terms.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Path:
    """What a program adds up to."""

    program: tuple[int, ...]  # triple numbers in order of execution
    alone: float  # seconds of collectives
    top: Floats  # [g] and per largest ratio
    busy: Floats  # [K] seconds of computing fixed work on each type
    share: Floats  # [g, K] and per ratio
    fixed_bytes: float
    shared_bytes: Floats  # [g]


def first_prices(problem: HapProblem) -> Prices:
    """Means in which no ratio matters; bytes cost nothing."""
    w = problem.speeds * problem.counts
    tops = np.tile(problem.counts / problem.counts.sum(), (problem.g, 1))
    return Prices(w / w.sum(), tops, np.zeros(problem.K))


def _summed(problem: HapProblem, graph: Graph, arcs: list[int]) -> Path:
    work = graph.work[np.array(arcs, dtype=np.int64)]
    comm, slow = work.comm, problem.speeds[-1] / problem.speeds
    return Path(
        program=tuple(graph.program(arcs)),
        alone=float(work.fixed[comm].sum()),
        top=work.shared[comm].sum(axis=0),
        busy=work.fixed[~comm].sum() * slow,
        share=work.shared[~comm].sum(axis=0)[:, None] * slow,
        fixed_bytes=float(work.fixed_bytes.sum()),
        shared_bytes=work.shared_bytes.sum(axis=0),
    )


def best_prices(
    graph: Graph, means: Means, start: Prices, known: Sequence[Path], threshold: float, run: Run
) -> tuple[float, Prices, list[Path], list[Path]]:
    """(Bound of the cell, the prices that show it, the paths that keep it from rising, all paths
    met), from prices and paths of a larger cell on; up to the threshold."""
    problem, prices = means.problem, start
    assert problem.capacity is not None
    paths = {p.program: p for p in known}
    binding, best, chosen = list(known), -np.inf, start
    for _ in range(ROUNDS):
        means.adopt(prices)
        step = means.prices(graph.work, prices.w[None])[:, 0]
        length, arc = lengths(graph, step)
        least = float(length[graph.start].min())
        value = least - means.room - ROUNDING * (least + means.room)
        if value > best:
            best, chosen = value, prices
        if best >= threshold or run.should_stop:
            break
        for v in range(len(means.x)):
            shortest = _summed(problem, graph, path(graph, arc[:, v]))
            paths[shortest.program] = shortest
        answer = _master(problem, means.x, list(paths.values()), run)
        if answer is None:
            break
        hoped, prices, shares = answer
        binding = [p for p, share in zip(paths.values(), shares, strict=True) if share > 0]
        if hoped - best <= PROMISE * max(abs(hoped), SMALLEST * problem.most_seconds):
            break
    means.adopt(chosen)
    return best, chosen, binding, list(paths.values())


def _master(
    problem: HapProblem, x: Floats, paths: Sequence[Path], run: Run
) -> tuple[float, Prices, Floats] | None:
    """(What no prices exceed as far as the paths tell, prices that reach it, the paths' shares)."""
    assert problem.capacity is not None
    most = problem.most_seconds or 1.0
    room = np.where(problem.capacity > 0, problem.capacity, 1.0)
    model = Model("hap-prices", totals=Totals(least=most, largest=most))
    level = model.seconds("level", lower=None)
    w = model.continuous("w", problem.K)
    u = model.continuous("u", (problem.g, problem.K))
    # of a device's memory, in `most`
    price = model.continuous("price", problem.K, 0.0, DEAREST)
    model.minimize(level, -1.0)
    model.equal("mean", w, to=1.0)
    for k in range(problem.g):
        model.equal("mean", u[k], to=1.0)
    columns = np.concatenate([[level], w, u.ravel(), price])
    for p in paths:
        for at in x:
            busy = p.busy + (p.share * at).sum(axis=0)
            top = (p.top[:, None] * at).ravel()
            over = (p.fixed_bytes + p.shared_bytes @ at - problem.capacity) / room * most
            values = np.concatenate([-busy, -top, np.clip(-over, -1e9 * most, 1e9 * most)])
            model.row("cut", columns, np.append(1.0, values), upper=p.alone)
    answer = minimise("milp", model, run.part(), report=lambda i, b: None)
    if answer.x is None or answer.row_dual is None or answer.objective is None:
        return None
    shares = np.abs(answer.row_dual[-len(paths) * len(x) :]).reshape(len(paths), -1).sum(axis=1)
    mean, tops = np.maximum(answer.values(w), 0.0), np.maximum(answer.values(u), 0.0)
    prices = Prices(
        mean / mean.sum(),
        tops / tops.sum(axis=1, keepdims=True),
        np.maximum(answer.values(price), 0.0) * most / room,
    )
    return -answer.objective, prices, shares
