"""Problem `hap` as a mixed-integer linear programme over the graph of needs (module `states`),
exact.

Sets   arcs a of the graph, K device types d of n_d devices, segments k.
Vars   z_a in {0,1}: the program runs arc a's triple; B_kd ratios; w_akd = z_a B_kd; l_ad seconds
       that type d has computed since the last (in reading order) synchronisation when arc a begins;
       t_a seconds of the stage that ends with arc a (a communication, or a computation into the
       empty set); m_a = z_a max_d B_kd.
Min    sum_a t_a + sum_comm (fixed z_a + shared m_a)   s.t.
(1) z is a path from {goal} to the empty set through no node twice
(2) w is a flow along z: what enters a node leaves it, it begins as B;  (3) sum_d n_d w_akd = z_a
(4) l is a flow that gains (F z_a + S w_akd) / v_d on a computation and starts anew after a
communication
(5) l_ad <= U z_a     (6) t_a >= l_ad (+ the computation's own seconds)     (7) m_a >= w_akd
(8) with memory  sum_a (fixed_bytes z_a + shared_bytes w_akd) <= device_bytes_d, k the segment of a
(9) of programs found that no ratios fit after all (tolerances), not all triples together
With z whole, (1)-(3) make w = z B exact because B does not change along the path. A path that runs
a triple twice holds no less than the program without the second time.

`relaxed` is for theories too wide for that graph: on the canonical graph, whose paths stand for
sets of triples in any order, one maximum over the whole program replaces the stages' maxima; a
lower bound of the problem. Memory does not depend on the order: what fits nothing there fits
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.formulations.hap.graph import Graph
from hetplan.formulations.hap.problem import Floats, HapProblem
from hetplan.formulations.hap.theory import Theory
from hetplan.solvers.linear_model import SMALLEST, Columns, LinearModel

# A triple that would fill a device's memory so many times over counts as filling it so often.
MOST_TIMES = 1e6
# Share of the memory granted beyond it, so that a solver's tolerance cuts nothing off; ratios are
# priced exactly later.
SLACK = 1e-8


@dataclass(frozen=True)
class Programme:
    """The model, its graph, the columns z [A], and model units per second."""

    model: LinearModel
    graph: Graph
    z: Columns
    unit: float


@dataclass(frozen=True)
class Arcs:
    """tail, comm, segment [A]; fixed, shared [A, K]: seconds on each type in model units (comm:
    alike)."""

    tail: Columns
    comm: Columns
    segment: Columns
    fixed: Floats
    shared: Floats


def arcs_of(problem: HapProblem, graph: Graph, unit: float) -> Arcs:
    """The arcs with their costs; what is too small for a solver becomes 0, which lowers the cost
    (below 1e-11 of it)."""
    steps = [graph.theory.steps[s] for s in graph.label]
    comm = np.array([s.comm for s in steps], dtype=bool)
    speed = np.where(comm[:, None], 1.0, problem.speeds[None, :])

    def seconds(values: list[float]) -> Floats:
        scaled = np.array(values)[:, None] * (unit / speed)
        return np.where(scaled < SMALLEST, 0.0, scaled)

    return Arcs(
        tail=np.repeat(np.arange(graph.n), np.diff(graph.first)),
        comm=comm.astype(np.int64),
        segment=np.array([s.segment for s in steps], dtype=np.int64),
        fixed=seconds([s.fixed for s in steps]),
        shared=seconds([s.shared for s in steps]),
    )


def build(
    problem: HapProblem, graph: Graph, unit: float, upper: float, *, relaxed: bool = False
) -> Programme:
    """The programme; `upper`: a cost that some program does not exceed, in seconds."""
    model = LinearModel("hap")
    arcs = arcs_of(problem, graph, unit)
    count = len(graph.head)
    z = model.binary("z", count)
    ratio = model.continuous("ratio", (problem.g, problem.K), 0.0, 1.0)
    w = model.continuous("w", (count, problem.g, problem.K), 0.0, 1.0)
    for k in range(problem.g):
        model.equal("whole", ratio[k], problem.counts.astype(float), to=1.0)
    follow_a_path(model, graph, arcs, z)
    carry_the_ratios(model, graph, arcs, w, ratio)
    share_out(model, problem, z, w)
    pay_for_communication(model, problem, arcs, z, w)
    fit_memory(model, problem, graph, arcs, z, w)
    if relaxed:
        bound_by_the_whole(model, problem, arcs, z, w)
    else:
        pay_for_stages(model, problem, graph, arcs, z, w, upper * unit)
    return Programme(model, graph, z, unit)


def follow_a_path(model: LinearModel, graph: Graph, arcs: Arcs, z: Columns) -> None:  # (1)
    """One unit from {goal} to the empty set; each node is left at most once."""
    for u in range(graph.n):
        out, into = z[arcs.tail == u], z[graph.head == u]
        begins = 1.0 if u == graph.start else 0.0
        if u < graph.n - 1:
            model.equal(
                "path",
                np.append(out, into),
                np.repeat([1.0, -1.0], [len(out), len(into)]),
                to=begins,
            )
            model.row("once", out, upper=1.0)


# (2)
def carry_the_ratios(
    model: LinearModel, graph: Graph, arcs: Arcs, w: Columns, ratio: Columns
) -> None:
    """What enters a node leaves it; at {goal} the ratios enter."""
    for u in range(graph.n - 1):
        out, into = arcs.tail == u, graph.head == u
        for k, d in np.ndindex(*ratio.shape):
            columns = [*w[out, k, d], *w[into, k, d], *([ratio[k, d]] if u == graph.start else [])]
            values = np.repeat([1.0, -1.0], [int(out.sum()), len(columns) - int(out.sum())])
            model.equal("carry", columns, values, to=0.0)


def share_out(model: LinearModel, problem: HapProblem, z: Columns, w: Columns) -> None:  # (3)
    """The ratios on a chosen arc sum to 1, on any other they vanish."""
    for a in range(len(z)):
        for k in range(problem.g):
            model.equal("share", np.append(w[a, k], z[a]), np.append(problem.counts, -1.0), to=0.0)


def pay_for_communication(
    model: LinearModel, problem: HapProblem, arcs: Arcs, z: Columns, w: Columns
) -> None:  # (7)
    """fixed z + shared max_d w."""
    comm = np.flatnonzero(arcs.comm)
    model.minimize(z[comm], arcs.fixed[comm, 0])
    paying = comm[arcs.shared[comm, 0] > 0]
    largest = model.continuous("largest", len(paying), 0.0, 1.0)
    model.minimize(largest, arcs.shared[paying, 0])
    for m, a in zip(largest, paying, strict=True):
        for d in range(problem.K):
            model.row("largest", [m, w[a, arcs.segment[a], d]], [1.0, -1.0], lower=0.0)


def pay_for_stages(
    model: LinearModel,
    problem: HapProblem,
    graph: Graph,
    arcs: Arcs,
    z: Columns,
    w: Columns,
    upper: float,
) -> None:  # (4), (5), (6)
    """Load per type along the path; a stage costs the largest."""
    count = len(z)
    load = model.continuous("load", (count, problem.K))
    ends = np.flatnonzero((arcs.comm == 1) | (graph.head == graph.n - 1))
    stage = dict(zip(ends, model.continuous("stage", len(ends)), strict=True))
    model.minimize(np.array(list(stage.values())), 1.0)
    for a in range(count):
        for d in range(problem.K):
            model.row("only", [load[a, d], z[a]], [1.0, -upper], upper=0.0)
            if a in stage:
                own = (
                    []
                    if arcs.comm[a]
                    else [(z[a], -arcs.fixed[a, d]), (w[a, arcs.segment[a], d], -arcs.shared[a, d])]
                )
                columns = [stage[a], load[a, d], *(c for c, _ in own)]
                model.row("slowest", columns, [1.0, -1.0, *(v for _, v in own)], lower=0.0)
    for u in range(graph.n - 1):
        out = np.flatnonzero(arcs.tail == u)
        into = np.flatnonzero((graph.head == u) & (arcs.comm == 0))
        for d in range(problem.K):
            columns = [
                *load[out, d],
                *load[into, d],
                *z[into],
                *(w[a, arcs.segment[a], d] for a in into),
            ]
            values = [
                *np.ones(len(out)),
                *-np.ones(len(into)),
                *-arcs.fixed[into, d],
                *-arcs.shared[into, d],
            ]
            model.equal("load", columns, values, to=0.0)


def fit_memory(
    model: LinearModel, problem: HapProblem, graph: Graph, arcs: Arcs, z: Columns, w: Columns
) -> None:  # (8)
    """Each type's bytes, as parts of its memory (of a byte where it has none); what is too small
    becomes 0. What would fill it alone is in no program."""
    if problem.capacity is None:
        return
    steps = [graph.theory.steps[s] for s in graph.label]
    fixed, shared = np.array([(s.fixed_bytes, s.shared_bytes) for s in steps]).T
    for d, room in enumerate(problem.capacity):
        unit = float(room) if room > 0 else 1.0
        shares = np.array([w[a, k, d] for a, k in enumerate(arcs.segment)], dtype=np.int64)
        model.fix(z[fixed > room], 0.0)
        parts = np.concatenate([np.minimum(fixed, 2.0 * unit), shared]) / unit
        parts = np.minimum(np.where(parts < SMALLEST, 0.0, parts), MOST_TIMES)
        model.row(
            "memory", np.concatenate([z, shares]), parts, upper=float(room) / unit * (1 + SLACK)
        )


def forbid(programme: Programme, program: Sequence[int]) -> None:  # (9)
    """These triples (numbers), which no ratios fit in memory, together: nor does anything with more
    of them."""
    chosen, steps = set(program), programme.graph.theory.steps
    positions = {n for n, step in enumerate(steps) if step.index in chosen}
    columns = [z for z, n in zip(programme.z, programme.graph.label, strict=True) if n in positions]
    programme.model.row("forbidden", columns, upper=len(positions) - 1.0)


def bound_by_the_whole(
    model: LinearModel, problem: HapProblem, arcs: Arcs, z: Columns, w: Columns
) -> None:
    """The busiest type's time over the whole program, instead of the sum of the stages' maxima."""
    total = model.continuous("total")
    model.minimize(total, 1.0)
    work = np.flatnonzero(arcs.comm == 0)
    for d in range(problem.K):
        shares = np.array([w[a, arcs.segment[a], d] for a in work], dtype=np.int64)
        columns = np.concatenate([[total], z[work], shares])
        values = np.concatenate([[1.0], -arcs.fixed[work, d], -arcs.shared[work, d]])
        model.row("total", columns, values, lower=0.0)


def walked(theory: Theory, graph: Graph, chosen: Floats) -> list[int]:
    """The program (triple numbers) of a path given by its arcs' values [A]."""
    path: list[int] = []
    u, seen = graph.start, set()
    while u < graph.n - 1 and u not in seen:
        seen.add(u)
        out = np.arange(graph.first[u], graph.first[u + 1])
        a = int(out[np.argmax(chosen[out])])
        path.append(theory.steps[graph.label[a]].index)
        u = int(graph.head[a])
    return path[::-1]
