"""OR-Tools CP-SAT: `write` makes a CP-SAT model of a `Model`, `solve` minimises it and maps options
and every status.

A CP-SAT model has integer variables and minimises an integer objective z. `Scale` converts z to the
instance's unit and states the error of rounding. A `ConstraintModel` is solved as it stands. Every
column of a `Model` becomes the variable of the same number: seconds are multiplied by a power of
two (`solvers.ticks`), and continuous columns are in steps of their grid. The docstring of
`solvers.model` says how values are rounded and which rules a model must keep to therefore.
"""

import math
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from hetplan.errors import InputError, UnsupportedError, require
from hetplan.solvers.constraint_model import ConstraintModel
from hetplan.solvers.expressions import Floats
from hetplan.solvers.model import Model, ModelAnswer, Row, Totals, member_names
from hetplan.solvers.native import GAP_SHARE, Latest, Scale, Sink, drive, wall_seconds_left
from hetplan.solvers.run import NativeValue, Options, Run, Stop, stop_reason
from hetplan.solvers.ticks import UNSOUND, ticks_per_second

BACKEND = "cp-sat"
SOLVER = f"CP-SAT {version('ortools')}"
# A row with fractions is multiplied by a power of two that brings its largest value to about this,
# so that nine digits of it are left.
LARGEST_ROW = 2.0**30


def write(model: Model) -> tuple[cp_model.CpModel, Scale]:
    """(CP-SAT model of a model, scale of its objective).

    Raises `Stopped` when the run of the model should stop. Raises ValueError where the model breaks
    a rule of `solvers.model`, UnsupportedError where its values are too large for CP-SAT.
    """
    writer = _Writer(model)
    for number, row in enumerate(model.rows):
        model.check()
        writer.add(number, row)
    writer.minimize()
    return writer.cp, writer.scale


