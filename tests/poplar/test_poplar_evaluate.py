"""The evaluator: figures worked out by hand, and decisions that break each constraint."""

from __future__ import annotations

import pytest

from hetplan.errors import InputError
from hetplan.formulations.poplar.data import Device, PoplarData, PoplarDecision, Share, Step
from hetplan.formulations.poplar.evaluate import evaluate
from hetplan.schema import parse

FAST = Device(name="fast", step_seconds=[1.0, 1.5, 3.0])
SLOW = Device(name="slow", step_seconds=[2.0, 5.0])


def data(stage: int, batch: int = 8) -> PoplarData:
    return PoplarData(zero_stage=stage, global_batch=batch, comm_seconds=0.25, devices=[FAST, SLOW])


def shares(*pairs: tuple[int, int]) -> PoplarDecision:
    return PoplarDecision(devices=[Share(samples=g, micro_batch=b) for g, b in pairs])


def steps(*rows: tuple[int, list[int]]) -> PoplarDecision:
    return PoplarDecision(steps=[Step(count=count, micro_batches=row) for count, row in rows])


def test_shares_by_hand() -> None:
    """5 as 2 + 2 + 1 takes 1.5 + 1.5 + 1; 3 as 1 + 1 + 1 takes 6; speeds 4/3 and 1/2 samples per
    second."""
    found = evaluate(data(1), shares((5, 2), (3, 1)))
    assert found.objective == 6.25
    assert found.parts["compute_seconds"] == 6.0 and found.parts["comm_seconds"] == 0.25
    assert found.parts["idle_seconds"] == 2.0
    assert found.parts["under_utilisation"] == pytest.approx(2.0 * 4 / 3)
    # an idle device needs no micro-batch
    assert evaluate(data(0, 4), shares((4, 2), (0, 0))).objective == pytest.approx(3.25)


def test_steps_by_hand() -> None:
    """Twice (2, 1): 2 + 0.25 each; once (1, 1): 2 + 0.25. The fast device idles 0.5, 0.5 and 1."""
    found = evaluate(data(3), steps((2, [2, 1]), (1, [1, 1])))
    assert found.objective == pytest.approx(6.75)
    assert found.parts["comm_seconds"] == 0.75
    assert found.parts["under_utilisation"] == pytest.approx(2.0 * 4 / 3)


@pytest.mark.parametrize(
    ("stage", "decision", "says"),
    [
        (0, shares((5, 2), (2, 1)), "add up to 7"),
        (0, shares((5, 4), (3, 1)), "decision.devices[0].micro_batch is 4, expected 1 to 3"),
        (0, shares((5, 0), (3, 1)), "decision.devices[0].micro_batch is 0, expected 1 to 3"),
        (0, shares((8, 2)), "has 1 entries, expected one per device (2)"),
        (0, steps((2, [2, 2])), "expected devices for ZeRO 0"),
        (2, shares((5, 2), (3, 1)), "expected steps for ZeRO 2"),
        (2, steps((4, [2])), "decision.steps[0].micro_batches has 1 entries"),
        (
            2,
            steps((1, [3, 2]), (1, [0, 3])),
            "decision.steps[1].micro_batches[1] is 3, expected at most 2",
        ),
        (2, steps((2, [2, 2]), (3, [0, 0])), "decision.steps[1] is empty"),
        (2, steps((1, [2, 2])), "add up to 4"),
    ],
)
def test_broken_decisions_are_rejected(stage: int, decision: PoplarDecision, says: str) -> None:
    found = evaluate(data(stage), decision)
    assert found.objective is None
    assert says in found.violations[0]


def test_decisions_carry_only_their_own_kind() -> None:
    assert shares((1, 1)).model_dump(mode="json") == {"devices": [{"samples": 1, "micro_batch": 1}]}
    assert steps((1, [1])).model_dump(mode="json") == {
        "steps": [{"count": 1, "micro_batches": [1]}]
    }
    both: dict[str, list[object]] = {"devices": [], "steps": []}
    for wrong in ({}, both):
        with pytest.raises(InputError, match="either devices"):
            parse(PoplarDecision, wrong, where="here")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"zero_stage": 4}, "zero_stage"),
        ({"global_batch": 0}, "global_batch"),
        ({"comm_seconds": -1.0}, "comm_seconds"),
        ({"devices": []}, "devices"),
        (
            {"devices": [{"name": "x", "step_seconds": [1.0, 0.0]}]},
            r"devices\[0\].step_seconds\[1\]",
        ),
    ],
)
def test_unusable_data_is_named(changes: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        parse(PoplarData, {**data(0).model_dump(), **changes}, where="file")
