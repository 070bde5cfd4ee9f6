"""OR-Tools CP-SAT: `write` states a `Model` in integers, `solve` maps options and every status.

A CP-SAT model minimises an integer objective z; `Scale` says how z maps to the instance's unit and
how far rounding may be off. Every column of a `Model` becomes the variable of the same number:
seconds times a power of two (`integer_scale`, from the model's `Totals`), continuous columns in
steps of their grid. How values are rounded, and what that asks of a model, stands in `model`.
"""

import math
from importlib.metadata import version
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from hetplan.errors import InputError, UnsupportedError, require
from hetplan.solvers.expressions import Floats
from hetplan.solvers.model import Model, ModelAnswer, Row, Totals, member_names
from hetplan.solvers.native import (
    GAP_SHARE,
    Latest,
    Scale,
    Sink,
    drive,
)
from hetplan.solvers.run import NativeValue, Options, Run, Stop, stop_reason

BACKEND = "cp-sat"
SOLVER = f"CP-SAT {version('ortools')}"
# CP-SAT 9.15 calls wrong values optimal, and feasible models infeasible, where coefficients are
# large: its presolve adds them up in 32 bits and drops enforcement literals
# (github.com/google/or-tools/issues/5293), and its detection of "greater than at least one of" errs
# too. Both are switched off and totals kept small there; 9.12 to 9.14 are right.
UNSOUND = version("ortools").startswith("9.15.")
# Totals stay below this: products with small counts remain far from int64, and sums are exact as
# floats.
LARGEST_TOTAL = 2.0**31 if UNSOUND else 2.0**40
# A row of fractions is multiplied until its largest value is about this.
LARGEST_ROW = 2.0**30


def integer_scale(least: float, largest: float, roundings: float, *, error: float = 5e-8) -> float:
    """The factor from the instance's unit to integers: the least power of two that rounds finely
    enough.

    least: a positive lower bound on the objective; largest: an upper bound on every total of the
    model (both in the instance's unit); roundings: how many roundings by less than 1 add up in one
    objective value; error: what these may come to, relative to `least`. Capped so that totals stay
    below LARGEST_TOTAL; the caller states the error it then has: roundings / factor.
    A power of two makes the product exact, so that rounding down is the only error.
    """
    if not (0 < least <= largest and math.isfinite(largest)):
        raise ValueError(
            f"integer_scale: least {least!r}, largest {largest!r}, expected 0 < least <= largest"
        )
    wanted = max(1.0, roundings) / (error * least)
    return 2.0 ** min(math.ceil(math.log2(wanted)), math.floor(math.log2(LARGEST_TOTAL / largest)))


def write(model: Model) -> tuple[cp_model.CpModel, Scale]:
    """The model in integers, and what they stand for. Raises `Stopped` when its run should stop,
    ValueError where it asks for what integers cannot say."""
    writer = _Writer(model)
    for number, row in enumerate(model.rows):
        model.check()
        writer.add(number, row)
    writer.minimize()
    return writer.cp, writer.scale


