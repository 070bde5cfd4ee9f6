"""What only Pyomo's driver does: many solvers by name, silence, models handed over in pieces."""

from __future__ import annotations

import io
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyomo.environ as pyo
import pytest
from pyomo.opt import TerminationCondition

from hetplan.errors import InputError, UnsupportedError
from hetplan.solvers import highs, native, pyomo_driver
from hetplan.solvers.model import Model, ModelAnswer
from hetplan.solvers.native import GAP_SHARE, UNCLEAR
from hetplan.solvers.pyomo_options import available, limit_time, own_options
from hetplan.solvers.run import NativeValue, Options, Run, Stop, Stopped, engine
from milps import knapsack, small
from stopping import After

# HiGHS comes with hetplan; more solvers can be named here where they are installed.
SOLVERS = ["appsi_highs", "highs", *os.environ.get("HETPLAN_TEST_PYOMO_SOLVERS", "").split()]
every_solver = pytest.mark.parametrize("solver", SOLVERS)


def run(solver: str = "highs", **options: object) -> Run:
    return Run(Options(**{"threads": 1, "pyomo_solver": solver, **options}))  # type: ignore[arg-type]


@pytest.fixture
def pyomo_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What Pyomo logs; its logger hands nothing on to the root."""
    logging.getLogger("pyomo").addHandler(caplog.handler)
    yield caplog
    logging.getLogger("pyomo").removeHandler(caplog.handler)


@every_solver
@pytest.mark.parametrize("seed", range(4))
def test_same_optimum_as_the_direct_driver(solver: str, seed: int) -> None:
    model = knapsack(25, 4, seed)
    direct, through = highs.solve(model, run()), pyomo_driver.solve(model, run(solver))
    assert direct.stop is through.stop is Stop.OPTIMAL
    assert through.objective == pytest.approx(direct.objective, rel=1e-6)
    assert through.bound is not None and through.objective is not None
    assert through.objective * (1 - 1e-6) <= through.bound <= through.objective


@pytest.mark.parametrize("wish", ["cancel", "time"])
def test_a_run_that_ends_keeps_what_is_known(
    wish: str, monkeypatch: pytest.MonkeyPatch, pyomo_log: pytest.LogCaptureFixture
) -> None:
    """HiGHS itself says when there is something to keep: then the user wants it to stop, or the
    time is up. Pyomo would log a warning that it does not know this status."""
    going, silence = run("highs", time_limit=3600.0), pyomo_driver._silence_highs

    def look(event: Any) -> None:
        if math.isfinite(event.data_out.mip_primal_bound) and math.isfinite(
            event.data_out.mip_dual_bound
        ):
            going.cancel.set() if wish == "cancel" else setattr(going, "started", -1e9)

    def silenced(solver: Any) -> None:
        add_block = solver.add_block
        solver.add_block = lambda model: (
            solver._solver_model.cbMipInterrupt.subscribe(look),
            add_block(model),
        )
        silence(solver)

    monkeypatch.setattr(pyomo_driver, "_silence_highs", silenced)
    answer = pyomo_driver.solve(knapsack(), going)
    assert answer.stop is (Stop.INTERRUPTED if wish == "cancel" else Stop.LIMIT)
    assert answer.objective is not None and answer.bound is not None
    assert answer.bound < answer.objective
    assert answer.x is not None and set(answer.x) <= {0.0, 1.0}
    assert not pyomo_log.records
    assert logging.getLogger("pyomo").level < logging.CRITICAL


@pytest.mark.parametrize("solver", ["appsi_highs", "highs"])
def test_a_limit_without_a_solution_keeps_the_bound(solver: str) -> None:
    """No subset of these numbers has the sum asked for as far as one relaxation tells."""
    model, draw = Model("market"), np.random.default_rng(1)
    x = model.binary("x", (30,))
    for _ in range(4):
        numbers = draw.integers(1, 100, 30).astype(float)
        model.row("split", numbers @ x == numbers.sum() // 2)
    model.minimize(x.sum())
    limits: dict[str, NativeValue] = {"mip_max_nodes": 1, "mip_heuristic_effort": 0.0}
    answer = pyomo_driver.solve(model, run(solver, native={"pyomo": limits}))
    assert (answer.stop, answer.objective, answer.x) == (Stop.LIMIT, None, None)
    assert answer.bound is not None and 0 < answer.bound < 30


class Told:
    """An interface of Pyomo whose results are those of HiGHS, altered by `alter`."""

    def __init__(self, alter: Callable[[Any], None]) -> None:
        self.alter = alter
        self.options: dict[str, object] = {}
        self.highs = pyo.SolverFactory("highs")
        self.highs.options["output_flag"] = False

    def solve(self, model: Any, **arguments: object) -> Any:
        results = self.highs.solve(model, load_solutions=False)
        self.alter(results)
        return results


def told(
    monkeypatch: pytest.MonkeyPatch, model: Model, alter: Callable[[Any], None], name: str = "cbc"
) -> ModelAnswer:
    """The answer to a model by an interface of that name that tells altered results of HiGHS."""
    monkeypatch.setattr(pyomo_driver, "configured", lambda options: Told(alter))
    return pyomo_driver.solve(model, run(name))


@pytest.mark.parametrize(
    ("condition", "stop", "message"),
    [
        ("optimal", Stop.OPTIMAL, ""),
        ("globallyOptimal", Stop.OPTIMAL, ""),
        ("infeasible", Stop.INFEASIBLE, ""),
        ("unbounded", Stop.ERROR, "found the model unbounded below"),
        ("infeasibleOrUnbounded", Stop.ERROR, UNCLEAR),
        ("maxTimeLimit", Stop.LIMIT, ""),
        ("feasible", Stop.LIMIT, ""),
        ("noSolution", Stop.LIMIT, ""),
        ("licensingProblems", Stop.ERROR, "ended with licensingProblems: no licence"),
        ("other", Stop.ERROR, "ended with other: no licence"),
    ],
)
def test_conditions_become_stops(
    condition: str, stop: Stop, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alter(results: Any) -> None:
        results.solver.termination_condition = TerminationCondition[condition]
        results.solver.message = "no licence"

    answer = told(monkeypatch, small(), alter)
    assert (answer.stop, answer.message) == (stop, message)
    found = stop in (Stop.OPTIMAL, Stop.LIMIT)
    assert answer.objective == (pytest.approx(19.0) if found else None)
    assert (answer.bound is not None) == found


def test_values_of_a_relaxation_are_no_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    """cbc hands them over when the time is up."""

    def fractional(results: Any) -> None:
        results.solver.termination_condition = TerminationCondition.maxTimeLimit
        for value in results.solution[0].variable.values():
            value["Value"] += 0.25  # keeps to the row of `small`

    answer = told(monkeypatch, small(), fractional)
    assert (answer.stop, answer.objective, answer.x) == (Stop.LIMIT, None, None)
    assert answer.bound == pytest.approx(19.0)


def test_an_iterate_of_a_linear_programme_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """gurobi tells its objective as the bound."""

    def stopped(results: Any) -> None:
        results.solver.termination_condition = TerminationCondition.maxTimeLimit
        results.problem.lower_bound = 12.0

    model = Model("lp")
    x = model.continuous("x", (2,))
    model.row("need", x.sum() >= 4)
    model.minimize(2 * x[0] + 3 * x[1])
    answer = told(monkeypatch, model, stopped)
    assert (answer.stop, answer.objective, answer.bound) == (Stop.LIMIT, None, None)


@pytest.mark.parametrize(
    ("name", "stated", "bound"),
    [
        ("cbc", 18.0, 18.0),
        ("cbc", 19.1, 19.0),  # a rounding error
        ("cbc", None, 19 * (1 - 0.1 * GAP_SHARE)),  # appsi_cbc states none
        ("cbc", -math.inf, 19 * (1 - 0.1 * GAP_SHARE)),
        ("mosek_direct", None, None),  # it was not told the gap
    ],
)
def test_bounds_are_those_stated_or_follow_from_the_gap(
    name: str, stated: float | None, bound: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alter(results: Any) -> None:
        results.problem.lower_bound = stated

    monkeypatch.setattr(pyomo_driver, "configured", lambda options: Told(alter))
    answer = pyomo_driver.solve(small(), run(name, gap=0.1))
    assert answer.objective == pytest.approx(19.0)
    assert answer.bound == (None if bound is None else pytest.approx(bound))


def test_what_is_printed_after_an_abandoned_solver_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pyomo redirects `sys.stdout` while gurobi runs, which prints."""
    going, end = run("gurobi"), threading.Event()

    class Deaf:
        def __init__(self) -> None:
            self.options: dict[str, object] = {}

        def solve(self, model: Any, **arguments: object) -> None:
            sys.stdout = io.StringIO()
            going.cancel.set()
            end.wait(60)

    monkeypatch.setattr(pyomo_driver, "configured", lambda options: Deaf())
    monkeypatch.setattr(native, "GRACE_SECONDS", 0.0)
    before = sys.stdout
    answer = pyomo_driver.solve(small(), going)
    after, sys.stdout = sys.stdout, before
    end.set()
    assert answer.stop is Stop.INTERRUPTED and "did not stop in time" in answer.message
    assert after is before


