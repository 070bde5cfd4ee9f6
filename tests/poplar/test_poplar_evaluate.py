"""The evaluator of `poplar`: objectives worked out by hand, each constraint broken alone and with
others, and inconsistent data."""

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


# Decisions of 8 samples that break the constraint of that number alone, and their ZeRO stage.
ALONE: list[tuple[int, int, PoplarDecision, list[str]]] = [
    (1, 0, steps((2, [2, 2])), ["decision has steps, expected devices for ZeRO 0"]),
    (1, 2, shares((5, 2), (3, 1)), ["decision has devices, expected steps for ZeRO 2"]),
    (2, 0, shares((8, 2)), ["decision.devices has 1 entries, expected one per device (2)"]),
    (
        2,
        0,
        shares((5, 2), (2, 1), (1, 1)),
        ["decision.devices has 3 entries, expected one per device (2)"],
    ),
    (
        2,
        2,
        steps((2, [2]), (1, [2, 1, 1])),
        [
            "decision.steps[0].micro_batches has 1 entries, expected one per device (2)",
            "decision.steps[1].micro_batches has 3 entries, expected one per device (2)",
        ],
    ),
    (
        3,
        1,
        shares((5, 4), (3, 0)),
        [
            "decision.devices[0].micro_batch is 4, expected 1 to 3 (5 samples on fast)",
            "decision.devices[1].micro_batch is 0, expected 1 to 2 (3 samples on slow)",
        ],
    ),
    (
        3,
        1,
        shares((8, 3), (0, 3)),
        ["decision.devices[1].micro_batch is 3, expected 0 to 2 (0 samples on slow)"],
    ),
    (
        3,
        3,
        steps((1, [4, 1]), (1, [0, 3])),
        [
            "decision.steps[0].micro_batches[0] is 4, expected at most 3 on fast",
            "decision.steps[1].micro_batches[1] is 3, expected at most 2 on slow",
        ],
    ),
    (4, 0, shares((5, 2), (2, 1)), ["samples add up to 7, expected global_batch (8)"]),
    (4, 3, steps((3, [2, 1])), ["samples add up to 9, expected global_batch (8)"]),
    (4, 3, steps(), ["samples add up to 0, expected global_batch (8)"]),
    (
        5,
        2,
        steps((3, [0, 0]), (2, [2, 2]), (1, [0, 0])),
        [
            "decision.steps[0] is empty, expected at least one sample in a step",
            "decision.steps[2] is empty, expected at least one sample in a step",
        ],
    ),
]


@pytest.mark.parametrize(("number", "stage", "decision", "expected"), ALONE)
def test_a_constraint_broken_alone_is_reported_alone_at_all_places(
    number: int, stage: int, decision: PoplarDecision, expected: list[str]
) -> None:
    found = evaluate(data(stage), decision)
    assert (found.objective, found.violations) == (None, tuple(expected))


def test_every_constraint_has_a_case_that_breaks_it_alone() -> None:
    assert {number for number, *_ in ALONE} == set(range(1, 6))


@pytest.mark.parametrize(
    ("stage", "decision", "expected"),
    [
        (
            1,
            shares((4, 4)),
            (
                "decision.devices has 1 entries, expected one per device (2)",
                "decision.devices[0].micro_batch is 4, expected 1 to 3 (4 samples on fast)",
                "samples add up to 4, expected global_batch (8)",
            ),
        ),
        (
            2,
            steps((1, [9]), (2, [0, 0])),
            (
                "decision.steps[0].micro_batches has 1 entries, expected one per device (2)",
                "decision.steps[0].micro_batches[0] is 9, expected at most 3 on fast",
                "samples add up to 9, expected global_batch (8)",
                "decision.steps[1] is empty, expected at least one sample in a step",
            ),
        ),
    ],
)
def test_constraints_broken_together_are_all_reported(
    stage: int, decision: PoplarDecision, expected: tuple[str, ...]
) -> None:
    found = evaluate(data(stage), decision)
    assert (found.objective, found.violations) == (None, expected)


def test_samples_on_a_device_that_no_sample_fits_on_are_reported() -> None:
    full = Device(name="full", step_seconds=[])
    found = evaluate(data(0).model_copy(update={"devices": [FAST, full]}), shares((5, 2), (3, 1)))
    assert found.violations == (
        "decision.devices[1].samples is 3, expected 0 on full, which no sample fits on",
    )


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
