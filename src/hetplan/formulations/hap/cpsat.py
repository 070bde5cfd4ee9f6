"""Problem `hap` as one CP-SAT model over the graph of needs; the ratios in steps of 1 / STEPS.

Sets   arcs a of the graph (module `states`), device types d of n_d devices, segments k.
Vars   z_a in {0,1}: the program runs arc a's triple; y_kd = floor(STEPS n_d B_kd); c_ud: when type d reaches
       node u, reading the program from its end; top_k >= y_kd / n_d.
Min    max_d c_(empty set)d   s.t.
(1) z is a path from {goal} to the empty set   (2) STEPS - K < sum_d y_kd <= STEPS
(3) z_a, a computation from u to h: c_hd >= c_ud + (F + S B_kd) / v_d
(4) z_a, a communication: c_hd >= c_ue + fixed + shared top_k for all types d, e (everyone waits)
All numbers are rounded down and every rounding lowers the cost, so the bound holds as it is; the decision's
ratios are re-optimised, and what rounding hid remains as a small gap. On a canonical graph (theories too wide
for the other) sums over the whole program replace (3) and (4), as in `programme`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from hetplan.formulations.hap.common import ended, pose
from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.first import first_program, simple_bound
from hetplan.formulations.hap.graphs import WIDE, choose
from hetplan.formulations.hap.problem import Floats, HapProblem, Ints
from hetplan.formulations.hap.programme import walked
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.formulations.hap.states import Graph
from hetplan.solvers import cpsat
from hetplan.solvers.native import Scale
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run

STATES = 8_000
STEPS = 2**16
LARGEST = 2.0**38  # of a total, in integer time units; finer units make the search crawl


@dataclass(frozen=True)
class Costs:
    """Per arc, in integer time units: fixed [A, K], shared [A, K] per step of y; comm, segment, tail [A]."""

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
    """Rounded down, so that no program is priced too high; costs beyond 4096 times `most` seconds are cut there."""
    steps = [graph.theory.steps[s] for s in graph.step]
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
    """Ratios rounded down lose less than one step per type; the largest is at least each of them."""
    for y, top in zip(v.y, v.top, strict=True):
        cp.add_linear_constraint(sum(y), STEPS - problem.K + 1 if problem.K > 1 else STEPS, STEPS)
        for d, n in enumerate(problem.counts):
            # top >= y / n - (what rounding n B down lost is below one step of n B, so it is a floor again)
            cp.add(int(n) * top + int(n) - 1 >= y[d])


def run_the_clocks(
    cp: cp_model.CpModel, problem: HapProblem, graph: Graph, costs: Costs, v: Variables, horizon: int
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
    cp: cp_model.CpModel, problem: HapProblem, graph: Graph, costs: Costs, v: Variables, horizon: int
) -> cp_model.IntVar:
    """The busiest type's time over the whole program plus all communication: a relaxation without order."""
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


def solve(data: HapData, run: Run) -> Outcome[HapDecision]:
    """The optimum up to the rounding of the ratios, or what there is when time runs out."""
    posed = pose(data, run)
    if isinstance(posed, Outcome):
        return posed
    problem, theory = posed.problem, posed.theory
    first = first_program(theory)
    least = best_ratios(problem, problem.stages(first), run).seconds
    floor = simple_bound(theory)
    chosen = choose(theory, STATES, STATES, run) if least > 0 and not run.should_stop else None
    if chosen is None or chosen.graph is None:
        return ended(
            posed, first, run=run, stop=Stop.OPTIMAL if least <= 0 else Stop.LIMIT, bound=floor,
            built=time.perf_counter(), solver=cpsat.SOLVER,
            message="" if chosen is None or run.should_stop else "the theory is too wide for this method",
        )  # fmt: skip
    graph = chosen.graph
    per_second = 2.0 ** np.floor(np.log2(LARGEST / least))
    costs = costs_of(problem, graph, per_second, least)
    cp = cp_model.CpModel()
    v = make_variables(cp, problem, graph)
    horizon = int(np.floor(least * per_second)) + 1
    follow_a_path(cp, graph, costs, v)
    share_out(cp, problem, v)
    leave_out_the_hopeless(cp, costs, v, horizon)
    price = run_the_clocks if chosen.exact else add_the_whole
    cp.minimize(price(cp, problem, graph, costs, v, horizon))
    built = time.perf_counter()
    answer = cpsat.solve(
        cp, linearised(run), Scale(per_unit=per_second, under=least),
        lambda incumbent, bound: run.report(incumbent=incumbent, bound=bound),
    )  # fmt: skip
    program = first
    if answer.has_solution:
        z: Floats = np.array([answer.value(z) for z in v.z], dtype=float)
        found = theory.program(walked(theory, graph, z))
        seconds = best_ratios(problem, problem.stages(found), Run(run.options, None, run.cancel)).seconds
        program = found if seconds <= least else first
    note = f"ratios rounded down to 1/{STEPS} in the model" if chosen.exact else WIDE
    stop = answer.stop if chosen.exact or answer.stop is not Stop.OPTIMAL else Stop.LIMIT
    return ended(
        posed, program, run=run, stop=Stop.ERROR if stop is Stop.INFEASIBLE else stop,
        bound=floor if answer.bound is None else max(floor, answer.bound), built=built, solver=answer.solver,
        message=answer.message or note, details={**answer.statistics, "states": graph.n},
    )  # fmt: skip


def linearised(run: Run) -> Run:
    """The run with enforced rows in the linear relaxation too, unless the user says otherwise: bisecting the
    ratios without it takes a thousand times as long."""
    own = {"linearization_level": 2, **run.options.native.get(cpsat.BACKEND, {})}
    options = replace(run.options, native={**run.options.native, cpsat.BACKEND: own})
    return replace(run, options=options)


def leave_out_the_hopeless(cp: cp_model.CpModel, costs: Costs, v: Variables, horizon: int) -> None:
    """Triples whose fixed cost alone exceeds the first program's time are in no better program."""
    for a, z in enumerate(v.z):
        if costs.fixed[a].max() > horizon:
            cp.add(z == 0)
