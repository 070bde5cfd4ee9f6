"""A run, and what the registry makes of its time: the wish to stop, seconds, bounds kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hetplan.clock import CLOCK
from hetplan.solvers import general, registry
from hetplan.solvers.registry import Evaluation, Family, Method
from hetplan.solvers.run import Options, Outcome, Run, Stop, Stopped
from stopping import cancelled_after, over


def test_check_raises_exactly_when_the_run_should_stop() -> None:
    Run().check()
    Run(Options(time_limit=60.0)).check()
    for stopped in (over(), cancelled_after(0), cancelled_after(0).part()):
        with pytest.raises(Stopped):
            stopped.check()


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
    monkeypatch.setattr(registry, "CLOCK", SimpleNamespace(seconds=lambda: next(ticks)))
    result = registry.solve(FAMILY, None, "forgetful")
    assert (result.build_seconds, result.solve_seconds, result.seconds) == (2.0, 5.5, 7.5)


def test_a_method_that_lets_the_wish_to_stop_pass_keeps_its_bound() -> None:
    result = registry.solve(FAMILY, None, "escaping", over())
    assert (result.stop, result.status, result.bound) == (Stop.LIMIT, "unknown", 1.5)
    assert registry.solve(FAMILY, None, "escaping", cancelled_after(0)).stop is Stop.INTERRUPTED


def formulate(data: object, run: Run) -> Outcome[str]:
    """Finds the optimum at once, if there is time."""
    run.check()
    return Outcome(stop=Stop.OPTIMAL, decision="it", bound=3.0)


# A driver whose import takes 100 s.
SLOW_DRIVER = """
from hetplan.clock import CLOCK

LATER = CLOCK.now() + 100
CLOCK.now = lambda: LATER


def label(options):
    return "a solver"
"""


def test_no_time_limit_counts_the_import_of_a_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Pyomo takes seconds for that."""
    monkeypatch.setattr(CLOCK, "now", lambda: 0.0)
    (tmp_path / "slow_driver.py").write_text(SLOW_DRIVER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(general.DRIVERS, "pyomo", "slow_driver")
    method = Method("pyomo", f"{__name__}:formulate", True, "")
    fake = Family("fake", "", "", "", "", f"{__name__}:evaluate", (method,))
    result = registry.solve_loaded(fake, None, "pyomo", Run(Options(time_limit=1.0)))
    assert CLOCK.now() == 100
    assert (result.status, result.seconds) == ("optimal", 0.0)
