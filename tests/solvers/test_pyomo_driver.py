"""The Pyomo driver: the same models as for HiGHS, statuses, bounds, solver names, options,
silence."""

from __future__ import annotations

import math
import os
import threading
from typing import Any

import pyomo.environ as pyo
import pytest

from hetplan.errors import InputError, UnsupportedError
from hetplan.solvers import highs, pyomo_driver
from hetplan.solvers.model import Model
from hetplan.solvers.native import Scale
from hetplan.solvers.options import Options
from hetplan.solvers.pyomo_dialects import dialect, engine
from hetplan.solvers.result import Stop
from hetplan.solvers.run import Run
from milps import knapsack, small

# HiGHS comes with hetplan; more solvers can be named here where they are installed.
SOLVERS = ["appsi_highs", "highs", *os.environ.get("HETPLAN_TEST_PYOMO_SOLVERS", "").split()]
every_solver = pytest.mark.parametrize("solver", SOLVERS)


def run(solver: str = "highs", **options: object) -> Run:
    return Run(Options(**{"threads": 1, "pyomo_solver": solver, **options}))  # type: ignore[arg-type]


@every_solver
def test_optimum_is_returned_in_the_instances_unit(solver: str) -> None:
    answer = pyomo_driver.solve(small(), run(solver), Scale(per_unit=4.0, offset=1.5))
    assert answer.stop is Stop.OPTIMAL
    assert answer.x is not None and answer.x.tolist() == [3.0, 4.0]
    assert answer.objective == pytest.approx(19 / 4 + 1.5)
    assert answer.bound is not None and answer.objective is not None
    assert answer.objective * (1 - 1e-6) < answer.bound <= answer.objective
    assert solver in answer.solver and "Pyomo" in answer.solver


@every_solver
@pytest.mark.parametrize("seed", range(4))
def test_same_optimum_as_the_direct_driver(solver: str, seed: int) -> None:
    model = knapsack(25, 4, seed)
    direct, through = highs.solve(model, run()), pyomo_driver.solve(model, run(solver))
    assert direct.stop is through.stop is Stop.OPTIMAL
    assert through.objective == pytest.approx(direct.objective, rel=1e-6)
    assert through.bound is not None and through.objective is not None
    assert through.objective * (1 - 1e-6) <= through.bound <= through.objective


@every_solver
def test_lp_has_a_bound(solver: str) -> None:
    model = Model("lp")
    x = model.continuous("x", (3,), lower=[0.0, 0.0, 2.0])
    model.minimize(x[:2], [2.0, 3.0])
    model.row("need", x[:2], lower=4.0)
    model.row("window", x[:2], [1.0, -1.0], lower=-5.0, upper=2.0)
    answer = pyomo_driver.solve(model, run(solver))
    assert answer.stop is Stop.OPTIMAL
    assert answer.objective == pytest.approx(9.0)
    assert answer.bound == pytest.approx(9.0, rel=1e-6)
    assert answer.values(x[2]) == 2.0  # occurs nowhere: stays at its bound


@every_solver
@pytest.mark.parametrize("whole", [False, True])
def test_infeasible_has_neither_objective_nor_bound(solver: str, whole: bool) -> None:
    model = Model("infeasible")
    x = model.integer("x", (2,), upper=5) if whole else model.continuous("x", (2,), upper=5)
    model.minimize(x, [1.0, 2.0])
    model.equal("sum", x, 2.0, to=7.0 if whole else 21.0)
    answer = pyomo_driver.solve(model, run(solver))
    assert answer.stop is Stop.INFEASIBLE
    assert answer.objective is None and answer.bound is None and answer.x is None


@every_solver
def test_unbounded_is_an_error_and_not_infeasible(solver: str) -> None:
    model = Model("unbounded")
    x = model.integer("x", (2,))
    model.minimize(x, [-1.0, 0.5])
    model.row("tie", x, [1.0, -1.0], upper=3.0)
    answer = pyomo_driver.solve(model, run(solver))
    assert answer.stop is Stop.ERROR
    assert "unbounded" in answer.message and answer.bound is None


@every_solver
def test_a_row_without_columns(solver: str) -> None:
    model = small()
    model.row("fine", [], upper=1.0)
    assert pyomo_driver.solve(model, run(solver)).stop is Stop.OPTIMAL
    model.row("never", [], lower=1.0)
    assert pyomo_driver.solve(model, run(solver)).stop is Stop.INFEASIBLE


