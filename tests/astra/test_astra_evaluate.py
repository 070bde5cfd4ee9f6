"""The evaluator of `astra`: an objective worked out by hand, each constraint broken alone and with
others, and inconsistent data."""

from __future__ import annotations

from typing import Any

import pytest

from hetplan.errors import InputError
from hetplan.formulations.astra.data import AstraData, AstraDecision
from hetplan.formulations.astra.evaluate import describe, evaluate
from hetplan.schema import parse

DOCUMENT: dict[str, Any] = {
    "layers": 4,
    "stages": 2,
    "micro_batches": 64,
    "data_parallel": 8,
    "tensor_parallel": 8,
    "device_types": [
        {"name": "a", "max_devices": 64, "layer_seconds": 1, "p2p_seconds": 0.5, "max_layers": 3},
        {"name": "b", "max_devices": 128, "layer_seconds": 2, "p2p_seconds": 0},
    ],
    "equal_layers_per_type": True,
}


def data(**changes: Any) -> AstraData:
    return parse(AstraData, DOCUMENT | changes, where="test")


def decision(*stages: tuple[str, int]) -> AstraDecision:
    return AstraDecision.model_validate({"stages": [{"type": t, "layers": n} for t, n in stages]})


def test_the_objective_by_hand() -> None:
    """Stages of 2.5 and 4 seconds, then of 3.5 and 2; the slowest again for 63 micro-batches."""
    found = evaluate(data(), decision(("a", 2), ("b", 2)))
    assert (found.objective, found.violations) == (2.5 + 4 + 63 * 4, ())
    assert evaluate(data(), decision(("a", 3), ("b", 1))).objective == 3.5 + 2 + 63 * 3.5


# Stages that break the constraint of that number alone.
ALONE: list[tuple[int, tuple[tuple[str, int], ...], list[str]]] = [
    (1, (("a", 1), ("b", 1)), ["the stages hold 2 layers, expected 4"]),
    (1, (("a", 3), ("b", 3)), ["the stages hold 6 layers, expected 4"]),
    (2, (("a", 2), ("a", 2)), ["a has 64 devices, 2 stages of 64 need 128"]),
    (4, (("b", 1), ("b", 3)), ["stages of b hold 1 to 3 layers, expected the same number"]),
    (5, (("b", 4),), ["1 stages, expected 2"]),
    (
        6,
        (("c", 2), ("d", 2)),
        [
            "stages[0].type is 'c', expected one of a, b",
            "stages[1].type is 'd', expected one of a, b",
        ],
    ),
]


@pytest.mark.parametrize(("number", "stages", "expected"), ALONE)
def test_a_constraint_broken_alone_is_reported_alone_at_all_places(
    number: int, stages: tuple[tuple[str, int], ...], expected: list[str]
) -> None:
    found = evaluate(data(), decision(*stages))
    assert (found.objective, found.violations) == (None, tuple(expected))


def test_memory_broken_alone_is_reported_alone_at_all_places() -> None:
    """(3), where there are devices enough for three stages of type a."""
    types = [DOCUMENT["device_types"][0] | {"max_devices": 640}, DOCUMENT["device_types"][1]]
    roomy = data(layers=9, stages=3, device_types=types)
    found = evaluate(roomy, decision(("a", 4), ("b", 1), ("a", 4)))
    assert found.violations == (
        "stages[0] holds 4 layers, a takes at most 3",
        "stages[2] holds 4 layers, a takes at most 3",
    )


def test_unequal_stages_break_nothing_where_equal_ones_are_not_asked_for() -> None:
    free = data(equal_layers_per_type=False)
    assert evaluate(free, decision(("b", 1), ("b", 3))).violations == ()


def test_constraints_broken_together_are_all_reported() -> None:
    found = evaluate(data(), decision(("a", 1), ("a", 4), ("c", 9)))
    assert found.violations == (
        "the stages hold 14 layers, expected 4",
        "a has 64 devices, 2 stages of 64 need 128",
        "stages[1] holds 4 layers, a takes at most 3",
        "stages of a hold 1 to 4 layers, expected the same number",
        "3 stages, expected 2",
        "stages[2].type is 'c', expected one of a, b",
    )


def test_no_stages_are_reported_and_not_priced() -> None:
    assert evaluate(data(), decision()).violations == (
        "the stages hold 0 layers, expected 4",
        "0 stages, expected 2",
    )


def test_a_decision_reads_for_people() -> None:
    (table,) = describe(data(), decision(("b", 2), ("a", 2)))
    assert table.rows == (
        ("0", "b", "2", "64", "4 s", "slowest"),
        ("1", "a", "2", "64", "2.5 s", "62.5 %"),
    )


def test_types_of_one_name_are_refused() -> None:
    types = [*DOCUMENT["device_types"], DOCUMENT["device_types"][0]]
    with pytest.raises(InputError) as error:
        data(device_types=types)
    assert "device_types[2].name repeats device_types[0].name ('a')" in str(error.value)
