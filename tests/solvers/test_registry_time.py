"""A run, and what the registry makes of its time: the wish to stop, seconds, bounds kept."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hetplan.solvers import registry
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