class _Writer:
    """Writes the columns, rows and costs of a model to a CP-SAT model."""

    cp: cp_model.CpModel
    scale: Scale  # scale of the objective
    per_second: float  # integers per second
    seconds: NDArray[np.bool_]  # [n] whether a column is in seconds
    grid: Floats  # [n] steps per unit of a continuous column; 0 for the others
    units: Floats  # [n] integers per unit of a column
    negative: NDArray[np.bool_]  # [n] whether a column may be negative
    x: list[cp_model.IntVar]  # [n] the variables

    def __init__(self, model: Model) -> None:
        self.model, self.cp = model, cp_model.CpModel()
        totals = model.totals or Totals(least=1.0, largest=1.0)
        self.per_second = ticks_per_second(totals)
        self.scale = Scale(
            per_unit=self.per_second,
            offset=totals.offset + model.constant,
            under=totals.roundings / self.per_second,
        )
        properties = model.properties()
        self.seconds, self.grid = properties["seconds"], properties["grid"]
        self.units = np.where(self.seconds, self.per_second, np.maximum(self.grid, 1.0))
        low, high = self._bounds(properties, totals.largest)
        self.negative = low < 0
        self.x = [
            self.cp.new_int_var(int(lower), int(upper), name)
            for lower, upper, name in zip(low, high, member_names(model.column_blocks), strict=True)
        ]

    def _bounds(self, properties: NDArray[Any], largest: float) -> tuple[Floats, Floats]:
        """([n] lower, [n] upper bounds) of the variables, rounded outwards except for integer
        columns. largest: seconds that no column in seconds exceeds. Raises ValueError for a column
        that has no bounds, or is continuous and has no grid."""
        lower, upper, integer = properties["lower"], properties["upper"], properties["integer"]
        upper = np.where(self.seconds, np.minimum(upper, largest), upper)
        low = np.where(integer, np.ceil(lower), np.floor(lower * self.units))
        high = np.where(integer, np.floor(upper), np.ceil(upper * self.units))
        unbounded = ~(np.isfinite(low) & np.isfinite(high))
        without_grid = ~(integer | self.seconds | (self.grid > 0))
        unusable = np.flatnonzero(unbounded | without_grid)
        if len(unusable) > 0:
            name = member_names(self.model.column_blocks)[int(unusable[0])]
            raise ValueError(
                f"{self.model.name}: column {name} needs bounds, and a grid if it is real"
            )
        return low, high

    def add(self, number: int, row: Row) -> None:
        """Add a row, relaxed by rounding. number: number of the row in the model."""
        unit = self._row_unit(row)
        values = row.values * unit / self.units[row.columns]
        if row.levels is not None:
            values = np.append(-np.diff(np.floor(row.levels * unit), prepend=0.0), 1.0)
        self._check_values(number, row, values)
        low, high = self._relaxed_bounds(row, unit, values)
        if row.lower == row.upper or (values == np.trunc(values)).all():
            self._add_constraint(row, np.trunc(values), low, high)
        else:  # a larger sum for the lower bound, a smaller one for the upper bound
            self._add_constraint(row, np.ceil(values), low, np.inf)
            self._add_constraint(row, np.floor(values), -np.inf, high)

    def _relaxed_bounds(self, row: Row, unit: float, values: Floats) -> tuple[float, float]:
        """(lower, upper) bound of a row in its unit, relaxed for columns with a grid.

        A variable of such a column is rounded down by less than 1, so that the row's sum changes by
        less than the sum of these columns' values: in whole numbers, by that sum less 1 at most.
        """
        grid_values = np.where(self.grid[row.columns] > 0, values, 0.0)
        lost = grid_values[grid_values > 0].sum()
        gained = -grid_values[grid_values < 0].sum()
        lower = row.lower * unit - max(0.0, lost - 1)
        upper = row.upper * unit + max(0.0, gained - 1)
        return lower, upper

    def _add_constraint(self, row: Row, values: Floats, low: float, high: float) -> None:
        """Add low <= sum of whole `values` * variables <= high under the row's conditions; nothing
        where both bounds are infinite."""
        if low == -np.inf and high == np.inf:
            return
        variables = [self.x[column] for column in row.columns.tolist()]
        integers = [int(value) for value in values.tolist()]
        constraint = self.cp.add_linear_constraint(
            cp_model.LinearExpr.weighted_sum(variables, integers),
            cp_model.INT_MIN if low == -np.inf else math.floor(low),
            cp_model.INT_MAX if high == np.inf else math.ceil(high),
        )
        # `~column` stands for a column that must be 0
        conditions = [self.x[c] if c >= 0 else ~self.x[~c] for c in row.when]
        constraint.only_enforce_if(conditions)

    def _row_unit(self, row: Row) -> float:
        """The factor that makes a row's values integers: integers per second, its finest grid, or a
        power of two for fractions."""
        if self.seconds[row.columns].any():
            return self.per_second
        bounds = np.array([b for b in (row.lower, row.upper) if math.isfinite(b)])
        if (row.values == np.trunc(row.values)).all() and (bounds == np.trunc(bounds)).all():
            return float(max(1.0, self.grid[row.columns].max(initial=0.0)))
        largest = max(np.abs(row.values).max(initial=0.0), np.abs(bounds).max(initial=0.0))
        return 2.0 ** math.floor(math.log2(LARGEST_ROW / largest))

    def _check_values(self, number: int, row: Row, values: Floats) -> None:
        """Raise as `write` does where a row has values that CP-SAT cannot have. values: values of
        the row in its unit, before rounding."""
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
        """Set the objective: the model's costs, rounded down."""
        costs = self.model.costs()
        scaled = costs * self.per_second / self.units
        if (self.seconds & (costs != np.trunc(costs))).any():
            raise ValueError(f"{self.model.name}: costs of seconds must be whole numbers")
        with_cost = np.flatnonzero(costs).tolist()
        variables = [self.x[column] for column in with_cost]
        integers = [math.floor(scaled[column]) for column in with_cost]
        self.cp.minimize(cp_model.LinearExpr.weighted_sum(variables, integers))


