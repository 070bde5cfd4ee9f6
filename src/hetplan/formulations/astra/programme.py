"""Problem `astra` as a mixed-integer linear programme; sets, variables and constraints stand in
`counted`.

(5) becomes a ladder over the distinct stage times v_0 < v_1 < …: step_k in {0,1} says that the
slowest stage takes v_k or longer, step_k >= step_{k+1}, theta = v_0 + sum_k (v_k - v_{k-1}) step_k,
and reach_q is the step of a_q.
That is tighter than one big-M row per kind, since lower steps come with every higher one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hetplan.formulations.astra.counted import Kinds
from hetplan.formulations.astra.problem import Floats
from hetplan.solvers.linear_model import Columns, LinearModel
from hetplan.solvers.run import Run

SAME = 1e-9  # relative


@dataclass(frozen=True)
class Programme:
    """The linear model, its kinds, its columns w [Q], and how many model units make a second."""

    model: LinearModel
    kinds: Kinds
    w: Columns
    per_second: float


def build(kinds: Kinds, run: Run | None = None) -> Programme:
    """The programme of a problem that `infeasible_because` has no objection to, its objective about
    1e3.

    Raises `Stopped` when `run` should stop.
    """
    problem = kinds.problem
    lower, upper = kinds.range
    estimate = lower if lower > 0 else upper
    per_second = 2.0 ** (10 - np.ceil(np.log2(estimate))) if estimate > 0 else 1.0
    model = LinearModel("astra", run)
    w = model.integer("w", len(kinds.type), 0, kinds.most)
    steps = distinct_times(kinds.seconds)
    step = model.binary("step", len(steps))
    model.fix(step[:1], 1)
    fill_all_stages(model, kinds, w)
    place_all_layers(model, kinds, w)
    keep_to_devices(model, kinds, w)
    climb_in_order(model, step)
    reach_before_use(model, kinds, w, step, np.searchsorted(steps, kinds.seconds, side="right") - 1)
    rises = np.diff(steps, prepend=0.0) * per_second
    outlast_the_average(model, kinds, w, step, rises, per_second)
    if problem.equal:
        one_number_per_type(model, kinds, w, model.binary("pick", len(kinds.type)))
    model.minimize(w, kinds.seconds * per_second)
    model.minimize(step, (problem.K - 1) * rises)
    return Programme(model, kinds, w, per_second)


def distinct_times(seconds: Floats) -> Floats:
    """The ladder's steps: distinct times, of those within SAME of each other the least (a bound
    stays a bound).

    Times that differ by rounding alone would need coefficients too small for double precision.
    """
    values = np.unique(seconds)
    steps = [values[0]]
    for value in values[1:]:
        if value > steps[-1] * (1 + SAME):
            steps.append(value)
    return np.array(steps)


def fill_all_stages(model: LinearModel, kinds: Kinds, w: Columns) -> None:  # (1)
    """As many stages as the pipeline has."""
    model.equal("stages", w, to=kinds.problem.P)


def place_all_layers(model: LinearModel, kinds: Kinds, w: Columns) -> None:  # (2)
    """Every layer on one stage."""
    model.equal("layers", w, kinds.layers, to=kinds.problem.N)


def keep_to_devices(model: LinearModel, kinds: Kinds, w: Columns) -> None:  # (3)
    """No type carries more stages than it has device groups."""
    for i, most in enumerate(kinds.problem.most_stages):
        if len(kinds.of(i)):
            model.row("devices", w[kinds.of(i)], upper=float(most))


def climb_in_order(model: LinearModel, step: Columns) -> None:  # (5)
    """A higher step comes with all lower ones."""
    for here, above in pairwise(step):
        model.row("ladder", [here, above], [1, -1], lower=0)


def reach_before_use(
    model: LinearModel, kinds: Kinds, w: Columns, step: Columns, rung: np.ndarray
) -> None:  # (4)
    """Stages of q's type with x(q) layers or more need the step of a_q; one row per type and
    step."""
    seen: set[tuple[int, int]] = set()
    for q in range(len(w)):
        key = (int(kinds.type[q]), int(rung[q]))
        if rung[q] == 0 or key in seen:
            continue
        seen.add(key)
        above = kinds.at_least(q)
        columns = np.append(w[above], step[rung[q]])
        model.row("reach", columns, np.append(np.ones(len(above)), -float(kinds.most[q])), upper=0)


def outlast_the_average(
    model: LinearModel, kinds: Kinds, w: Columns, step: Columns, rises: Floats, scale: float
) -> None:  # (7)
    """The slowest stage takes no less than the average one."""
    work = kinds.seconds * scale
    model.row("average", np.append(step, w), np.append(kinds.problem.P * rises, -work), lower=0)


def one_number_per_type(model: LinearModel, kinds: Kinds, w: Columns, pick: Columns) -> None:  # (6)
    """With equal layers per type, each type picks one number of layers."""
    for q in range(len(w)):
        model.row("use", [w[q], pick[q]], [1, -float(kinds.most[q])], upper=0)
    for i in range(kinds.problem.M):
        if len(kinds.of(i)):
            model.row("pick", pick[kinds.of(i)], upper=1)
