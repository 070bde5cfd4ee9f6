"""A quick proof of HiGHS is asked for a second time, with another seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hetplan.solvers import general, highs
from hetplan.solvers.model import Model, ModelAnswer
from hetplan.solvers.run import Options, Run, Stop

Answers = Callable[[int], ModelAnswer]  # by seed


def model() -> Model:
    """The least of x + 2 y with x + y >= 1: 1."""
    one = Model("one")
    x = one.binary("x", 2)
    one.row("some", x.sum() >= 1)
    one.minimize(np.array([1.0, 2.0]) @ x)
    return one


def answered(monkeypatch: pytest.MonkeyPatch, by_seed: dict[int, ModelAnswer]) -> ModelAnswer:
    """The answer of `milp` where HiGHS answers as given for each seed."""
    asked: list[int] = []

    def solve(stated: Any, run: Run, report: Any = None) -> ModelAnswer:
        asked.append(run.options.seed)
        return by_seed[run.options.seed]

    monkeypatch.setattr(highs, "solve", solve)
    answer = general.minimise("milp", model(), Run(Options(seed=7)))
    assert asked == [7, 8]
    return answer


def proven(objective: float) -> ModelAnswer:
    return ModelAnswer(
        stop=Stop.OPTIMAL, objective=objective, bound=objective, x=np.array([1.0, 0.0])
    )


NONE = ModelAnswer(stop=Stop.INFEASIBLE)
LATE = ModelAnswer(stop=Stop.LIMIT, objective=3.0, bound=0.5)


@pytest.mark.parametrize(
    ("first", "second", "objective", "bound"),
    [
        (proven(2.0), proven(1.0), 1.0, 1.0),  # an optimum was cut off
        (proven(1.0), proven(2.0), 1.0, 1.0),
        (NONE, proven(1.0), 1.0, 1.0),
        (proven(1.0), NONE, 1.0, 1.0),
        (proven(1.0), LATE, 1.0, 1.0),
        (NONE, NONE, None, None),
    ],
)
def test_the_better_solution_and_the_lower_bound_are_taken(
    first: ModelAnswer,
    second: ModelAnswer,
    objective: float | None,
    bound: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = answered(monkeypatch, {7: first, 8: second})
    assert (answer.objective, answer.bound) == (objective, bound)
    assert (answer.stop is Stop.INFEASIBLE) == (objective is None)


def test_linear_programmes_and_long_runs_are_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Model] = []

    def solve(stated: Model, run: Run, report: Any = None) -> ModelAnswer:
        asked.append(stated)
        return proven(1.0)

    monkeypatch.setattr(highs, "solve", solve)
    linear = Model("linear")
    linear.minimize(linear.continuous("x") + 0)
    general.minimise("milp", linear, Run())
    monkeypatch.setattr(general, "CONFIRMED_SECONDS", -1.0)
    general.minimise("milp", model(), Run())
    assert len(asked) == 2