def test_rows_that_always_hold_are_left_out() -> None:
    """scip_direct refuses rows without variables, appsi_gurobi rows without bounds."""
    model = small()
    x = model.binary("z")
    model.row("empty", x - x <= 1)
    model.row("free", x <= math.inf)
    assert len(pyomo_driver.as_pyomo(model.arrays(), run()).row) == 1


def test_a_model_that_is_not_finished_in_time_is_no_error_of_pyomo(
    pyomo_log: pytest.LogCaptureFixture,
) -> None:
    going, arrays = run(), knapsack().arrays()
    going.cancel.set()
    with pytest.raises(Stopped):
        pyomo_driver.as_pyomo(arrays, going)
    assert not pyomo_log.records


def test_nothing_is_printed_and_output_stays_ours(capfd: pytest.CaptureFixture[str]) -> None:
    class Printing(After):
        """Prints at every look: what is printed while HiGHS runs is the user's."""

        def is_set(self) -> bool:
            print("in the middle")
            return super().is_set()

    cancel = Printing(300)
    answer = pyomo_driver.solve(knapsack(), Run(Options(threads=1), cancel=cancel))
    assert answer.stop is Stop.INTERRUPTED
    assert capfd.readouterr() == ("in the middle\n" * cancel.looked, "")


def test_unknown_and_missing_solvers_are_refused() -> None:
    with pytest.raises(InputError, match="no_such_solver"):
        pyomo_driver.solve(small(), run("no_such_solver"))
    with pytest.raises(InputError, match="unknown Pyomo solver"):  # never run as a program
        pyomo_driver.solve(small(), run("/bin/true"))
    missing = ("mosek_direct", "xpress_direct", "cplex")
    absent = next(name for name in missing if not available(name))
    with pytest.raises(UnsupportedError, match=f"{absent}.*available here: .*appsi_highs"):
        pyomo_driver.solve(small(), run(absent))


