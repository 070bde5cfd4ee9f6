"""The HiGHS driver: statuses, bounds, time-outs, cancellation, options, duals, thread counts."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from hetplan.errors import InputError
from hetplan.solvers import highs
from hetplan.solvers.model import Model, ModelAnswer
from hetplan.solvers.native import Scale
from hetplan.solvers.options import Options
from hetplan.solvers.result import Stop
from hetplan.solvers.run import Progress, Run
from milps import knapsack, small


def run(**options: object) -> Run:
    return Run(Options(**{"threads": 1, **options}))  # type: ignore[arg-type]


def test_optimum_is_returned_in_the_instances_unit() -> None:
    answer = highs.solve(small(), run(), Scale(per_unit=4.0, offset=1.5))
    assert answer.stop is Stop.OPTIMAL
    assert answer.x is not None and answer.x.tolist() == [3.0, 4.0]
    assert answer.objective == pytest.approx(19 / 4 + 1.5)
    assert answer.bound is not None and answer.objective is not None
    assert answer.objective * (1 - 1e-6) < answer.bound < answer.objective
    assert answer.solver.startswith("HiGHS 1.")


def test_lp_gives_duals_and_a_bound() -> None:
    model = Model("lp")
    x = model.continuous("x", (2,))
    model.minimize(x, [2.0, 3.0])
    model.row("need", x, lower=4.0)
    model.row("cap", x, [1.0, 0.0], upper=3.0)
    answer = highs.solve(model, run())
    assert answer.stop is Stop.OPTIMAL
    assert answer.values(x).tolist() == pytest.approx([3.0, 1.0])
    assert answer.row_dual is not None and answer.row_dual.tolist() == pytest.approx([3.0, -1.0])
    assert answer.column_dual is not None and answer.column_dual.tolist() == pytest.approx(
        [0.0, 0.0]
    )
    assert answer.bound == pytest.approx(9.0)


@pytest.mark.parametrize("whole", [False, True])
def test_infeasible_has_neither_objective_nor_bound(whole: bool) -> None:
    model = Model("infeasible")
    x = model.integer("x", (2,), upper=5) if whole else model.continuous("x", (2,), upper=5)
    model.minimize(x, [1.0, 2.0])
    model.equal("parity" if whole else "sum", x, 2.0, to=7.0 if whole else 21.0)
    answer = highs.solve(model, run())
    assert answer.stop is Stop.INFEASIBLE
    assert answer.objective is None and answer.bound is None and answer.x is None


@pytest.mark.parametrize("whole", [False, True])
def test_unbounded_is_an_error_and_not_infeasible(whole: bool) -> None:
    model = Model("unbounded")
    x = model.integer("x", (2,)) if whole else model.continuous("x", (2,))
    model.minimize(x, [-1.0, 0.5])
    model.row("tie", x, [1.0, -1.0], upper=3.0)
    answer = highs.solve(model, run())
    assert answer.stop is Stop.ERROR
    assert "unbounded" in answer.message
    assert answer.bound is None


def test_infeasible_and_unbounded_are_told_apart() -> None:
    model = Model("both")
    x = model.integer("x", (3,))
    model.minimize(x, [-1.0, 0.5, 0.0])
    model.row("ray", x, [1.0, -1.0, 0.0], upper=3.0)
    model.row("never", x, [0.0, 0.0, 1.0], upper=-1.0)
    assert highs.solve(model, run()).stop is Stop.INFEASIBLE


def test_a_model_without_columns_or_rows() -> None:
    model = Model("empty")
    model.constant = 5.0
    answer = highs.solve(model, run())
    assert answer.stop is Stop.OPTIMAL and answer.objective == answer.bound == 5.0
    model.row("never", [], lower=1.0)
    assert highs.solve(model, run()).stop is Stop.INFEASIBLE
    model = Model("no rows")
    x = model.binary("x", (2,))
    model.minimize(x, [1.0, -1.0])
    answer = highs.solve(model, run())
    assert answer.stop is Stop.OPTIMAL and answer.values(x).tolist() == [0.0, 1.0]


def test_time_out_keeps_incumbent_and_bound() -> None:
    answer = highs.solve(knapsack(), run(time_limit=1.2))
    assert answer.stop is Stop.LIMIT
    assert answer.objective is not None and answer.bound is not None
    assert 0 < answer.bound < answer.objective
    assert answer.x is not None and set(answer.x) <= {0.0, 1.0}


def test_time_out_without_a_bound_says_none() -> None:
    answer = highs.solve(knapsack(3000, 1000), run(time_limit=0.01))
    assert answer.stop is Stop.LIMIT
    assert answer.bound is None or answer.bound > 0


def test_cancel_keeps_what_is_known() -> None:
    going = run()
    threading.Timer(1.2, going.cancel.set).start()
    answer = highs.solve(knapsack(), going)
    assert answer.stop is Stop.INTERRUPTED
    assert answer.objective is not None and answer.bound is not None
    assert answer.bound < answer.objective


def _not_hearing(deaf: list[highs._Listener]) -> Callable[[highs._Listener], None]:
    """A method in place of `interrupt` that only notes who was asked."""

    def interrupt(listener: highs._Listener) -> None:
        deaf.append(listener)

    return interrupt


def test_cancel_returns_although_highs_hears_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    deaf: list[highs._Listener] = []
    really = highs._Listener.interrupt
    monkeypatch.setattr(highs._Listener, "interrupt", _not_hearing(deaf))
    going = run(time_limit=8.0)
    threading.Timer(1.5, going.cancel.set).start()
    answer = highs.solve(knapsack(), going)
    really(deaf[0])
    assert answer.stop is Stop.INTERRUPTED
    assert answer.seconds < 8.0
    assert answer.objective is not None and answer.x is not None
    assert "last report" in answer.message


DEEP_IN_AN_LP = """
import threading
from hetplan.solvers import highs
from hetplan.solvers.options import Options
from hetplan.solvers.run import Run
from milps import sparse_packing
going = Run(Options(threads=2))
model = sparse_packing(20000, 10000, 20).arrays()
threading.Timer(2.5, going.cancel.set).start()
print(highs.solve(model, going).stop)
"""


@pytest.mark.slow
def test_the_process_may_end_while_highs_is_deep_in_an_lp() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", DEEP_IN_AN_LP],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "interrupted\n", "")


def test_progress_is_reported_in_the_instances_unit() -> None:
    seen: list[Progress] = []
    watched = Run(Options(threads=1, time_limit=1.5), watch=seen.append)
    highs.solve(knapsack(), watched, Scale(per_unit=10.0))
    incumbents = [p.incumbent for p in seen if p.incumbent is not None]
    assert incumbents and all(math.isfinite(p) for p in incumbents)
    assert watched.bound is not None and watched.incumbent is not None
    assert watched.bound < watched.incumbent


def test_the_number_of_threads_may_change_from_model_to_model() -> None:
    for threads in (1, 2, 1, 3, 2):
        answer = highs.solve(small(), run(threads=threads))
        assert answer.stop is Stop.OPTIMAL and answer.objective == pytest.approx(19.0)


def test_models_may_run_side_by_side() -> None:
    answers: list[ModelAnswer] = []
    workers = [
        threading.Thread(
            target=lambda t=t: answers.append(highs.solve(knapsack(30, 5, t), run(threads=t)))
        )
        for t in (1, 2, 3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [answer.stop for answer in answers] == [Stop.OPTIMAL] * 3


def test_gap_asked_for_ends_the_search() -> None:
    answer = highs.solve(knapsack(60, 5), run(gap=0.5, time_limit=60))
    assert answer.stop is Stop.OPTIMAL
    assert answer.objective is not None and answer.bound is not None
    assert answer.bound <= answer.objective <= answer.bound / (1 - 0.5)


def test_start_solution_is_used() -> None:
    model = knapsack()
    model.start = np.zeros(model.size)
    answer = highs.solve(model, run(native={"highs": {"mip_max_nodes": 0, "presolve": "off"}}))
    assert answer.stop is Stop.LIMIT
    assert answer.objective is not None and answer.objective <= model.constant


@pytest.mark.parametrize(
    ("name", "value"),
    [("no_such_option", 1), ("presolve", 3), ("mip_max_nodes", "many"), ("mip_max_nodes", -5)],
)
def test_bad_native_option_is_an_input_error(name: str, value: object) -> None:
    with pytest.raises(InputError, match=f"highs.{name}"):
        highs.solve(small(), run(native={"highs": {name: value}}))


def test_an_exception_of_the_watcher_stops_the_search_and_comes_out() -> None:
    class Enough(Exception):
        pass

    def watch(progress: Progress) -> None:
        raise Enough

    before = threading.enumerate()
    with pytest.raises(Enough):
        highs.solve(knapsack(50, 20), Run(Options(threads=1), watch=watch))
    mine = [t for t in threading.enumerate() if t.name == "hetplan-native" and t not in before]
    deadline = time.monotonic() + 60
    while any(t.is_alive() for t in mine):
        assert time.monotonic() < deadline, "the search goes on although nobody waits for it"
        time.sleep(0.01)


@pytest.mark.parametrize("estimate", [1e-9, 0.7, 1.0, 1024.0, 3e7])
def test_objective_unit_brings_the_objective_to_about_a_thousand(estimate: float) -> None:
    assert 512 <= estimate * highs.objective_unit(estimate) <= 1024


def test_objective_unit_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="estimate"):
        highs.objective_unit(0.0)
