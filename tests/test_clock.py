"""The clock of time limits stands still while kernels are compiled."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any

import pytest
from numba.core import dispatcher

from hetplan.clock import CLOCK, Clock
from hetplan.compiled import Cache, kernel
from hetplan.formulations import family
from hetplan.formulations.amp import cuts, rows
from hetplan.instances.library import library
from hetplan.solvers.general import minimise
from hetplan.solvers.native import wall_seconds_left
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run, Stop
from milps import knapsack

made_by_numba: Any = dispatcher


class Seconds:
    """A clock's hand that only the test moves."""

    def __init__(self) -> None:
        self.passed = 0.0

    def __call__(self) -> float:
        return self.passed


def test_a_clock_counts_what_passes_outside_of_its_stops() -> None:
    now = Seconds()
    clock = Clock(now)
    begun = clock.seconds()
    now.passed += 1
    with clock.stopped():
        now.passed += 10
        assert clock.seconds() - begun == 1
        with clock.stopped():
            now.passed += 100
        now.passed += 1000
        assert clock.seconds() - begun == 1
    now.passed += 2
    assert clock.seconds() - begun == 3


def test_a_clock_goes_on_after_an_error() -> None:
    now = Seconds()
    clock = Clock(now)
    begun = clock.seconds()
    with contextlib.suppress(ValueError), clock.stopped():
        now.passed += 10
        raise ValueError
    now.passed += 2
    assert clock.seconds() - begun == 2


@pytest.fixture
def slow_compiler(monkeypatch: pytest.MonkeyPatch) -> Seconds:
    """A time that passes only while kernels are compiled, an hour for each; nothing is cached."""
    now, compiler = Seconds(), made_by_numba._FunctionCompiler
    compile_at_once = compiler.compile

    def compile_slowly(*arguments: Any) -> Any:
        now.passed += 3600
        return compile_at_once(*arguments)

    monkeypatch.setattr(compiler, "compile", compile_slowly)
    monkeypatch.setattr(Cache, "load_overload", lambda *arguments: None)
    monkeypatch.setattr(Cache, "save_overload", lambda *arguments: None)
    monkeypatch.setattr(CLOCK, "now", now)
    return now


def test_a_run_does_not_count_the_compilation_of_kernels(slow_compiler: Seconds) -> None:
    @kernel
    def inner(x: float) -> float:
        return 2 * x

    @kernel
    def outer(x: float) -> float:
        return inner(x) + 1

    run = Run(Options(time_limit=1.0))
    assert outer(1.5) == 4.0
    assert slow_compiler.passed >= 2 * 3600, "both kernels were compiled"
    assert (run.elapsed, run.remaining) == pytest.approx((0.0, 1.0), abs=1e-6)
    assert not run.should_stop
    slow_compiler.passed += 2
    assert run.should_stop


def test_a_method_has_all_its_time_in_a_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """AMP's kernels are new, and take an hour each before they run."""
    now, load = Seconds(), Cache.load_overload

    def load_slowly(*arguments: Any) -> Any:
        now.passed += 3600
        return load(*arguments)

    monkeypatch.setattr(Cache, "load_overload", load_slowly)
    monkeypatch.setattr(CLOCK, "now", now)
    monkeypatch.setattr(cuts, "cheapest_cut", kernel(cuts.cheapest_cut.py_func))  # type: ignore[attr-defined]
    monkeypatch.setattr(rows, "complete", kernel(rows.complete.py_func))  # type: ignore[attr-defined]
    (entry,) = library("amp", "tiny-mixed")
    data = entry.load().data
    result = solve(family("amp"), data, "exact", Run(Options(time_limit=1.0)))
    assert now.passed >= 2 * 3600
    assert result.stop is Stop.OPTIMAL
    assert result.seconds == pytest.approx(0.0, abs=1e-6)


def test_a_clock_may_count_the_processor() -> None:
    """Solvers get no limit of it: they count the wall, of which a busy machine takes more."""
    clock = Clock(Seconds())
    assert clock.counts_the_wall
    clock.count_the_processor()
    assert clock.now is time.process_time
    assert not clock.counts_the_wall


@pytest.mark.parametrize(("counts_the_wall", "limit"), [(True, 1.0), (False, math.inf)])
def test_only_seconds_of_the_wall_limit_native_code(
    counts_the_wall: bool, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CLOCK, "now", Seconds())
    monkeypatch.setattr(CLOCK, "counts_the_wall", counts_the_wall)
    run = Run(Options(time_limit=1.0))
    assert wall_seconds_left(run) == limit
    assert wall_seconds_left(Run()) == math.inf


@pytest.mark.parametrize("method", ["cp-sat", "milp"])
def test_a_solver_without_a_limit_of_its_own_is_stopped(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model takes it minutes."""
    monkeypatch.setattr(CLOCK, "counts_the_wall", False)
    answer = minimise(method, knapsack(), Run(Options(time_limit=0.1, threads=1)))
    assert answer.stop is Stop.LIMIT
