"""Problem `poplar` through CP-SAT: the counting model of `levels`, one function per constraint.

Times are multiplied by a power of two and rounded down, so that the model prices no plan too high
and its bound holds as it is; each step is off by less than one unit.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from hetplan.formulations.poplar.data import PoplarData, PoplarDecision
from hetplan.formulations.poplar.first import known_before, too_large
from hetplan.formulations.poplar.levels import NO_PLAN, Levels, build_levels, decode
from hetplan.formulations.poplar.problem import NOTHING_FITS, Ints, compile_problem
from hetplan.formulations.poplar.ties import SAME, Counts, Tie, settle
from hetplan.solvers import cpsat
from hetplan.solvers.native import Scale
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run
from hetplan.solvers.whole import Whole


@dataclass(frozen=True)
class Variables:
    """y[k][l - 1] and s[j] of the model; cost: its integer step costs [J], v_j + C rounded down."""

    y: list[list[Any]]
    s: list[Any]
    cost: Ints

    def counts(self, answer: cpsat.CpAnswer) -> Counts:
        """{load: devices} per group and s."""
        loads = [
            Counter({l: n for l, y in enumerate(row, 1) if (n := answer.value(y))})
            for row in self.y
        ]
        return loads, [answer.value(s) for s in self.s]


def solve(data: PoplarData, run: Run) -> Outcome[PoplarDecision]:
    """Proven optimum up to rounding, or what there is when time runs out."""
    begun = time.perf_counter()
    problem = compile_problem(data)
    if not problem.groups:
        spent = time.perf_counter() - begun
        return Outcome(
            stop=Stop.INFEASIBLE, message=NOTHING_FITS, build_seconds=spent, solver=cpsat.SOLVER
        )
    levels = build_levels(problem)
    if levels is None:
        return too_large(problem, cpsat.SOLVER, time.perf_counter() - begun)
    largest = max(levels.ceiling, float(levels.times[-1])) + levels.step_seconds
    per_second = cpsat.integer_scale(levels.floor, largest, levels.most_steps)
    scale = Scale(per_unit=per_second, offset=levels.offset, under=levels.most_steps / per_second)

    def again(tie: Tie) -> tuple[Stop, Counts | None]:
        model = build(levels, per_second, run, tie)
        answer = cpsat.solve(model.cp, run, report=lambda incumbent, bound: None)
        return answer.stop, model.v.counts(answer) if answer.has_solution else None

    outcome = Whole(
        build=lambda: build(levels, per_second, run),
        ask=lambda model: cpsat.solve(model.cp, run, scale),
        read=lambda model, answer: decode(levels, *model.v.counts(answer)),
        solver=cpsat.SOLVER,
        infeasible=NO_PLAN,
        known=known_before(problem),
    ).solve(run, begun)
    return settle(levels, outcome, run, again)


@dataclass(frozen=True)
class Model:
    """The CP-SAT model and its variables."""

    cp: cpsat.Model
    v: Variables


def build(levels: Levels, per_second: float, run: Run, tie: Tie | None = None) -> Model:
    """The whole model, with the second objective for a `tie`; raises `Stopped` when `run` should
    stop."""
    model = cpsat.Model(run)
    v = make_variables(model, levels, per_second)
    for constrain in (add_up_to_the_batch, order_steps, fit_into_steps):
        constrain(model, levels, v)
    rises = np.diff(v.cost, prepend=0).tolist()
    if tie is None:
        model.minimize(cp_model.LinearExpr.weighted_sum(v.s, rises))
    else:
        keep_the_least_time(model, levels, v, tie, per_second)
        model.minimize(under_utilisation(v, tie))
    return Model(model, v)


def keep_the_least_time(
    model: Any, levels: Levels, v: Variables, tie: Tie, per_second: float
) -> None:
    """(4); costs were rounded down, so that the known plan keeps within its own price rounded down
    as well."""
    if levels.problem.stepwise:
        rises = np.diff(v.cost, prepend=0).tolist()
        allowed = int(cpsat.rounded_down(tie.seconds * (1 + SAME), per_second))
        model.add(cp_model.LinearExpr.weighted_sum(v.s, rises) <= allowed)
    for s, seconds in zip(v.s, levels.times.tolist(), strict=True):
        if seconds > tie.seconds * (1 + SAME):
            model.add(s == 0)


def under_utilisation(v: Variables, tie: Tie) -> Any:
    """The second objective in integers: coefficients rounded to the nearest, fine beside the
    total."""
    scale = cpsat.integer_scale(tie.total, 2 * tie.total, 1.0, error=1e-9)
    terms = [*(y for row in v.y for y in row), *v.s]
    weights = np.rint(np.concatenate((*tie.y, tie.s)) * scale).astype(np.int64).tolist()
    return cp_model.LinearExpr.weighted_sum(terms, weights) + round(tie.constant * scale)


def make_variables(model: Any, levels: Levels, per_second: float) -> Variables:
    """y and s with the bounds that G and the known plan give."""
    problem, steps = levels.problem, levels.most_steps
    y = [
        [
            model.new_int_var(0, min(problem.total // l, group.count * steps), f"y_{k}_{l}")
            for l in range(1, len(row) + 1)
        ]
        for k, (group, row) in enumerate(zip(problem.groups, levels.seconds, strict=True))
    ]
    s = [model.new_int_var(0, steps, f"s_{j}") for j in range(len(levels.times))]
    return Variables(y, s, cpsat.rounded_down(levels.times + levels.step_seconds, per_second))


def add_up_to_the_batch(model: Any, levels: Levels, v: Variables) -> None:
    """(1)"""
    pairs = [(y, l) for row in v.y for l, y in enumerate(row, 1)]
    model.add(
        cp_model.LinearExpr.weighted_sum([y for y, _ in pairs], [l for _, l in pairs])
        == levels.problem.total
    )


def order_steps(model: Any, levels: Levels, v: Variables) -> None:
    """(2)"""
    for longer, here in zip(v.s[1:], v.s, strict=False):
        model.add(longer <= here)


def fit_into_steps(model: Any, levels: Levels, v: Variables) -> None:
    """(3)"""
    for group, row, y in zip(levels.problem.groups, levels.seconds, v.y, strict=True):
        order = np.argsort(row, kind="stable")
        for start, value in [
            (i, row[order[i]])
            for i in range(len(row))
            if i == 0 or row[order[i]] > row[order[i - 1]]
        ]:
            taking = sum(y[i] for i in order[start:])
            j = int(np.searchsorted(levels.times, value))
            model.add(taking <= (group.count * v.s[j] if j < len(v.s) else 0))
