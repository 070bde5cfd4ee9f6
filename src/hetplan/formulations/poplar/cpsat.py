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
from hetplan.formulations.poplar.levels import TOO_LARGE, Levels, build_levels, decode
from hetplan.formulations.poplar.problem import NOTHING_FITS, Ints, compile_problem
from hetplan.solvers import cpsat
from hetplan.solvers.native import Scale
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run


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
        return Outcome(stop=Stop.INFEASIBLE, message=NOTHING_FITS, solver=cpsat.SOLVER)
    levels = build_levels(problem)
    if levels is None:
        return Outcome(stop=Stop.LIMIT, message=TOO_LARGE, solver=cpsat.SOLVER)
    largest = max(levels.ceiling, float(levels.times[-1])) + levels.step_seconds
    per_second = cpsat.integer_scale(levels.floor, largest, levels.most_steps)
    model, v = build(levels, per_second)
    scale = Scale(per_unit=per_second, offset=levels.offset, under=levels.most_steps / per_second)
    built = time.perf_counter()
    answer = cpsat.solve(model, run, scale)
    decision = None
    if answer.has_solution:
        loads = [Counter({l: n for l, y in enumerate(row, 1) if (n := answer.value(y))}) for row in v.y]
        decision = decode(levels, loads, [answer.value(s) for s in v.s])
    return Outcome(
        stop=answer.stop,
        decision=decision,
        bound=answer.bound,
        build_seconds=built - begun,
        solve_seconds=time.perf_counter() - built,
        solver=answer.solver,
        message=answer.message,
        details=answer.statistics,
    )


def build(levels: Levels, per_second: float) -> tuple[Any, Variables]:
    """The model and its variables."""
    model = cp_model.CpModel()
    v = make_variables(model, levels, per_second)
    for constrain in (add_up_to_the_batch, order_steps, fit_into_steps):
        constrain(model, levels, v)
    rises = np.diff(v.cost, prepend=0)
    model.minimize(cp_model.LinearExpr.weighted_sum(v.s, rises.tolist()))
    return model, v


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