class _Writer:
    """A model on its way into CP-SAT: x [n] variables, units [n] of each column's integers."""

    def __init__(self, model: Model) -> None:
        self.model, self.cp = model, cp_model.CpModel()
        totals = model.totals or Totals(least=1.0, largest=1.0)
        least = min(totals.largest, max(totals.least, totals.largest * 1e-6))
        self.per_second = 1.0
        if totals.largest > 0:
            self.per_second = integer_scale(
                least, totals.largest, totals.roundings, error=totals.error
            )
        self.scale = Scale(
            per_unit=self.per_second,
            offset=totals.offset + model.constant,
            under=totals.roundings / self.per_second,
        )
        of = model.properties()
        self.seconds, self.grid, whole = of["seconds"], of["grid"], of["integer"]
        self.units = np.where(self.seconds, self.per_second, np.maximum(self.grid, 1.0))
        lower, most = of["lower"], np.minimum(of["upper"], totals.largest)
        upper = np.where(self.seconds, most, of["upper"])
        low, high = np.floor(lower * self.units), np.ceil(upper * self.units)
        low, high = np.where(whole, np.ceil(lower), low), np.where(whole, np.floor(upper), high)
        unusable = ~(np.isfinite(low) & np.isfinite(high)) | ~(
            whole | self.seconds | (self.grid > 0)
        )
        if unusable.any():
            name = member_names(model.column_blocks)[int(np.flatnonzero(unusable)[0])]
            raise ValueError(f"{model.name}: column {name} needs bounds, and a grid if it is real")
        self.negative = low < 0
        self.x = [
            self.cp.new_int_var(int(a), int(b), name)
            for a, b, name in zip(low, high, member_names(model.column_blocks), strict=True)
        ]

    def add(self, number: int, row: Row) -> None:
        """A row, relaxed by rounding."""
        unit = self._row_unit(row)
        values = row.values * unit / self.units[row.columns]
        if row.levels is not None:
            values = np.append(-np.diff(np.floor(row.levels * unit), prepend=0.0), 1.0)
        self._check(number, row, values)
        conditions = [self.x[c] if c >= 0 else ~self.x[~c] for c in row.when]
        # what rounding down took from the columns with a grid
        of_grid = np.where(self.grid[row.columns] > 0, values, 0.0)
        more, less = of_grid[of_grid > 0].sum(), -of_grid[of_grid < 0].sum()
        low, high = row.lower * unit - max(0.0, more - 1), row.upper * unit + max(0.0, less - 1)
        sides = [(np.trunc(values), low, high)]
        if row.lower != row.upper and not (values == np.trunc(values)).all():
            sides = [(np.ceil(values), low, np.inf), (np.floor(values), -np.inf, high)]
        for whole, least, most in sides:
            if least > -np.inf or most < np.inf:
                expression = cp_model.LinearExpr.weighted_sum(
                    [self.x[c] for c in row.columns.tolist()], [int(v) for v in whole.tolist()]
                )
                self.cp.add_linear_constraint(
                    expression,
                    cp_model.INT_MIN if least == -np.inf else math.floor(least),
                    cp_model.INT_MAX if most == np.inf else math.ceil(most),
                ).only_enforce_if(conditions)

    def _row_unit(self, row: Row) -> float:
        """The factor that brings a row's seconds, grids or fractions to integers."""
        if self.seconds[row.columns].any():
            return self.per_second
        bounds = np.array([b for b in (row.lower, row.upper) if math.isfinite(b)])
        if (row.values == np.trunc(row.values)).all() and (bounds == np.trunc(bounds)).all():
            return float(max(1.0, self.grid[row.columns].max(initial=0.0)))
        largest = max(np.abs(row.values).max(initial=0.0), np.abs(bounds).max(initial=0.0))
        return 2.0 ** math.floor(math.log2(LARGEST_ROW / largest))

    def _check(self, number: int, row: Row, values: Floats) -> None:
        """Raises what `write` says."""
        rounded = values != np.trunc(values)
        name = self.model.row_names[number]
        if (rounded & (self.seconds[row.columns] | self.negative[row.columns])).any():
            raise ValueError(f"{self.model.name}: {name}: values of seconds must be whole numbers")
        require(
            np.abs(values).max(initial=0.0) <= LARGEST_ROW**1.5,
            f"{self.model.name}: {name}: values too large for CP-SAT",
            kind=UnsupportedError,
        )

    def minimize(self) -> None:
        """The costs, rounded down."""
        costs = self.model.costs()
        scaled = costs * self.per_second / self.units
        if (self.seconds & (costs != np.trunc(costs))).any():
            raise ValueError(f"{self.model.name}: costs of seconds must be whole numbers")
        used = np.flatnonzero(costs).tolist()
        self.cp.minimize(
            cp_model.LinearExpr.weighted_sum(
                [self.x[c] for c in used], [math.floor(scaled[c]) for c in used]
            )
        )


class _Listener(cp_model.CpSolverSolutionCallback):
    """Keeps what CP-SAT reports from its threads."""

    def __init__(self, latest: Latest) -> None:
        super().__init__()
        self._latest = latest

    def on_solution_callback(self) -> None:
        """Called for each better solution."""
        self._latest.incumbent = (list(self.response_proto.solution), self.objective_value)
        self._latest.on_bound(self.best_objective_bound)


