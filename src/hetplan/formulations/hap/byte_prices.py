"""Prices of bytes for a cell, with the means over types beside them, by cutting planes.

Multipliers (module `means`) give every program at every point of the cell a cost that bounds its
seconds from below. The bound that they prove for the cell is the least cost of all programs and
points. It is attained at a vertex, and at a vertex the program of least cost is a shortest path of
the graph. That path costs at most as much as any other path, so each known path bounds from above
the bound that multipliers can prove. A linear programme finds the multipliers for which the least
cost of the known paths at the vertices is largest; the shortest paths by these multipliers are
added to the known ones. Of the multipliers' means over device types there is only one here: all
stages share it.
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

# Seconds that a round counts towards the budget of a run.
ROUND_SECONDS = 1e-2

# All memory of a device costs at most this multiple of the seconds of all triples. Prices need some
# limit: where no program fits in a cell, the bound rises with them without end.
DEAREST = 1e5
# Rounds of cutting planes per cell at most. A further round must promise to raise the bound by this
# share of it.
ROUNDS, PROMISE = 40, 1e-7
# Rounding in sums of thousands of terms.
CUT_ROUNDING = 1e-12


@dataclass(frozen=True)
class ProgramTotals:
    """The sums of work of a program, a path of the graph."""

    program: tuple[int, ...]  # triple numbers in order of execution
    fixed_comm: float  # seconds of collectives, whatever the ratios
    shared_comm: Floats  # [g] seconds of collectives per largest ratio
    fixed_computing: Floats  # [K] seconds of computing on each type, whatever the ratios
    shared_computing: Floats  # [g, K] seconds of computing on each type per ratio
    fixed_bytes: float  # bytes on every device
    shared_bytes: Floats  # [g] bytes per ratio


def first_multipliers(problem: HapProblem) -> Multipliers:
    """Means by which all ratios cost the same; bytes cost nothing.

    Let B_kd be the ratio of each of the n_d devices of type d in segment k, and v_d their speed.
    The weights are in proportion to n_d v_d for computing (whose cost is B_kd / v_d) and to n_d for
    the largest ratio (whose cost is B_kd). Both costs are then in proportion to sum_d n_d B_kd, and
    this sum is 1 for all ratios.
    """
    speed_of_type = problem.speeds * problem.counts
    share_of_devices = problem.counts / problem.counts.sum()
    return Multipliers(
        type_weights=speed_of_type / speed_of_type.sum(),
        top_weights=np.tile(share_of_devices, (problem.g, 1)),
        byte_prices=np.zeros(problem.K),
    )


def _totals(problem: HapProblem, graph: Graph, arcs: list[int]) -> ProgramTotals:
    """The sums of work along the arcs of a path."""
    work = graph.work[np.array(arcs, dtype=np.int64)]
    comm = work.comm
    # [K] seconds on each type per second on the fastest one, which the work is counted in and which
    # is the last
    slow = problem.speeds[-1] / problem.speeds
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
    """(A lower bound of the cell, the multipliers that prove it, the programs met as paths).

    means: means of the cell; its multipliers are set to the best ones. start: the first
    multipliers, those of a larger cell. threshold: no better multipliers are sought once the bound
    has reached it.
    """
    problem, multipliers = means.problem, start
    paths: dict[tuple[int, ...], ProgramTotals] = {}
    best, chosen = -np.inf, start
    for _ in range(ROUNDS):
        means.set_multipliers(multipliers)
        run.count(ROUND_SECONDS)
        one_mean = multipliers.type_weights[None]  # [1, K]
        cost = means.costs(graph.work, one_mean)[:, 0]  # [arc, V] by this mean
        length, first_arc = shortest(graph, cost)
        least = float(length[graph.start].min())
        rounding = CUT_ROUNDING * (least + means.memory_seconds)
        value = least - means.memory_seconds - rounding
        if value > best:
            best, chosen = value, multipliers
        if best >= threshold or run.should_stop:
            break
        for v in range(len(means.x)):
            totals = _totals(problem, graph, path(graph, first_arc[:, v]))
            paths[totals.program] = totals
        answer = _best_by_cuts(problem, means.x, list(paths.values()), run)
        if answer is None:
            break
        upper_bound, multipliers = answer
        promised = upper_bound - best
        if promised <= PROMISE * max(abs(upper_bound), SMALLEST * problem.seconds_of_all):
            break
    means.set_multipliers(chosen)
    return best, chosen, list(paths.values())


def _best_by_cuts(
    problem: HapProblem, x: Floats, paths: Sequence[ProgramTotals], run: Run
) -> tuple[float, Multipliers] | None:
    """(The largest bound that multipliers prove against these paths alone, such multipliers).

    The bound is an upper bound of what any multipliers can prove in the cell of vertices x
    [V, g, K]. None where the solver found no multipliers.

    Vars   level seconds; w_d and u_kd means over types; price_d seconds of all memory of a device.
    Max    level  s.t.
    (1) sum_d w_d = 1               (2) sum_d u_kd = 1
    (3) level <= the cost of each path at each vertex by the multipliers, less the price of memory
    """
    assert problem.capacity is not None
    most = problem.seconds_of_all or 1.0
    room = np.where(problem.capacity > 0, problem.capacity, 1.0)
    model = Model("hap-prices", totals=Totals(least=most, largest=most))
    level = model.seconds("level", lower=None)
    w = model.continuous("w", problem.K)
    u = model.continuous("u", (problem.g, problem.K))
    price = model.continuous("price", problem.K, 0.0, DEAREST)  # in units of `most`
    model.minimize(-level)
    model.row("mean", w.sum() == 1)  # (1)
    model.row("mean", u.sum(axis=1) == 1)  # (2)
    for p in paths:
        for ratios in x:
            busy = p.fixed_computing + (p.shared_computing * ratios).sum(axis=0)
            top = p.shared_comm[:, None] * ratios
            free_bytes = problem.capacity - (p.fixed_bytes + p.shared_bytes @ ratios)
            # clipped, so that a solver takes the coefficients; the bound of the multipliers is
            # computed from the graph, not from these rows
            free = np.clip(free_bytes / room * most, -1e9 * most, 1e9 * most)
            seconds = p.fixed_comm + busy @ w + (top * u).sum()
            model.row("cut", level <= seconds - free @ price)  # (3)
    answer = minimise("milp", model, run.part(), report=lambda incumbent, bound: None)
    if answer.x is None or answer.objective is None:
        return None
    type_weights = np.maximum(answer.values(w), 0.0)
    top_weights = np.maximum(answer.values(u), 0.0)
    multipliers = Multipliers(
        type_weights=type_weights / type_weights.sum(),
        top_weights=top_weights / top_weights.sum(axis=1, keepdims=True),
        byte_prices=np.maximum(answer.values(price), 0.0) * most / room,
    )
    return -answer.objective, multipliers
