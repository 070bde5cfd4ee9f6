"""Driver of the solvers behind Pyomo: it solves a `Model` by the solver of a given name, and maps
every status.

`solvers.pyomo_options` knows the solvers' names and options. A solver's bound is used only where it
reports one.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pyomo.environ as pyo
from pyomo.common import tee
from pyomo.common.enums import CaptureOutputMode
from pyomo.core.expr.numeric_expr import LinearExpression
from pyomo.opt import SolverStatus, TerminationCondition

from hetplan.errors import kind_and_text, one_line
from hetplan.solvers.model import LinearArrays, Model, ModelAnswer
from hetplan.solvers.native import (
    GAP_SHARE,
    GRACE_SECONDS,
    UNCLEAR,
    Scale,
    Sink,
    drive,
)
from hetplan.solvers.pyomo_options import (
    NAMES,
    configured,
    solver_label,
)
from hetplan.solvers.run import HIGHS, Options, Run, Stop, engine, stop_reason

# Seconds after the time limit at which a solver that did not stop by itself is given up.
OVERTIME_SECONDS = 5.0
# Bounds of floating-point solvers are lowered by this share, as those of HiGHS are.
BOUND_ALLOWANCE = 1e-7

# Pyomo's termination conditions. Those of _STOPPED become `stop_reason(run)`.
_PROVEN = {
    TerminationCondition.optimal: Stop.OPTIMAL,
    TerminationCondition.globallyOptimal: Stop.OPTIMAL,
    TerminationCondition.infeasible: Stop.INFEASIBLE,
}
_STOPPED = {
    TerminationCondition.maxTimeLimit,
    TerminationCondition.maxIterations,
    TerminationCondition.maxEvaluations,
    TerminationCondition.minFunctionValue,
    TerminationCondition.feasible,
    TerminationCondition.resourceInterrupt,
    TerminationCondition.userInterrupt,
    TerminationCondition.noSolution,
    TerminationCondition.intermediateNonInteger,
}


def as_pyomo(
    arrays: LinearArrays, name: str = "model", run: Run | None = None
) -> pyo.ConcreteModel:
    """The linear programme as a ConcreteModel with variables `x`, rows `row` and objective `cost`.

    Rows without entries or without bounds are left out. Raises `Stopped` when `run` should stop.
    """
    model, run = pyo.ConcreteModel(name), run or Run()
    rows, columns = arrays.shape

    def bounds(model: pyo.ConcreteModel, i: int) -> tuple[float | None, float | None]:
        run.check()
        return _finite(arrays.lower[i]), _finite(arrays.upper[i])

    def row(model: pyo.ConcreteModel, r: int) -> Any:
        run.check()
        entries = slice(arrays.starts[r], arrays.starts[r + 1])
        lower, upper = _finite(arrays.row_lower[r]), _finite(arrays.row_upper[r])
        if entries.start == entries.stop or (lower is None and upper is None):
            return pyo.Constraint.Skip
        terms = LinearExpression(
            linear_coefs=arrays.values[entries].tolist(),
            linear_vars=[x[c] for c in arrays.columns[entries]],
        )
        if lower == upper:
            return terms == lower
        return (lower, terms, upper)

    domains = {i: pyo.Integers if whole else pyo.Reals for i, whole in enumerate(arrays.integer)}
    model.x = pyo.Var(range(columns), domain=domains, bounds=bounds)
    x = list(model.x.values())
    model.row = pyo.Constraint(range(rows), rule=row)
    used = np.flatnonzero(arrays.cost)
    cost = LinearExpression(
        constant=arrays.constant,
        linear_coefs=arrays.cost[used].tolist(),
        linear_vars=[x[c] for c in used],
    )
    model.cost = pyo.Objective(expr=cost, sense=pyo.minimize)
    return model


def _finite(bound: float) -> float | None:
    """The bound as Pyomo takes it: None where it is infinite."""
    return float(bound) if math.isfinite(bound) else None


def solve(model: Model, run: Run, report: Sink | None = None) -> ModelAnswer:
    """Minimise `model` by the solver `run.options.pyomo_solver` within the remaining time of `run`.

    report: receives the incumbent and the bound in the instance's unit, once. None: `run.report`.
    Raises UnsupportedError where that solver is not installed (naming those that are), InputError
    for an unknown solver name or a native option that repeats a common one.
    """
    arrays, scale = model.arrays(), model.milp_scale()
    # `as_pyomo` leaves out rows without entries, whose sum is 0: they hold, or nothing does
    empty = np.diff(arrays.starts) == 0
    if ((arrays.row_lower > 0) & empty).any() or ((arrays.row_upper < 0) & empty).any():
        return ModelAnswer(stop=Stop.INFEASIBLE, solver=solver_label(run.options))
    concrete = as_pyomo(arrays, model.name, run)
    run.check()
    answer = _minimised(concrete, run, scale, report, whole=bool(arrays.integer.any()))
    x = None
    if answer.has_solution:
        # the solver has no values of columns that occur nowhere: any value within bounds will do
        x = np.clip(0.0, arrays.lower, arrays.upper)
        for i, variable in concrete.x.items():
            if variable.value is not None:
                x[i] = float(variable.value)
        x = np.where(arrays.integer, np.round(x), x / model.milp_units())
    return replace(answer, x=x, model=model)


def label(options: Options) -> str:
    """The text of `solver_label`. Raises as `solve` does where the solver is unknown or not
    installed, and for its native options."""
    configured(options, None)
    return solver_label(options)


def _minimised(
    model: pyo.ConcreteModel, run: Run, scale: Scale, report: Sink | None, *, whole: bool
) -> ModelAnswer:
    """The answer of the solver to a Pyomo model, without x. The model's variables have it.

    whole: whether the model has integer variables. Raises as `solve` does. An exception of the
    solver becomes stop `error` with its message.
    """
    options = run.options
    label = solver_label(options)
    is_highs = engine(options.pyomo_solver) == HIGHS
    solver = configured(options, _limit(run))
    if is_highs:
        _silence_highs(solver)

    def interrupt() -> None:  # other solvers cannot be interrupted from here
        # the interface has no HiGHS until it begins to solve
        if is_highs and solver._solver_model is not None:
            solver._solver_model.cancelSolve()

    def work() -> Any:
        try:
            return solver.solve(model, load_solutions=False, timelimit=_limit(run))
        except Exception as error:  # noqa: BLE001 - the solvers' own exceptions have no common base
            return kind_and_text(error)

    overtime = GRACE_SECONDS if is_highs else OVERTIME_SECONDS
    with _output_left_alone(is_highs):
        results = drive(work, run=run, interrupt=interrupt, poll=lambda: None, overtime=overtime)
    if results is None:
        return ModelAnswer(
            stop=stop_reason(run),
            solver=label,
            message=f"{options.pyomo_solver} did not stop in time; what it had found is lost",
        )
    if isinstance(results, str):
        return ModelAnswer(stop=Stop.ERROR, solver=label, message=results)
    answer = replace(_read(model, results, run, scale, whole), solver=label)
    incumbent = None if answer.objective is None else answer.objective + scale.under
    if report is None:
        run.report(incumbent=incumbent, bound=answer.bound)
    else:
        report(incumbent, answer.bound)
    return answer


def _limit(run: Run) -> float | None:
    """The seconds left of the time limit as Pyomo's interfaces take them; None for no limit."""
    if math.isinf(run.seconds_left):
        return None
    return max(run.seconds_left, 1e-3)  # several interfaces take 0 for no limit