def label(options: Options) -> str:
    """Name and version for results."""
    return SOLVER


def solve(model: Model, run: Run, report: Sink | None = None) -> ModelAnswer:
    """Minimise `model` within what is left of `run`.

    report: where incumbents and bounds go, in the instance's unit (default: `run.report`, right
    when the model is the whole problem). Raises InputError for a native option that CP-SAT does not
    have, and what `write` raises, `Stopped` among it.
    """
    solver = _configured(run.options)
    cp, scale = write(model)
    run.check()
    if math.isfinite(run.remaining):
        solver.parameters.max_time_in_seconds = run.remaining
    latest = Latest()
    solver.best_bound_callback = latest.on_bound
    status = drive(
        lambda: solver.solve(cp, _Listener(latest)),
        run=run,
        interrupt=solver.stop_search,
        poll=latest.relay(scale, run, report),
    )
    stop, message = _mapped(cp, solver, status, run)
    statistics: dict[str, object] = {}
    if status is not None:  # an abandoned search answers with its last reports
        statistics = {"branches": solver.num_branches, "conflicts": solver.num_conflicts}
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            latest.incumbent = (list(solver.response_proto.solution), solver.objective_value)
            latest.on_bound(solver.best_objective_bound)
    (solution, objective), bound = latest.incumbent, latest.bound
    of = model.properties()
    units = np.where(of["seconds"], scale.per_unit, np.maximum(of["grid"], 1.0))
    return ModelAnswer(
        stop=stop,
        objective=None if objective is None else scale.value(objective),
        bound=None if bound is None or stop is Stop.INFEASIBLE else scale.value(bound),
        solver=SOLVER,
        message=message,
        statistics=statistics,
        x=None if solution is None else np.array(solution, dtype=float) / units,
        model=model,
    )


def _mapped(model: Any, solver: Any, status: Any, run: Run) -> tuple[Stop, str]:
    """CP-SAT's status as ours, with a message where there is more to say."""
    if status is None:
        return stop_reason(run), "CP-SAT did not stop in time; its last report is taken"
    if status == cp_model.MODEL_INVALID:
        return Stop.ERROR, f"CP-SAT refuses the model: {str(model.validate())[:300]}"
    known = {
        cp_model.OPTIMAL: Stop.OPTIMAL,
        cp_model.INFEASIBLE: Stop.INFEASIBLE,
        cp_model.FEASIBLE: stop_reason(run),
        cp_model.UNKNOWN: stop_reason(run),
    }
    unknown = f"CP-SAT returned a status that hetplan does not know: {solver.status_name(status)}"
    return known.get(status, Stop.ERROR), "" if status in known else unknown


def _configured(options: Options) -> Any:
    """A CpSolver with the common options mapped and the native block applied on top."""
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.num_workers = options.threads
    parameters.random_seed = options.seed
    parameters.relative_gap_limit = options.gap * GAP_SHARE
    parameters.catch_sigint_signal = False  # Ctrl-C belongs to the caller, who sets run.cancel
    if UNSOUND:
        parameters.presolve_inclusion_work_limit = 0
        parameters.auto_detect_greater_than_at_least_one_of = False
    for name, value in options.native.get(BACKEND, {}).items():
        _set_native(parameters, name, value)
    return solver


def _set_native(parameters: Any, name: str, value: NativeValue) -> None:
    """One native option; raises InputError where CP-SAT has none of that name or takes no such
    value."""
    where = f"native option {BACKEND}.{name}"
    require(
        not name.startswith("_")
        and hasattr(parameters, name)
        and (not callable(getattr(parameters, name))),
        "unknown",
        where=where,
        expected="a field of CP-SAT's SatParameters",
    )
    try:
        setattr(parameters, name, value)
    except (TypeError, ValueError, AttributeError):
        kind = type(getattr(parameters, name)).__name__
        raise InputError("value not usable", where=where, got=value, expected=kind) from None
