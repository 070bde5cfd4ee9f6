"""General solvers under a budget of counted seconds: no clock decides what they answer."""

from __future__ import annotations

from typing import Any

import pytest

from amp.cases import data_of
from hetplan.clock import CLOCK
from hetplan.formulations.amp.family import FAMILY
from hetplan.solvers import general, highs
from hetplan.solvers.general import minimise
from hetplan.solvers.model import ModelAnswer
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run, Stop
from milps import knapsack, small

BUDGET = {"cp-sat": 0.05, "milp": 0.1}  # counted seconds
FASTER = (1.0, 1e6)  # of a clock; with the second one every limit in seconds is over at once


def run_with(budget: float) -> Run:
    return Run(Options(threads=1), budget=budget)


def hurry(monkeypatch: pytest.MonkeyPatch, faster: float) -> None:
    """Have the clock of time limits run so many times as fast."""
    real = CLOCK.now
    monkeypatch.setattr(CLOCK, "now", lambda: faster * real())


@pytest.mark.parametrize("method", list(BUDGET))
def test_another_clock_gives_the_same_answer(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    for faster in FASTER:
        with monkeypatch.context() as patch:
            hurry(patch, faster)
            answers.append(minimise(method, knapsack(60, 15), run_with(BUDGET[method])))
    first, second = answers
    assert first.stop is second.stop is Stop.LIMIT
    assert first.message == "" and first.bound is not None
    assert (first.objective, first.bound) == (second.objective, second.bound)
    assert first.statistics == second.statistics


@pytest.mark.parametrize("method", list(BUDGET))
def test_the_work_is_counted_and_a_used_up_budget_ends_the_run(method: str) -> None:
    run = run_with(BUDGET[method])
    minimise(method, knapsack(60, 15), run)
    assert run.spent >= 0.9 * BUDGET[method]
    rest = run.part()
    assert minimise(method, knapsack(60, 15), rest).stop is Stop.LIMIT
    assert rest.spent < 0.2 * BUDGET[method]


@pytest.mark.parametrize(("counted", "asked"), [(1.0, 2), (10.0, 1)])
@pytest.mark.parametrize("faster", FASTER)
def test_a_count_says_whether_a_proof_is_asked_for_again(
    counted: float, asked: int, faster: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets: list[float] = []

    def proven(model: Any, run: Run, report: Any = None) -> ModelAnswer:
        budgets.append(run.remaining)
        run.count(counted)
        return ModelAnswer(stop=Stop.OPTIMAL, objective=1.0, bound=1.0)

    monkeypatch.setattr(highs, "solve", proven)
    hurry(monkeypatch, faster)
    general.minimise("milp", small(), run_with(100.0))
    assert budgets == [100.0, 99.0][:asked]


@pytest.mark.parametrize("method", ["cp-sat", "milp"])
def test_a_sweep_over_configurations_hears_no_clock(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for faster in FASTER:
        with monkeypatch.context() as patch:
            hurry(patch, faster)
            data = data_of((0, 6))
            results.append(solve(FAMILY, data, method, run_with(0.3)))
    first, second = results
    assert (first.decision, first.bound) == (second.decision, second.bound)
    assert dict(first.details) == dict(second.details)