def _silence_highs(solver: Any) -> None:
    """Silence HiGHS before its first output: Pyomo's interface turns the log on, with a banner."""
    add_block = solver.add_block

    def add_quietly(model: pyo.ConcreteModel) -> None:
        solver._solver_model.setOptionValue("output_flag", False)
        add_block(model)

    solver.add_block = add_quietly


@contextmanager
def _output_left_alone(quiet: bool) -> Iterator[None]:
    """While a solver runs, keep Pyomo from warnings, and, if the solver is quiet, from redirecting
    the whole process's output.

    Pyomo warns of an incumbent that is not optimal and of an interruption. The answer says both.
    """
    before = tee.OVERRIDE_CAPTURE_OUTPUT
    logger = logging.getLogger("pyomo")
    level = logger.level
    if quiet:
        tee.OVERRIDE_CAPTURE_OUTPUT = CaptureOutputMode.DISABLE
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        tee.OVERRIDE_CAPTURE_OUTPUT = before
        logger.setLevel(level)


def _read(
    model: pyo.ConcreteModel, results: Any, run: Run, scale: Scale, whole: bool
) -> ModelAnswer:
    """Pyomo's results as an answer. The incumbent is loaded into the model's variables. whole: as
    in `_minimised`."""
    stop, message = _stop_and_message(results, run)
    # some interfaces return infeasible iterates of a linear programme that was stopped
    may_be_infeasible = stop is not Stop.OPTIMAL and not whole
    if stop is Stop.INFEASIBLE or message == UNCLEAR or may_be_infeasible:
        return ModelAnswer(stop=stop, message=message)
    objective = None
    if len(results.solution) > 0 and len(results.solution[0].variable) > 0:
        # Pyomo would warn of the incumbent of a stopped run
        results.solver.status = SolverStatus.ok
        model.solutions.load_from(results)
        objective = float(pyo.value(model.cost))
    elif stop is Stop.OPTIMAL:
        stop, message = Stop.ERROR, "reported an optimum without a solution"
    bound = _bound(results, stop, objective, run.options)
    return ModelAnswer(
        stop=stop,
        objective=None if objective is None else scale.value(objective),
        bound=None if bound is None else scale.value(bound - BOUND_ALLOWANCE * abs(bound)),
        message=message,
    )


def _bound(results: Any, stop: Stop, objective: float | None, options: Options) -> float | None:
    """The proven bound in the model's unit; None where nothing is proven.

    It is the bound that the solver reports. Without one, an optimum within the gap asked for
    implies a bound.
    """
    stated = results.problem.lower_bound
    if isinstance(stated, int | float) and math.isfinite(stated) and stop is not Stop.ERROR:
        # rounding may put a bound above the objective
        return float(stated) if objective is None else min(float(stated), objective)
    # only the solvers of `NAMES` were told the gap
    if stop is Stop.OPTIMAL and objective is not None and engine(options.pyomo_solver) in NAMES:
        return objective - options.gap * GAP_SHARE * abs(objective)
    return None


def _stop_and_message(results: Any, run: Run) -> tuple[Stop, str]:
    """(`Stop` for Pyomo's termination condition, message of an error or "")."""
    condition = results.solver.termination_condition
    said = one_line(str(results.solver.message or ""))[:200] if results.solver.message else ""
    if condition in _PROVEN:
        return _PROVEN[condition], ""
    # not every solver has a termination condition for an interruption
    if condition in _STOPPED or run.should_stop:
        return stop_reason(run), ""
    if condition == TerminationCondition.infeasibleOrUnbounded:
        return Stop.ERROR, UNCLEAR
    if condition == TerminationCondition.unbounded:
        return Stop.ERROR, "found the model unbounded below"
    return Stop.ERROR, f"ended with {condition}" + (f": {said}" if said else "")