@every_solver
def test_time_out_keeps_incumbent_and_bound(solver: str) -> None:
    answer = pyomo_driver.solve(knapsack(), run(solver, time_limit=1.5))
    assert answer.stop is Stop.LIMIT
    assert answer.objective is not None and answer.bound is not None
    assert 0 < answer.bound < answer.objective


def test_cancel_keeps_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS itself says when there is something to keep: then the user wants it to stop."""
    going, fill = run("highs"), pyomo_driver._filled_highs

    def look(event: Any) -> None:
        if math.isfinite(event.data_out.mip_primal_bound) and math.isfinite(
            event.data_out.mip_dual_bound
        ):
            going.cancel.set()

    def filled(*arguments: Any) -> Any:
        native = fill(*arguments)
        native.cbMipInterrupt.subscribe(look)
        return native

    monkeypatch.setattr(pyomo_driver, "_filled_highs", filled)
    answer = pyomo_driver.solve(knapsack(), going)
    assert answer.stop is Stop.INTERRUPTED
    assert answer.objective is not None and answer.bound is not None
    assert answer.bound < answer.objective


def test_nothing_is_printed_and_output_stays_ours(capfd: pytest.CaptureFixture[str]) -> None:
    going = run(time_limit=1.2)
    threading.Timer(0.6, lambda: print("in the middle")).start()
    pyomo_driver.solve(knapsack(), going)
    assert capfd.readouterr() == ("in the middle\n", "")


def test_the_number_of_threads_may_change_from_model_to_model() -> None:
    for threads in (1, 2, 1):
        assert pyomo_driver.solve(small(), run(threads=threads)).stop is Stop.OPTIMAL


def test_concrete_models_keep_their_incumbent_in_their_variables() -> None:
    model = pyo.ConcreteModel()
    model.x = pyo.Var(domain=pyo.NonNegativeIntegers)
    model.need = pyo.Constraint(expr=2 * model.x >= 7)
    model.cost = pyo.Objective(expr=3 * model.x + 1)
    answer = pyomo_driver.solve_concrete(model, run())
    assert answer.stop is Stop.OPTIMAL and answer.objective == pytest.approx(13.0)
    assert pyo.value(model.x) == pytest.approx(4.0)


def test_unknown_solver_name_is_an_input_error() -> None:
    with pytest.raises(InputError, match="no_such_solver"):
        pyomo_driver.solve(small(), run("no_such_solver"))
    with pytest.raises(InputError, match="unknown Pyomo solver"):  # never run as a program
        pyomo_driver.solve(small(), run("/bin/true"))


def test_missing_solver_is_refused_naming_those_that_are_here() -> None:
    missing = next(
        name
        for name in ("mosek_direct", "xpress_direct", "cplex")
        if not pyomo_driver.available(name)
    )
    with pytest.raises(UnsupportedError, match=f"{missing}.*available here: .*appsi_highs"):
        pyomo_driver.solve(small(), run(missing))


@pytest.mark.parametrize("name", ["no_such_option", "mip_rel_gap", "threads", "random_seed"])
def test_bad_native_option_is_an_input_error(name: str) -> None:
    with pytest.raises(InputError, match=f"pyomo.{name}"):
        pyomo_driver.solve(small(), run(native={"pyomo": {name: 1}}))


def test_native_options_reach_the_solver() -> None:
    answer = pyomo_driver.solve(
        knapsack(), run(native={"pyomo": {"mip_max_nodes": 0, "presolve": "off"}})
    )
    assert answer.stop is Stop.LIMIT


def test_interface_names_lead_to_their_engine() -> None:
    names = ("appsi_gurobi", "gurobi_direct_v2", "gurobi_persistent", "gurobi")
    assert {engine(name) for name in names} == {"gurobi"}
    assert dialect("gurobi_direct").options(Options(threads=3, seed=4), limit=9.0) == {
        "MIPGap": 8e-7, "Threads": 3, "Seed": 4, "TimeLimit": 9.0,
        "MIPGapAbs": 0, "FeasibilityTol": 1e-9, "IntFeasTol": 1e-9,
    }  # fmt: skip
    assert "TimeLimit" not in dialect("gurobi").options(Options())
    assert dialect("nobody_knows").options(Options()) == {}
