"""Problem `poplar` through CP-SAT: the counting model of `levels`, one function per constraint.

Times are multiplied by a power of two and rounded down, so that the model prices no plan too high and its
bound holds as it is; each step is off by less than one unit.
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


def solve(data: PoplarData, run: Run) -> Outcome[PoplarDecision]:
    """Proven optimum up to rounding, or what there is when time runs out."""
    begun = time.perf_counter()
    problem = compile_problem(data)
    if not problem.groups:
        spent = time.perf_counter() - begun
        return Outcome(stop=Stop.INFEASIBLE, message=NOTHING_FITS, build_seconds=spent, solver=cpsat.SOLVER)
    levels = build_levels(problem)
    if levels is None:
        return too_large(problem, cpsat.SOLVER, time.perf_counter() - begun)
    largest = max(levels.ceiling, float(levels.times[-1])) + levels.step_seconds
    per_second = cpsat.integer_scale(levels.floor, largest, levels.most_steps)
    scale = Scale(per_unit=per_second, offset=levels.offset, under=levels.most_steps / per_second)

    def read(model: Model, answer: cpsat.CpAnswer) -> PoplarDecision:
        v = model.v
        loads = [Counter({l: n for l, y in enumerate(row, 1) if (n := answer.value(y))}) for row in v.y]
        return decode(levels, loads, [answer.value(s) for s in v.s])

    return Whole(
        build=lambda: build(levels, per_second, run),
        ask=lambda model: cpsat.solve(model.cp, run, scale),
        read=read,
        solver=cpsat.SOLVER,
        infeasible=NO_PLAN,
        known=known_before(problem),
    ).solve(run, begun)


@dataclass(frozen=True)
class Model:
    """The CP-SAT model and its variables."""

    cp: cpsat.Model
    v: Variables


def build(levels: Levels, per_second: float, run: Run) -> Model:
    """The whole model; raises `Stopped` when `run` should stop."""
    model = cpsat.Model(run)
    v = make_variables(model, levels, per_second)
    for constrain in (add_up_to_the_batch, order_steps, fit_into_steps):
        constrain(model, levels, v)
    rises = np.diff(v.cost, prepend=0)
    model.minimize(cp_model.LinearExpr.weighted_sum(v.s, rises.tolist()))
    return Model(model, v)


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
        cp_model.LinearExpr.weighted_sum([y for y, _ in pairs], [l for _, l in pairs]) == levels.problem.total
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
            (i, row[order[i]]) for i in range(len(row)) if i == 0 or row[order[i]] > row[order[i - 1]]
        ]:
            taking = sum(y[i] for i in order[start:])
            j = int(np.searchsorted(levels.times, value))
            model.add(taking <= (group.count * v.s[j] if j < len(v.s) else 0))
