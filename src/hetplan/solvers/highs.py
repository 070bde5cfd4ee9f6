"""Driver of HiGHS: it solves a `Model`, and maps options and every model status.

Tolerances are tightened to 1e-9, because a plan's bound has to hold to 1e-6. The objective is of
the order of 1e3 in the model's unit (`Model.milp_scale`), so that HiGHS's absolute tolerances mean
little. Floating point proves nothing to the last digit, so that bounds are lowered by
BOUND_ALLOWANCE.

Presolve is off in every run of HiGHS (`SETTINGS`). The presolve of HiGHS 1.14 errs on small clean
models, some of whose coefficients nearly tie: it calls feasible models infeasible, cuts optima off,
and may never return. On the small packaged instances of all problems HiGHS proves as much without
it in less time. Where the user turns it on, `general.minimise` takes plans from it, and no proof.

Errors without presolve are rarer, but there are some: in 1,800 runs of `milp` and `pyomo` on tiny
instances of `amp` HiGHS 1.14 cut off one optimum (`python -m play amp --seed 1058 --count 1`). With
another seed it does not. `general.minimise` therefore asks for every quick proof a second time.
"""

import logging
import math
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import highspy
import numpy as np
from numpy.typing import NDArray

from hetplan.errors import require
from hetplan.solvers.model import LinearArrays, Model, ModelAnswer, trivial_answer
from hetplan.solvers.native import (
    GAP_SHARE,
    UNCLEAR,
    Latest,
    Scale,
    Sink,
    drive,
    wall_seconds_left,
)
from hetplan.solvers.run import NativeValue, Options, Run, Stop, stop_reason

BACKEND = "highs"
SOLVER = f"HiGHS {version('highspy')}"
TOLERANCE = 1e-9
BOUND_ALLOWANCE = 1e-7  # relative; far above TOLERANCE, and a tenth of the gap of optimal plans
# Options of every run of HiGHS, also through Pyomo. The user's own options are set after them.
SETTINGS: Mapping[str, NativeValue] = {"output_flag": False, "presolve": "off"}
# Further options for models whose solutions and bounds have to hold to TOLERANCE.
EXACT: Mapping[str, NativeValue] = {
    "mip_abs_gap": 0.0,
    "mip_feasibility_tolerance": TOLERANCE,
    "primal_feasibility_tolerance": TOLERANCE,
    "dual_feasibility_tolerance": TOLERANCE,
}
# HiGHS asks now and then whether it should stop: in every node, and between the steps of the root.
# Each time counts CHECK_SECONDS towards a budget, and ENTRY_SECONDS more for each entry of the
# model.
CHECK_SECONDS = 1e-2
ENTRY_SECONDS = 2e-6
# Seconds of a slow core that an iteration of the simplex takes for each row of the model. On the
# programmes over nodes of `joint` an iteration takes 1 to 2 times as long as this says.
ROW_SECONDS = 1.5e-7
FEASIBLE = 2  # value of HighsInfo.primal_solution_status: 0 none, 1 infeasible, 2 feasible

# Model statuses of HiGHS. Those of _STOPPED become `stop_reason(run)`. A status that is in none of
# the three is logged and becomes ERROR.
_PROVEN = {"kOptimal": Stop.OPTIMAL, "kInfeasible": Stop.INFEASIBLE}
_STOPPED = {
    "kTimeLimit", "kIterationLimit", "kSolutionLimit", "kMemoryLimit", "kObjectiveBound",
    "kObjectiveTarget", "kInterrupt", "kHighsInterrupt",
}  # fmt: skip
_FAILED = {
    "kNotset": "did not start",
    "kLoadError": "could not load the model",
    "kModelError": "found the model faulty",
    "kModelEmpty": "found the model empty",
    "kPresolveError": "failed in presolve",
    "kSolveError": "failed while solving",
    "kPostsolveError": "failed in postsolve",
    "kUnbounded": "found the model unbounded below",
    "kUnknown": "could not reach its tolerances",
}


def label(options: Options) -> str:
    """The name and version of HiGHS, for results."""
    return SOLVER


