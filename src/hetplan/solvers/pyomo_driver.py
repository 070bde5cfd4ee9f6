"""Driver of the solvers behind Pyomo: it solves a `Model` by the solver of a given name.

Every solver is called in the same way, by `pyo.SolverFactory(name).solve`, since this interface of
Pyomo alone has all of them. `solvers.pyomo_options` knows the solvers' names and options.
"""

import logging
import math
import sys
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
from hetplan.solvers.expressions import Floats, Ints
from hetplan.solvers.highs import BOUND_ALLOWANCE
from hetplan.solvers.model import LinearArrays, Model, ModelAnswer, trivial_answer
from hetplan.solvers.native import (
    GAP_SHARE,
    GRACE_SECONDS,
    UNCLEAR,
    Sink,
    drive,
    wall_seconds_left,
)
from hetplan.solvers.pyomo_options import Solver, configured, limit_time, solver_label, solver_of
from hetplan.solvers.run import HIGHS, Options, Run, Stop, engine, stop_reason

# Seconds after the time limit at which a solver that cannot be interrupted is given up.
OVERTIME_SECONDS = 5.0

# Pyomo's termination condition -> why the run ended, and a message. LIMIT becomes
# `stop_reason(run)`. Any other condition is an error that names it.
_STOPS = {
    TerminationCondition.optimal: (Stop.OPTIMAL, ""),
    TerminationCondition.globallyOptimal: (Stop.OPTIMAL, ""),
    TerminationCondition.infeasible: (Stop.INFEASIBLE, ""),
    TerminationCondition.infeasibleOrUnbounded: (Stop.ERROR, UNCLEAR),
    TerminationCondition.unbounded: (Stop.ERROR, "found the model unbounded below"),
    TerminationCondition.maxTimeLimit: (Stop.LIMIT, ""),
    TerminationCondition.maxIterations: (Stop.LIMIT, ""),
    TerminationCondition.maxEvaluations: (Stop.LIMIT, ""),
    TerminationCondition.minFunctionValue: (Stop.LIMIT, ""),
    TerminationCondition.feasible: (Stop.LIMIT, ""),
    TerminationCondition.resourceInterrupt: (Stop.LIMIT, ""),
    TerminationCondition.userInterrupt: (Stop.LIMIT, ""),
    TerminationCondition.noSolution: (Stop.LIMIT, ""),
    TerminationCondition.intermediateNonInteger: (Stop.LIMIT, ""),
}


def solve(model: Model, run: Run, report: Sink | None = None) -> ModelAnswer:
    """Minimise `model` by the solver `run.options.pyomo_solver` within the remaining time of `run`.

    report: receives the incumbent and the bound in the instance's unit, once. None: `run.report`.
    Raises as `configured` does, and `Stopped` where the run should stop before the solver begins.
    An exception of the solver becomes stop `error` with its message.
    """
    interface, label = configured(run.options), solver_label(run.options)
    arrays, scale = model.arrays(), model.milp_scale()
    if (trivial := trivial_answer(arrays, scale, label)) is not None:
        return trivial
    concrete = as_pyomo(arrays, run)
    with _output_left_alone(solver_of(run.options.pyomo_solver)):
        answer = _minimised(interface, concrete, arrays, run)
    x = answer.x
    answer = replace(
        answer,
        objective=None if answer.objective is None else scale.value(answer.objective),
        bound=None if answer.bound is None else scale.value(answer.bound),
        x=None if x is None else np.where(arrays.integer, np.round(x), x / model.milp_units()),
        solver=label,
        model=model,
    )
    incumbent = None if answer.objective is None else answer.objective + scale.under
    if report is None:
        run.report(incumbent=incumbent, bound=answer.bound)
    else:
        report(incumbent, answer.bound)
    return answer


def label(options: Options) -> str:
    """The text of `solver_label`. Raises as `configured` does."""
    configured(options)
    return solver_label(options)


def as_pyomo(arrays: LinearArrays, run: Run) -> pyo.ConcreteModel:
    """The linear programme as a ConcreteModel with variables `x`, rows `row` and objective `cost`.

    Raises `Stopped` when `run` should stop.
    """
    # Pyomo has no value of a variable that occurs nowhere: any value within its bounds will do
    values = np.clip(0.0, arrays.lower, arrays.upper).tolist()
    model = pyo.ConcreteModel()
    model.x = pyo.Var(
        range(len(values)),
        domain=lambda _, i: pyo.Integers if arrays.integer[i] else pyo.Reals,
        bounds=lambda _, i: (float(arrays.lower[i]), float(arrays.upper[i])),
        initialize=lambda _, i: values[i],
    )
    x = list(model.x.values())

    def linear(coefficients: Floats, columns: Ints) -> LinearExpression:
        return LinearExpression(
            linear_coefs=coefficients.tolist(), linear_vars=[x[i] for i in columns]
        )

    costly = np.flatnonzero(arrays.cost)
    model.cost = pyo.Objective(expr=linear(arrays.cost[costly], costly) + arrays.constant)
    model.row = pyo.ConstraintList()
    bounds = zip(arrays.row_lower.tolist(), arrays.row_upper.tolist(), strict=True)
    for number, (lower, upper) in enumerate(bounds):
        run.check()
        entries = slice(arrays.starts[number], arrays.starts[number + 1])
        # scip_direct refuses rows without variables, and appsi_gurobi rows without bounds
        if entries.start < entries.stop and (lower, upper) != (-math.inf, math.inf):
            body = linear(arrays.values[entries], arrays.columns[entries])
            model.row.add((lower, body, upper))
    return model


