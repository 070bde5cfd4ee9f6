"""How the registry judges an outcome: each contradiction between a method and the evaluator is an
error, and what holds is passed on."""

from __future__ import annotations

import pytest

from hetplan.errors import DisagreementError
from hetplan.solvers.registry import Evaluation, Family, Method, judged, solve
from hetplan.solvers.run import Outcome, Run, Stop

WORTH = 3.0


def evaluate(data: object, decision: str) -> Evaluation:
    """A decision of two lines is rejected for two reasons, and an empty one for none."""
    if decision == "good":
        return Evaluation(WORTH, parts={"share": 0.5, "rest": 2.5})
    return Evaluation(None, tuple(decision.split()))


def near(data: object, run: Run) -> Outcome[str]:
    """Ends with a bound that rounding puts a hair above the objective."""
    return Outcome(
        stop=Stop.OPTIMAL, decision="good", bound=WORTH * (1 + 1e-9), details={"nodes": 7}
    )


def hungry(data: object, run: Run) -> Outcome[str]:
    """Runs out of memory."""
    raise MemoryError


METHODS = tuple(Method(name, f"{__name__}:{name}", True, "") for name in ("near", "hungry"))
FAMILY = Family(
    "fake", "", "", "", "", f"{__name__}:evaluate", METHODS, beside=("share",)
)  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (
            Outcome(stop=Stop.INFEASIBLE, decision="good"),
            "fake/near: calls infeasible what it has a decision for",
        ),
        (Outcome(stop=Stop.DONE, decision="late heavy"), "fake/near: decision rejected: late"),
        (Outcome(stop=Stop.DONE, decision=""), "fake/near: decision rejected: no reason given"),
        (
            Outcome(stop=Stop.OPTIMAL, decision="good", bound=3.1),
            "fake/near: bound 3.1 exceeds objective 3.0",
        ),
    ],
)
def test_a_method_that_contradicts_the_evaluator_is_an_error(
    outcome: Outcome[str], message: str
) -> None:
    with pytest.raises(DisagreementError) as error:
        judged(FAMILY, "near", None, outcome)
    assert str(error.value) == message


def test_an_outcome_that_holds_is_evaluated_once_it_has_a_decision() -> None:
    assert judged(FAMILY, "near", None, Outcome(stop=Stop.INFEASIBLE)) is None
    assert judged(FAMILY, "near", None, Outcome(stop=Stop.LIMIT, bound=9.0)) is None
    evaluation = judged(FAMILY, "near", None, Outcome(stop=Stop.DONE, decision="good"))
    assert evaluation is not None and evaluation.objective == WORTH


def test_the_result_has_the_objective_the_bound_below_it_and_what_stands_beside() -> None:
    result = solve(FAMILY, None, "near")
    assert (result.objective, result.bound) == (WORTH, WORTH)
    assert result.details == {"nodes": 7, "share": 0.5}


def test_running_out_of_memory_is_an_outcome() -> None:
    result = solve(FAMILY, None, "hungry")
    assert (result.stop, result.decision, result.message) == (Stop.ERROR, None, "out of memory")