def solve(model: Model, run: Run, report: Sink | None = None) -> ModelAnswer:
    """Minimise `model` within the remaining time of `run`.

    report: receives incumbents and bounds in the instance's unit. None: `run.report`, which is
    right when the model is the whole problem.
    Raises InputError for a native option that HiGHS does not have, `Stopped` where the run should
    stop before HiGHS begins.
    """
    arrays, units, scale = model.arrays(), model.milp_units(), model.milp_scale()
    run.check()
    if (trivial := trivial_answer(arrays, scale, SOLVER)) is not None:
        return trivial
    highs = _prepared(arrays, run)
    run.check()
    latest = Latest()
    checks = Checks(CHECK_SECONDS + ENTRY_SECONDS * len(arrays.values), run)
    _listen(highs, latest, checks)
    status = drive(
        highs.run, run=run, interrupt=highs.cancelSolve, poll=latest.relay(scale, run, report)
    )
    statistics: dict[str, object] = {}
    if status is None:  # `drive` has abandoned HiGHS
        stop, message = stop_reason(run), "HiGHS did not stop in time; its last report is taken"
    else:
        _keep_last_word(highs, latest, bool(arrays.integer.any()))
        stop, message = _stop_and_message(highs, run)
        checks.count_them()
        info = highs.getInfo()
        statistics = {
            "nodes": int(info.mip_node_count),
            "iterations": max(int(info.simplex_iteration_count), 0),
        }
    values = {} if stop is Stop.INFEASIBLE else _read(latest, arrays, scale, units)
    return ModelAnswer(
        stop=stop,
        solver=SOLVER,
        message=message,
        statistics=statistics,
        model=model,
        **values,
    )


def iteration_seconds(model: Model) -> float:
    """Seconds of a slow core that an iteration of the simplex takes on this model."""
    return ROW_SECONDS * len(model.rows)


def instance(options: Options, settings: Mapping[str, NativeValue] = SETTINGS) -> Any:
    """A Highs without a model, with the settings and then the user's own options of HiGHS.

    Raises InputError for an option that HiGHS does not have, or a value that it does not take.
    """
    highs = highspy.Highs()
    for name, value in settings.items():
        _check(highs.setOptionValue(name, value), f"option {name}")
    for name, value in options.native.get(BACKEND, {}).items():
        set_native(highs, name, value, f"native option {BACKEND}.{name}")
    return highs


def check_native(options: Options) -> None:
    """Raise InputError for a native option that HiGHS does not have.

    Methods that run HiGHS on some instances only call this, so that the option is refused on all.
    """
    if options.native.get(BACKEND):
        instance(options)


def loaded(arrays: LinearArrays, highs: Any) -> Any:
    """`highs` with the model, handed over row by row in one call that takes whole arrays."""
    rows, columns = arrays.shape
    entries = (arrays.starts[:-1].astype(np.int32), arrays.columns.astype(np.int32), arrays.values)
    bounds = (arrays.lower, arrays.upper, arrays.row_lower, arrays.row_upper)
    layout, sense = int(highspy.MatrixFormat.kRowwise), int(highspy.ObjSense.kMinimize)
    status = highs.passModel(
        columns, rows, len(arrays.values), layout, sense, arrays.constant, arrays.cost, *bounds,
        *entries,
        arrays.integer.astype(np.int32),
    )  # fmt: skip
    _check(status, "passing the model")
    return highs


def _prepared(arrays: LinearArrays, run: Run) -> Any:
    """A silent Highs with the options of the run and the model."""
    common: dict[str, NativeValue] = {
        "threads": run.options.threads,
        "random_seed": run.options.seed,
        "mip_rel_gap": run.options.gap * GAP_SHARE,
    }
    highs = loaded(arrays, instance(run.options, {**SETTINGS, **EXACT, **common}))
    if (left := wall_seconds_left(run)) < math.inf:  # last, as passing the model takes time too
        _check(highs.setOptionValue("time_limit", left), "option time_limit")
    return highs