def _minimised(
    interface: Any, model: pyo.ConcreteModel, arrays: LinearArrays, run: Run
) -> ModelAnswer:
    """The solver's answer in the model's unit."""
    try:
        results = _results(interface, model, run)
    except Exception as error:  # noqa: BLE001 - the solvers' own exceptions have no common base
        return ModelAnswer(stop=Stop.ERROR, message=kind_and_text(error))
    if results is None:
        late = f"{run.options.pyomo_solver} did not stop in time; its plans are lost"
        return ModelAnswer(stop=stop_reason(run), message=late)
    stop, message = _stop_and_message(results, run)
    # of a linear programme that was stopped, gurobi and HiGHS tell the objective of an iterate
    stopped_early = stop is not Stop.OPTIMAL and not arrays.integer.any()
    if stop in (Stop.INFEASIBLE, Stop.ERROR) or stopped_early:
        return ModelAnswer(stop=stop, message=message)
    x = _solution(model, results)
    # where cbc has no solution, it tells the values of its last relaxation
    if x is not None and stop is not Stop.OPTIMAL and not arrays.satisfied_by(x):
        x = None
    if x is None and stop is Stop.OPTIMAL:
        return ModelAnswer(stop=Stop.ERROR, message="reported an optimum without a solution")
    objective = None if x is None else float(arrays.cost @ x) + arrays.constant
    bound = _bound(results, stop, objective, run.options)
    return ModelAnswer(stop=stop, message=message, objective=objective, bound=bound, x=x)


def _results(interface: Any, model: pyo.ConcreteModel, run: Run) -> Any:
    """Pyomo's results, whose solution is not in the model yet; None where the solver did not end in
    time."""
    name = run.options.pyomo_solver
    is_highs = engine(name) == HIGHS
    if is_highs:
        _silence_highs(interface)

    def work() -> Any:
        limit = limit_time(interface, name, wall_seconds_left(run))
        return interface.solve(model, load_solutions=False, timelimit=limit)

    def interrupt() -> None:  # other solvers cannot be interrupted from here
        # the interface has no HiGHS until it begins to solve
        if is_highs and interface._solver_model is not None:
            interface._solver_model.cancelSolve()

    overtime = GRACE_SECONDS if is_highs else OVERTIME_SECONDS
    return drive(work, run=run, interrupt=interrupt, poll=lambda: None, overtime=overtime)


def _silence_highs(interface: Any) -> None:
    """Silence HiGHS before the options reach it: it prints a banner with its first variable."""
    add_block = interface.add_block

    def add_quietly(model: pyo.ConcreteModel) -> None:
        interface._solver_model.silent()
        add_block(model)

    interface.add_block = add_quietly


@contextmanager
def _output_left_alone(solver: Solver) -> Iterator[None]:
    """While a solver runs, keep Pyomo from redirecting the output of the whole process, unless the
    solver prints, and from logging warnings of what the answer says as well.

    `sys.stdout` would stay redirected after a solver that did not end in time.
    """
    capture, streams = tee.OVERRIDE_CAPTURE_OUTPUT, (sys.stdout, sys.stderr)
    logger = logging.getLogger("pyomo")
    level = logger.level
    if not solver.prints:
        tee.OVERRIDE_CAPTURE_OUTPUT = CaptureOutputMode.DISABLE
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        tee.OVERRIDE_CAPTURE_OUTPUT = capture
        sys.stdout, sys.stderr = streams
        logger.setLevel(level)


def _stop_and_message(results: Any, run: Run) -> tuple[Stop, str]:
    """(`Stop` for Pyomo's termination condition, message of an error or "")."""
    condition = results.solver.termination_condition
    if condition not in _STOPS and not run.should_stop:
        said = one_line(f"ended with {condition}: {results.solver.message}")
        return Stop.ERROR, said[:200]
    # not every interface has a termination condition for an interruption
    stop, message = _STOPS.get(condition, (Stop.LIMIT, ""))
    return (stop_reason(run) if stop is Stop.LIMIT else stop), message


def _solution(model: pyo.ConcreteModel, results: Any) -> Floats | None:
    """[n] the values of the solution among Pyomo's results; None where there is none."""
    if len(results.solution) == 0 or len(results.solution[0].variable) == 0:
        return None
    # the status of an interrupted HiGHS is unknown, with which Pyomo would load nothing
    results.solver.status = SolverStatus.ok
    model.solutions.load_from(results)
    return np.array([variable.value for variable in model.x.values()], dtype=float)


def _bound(results: Any, stop: Stop, objective: float | None, options: Options) -> float | None:
    """The proven bound in the model's unit; None where nothing is proven.

    It is the bound that the solver reports. Without one, an optimum within the gap asked for
    implies a bound.
    """
    bound = results.problem.lower_bound
    if not isinstance(bound, int | float) or not math.isfinite(bound):
        was_told_gap = solver_of(options.pyomo_solver).gap is not None
        if stop is not Stop.OPTIMAL or objective is None or not was_told_gap:
            return None
        bound = objective - options.gap * GAP_SHARE * abs(objective)
    if objective is not None:
        bound = min(bound, objective)  # rounding may put a bound above the objective
    return float(bound - BOUND_ALLOWANCE * abs(bound))
