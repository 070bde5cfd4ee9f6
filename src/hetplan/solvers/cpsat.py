"""Driver of OR-Tools CP-SAT: options in, incumbents and bounds out, every status mapped.

A model minimises an integer objective z; `Scale` says how z maps to the instance's unit and how far
rounding may be off. `integer_scale` chooses the factor from the data, `rounded_down` turns floats
into integers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from ortools.sat.python import cp_model

from hetplan.errors import InputError
from hetplan.solvers.native import (
    GAP_SHARE,
    HANDED_OVER,
    Answer,
    Latest,
    Scale,
    Sink,
    drive,
    stopped,
)
from hetplan.solvers.options import NativeValue, Options
from hetplan.solvers.result import Stop
from hetplan.solvers.run import Run

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


@dataclass(frozen=True, kw_only=True)
class CpAnswer(Answer):
    """An answer with the value of each variable of the model, by index."""

    solution: Sequence[int] | None = None

    def value(self, variable: Any) -> int:
        """The incumbent's value of a variable of the model (not of an expression or a negated
        literal)."""
        assert self.solution is not None, "no incumbent to read"
        index: int = variable.index
        assert index >= 0, "negated literals have no value of their own"
        return int(self.solution[index])

    def chosen(self, variables: Iterable[Any]) -> list[int]:
        """Positions of those Boolean variables that are true in the incumbent."""
        return [i for i, variable in enumerate(variables) if self.value(variable)]


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
    allowed = LARGEST_TOTAL / largest
    return 2.0 ** min(math.ceil(math.log2(wanted)), math.floor(math.log2(allowed)))


def rounded_down(values: ArrayLike, scale: float) -> NDArray[np.int64]:
    """floor(values * scale) as integers: the model never prices a decision too high."""
    return np.floor(np.asarray(values, dtype=float) * scale).astype(np.int64)


def rounded_up(values: ArrayLike, scale: float) -> NDArray[np.int64]:
    """ceil(values * scale) as integers."""
    return np.ceil(np.asarray(values, dtype=float) * scale).astype(np.int64)


class Model(cp_model.CpModel):
    """A CpModel built for `run`: variables and constraints raise `Stopped` once the run should
    stop."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._check_run = run.check

    def new_bool_var(self, name: str) -> Any:
        """See CpModel."""
        self._check_run()
        return super().new_bool_var(name)

    def new_int_var(self, lb: Any, ub: Any, name: str) -> Any:
        """See CpModel."""
        self._check_run()
        return super().new_int_var(lb, ub, name)

    def add(self, ct: Any) -> Any:
        """See CpModel."""
        self._check_run()
        return super().add(ct)

    def add_bool_or(self, *literals: Any) -> Any:
        """See CpModel."""
        self._check_run()
        return super().add_bool_or(*literals)


class _Listener(cp_model.CpSolverSolutionCallback):
    """Keeps what CP-SAT reports from its threads."""

    def __init__(self, latest: Latest) -> None:
        super().__init__()
        self._latest = latest

    def on_solution_callback(self) -> None:
        """Called for each better solution."""
        self._latest.on_solution(list(self.response_proto.solution), self.objective_value)
        self._latest.on_bound(self.best_objective_bound)


def solve(model: Any, run: Run, scale: Scale | None = None, report: Sink | None = None) -> CpAnswer:
    """Minimise `model` (an ortools CpModel) within what is left of `run`.

    scale: objective -> instance's unit (default: one to one). report: where incumbents and bounds
    go, in the instance's unit (default: `run.report`, right when the model is the whole problem).
    Raises InputError for a native option that CP-SAT does not have.
    """
    scale = scale or Scale()
    if run.tap is not None:
        run.tap(model, scale)
        return CpAnswer(stop=stopped(run), solver=SOLVER, message=HANDED_OVER)
    solver = _configured(run.options)
    if run.should_stop:
        return CpAnswer(stop=stopped(run), solver=SOLVER)
    if math.isfinite(run.remaining):
        solver.parameters.max_time_in_seconds = run.remaining
    latest, begun = Latest(), time.perf_counter()
    relay = latest.relay(scale, run, report)
    has_objective = bool(model.has_objective())
    if has_objective:
        solver.best_bound_callback = latest.on_bound
    status = drive(
        lambda: solver.solve(model, _Listener(latest)),
        run=run,
        interrupt=solver.stop_search,
        poll=relay if has_objective else lambda: None,
    )
    return _answer(model, solver, status, latest, scale, run, time.perf_counter() - begun)


def _answer(
    model: Any, solver: Any, status: Any, latest: Latest, scale: Scale, run: Run, seconds: float
) -> CpAnswer:
    """Map the native status; an abandoned search (status None) answers with its last reports."""
    stop, message = _mapped(model, solver, status, run)
    (solution, objective), bound = latest.found, latest.bound
    statistics: dict[str, object] = {}
    if status is not None:
        statistics = {"branches": solver.num_branches, "conflicts": solver.num_conflicts}
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            solution, objective = list(solver.response_proto.solution), solver.objective_value
            latest.on_bound(solver.best_objective_bound)
            bound = latest.bound
    if not model.has_objective():  # any solution is as good as another
        objective, bound = (None if solution is None else 0.0), None
    if stop is Stop.INFEASIBLE:
        bound = None
    return CpAnswer(
        stop=stop,
        objective=None if objective is None else scale.value(objective),
        bound=None if bound is None else scale.bound(bound),
        seconds=seconds,
        solver=SOLVER,
        message=message,
        statistics=statistics,
        solution=solution,
    )


def _mapped(model: Any, solver: Any, status: Any, run: Run) -> tuple[Stop, str]:
    """CP-SAT's status as ours, with a message where there is more to say."""
    if status is None:
        return stopped(run), "CP-SAT did not stop in time; its last report is taken"
    if status == cp_model.OPTIMAL:
        return Stop.OPTIMAL, ""
    if status == cp_model.INFEASIBLE:
        return Stop.INFEASIBLE, ""
    if status in (cp_model.FEASIBLE, cp_model.UNKNOWN):
        return stopped(run), ""
    if status == cp_model.MODEL_INVALID:
        return Stop.ERROR, f"CP-SAT refuses the model: {str(model.validate())[:300]}"
    return (
        Stop.ERROR,
        f"CP-SAT returned a status that hetplan does not know: {solver.status_name(status)}",
    )


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
    if name.startswith("_") or not hasattr(parameters, name) or callable(getattr(parameters, name)):
        raise InputError("unknown", where=where, expected="a field of CP-SAT's SatParameters")
    try:
        setattr(parameters, name, value)
    except (TypeError, ValueError, AttributeError):
        kind = type(getattr(parameters, name)).__name__
        raise InputError("value not usable", where=where, got=value, expected=kind) from None