def set_native(highs: Any, name: str, value: NativeValue, where: str) -> None:
    """Set one of HiGHS's own options. Raises InputError where HiGHS has no option of that name or
    does not accept the value. where: the option's name for the error."""
    status, _ = highs.getOptionType(name)
    require(
        status == highspy.HighsStatus.kOk,
        "unknown",
        where=where,
        expected="an option of HiGHS",
    )
    try:
        accepted = highs.setOptionValue(name, value) == highspy.HighsStatus.kOk
    except TypeError:
        accepted = False
    require(
        accepted,
        "value not usable",
        where=where,
        got=value,
        expected="a value that HiGHS accepts",
    )


def _check(status: Any, what: str) -> None:
    assert status == highspy.HighsStatus.kOk, f"HiGHS: {what}: {status}"


def _listen(highs: Any, latest: Latest, checks: "Checks") -> None:
    """Have HiGHS write its incumbents and bounds to `latest`, and stop when it is cancelled or when
    `checks` has no more of them left."""

    def improved(event: Any) -> None:
        data = event.data_out
        latest.incumbent = (np.array(data.mip_solution), float(data.objective_function_value))

    def check(event: Any) -> None:
        latest.on_bound(float(event.data_out.mip_dual_bound))
        if checks.used_up():
            event.interrupt()

    highs.HandleUserInterrupt = True
    highs.cbMipImprovingSolution += improved
    highs.cbMipInterrupt += check


class Checks:
    """The work of one run of HiGHS: how often it asked whether it should stop.

    HiGHS's thread counts them, and the method's thread tells the run of them at the end.
    """

    def __init__(self, seconds: float, run: Run) -> None:
        self.seconds, self.run = seconds, run  # counted seconds of one of them
        limited = run.budget is not None
        self.most = run.remaining / seconds if limited else math.inf
        self.number = 0

    def used_up(self) -> bool:
        """Whether the budget of the run is used up after one more of them."""
        self.number += 1
        return self.number >= self.most

    def count_them(self) -> None:
        """Count all of them towards the budget of the run."""
        self.run.count(self.seconds * self.number)


def _keep_last_word(highs: Any, latest: Latest, is_mip: bool) -> None:
    """Put HiGHS's final solution and bound in place of the last reported ones."""
    info = highs.getInfo()
    if info.primal_solution_status == FEASIBLE:
        values = np.array(highs.getSolution().col_value, dtype=float)
        latest.incumbent = (values, float(info.objective_function_value))
    optimal = highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
    # the count is -1 where the branch and bound did not begin
    if is_mip and (optimal or info.mip_node_count >= 0):
        latest.on_bound(float(info.mip_dual_bound))
    elif optimal:  # of a linear programme the objective is the bound, by strong duality
        latest.on_bound(float(info.objective_function_value))


def _stop_and_message(highs: Any, run: Run) -> tuple[Stop, str]:
    """(`Stop` for the model status of HiGHS, message of an error or "")."""
    status = highs.getModelStatus().name
    if status == "kUnboundedOrInfeasible":
        return Stop.ERROR, UNCLEAR
    if status in _PROVEN:
        return _PROVEN[status], ""
    if status in _STOPPED:
        expected = status in ("kTimeLimit", "kInterrupt")
        return stop_reason(run), "" if expected else f"HiGHS: {status}"
    if status not in _FAILED:
        logging.getLogger("hetplan").warning("HiGHS returned an unknown model status: %s", status)
    return Stop.ERROR, f"HiGHS {_FAILED.get(status, f'returned {status}')}"


def _read(
    latest: Latest, arrays: LinearArrays, scale: Scale, units: NDArray[np.float64]
) -> dict[str, Any]:
    """The fields objective, x and bound of an answer, as far as there are such: integers are made
    whole, and seconds are in seconds."""
    (solution, objective), bound = latest.incumbent, latest.bound
    read: dict[str, Any] = {}
    if objective is not None:
        read["objective"] = scale.value(objective)
        read["x"] = np.where(arrays.integer, np.round(solution), solution / units)
    if bound is not None:
        read["bound"] = scale.value(bound - BOUND_ALLOWANCE * abs(bound))
    return read
