"""Problem `ditto` as one CP-SAT model; sets, variables and numbers of constraints as in `arcs`.

Seconds become integers by rounding down; theta's own coefficient N_b - (stages behind k*) is
positive, so the model prices no template too high and its bound holds as it is. The scale is as
fine as CP-SAT's integers allow: two stages that the evaluator tells apart must stay apart, since T
jumps with the place of the slowest.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from hetplan.formulations.ditto.arcs import Arcs, known_before, least_objective, list_arcs
from hetplan.formulations.ditto.data import DittoData, DittoDecision
from hetplan.formulations.ditto.milp import NONE_FITS
from hetplan.formulations.ditto.problem import Ints, compile_problem, infeasible_because
from hetplan.solvers import cpsat
from hetplan.solvers.native import Scale
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run
from hetplan.solvers.whole import Whole

# Relative to the least objective: far below the evaluator's tie in all but enormous instances.
FINEST = 1e-11


@dataclass(frozen=True)
class Model:
    """The model with its variables; seconds [Q] and slack (the tie) in integer time units."""

    cp: cpsat.Model
    arcs: Arcs
    seconds: Ints
    slack: int
    before: list[cp_model.IntVar]
    after: list[cp_model.IntVar]
    peak: list[cp_model.IntVar]
    theta: cp_model.IntVar

    def total(self, arcs: Ints, values: Ints) -> cp_model.LinearExprT:
        """Sum over the given arcs, in all roles, of their values (values [Q])."""
        peaks = self.arcs.peaks_of(arcs)
        variables = [block[q] for block in (self.before, self.after) for q in arcs.tolist()]
        variables += [self.peak[p] for p in peaks.tolist()]
        weights = np.concatenate([values[arcs], values[arcs], values[self.arcs.peak_arc[peaks]]])
        return cp_model.LinearExpr.weighted_sum(variables, weights.tolist())


def follow_a_path(m: Model) -> None:  # (1)
    """Stages in front of k* lead from layer 0 up to it, stages behind it from there to layer L."""
    arcs, layers = m.arcs, m.arcs.problem.layers
    for at in range(layers + 1):
        ends, begins = np.flatnonzero(arcs.last == at), np.flatnonzero(arcs.first == at)
        peaks = [m.peak[p] for p in arcs.peaks_of(begins).tolist()]
        arriving = sum(m.before[q] for q in ends.tolist()) + (1 if at == 0 else 0)
        m.cp.add(arriving == sum([*(m.before[q] for q in begins.tolist()), *peaks]))
        peaks = [m.peak[p] for p in arcs.peaks_of(ends).tolist()]
        arriving = sum([*(m.after[q] for q in ends.tolist()), *peaks])
        m.cp.add(arriving == sum(m.after[q] for q in begins.tolist()) + (1 if at == layers else 0))


def keep_below_the_slowest(m: Model) -> None:  # (2)
    """No stage in front of k* is slower than it, none behind it by more than the tie; theta: its
    time."""
    m.cp.add(
        m.theta == cp_model.LinearExpr.weighted_sum(m.peak, m.seconds[m.arcs.peak_arc].tolist())
    )
    for layer in range(m.arcs.problem.layers):
        q = m.arcs.covering(layer)
        variables = [block[i] for block in (m.before, m.after) for i in q.tolist()]
        times = np.concatenate([m.seconds[q], np.maximum(m.seconds[q] - m.slack, 0)])
        m.cp.add(cp_model.LinearExpr.weighted_sum(variables, times.tolist()) <= m.theta)


def count_stages_behind(m: Model) -> None:  # (3)
    """k* knows how many stages lie behind it."""
    m.cp.add(cp_model.LinearExpr.weighted_sum(m.peak, m.arcs.behind.tolist()) == sum(m.after))


def keep_to_devices(m: Model) -> None:  # (4)
    """Each kind gives what it has."""
    for i, available in enumerate(m.arcs.problem.devices.tolist()):
        m.cp.add(m.total(np.flatnonzero(m.arcs.kind == i), m.arcs.devices) <= available)


def keep_to_micro_batches(m: Model) -> None:  # (5)
    """No more stages than micro-batches."""
    m.cp.add(sum([*m.before, *m.after, *m.peak]) <= m.arcs.problem.micro_batches)


def fit_memory(m: Model) -> None:  # (6)
    """A stage holds as many micro-batches as there are stages from it on."""
    arcs = m.arcs
    if not arcs.problem.has_memory:
        return
    most = arcs.problem.most_stages
    for a in range(arcs.problem.layers):
        taken = np.where(arcs.first == a, most - arcs.alive, 0) + 1
        m.cp.add(m.total(np.flatnonzero(arcs.first >= a), taken) <= most)


def minimise_time(m: Model) -> None:
    """T, written with theta."""
    weights = (m.arcs.problem.micro_batches - m.arcs.behind) * m.seconds[m.arcs.peak_arc]
    m.cp.minimize(
        cp_model.LinearExpr.weighted_sum(m.before, m.seconds.tolist())
        + cp_model.LinearExpr.weighted_sum(m.after, (2 * m.seconds).tolist())
        + cp_model.LinearExpr.weighted_sum(m.peak, weights.tolist())
    )


CONSTRAINTS = (
    follow_a_path,
    keep_below_the_slowest,
    count_stages_behind,
    keep_to_devices,
    keep_to_micro_batches,
    fit_memory,
)


def build(arcs: Arcs, scale: float, run: Run) -> Model:
    """The whole model; `scale`: integer time units per second. Raises `Stopped` when `run` should
    stop."""
    cp, every = cpsat.Model(run), range(len(arcs))
    seconds = cpsat.rounded_down(arcs.seconds, scale)
    model = Model(
        cp=cp,
        arcs=arcs,
        seconds=seconds,
        slack=math.ceil(arcs.tie * scale),
        before=[cp.new_bool_var(f"before{q}") for q in every],
        after=[cp.new_bool_var(f"after{q}") for q in every],
        peak=[cp.new_bool_var(f"peak{p}") for p in range(len(arcs.peak_arc))],
        theta=cp.new_int_var(0, int(seconds.max(initial=0)), "theta"),
    )
    for constrain in CONSTRAINTS:
        constrain(model)
    minimise_time(model)
    if arcs.start is not None:
        for block, used in zip((model.before, model.peak, model.after), arcs.roles(), strict=True):
            chosen = set(used.tolist())
            for number, variable in enumerate(block):
                cp.add_hint(variable, number in chosen)
        cp.add_hint(model.theta, int(seconds[arcs.peak_arc[arcs.roles()[1]]].sum()))
    return model


def solve(data: DittoData, run: Run) -> Outcome[DittoDecision]:
    """Proven optimum up to the rounding stated in the bound, or what there is when time runs
    out."""
    begun = time.perf_counter()
    problem = compile_problem(data)
    reason = infeasible_because(problem)
    if reason is not None:
        spent = time.perf_counter() - begun
        return Outcome(
            stop=Stop.INFEASIBLE, message=reason, build_seconds=spent, solver=cpsat.SOLVER
        )
    arcs = list_arcs(problem, run)
    roundings = problem.micro_batches + 2 * problem.most_stages
    largest = roundings * float(arcs.seconds.max(initial=0.0))
    least = min(
        largest, max(least_objective(problem), largest * 1e-6)
    )  # above: no template, CP-SAT will say so
    scale = cpsat.integer_scale(least, largest, roundings, error=FINEST) if largest > 0 else 1.0

    def read(model: Model, answer: cpsat.CpAnswer) -> DittoDecision:
        peaks = arcs.peak_arc[answer.chosen(model.peak)].tolist()
        used = [*answer.chosen(model.before), *answer.chosen(model.after), *peaks]
        return problem.decision(arcs.stages(np.array(used, dtype=np.int64)))

    return Whole(
        build=lambda: build(arcs, scale, run),
        ask=lambda model: cpsat.solve(
            model.cp, run, Scale(per_unit=scale, under=roundings / scale)
        ),
        read=read,
        solver=cpsat.SOLVER,
        infeasible=NONE_FITS,
        known=known_before(arcs),
    ).solve(run, begun)
