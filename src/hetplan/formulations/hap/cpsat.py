"""Problem `hap` as one CP-SAT model over the graph of needs; the ratios in steps of 1 / STEPS.

Sets   arcs a of the graph (module `states`), device types d of n_d devices, segments k.
Vars   z_a in {0,1}: the program runs arc a's triple; y_kd = floor(STEPS n_d B_kd); c_ud: when type
       d reaches node u, reading the program from its end; top_k >= y_kd / n_d.
Min    max_d c_(empty set)d   s.t.
(1) z is a path from {goal} to the empty set   (2) STEPS - K < sum_d y_kd <= STEPS
(3) z_a, a computation from u to h: c_hd >= c_ud + (F + S B_kd) / v_d
(4) z_a, a communication: c_hd >= c_ue + fixed + shared top_k for all types d, e (everyone waits)
(5) with memory, of each device: sum_a (fixed_bytes z_a + shared_bytes z_a B_kd) <= device_bytes_d
(6) of programs found that no ratios fit in memory, not all triples together, and the model is
solved again All numbers are rounded down and every rounding lowers the cost, so the bound holds as
it is; the decision's ratios are re-optimised, and what rounding hid remains as a small gap. On a
canonical graph (theories too wide for the other) sums over the whole program replace (3) and (4),
as in `programme`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from hetplan.formulations.hap.common import NONE_FITS, ended, pose
from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.first import fitting_program, simple_bound
from hetplan.formulations.hap.graph import WIDE, Graph, choose
from hetplan.formulations.hap.problem import Floats, HapProblem, Ints
from hetplan.formulations.hap.programme import walked
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.solvers import cpsat
from hetplan.solvers.native import Scale
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run

STATES = 8_000
STEPS = 2**16
BYTES = 2.0**34  # of a device's memory, in integer units
LARGEST = 2.0**38  # of a total, in integer time units; finer units make the search crawl


@dataclass(frozen=True)
class Costs:
    """Per arc, in integer time units: fixed [A, K], shared [A, K] per step of y; comm, segment,
    tail [A]."""

    fixed: Ints
    shared: Ints
    comm: Ints
    segment: Ints
    tail: Ints


@dataclass(frozen=True)
class Variables:
    """z [A]; y [g][K]; top [g]."""

    z: list[cp_model.IntVar]
    y: list[list[cp_model.IntVar]]
    top: list[cp_model.IntVar]


def costs_of(problem: HapProblem, graph: Graph, per_second: float, most: float) -> Costs:
    """Rounded down, so that no program is priced too high; costs beyond 4096 times `most` seconds
    are cut there."""
    steps = [graph.theory.steps[s] for s in graph.label]
    comm = np.array([s.comm for s in steps], dtype=bool)
    speed = np.where(comm[:, None], 1.0, problem.speeds[None, :])
    each = np.where(comm[:, None], 1.0, problem.counts[None, :].astype(float)) * STEPS
    fixed = np.array([s.fixed for s in steps])[:, None] / speed
    shared = np.minimum(np.array([s.shared for s in steps])[:, None] / speed, 4096 * most) / each
    fixed = np.minimum(fixed, 4096 * most)
    return Costs(
        fixed=cpsat.rounded_down(fixed, per_second),
        shared=cpsat.rounded_down(shared, per_second),
        comm=comm.astype(np.int64),
        segment=np.array([s.segment for s in steps], dtype=np.int64),
        tail=np.repeat(np.arange(graph.n), np.diff(graph.first)),
    )


def make_variables(cp: cp_model.CpModel, problem: HapProblem, graph: Graph) -> Variables:
    """All variables with their bounds."""
    g, K = range(problem.g), range(problem.K)
    return Variables(
        z=[cp.new_bool_var(f"z{a}") for a in range(len(graph.head))],
        y=[[cp.new_int_var(0, STEPS, f"y{k}_{d}") for d in K] for k in g],
        top=[cp.new_int_var(0, STEPS, f"top{k}") for k in g],
    )


def follow_a_path(cp: cp_model.CpModel, graph: Graph, costs: Costs, v: Variables) -> None:  # (1)
    """One unit from {goal} to the empty set; each node is left at most once."""
    out: list[list[cp_model.IntVar]] = [[] for _ in range(graph.n)]
    into: list[list[cp_model.IntVar]] = [[] for _ in range(graph.n)]
    for a, z in enumerate(v.z):
        out[costs.tail[a]].append(z)
        into[graph.head[a]].append(z)
    for u in range(graph.n - 1):
        cp.add(sum(out[u]) - sum(into[u]) == (1 if u == graph.start else 0))
        cp.add_at_most_one(out[u])


def share_out(cp: cp_model.CpModel, problem: HapProblem, v: Variables) -> None:  # (2)
    """Ratios rounded down lose less than one step per type; the largest is at least each of
    them."""
    for y, top in zip(v.y, v.top, strict=True):
        cp.add_linear_constraint(sum(y), STEPS - problem.K + 1 if problem.K > 1 else STEPS, STEPS)
        for d, n in enumerate(problem.counts):
            # top >= y / n - (what rounding n B down lost is below one step of n B, so it is a floor
            # again)
            cp.add(int(n) * top + int(n) - 1 >= y[d])


def run_the_clocks(
    cp: cp_model.CpModel,
    problem: HapProblem,
    graph: Graph,
    costs: Costs,
    v: Variables,
    horizon: int,
) -> cp_model.IntVar:  # (3), (4)
    """Clocks per node and type along the chosen path; returns the last one."""
    K = range(problem.K)
    clock = [[cp.new_int_var(0, horizon, f"c{u}_{d}") for d in K] for u in range(graph.n)]
    for a, z in enumerate(v.z):
        u, h, k = int(costs.tail[a]), int(graph.head[a]), int(costs.segment[a])
        for d in K:
            fixed, shared = int(costs.fixed[a, d]), int(costs.shared[a, d])
            if not costs.comm[a]:
                cp.add(clock[h][d] >= clock[u][d] + fixed + shared * v.y[k][d]).only_enforce_if(z)
                continue
            for e in K:
                cp.add(clock[h][d] >= clock[u][e] + fixed + shared * v.top[k]).only_enforce_if(z)
    last = cp.new_int_var(0, horizon, "last")
    cp.add_max_equality(last, clock[graph.n - 1])
    return last


def add_the_whole(
    cp: cp_model.CpModel,
    problem: HapProblem,
    graph: Graph,
    costs: Costs,
    v: Variables,
    horizon: int,
) -> cp_model.IntVar:
    """The busiest type's time over the whole program plus all communication: a relaxation without
    order."""
    total = cp.new_int_var(0, horizon, "total")
    comm: list[Any] = []
    busy: list[list[Any]] = [[] for _ in range(problem.K)]
    for a, z in enumerate(v.z):
        k = int(costs.segment[a])
        for d in range(1 if costs.comm[a] else problem.K):
            factor = v.top[k] if costs.comm[a] else v.y[k][d]
            shared, terms = int(costs.shared[a, d]), comm if costs.comm[a] else busy[d]
            terms.append(int(costs.fixed[a, d]) * z)
            if shared:
                part = cp.new_int_var(0, STEPS, f"p{a}_{d}")
                cp.add(part >= factor).only_enforce_if(z)
                terms.append(shared * part)
    for terms in busy:
        cp.add(total >= sum(terms) + sum(comm))
    return total


# (5)
def fit_memory(cp: cp_model.CpModel, problem: HapProblem, graph: Graph, v: Variables) -> None:
    """Each type's bytes in parts of its memory; all of them are rounded down, which lets in too
    much at worst."""
    if problem.capacity is None:
        return
    for d, (room, n) in enumerate(zip(problem.capacity, problem.counts, strict=True)):
        unit = BYTES / float(room) if room > 0 else 1.0
        terms: list[Any] = []
        for a, (z, s) in enumerate(zip(v.z, graph.label, strict=True)):
            step = graph.theory.steps[s]
            fixed = int(min(step.fixed_bytes * unit, 2 * BYTES))
            shared = int(min(step.shared_bytes * unit, 256 * BYTES) / (STEPS * n))
            if fixed:
                terms.append(fixed * z)
            if shared:
                part = cp.new_int_var(0, STEPS, f"held{a}_{d}")
                cp.add(part >= v.y[step.segment][d]).only_enforce_if(z)
                terms.append(shared * part)
        if terms:
            cp.add(sum(terms) <= int(room * unit))


def forbid(cp: cp_model.CpModel, graph: Graph, v: Variables, program: Sequence[int]) -> None:  # (6)
    """These triples (numbers) together hold too much, and so does whatever else a program adds."""
    chosen = set(program)
    positions = {n for n, step in enumerate(graph.theory.steps) if step.index in chosen}
    arcs = [z for z, s in zip(v.z, graph.label, strict=True) if s in positions]
    cp.add(sum(arcs) <= len(positions) - 1)


def solve(data: HapData, run: Run) -> Outcome[HapDecision]:
    """The optimum up to the rounding of the ratios, or what there is when time runs out."""
    posed = pose(data, run)
    if isinstance(posed, Outcome):
        return posed
    problem, theory = posed.problem, posed.theory
    first, least = fitting_program(theory, run)
    floor = simple_bound(theory)
    chosen = choose(theory, STATES, STATES, run) if least > 0 and not run.should_stop else None
    if chosen is None:
        return ended(
            posed, first, run=run, stop=Stop.OPTIMAL if least <= 0 else Stop.LIMIT, bound=floor,
            built=time.perf_counter(), solver=cpsat.SOLVER,
            message="" if least <= 0 or run.should_stop else "the theory is too wide for this method",
        )  # fmt: skip
    graph = chosen
    upper = least if np.isfinite(least) else problem.most_seconds or 1.0
    per_second = 2.0 ** np.floor(np.log2(LARGEST / upper))
    costs = costs_of(problem, graph, per_second, upper)
    cp = cp_model.CpModel()
    v = make_variables(cp, problem, graph)
    horizon = int(np.floor(upper * per_second)) + 1
    follow_a_path(cp, graph, costs, v)
    share_out(cp, problem, v)
    fit_memory(cp, problem, graph, v)
    leave_out_the_hopeless(cp, costs, v, horizon)
    price = run_the_clocks if chosen.ordered else add_the_whole
    cp.minimize(price(cp, problem, graph, costs, v, horizon))
    built = time.perf_counter()
    program = first
    while True:
        answer = cpsat.solve(
            cp, linearised(run), Scale(per_unit=per_second, under=upper),
            lambda incumbent, bound: run.report(incumbent=incumbent, bound=bound),
        )  # fmt: skip
        if not answer.has_solution:
            break
        z: Floats = np.array([answer.value(z) for z in v.z], dtype=float)
        found = theory.program(walked(theory, graph, z))
        ratios = best_ratios(problem, problem.stages(found), Run(run.options, None, run.cancel))
        if ratios.seconds <= least:
            program, least = found, ratios.seconds
        if answer.stop is not Stop.OPTIMAL or not ratios.impossible:
            break
        forbid(cp, graph, v, found)
    if answer.stop is Stop.INFEASIBLE and problem.capacity is not None:
        none = not np.isfinite(least)
        return ended(
            posed, None if none else program, run=run, stop=Stop.INFEASIBLE if none else Stop.ERROR,
            bound=None if none else floor, built=built, solver=answer.solver, message=NONE_FITS if none else "",
        )  # fmt: skip
    note = f"ratios rounded down to 1/{STEPS} in the model" if chosen.ordered else WIDE
    stop = answer.stop if chosen.ordered or answer.stop is not Stop.OPTIMAL else Stop.LIMIT
    return ended(
        posed, program, run=run, stop=Stop.ERROR if stop is Stop.INFEASIBLE else stop,
        bound=floor if answer.bound is None else max(floor, answer.bound), built=built, solver=answer.solver,
        message=answer.message or note, details={**answer.statistics, "states": graph.n},
    )  # fmt: skip


def linearised(run: Run) -> Run:
    """The run with enforced rows in the linear relaxation too, unless the user says otherwise:
    bisecting the ratios without it takes a thousand times as long."""
    own = {"linearization_level": 2, **run.options.native.get(cpsat.BACKEND, {})}
    options = replace(run.options, native={**run.options.native, cpsat.BACKEND: own})
    return replace(run, options=options)


def leave_out_the_hopeless(cp: cp_model.CpModel, costs: Costs, v: Variables, horizon: int) -> None:
    """Triples whose fixed cost alone exceeds the first program's time are in no better program."""
    for a, z in enumerate(v.z):
        if costs.fixed[a].max() > horizon:
            cp.add(z == 0)
