"""Problem `poplar` as a mixed-integer programme: the counting model of `levels`, for HiGHS and
through Pyomo.

Times are in units that bring the objective to the order of 1e3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hetplan.formulations.poplar.levels import Levels
from hetplan.formulations.poplar.problem import Floats
from hetplan.formulations.poplar.ties import SAME, Tie
from hetplan.solvers.highs import objective_unit
from hetplan.solvers.linear_model import Columns, LinearModel
from hetplan.solvers.run import Run

# In units of which the objective has about a thousand.
SMALLEST_RISE = 1e-9


@dataclass(frozen=True)
class Programme:
    """The model, its columns y[k] [L_k] and s [J], and how many of its units are one second."""

    model: LinearModel
    y: list[Columns]
    s: Columns
    per_second: float

    def counts(self, values: Callable[[Columns], Floats]) -> tuple[list[Counter[int]], list[int]]:
        """{load: devices} per group and s, from the incumbent's values at given columns."""
        loads = [
            Counter(
                {l: n for l, n in enumerate(np.rint(values(columns)).astype(int).tolist(), 1) if n}
            )
            for columns in self.y
        ]
        return loads, np.rint(values(self.s)).astype(int).tolist()


def build(
    levels: Levels, per_second: float, run: Run | None = None, tie: Tie | None = None
) -> Programme:
    """The programme, constraints in the order of their numbers, with the second objective for a
    `tie`.

    Raises `Stopped` when `run` should stop.
    """
    model = LinearModel("poplar", run)
    p = make_columns(model, levels, per_second)
    for constrain in (add_up_to_the_batch, order_steps, fit_into_steps):
        constrain(levels, p)
    if tie is None:
        model.minimize(p.s, _rises((levels.times + levels.step_seconds) * per_second))
    else:
        keep_the_least_time(levels, p, tie)
        minimize_under_utilisation(p, tie)
    return p


def keep_the_least_time(levels: Levels, p: Programme, tie: Tie) -> None:
    """(4)"""
    if levels.problem.stepwise:
        rises = _rises((levels.times + levels.step_seconds) * p.per_second)
        paid = np.flatnonzero(rises)
        most = tie.seconds * p.per_second * (1 + SAME)
        p.model.row("keep_the_least_time", p.s[paid], rises[paid], upper=most)
    p.model.fix(p.s[levels.times > tie.seconds * (1 + SAME)], 0)


def minimize_under_utilisation(p: Programme, tie: Tie) -> None:
    """The second objective, in units of which the total has about a thousand."""
    unit = objective_unit(tie.total)
    for columns, weights in (*zip(p.y, tie.y, strict=True), (p.s, tie.s)):
        weights = np.where(np.abs(weights * unit) >= SMALLEST_RISE, weights * unit, 0.0)
        p.model.minimize(columns, weights)
    p.model.constant = tie.constant * unit


def _rises(costs: Floats) -> Floats:
    """Differences of ascending step costs; those too small for a solver wait for the next one."""
    rises, paid = np.zeros(len(costs)), 0.0
    for j, cost in enumerate(costs.tolist()):
        if cost - paid >= SMALLEST_RISE:
            rises[j], paid = cost - paid, cost
    return rises


def make_columns(model: LinearModel, levels: Levels, per_second: float) -> Programme:
    """y and s with the bounds that G and the known plan give."""
    problem, steps = levels.problem, levels.most_steps
    y = [
        model.integer(
            f"y{k}",
            len(row),
            0,
            np.minimum(problem.total // np.arange(1, len(row) + 1), group.count * steps),
        )
        for k, (group, row) in enumerate(zip(problem.groups, levels.seconds, strict=True))
    ]
    return Programme(model, y, model.integer("s", len(levels.times), 0, steps), per_second)


def add_up_to_the_batch(levels: Levels, p: Programme) -> None:
    """(1)"""
    loads = np.concatenate([np.arange(1, len(columns) + 1) for columns in p.y])
    p.model.equal("add_up_to_the_batch", np.concatenate(p.y), loads, to=levels.problem.total)


def order_steps(levels: Levels, p: Programme) -> None:
    """(2)"""
    for here, longer in zip(p.s, p.s[1:], strict=False):
        p.model.row("order_steps", [here, longer], [1, -1], lower=0)


def fit_into_steps(levels: Levels, p: Programme) -> None:
    """(3)"""
    for group, row, columns in zip(levels.problem.groups, levels.seconds, p.y, strict=True):
        order = np.argsort(row, kind="stable")
        firsts = np.flatnonzero(np.diff(row[order], prepend=-1.0) > 0)
        for first in firsts.tolist():
            taking = columns[order[first:]]
            j = int(np.searchsorted(levels.times, row[order[first]]))
            if j < len(p.s):
                values = np.append(np.ones(len(taking)), -group.count)
                p.model.row("fit_into_steps", np.append(taking, p.s[j]), values, upper=0)
            else:
                p.model.row("fit_into_steps", taking, upper=0)