class _Listener(cp_model.CpSolverSolutionCallback):
    """Keeps the incumbents and bounds that CP-SAT reports from its threads in `latest`."""

    def __init__(self, latest: Latest) -> None:
        super().__init__()
        self._latest = latest

    def on_solution_callback(self) -> None:
        """Keep a better solution; CP-SAT calls this."""
        self._latest.incumbent = (list(self.response_proto.solution), self.objective_value)
        self._latest.on_bound(self.best_objective_bound)


def label(options: Options) -> str:
    """The name and version of CP-SAT, for results."""
    return SOLVER


def solve(model: Model | ConstraintModel, run: Run, report: Sink | None = None) -> ModelAnswer:
    """Minimise `model` within the remaining time of `run`.

    report: receives incumbents and bounds in the instance's unit. None: `run.report`, which is
    right when the model is the whole problem. Raises InputError for a native option that CP-SAT
    does not have, and the errors of `write`, including `Stopped`.
    """
    solver = _configured(run.options)
    cp, scale = (model.cp, model.scale) if isinstance(model, ConstraintModel) else write(model)
    run.check()
    if math.isfinite(left := wall_seconds_left(run)):
        solver.parameters.max_time_in_seconds = left
    if run.budget is not None:
        solver.parameters.max_deterministic_time = run.remaining
    latest = Latest()
    solver.best_bound_callback = latest.on_bound
    status = drive(
        lambda: solver.solve(cp, _Listener(latest)),
        run=run,
        interrupt=solver.stop_search,
        poll=latest.relay(scale, run, report),
    )
    stop, message = _stop_and_message(cp, solver, status, run)
    statistics: dict[str, object] = {}
    if status is not None:  # without a status the search was abandoned, and its last reports count
        run.count(solver.response_proto.deterministic_time)
        statistics = {"branches": solver.num_branches, "conflicts": solver.num_conflicts}
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            latest.incumbent = (list(solver.response_proto.solution), solver.objective_value)
            latest.on_bound(solver.best_objective_bound)
    (solution, objective), bound = latest.incumbent, latest.bound
    x = None if solution is None else np.array(solution, dtype=float)
    if x is not None and isinstance(model, Model):
        properties = model.properties()
        grid_units = np.maximum(properties["grid"], 1.0)
        x /= np.where(properties["seconds"], scale.per_unit, grid_units)
    return ModelAnswer(
        stop=stop,
        objective=None if objective is None else scale.value(objective),
        bound=None if bound is None or stop is Stop.INFEASIBLE else scale.value(bound),
        solver=SOLVER,
        message=message,
        statistics=statistics,
        x=x,
        model=model if isinstance(model, Model) else None,
    )


def _stop_and_message(model: Any, solver: Any, status: Any, run: Run) -> tuple[Stop, str]:
    """(`Stop` for a status of CP-SAT, message of an error or ""). status: None where CP-SAT did not
    stop in time."""
    if status is None:
        return stop_reason(run), "CP-SAT did not stop in time; its last report is taken"
    if status == cp_model.MODEL_INVALID:
        return Stop.ERROR, f"CP-SAT refuses the model: {str(model.validate())[:300]}"
    if status == cp_model.OPTIMAL:
        return Stop.OPTIMAL, ""
    if status == cp_model.INFEASIBLE:
        return Stop.INFEASIBLE, ""
    if status in (cp_model.FEASIBLE, cp_model.UNKNOWN):
        return stop_reason(run), ""
    name = solver.status_name(status)
    return Stop.ERROR, f"CP-SAT returned a status that hetplan does not know: {name}"


def _configured(options: Options) -> Any:
    """A CpSolver with the common options, and then the user's native options, set."""
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
    """Set one native option; raises InputError where CP-SAT has no option of that name or does not
    accept the value."""
    where = f"native option {BACKEND}.{name}"
    is_public = not name.startswith("_") and hasattr(parameters, name)
    require(
        is_public and not callable(getattr(parameters, name)),
        "unknown",
        where=where,
        expected="a field of CP-SAT's SatParameters",
    )
    try:
        setattr(parameters, name, value)
    except (TypeError, ValueError, AttributeError):
        kind = type(getattr(parameters, name)).__name__
        raise InputError("value not usable", where=where, got=value, expected=kind) from None
