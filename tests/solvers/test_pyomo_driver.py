"""What only Pyomo's driver does: many solvers by name, silence, models handed over in pieces."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest

from hetplan.errors import InputError, UnsupportedError
from hetplan.solvers import highs, pyomo_driver
from hetplan.solvers.pyomo_options import available, own_options
from hetplan.solvers.run import Options, Run, Stop, engine
from milps import knapsack, small
from stopping import After

# HiGHS comes with hetplan; more solvers can be named here where they are installed.
SOLVERS = ["appsi_highs", "highs", *os.environ.get("HETPLAN_TEST_PYOMO_SOLVERS", "").split()]
every_solver = pytest.mark.parametrize("solver", SOLVERS)


def run(solver: str = "highs", **options: object) -> Run:
    return Run(Options(**{"threads": 1, "pyomo_solver": solver, **options}))  # type: ignore[arg-type]


@every_solver
@pytest.mark.parametrize("seed", range(4))
def test_same_optimum_as_the_direct_driver(solver: str, seed: int) -> None:
    model = knapsack(25, 4, seed)
    direct, through = highs.solve(model, run()), pyomo_driver.solve(model, run(solver))
    assert direct.stop is through.stop is Stop.OPTIMAL
    assert through.objective == pytest.approx(direct.objective, rel=1e-6)
    assert through.bound is not None and through.objective is not None
    assert through.objective * (1 - 1e-6) <= through.bound <= through.objective


def test_cancel_keeps_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS itself says when there is something to keep: then the user wants it to stop."""
    going, silence = run("highs"), pyomo_driver._silence_highs

    def look(event: Any) -> None:
        if math.isfinite(event.data_out.mip_primal_bound) and math.isfinite(
            event.data_out.mip_dual_bound
        ):
            going.cancel.set()

    def silenced(solver: Any) -> None:
        add_block = solver.add_block
        solver.add_block = lambda model: (
            solver._solver_model.cbMipInterrupt.subscribe(look),
            add_block(model),
        )
        silence(solver)

    monkeypatch.setattr(pyomo_driver, "_silence_highs", silenced)
    answer = pyomo_driver.solve(knapsack(), going)
    assert answer.stop is Stop.INTERRUPTED
    assert answer.objective is not None and answer.bound is not None
    assert answer.bound < answer.objective


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
    assert own_options("gurobi_direct", Options(threads=3, seed=4), limit=9.0) == {
        "MIPGap": 8e-7, "Threads": 3, "Seed": 4, "TimeLimit": 9.0,
        "MIPGapAbs": 0, "FeasibilityTol": 1e-9, "IntFeasTol": 1e-9,
    }  # fmt: skip
    assert "TimeLimit" not in own_options("gurobi", Options())
    assert own_options("nobody_knows", Options()) == {}