def test_interface_names_lead_to_their_engine() -> None:
    names = ("appsi_gurobi", "gurobi_direct_v2", "gurobi_persistent", "gurobi")
    assert {engine(name) for name in names} == {"gurobi"}
    assert own_options("gurobi_direct", Options(threads=3, seed=4)) == {
        "MIPGap": 8e-7, "Threads": 3, "Seed": 4,
        "MIPGapAbs": 0, "FeasibilityTol": 1e-9, "IntFeasTol": 1e-9,
    }  # fmt: skip
    assert own_options("nobody_knows", Options()) == {}


@pytest.mark.parametrize(
    ("name", "seconds", "passed", "own"),
    [
        ("gurobi", 9.5, None, {"TimeLimit": 9.5}),  # its interface ignores what Pyomo passes
        ("cplex_direct", 0.0, None, {"timelimit": 1e-3}),  # 0 would be no limit
        ("cbc", 9.5, 9.5, {}),
        ("glpk", 9.5, 10, {}),  # glpsol refuses what is not whole
        ("nobody_knows", 9.5, 9.5, {}),
        ("glpk", math.inf, None, {}),
        ("gurobi", math.inf, None, {}),
    ],
)
def test_time_limits_reach_every_solver(
    name: str, seconds: float, passed: float | None, own: dict[str, float]
) -> None:
    interface = SimpleNamespace(options={})
    assert limit_time(interface, name, seconds) == passed
    assert interface.options == own
