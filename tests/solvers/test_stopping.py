"""Building, handing over and solving stop when the run should stop, and what is known then is
kept."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pyomo.environ as pyo
import pytest

from hetplan.solvers import cpsat, highs, pyomo_driver, registry
from hetplan.solvers.model import ModelAnswer
from hetplan.solvers.options import Options
from hetplan.solvers.registry import Evaluation, Family, Method
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run, Stopped
from milps import knapsack, small
from stopping import After, cancelled_after, over

DRIVERS: dict[str, Callable[..., ModelAnswer]] = {"highs": highs.solve, "pyomo": pyomo_driver.solve}
every_driver = pytest.mark.parametrize("driver", DRIVERS)


def test_check_raises_exactly_when_the_run_should_stop() -> None:
    Run().check()
    Run(Options(time_limit=60.0)).check()
    for stopped in (over(), cancelled_after(0), cancelled_after(0).part()):
        with pytest.raises(Stopped):
            stopped.check()


def test_a_model_for_no_run_never_stops() -> None:
    assert small().arrays().shape == (1, 2)


@pytest.mark.parametrize(
    "add",
    [
        lambda model, x: model.new_bool_var("b"),
        lambda model, x: model.new_int_var(0, 3, "i"),
        lambda model, x: model.add(x <= 2),
        lambda model, x: model.add_bool_or(x, ~x),
    ],
)
def test_a_cpsat_model_stops_at_every_piece(add: Callable[[Any, Any], Any]) -> None:
    model = cpsat.Model(cancelled_after(2))
    x = model.new_bool_var("x")
    add(model, x)
    with pytest.raises(Stopped):
        add(model, x)


@every_driver
@pytest.mark.parametrize("looks", [0, 1, 30, 61, 62, 100])
def test_drivers_answer_wherever_they_are_stopped(
    driver: str, looks: int, capfd: pytest.CaptureFixture[str]
) -> None:
    cancel = After(10**9)
    going = Run(Options(threads=1), cancel=cancel)
    model = knapsack(100, 60, run=going)
    cancel.looks = cancel.looked + looks
    answer = DRIVERS[driver](model, going)
    assert answer.stop is Stop.INTERRUPTED
    assert answer.solver
    assert (answer.x is None) == (answer.objective is None)
    assert capfd.readouterr() == ("", "")


@every_driver
def test_drivers_begin_nothing_when_the_time_is_up(driver: str) -> None:
    answer = DRIVERS[driver](knapsack(), over())
    assert (answer.stop, answer.objective, answer.bound) == (Stop.LIMIT, None, None)


@pytest.mark.parametrize("solver", ["highs", "appsi_highs"])
def test_pyomo_hands_its_model_to_highs_in_pieces(
    solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pyomo_driver, "PIECE", 1)
    concrete = pyomo_driver.as_pyomo(knapsack(20, 50).arrays())
    cancel = After(10)
    going = Run(Options(threads=1, pyomo_solver=solver), cancel=cancel)
    answer = pyomo_driver.solve_concrete(concrete, going)
    assert (answer.stop, answer.objective) == (Stop.INTERRUPTED, None)
    assert cancel.looked < 20  # of the 50 rows, few were looked at


@pytest.mark.parametrize("solver", ["highs", "appsi_highs"])
@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_the_size_of_the_pieces_changes_nothing(
    solver: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pyomo_driver, "PIECE", piece)
    going = Run(Options(threads=1, pyomo_solver=solver))
    direct, through = (
        highs.solve(knapsack(25, 8), going),
        pyomo_driver.solve(knapsack(25, 8), going),
    )
    assert through.stop is Stop.OPTIMAL
    assert through.objective == pytest.approx(direct.objective, rel=1e-9)


def test_rows_without_columns_and_without_bounds_stay_out_of_pyomo() -> None:
    model = small()
    model.row("free", [0, 1])
    model.row("empty", [], upper=1.0)
    concrete = pyomo_driver.as_pyomo(model.arrays())
    assert len(concrete.row) == 1
    assert [variable.domain for variable in concrete.x.values()] == [pyo.Integers, pyo.Integers]


def evaluate(data: object, decision: str) -> Evaluation:
    return Evaluation(3.0)


def forgetful(data: object, run: Run) -> Outcome[str]:
    """Says nothing of its time but two seconds of building."""
    return Outcome(stop=Stop.DONE, decision="it", build_seconds=2.0)


def escaping(data: object, run: Run) -> Outcome[str]:
    """Lets the wish to stop pass."""
    run.report(bound=1.5)
    run.check()
    return Outcome(stop=Stop.DONE)


FAMILY = Family(
    "fake", "", "", "", "", f"{__name__}:evaluate",
    tuple(Method(name, f"{__name__}:{name}", True, "") for name in ("forgetful", "escaping")),
)  # fmt: skip


def test_seconds_add_up_to_what_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([100.0, 107.5])
    monkeypatch.setattr(registry, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    result = registry.solve(FAMILY, None, "forgetful")
    assert (result.build_seconds, result.solve_seconds, result.seconds) == (2.0, 5.5, 7.5)


def test_a_method_that_lets_the_wish_to_stop_pass_keeps_its_bound() -> None:
    result = registry.solve(FAMILY, None, "escaping", over())
    assert (result.stop, result.status, result.bound) == (Stop.LIMIT, "unknown", 1.5)
    assert registry.solve(FAMILY, None, "escaping", cancelled_after(0)).stop is Stop.INTERRUPTED
