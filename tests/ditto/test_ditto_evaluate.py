"""The evaluator and the data: worked by hand, every violation by name, invariants."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from ditto.ditto_cases import data_of, middle_instance
from hetplan.errors import InputError
from hetplan.formulations.ditto.data import DittoData, DittoDecision
from hetplan.formulations.ditto.evaluate import evaluate, evaluation_of
from hetplan.formulations.ditto.family import FAMILY
from hetplan.schema import parse
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run

DOCUMENT: dict[str, Any] = {
    "micro_batches": 4,
    "device_types": [
        {
            "name": "a",
            "nodes": 1,
            "devices_per_node": 2,
            "forward_seconds": [1.0, 2.0, 3.0],
            "backward_seconds": [1.0, 2.0, 3.0],
            "allreduce_seconds": {"2": [0.1, 0.1, 0.2]},
        },
        {
            "name": "b",
            "nodes": 1,
            "devices_per_node": 2,
            "forward_seconds": [0.5, 1.0, 1.5],
            "backward_seconds": [0.5, 1.0, 1.5],
            "allreduce_seconds": {"2": [0.0, 0.0, 0.0]},
        },
    ],
    "memory": {
        "device_bytes": {"a": 10.0, "b": 10.0},
        "layer_state_bytes": [4.0, 4.0, 4.0],
        "layer_activation_bytes": [1.0, 1.0, 1.0],
    },
}


def data(**changes: Any) -> DittoData:
    return parse(DittoData, {**copy.deepcopy(DOCUMENT), **changes}, where="test")


def decision(*stages: tuple[int, int, str, int]) -> DittoDecision:
    keys = ("first", "last", "type", "devices")
    return DittoDecision.model_validate(
        {"stages": [dict(zip(keys, stage, strict=True)) for stage in stages]}
    )


def test_a_template_worked_by_hand() -> None:
    # Stage 0: layers 0 and 1 on two of a: (2 + 4) / 2 + 2 (0.1 + 0.1) = 3.4.  Stage 1: layer 2 on
    # one of b: 3.
    found = evaluate(data(), decision((0, 2, "a", 2), (2, 3, "b", 1)))
    assert found.violations == ()
    # k* = 0: T1 = 6.4, T2 = (4 - 2 + 0 - 1) 3.4, T3 = 6.4.
    assert found.objective == pytest.approx(6.4 + 3.4 + 6.4)
    assert found.parts["T2"] == pytest.approx(3.4)


def test_a_uniform_pipeline_takes_n_plus_s_minus_one_stages() -> None:
    assert evaluation_of(10, [2.0] * 4).objective == pytest.approx((10 + 4 - 1) * 2.0)


def test_the_first_of_equally_slow_stages_counts() -> None:
    parts = evaluation_of(8, [1.0, 3.0, 1.0, 3.0 + 1e-10]).parts
    assert parts["slowest stage"] == 1.0
    assert evaluation_of(8, [1.0, 3.0, 1.0, 3.0 + 1e-6]).parts["slowest stage"] == 3.0
    # nanoseconds are told apart too: the tie is relative
    assert evaluation_of(8, [1e-9, 3e-9, 1e-9, 3.1e-9]).parts["slowest stage"] == 3.0


@pytest.mark.parametrize(
    ("method", "seeds"),
    [
        ("exact", 30),
        ("cp-sat", 5),
        ("cp-sat-linear", 5),
        ("milp", 5),
        ("oobleck", 80),
        ("greedy-joined", 30),
    ],
)
def test_the_unit_of_time_changes_nothing(method: str, seeds: int) -> None:
    """Layers of nanoseconds, with stages closer to each other than a nanosecond."""
    for seed in range(20, 20 + seeds):
        instance = data_of(seed)
        kinds = [
            kind.model_copy(
                update={
                    "forward_seconds": [1e-9 * t for t in kind.forward_seconds],
                    "backward_seconds": [1e-9 * t for t in kind.backward_seconds],
                    "allreduce_seconds": {
                        x: [1e-9 * t for t in row] for x, row in kind.allreduce_seconds.items()
                    },
                }
            )
            for kind in instance.device_types
        ]
        small = instance.model_copy(update={"device_types": kinds})
        run = Run(Options(threads=1))
        seconds, nanoseconds = (solve(FAMILY, d, method, run).objective for d in (instance, small))
        assert nanoseconds == (seconds and pytest.approx(1e-9 * seconds, rel=1e-6))


Stages = list[tuple[int, int, str, int]]
# Two nodes of type a, and devices without limits of memory.
ROOMY: dict[str, Any] = {
    "device_types": [DOCUMENT["device_types"][0] | {"nodes": 2}, DOCUMENT["device_types"][1]],
    "memory": None,
}
# Stages that break the constraint of that number alone, and changes of DOCUMENT.
ALONE: list[tuple[int, Stages, dict[str, Any], list[str]]] = [
    (1, [], {}, ["no stages, expected at least one"]),
    (1, [(0, 1, "a", 1), (2, 3, "b", 1)], {}, ["stages[1] begins with layer 2, expected 1"]),
    (1, [(0, 2, "a", 1), (1, 3, "b", 1)], {}, ["stages[1] begins with layer 1, expected 2"]),
    (1, [(0, 2, "a", 1)], {}, ["the stages end at layer 2, expected 3"]),
    (1, [(0, 2, "a", 1), (2, 4, "b", 1)], {}, ["the stages end at layer 4, expected 3"]),
    (
        1,
        [(1, 1, "a", 1), (1, 1, "a", 1), (1, 3, "b", 2)],
        {},
        [
            "stages[0] begins with layer 1, expected 0",
            "stages[0] is empty: [1, 1)",
            "stages[1] is empty: [1, 1)",
        ],
    ),
    (2, [(0, 3, "a", 3)], ROOMY, ["stages[0].devices is 3, expected a power of two up to 2"]),
    (2, [(0, 3, "a", 4)], ROOMY, ["stages[0].devices is 4, expected a power of two up to 2"]),
    (
        2,
        [(0, 1, "a", 1), (1, 3, "a", 3)],
        {
            "device_types": [
                kind | {"devices_per_node": 4, "allreduce_seconds": dict.fromkeys("24", [0.1] * 3)}
                for kind in DOCUMENT["device_types"]
            ],
        },
        ["stages[1].devices is 3, expected a power of two up to 4"],
    ),
    (
        3,
        [(0, 1, "a", 2), (1, 2, "a", 1), (2, 3, "b", 2), (3, 4, "b", 1)],
        {
            "device_types": [
                kind
                | {"forward_seconds": [1.0] * 4, "backward_seconds": [1.0] * 4}
                | {"allreduce_seconds": {"2": [0.0] * 4}}
                for kind in DOCUMENT["device_types"]
            ],
            "memory": None,
        },
        [
            "3 devices of type a are used, expected at most 2",
            "3 devices of type b are used, expected at most 2",
        ],
    ),
    (
        4,
        [(0, 1, "a", 1), (1, 2, "a", 1), (2, 3, "b", 1)],
        {"micro_batches": 2},
        ["3 stages, expected at most micro_batches (2)"],
    ),
    (5, [(0, 3, "a", 1)], {}, ["stages[0] needs 15 bytes per device, a has 10"]),
    (
        5,
        [(0, 1, "b", 1), (1, 3, "a", 1)],
        {"memory": DOCUMENT["memory"] | {"device_bytes": {"a": 9.0, "b": 5.0}}},
        [
            "stages[0] needs 6 bytes per device, b has 5",
            "stages[1] needs 10 bytes per device, a has 9",
        ],
    ),
    (
        6,
        [(0, 1, "c", 1), (1, 3, "d", 1)],
        {},
        [
            "stages[0].type is 'c', expected one of a, b",
            "stages[1].type is 'd', expected one of a, b",
        ],
    ),
]


@pytest.mark.parametrize(("number", "stages", "changes", "expected"), ALONE)
def test_a_constraint_broken_alone_is_reported_alone_at_all_places(
    number: int, stages: Stages, changes: dict[str, Any], expected: list[str]
) -> None:
    found = evaluate(data(**changes), decision(*stages))
    assert (found.objective, found.violations) == (None, tuple(expected))


def test_every_constraint_has_a_case_that_breaks_it_alone() -> None:
    assert {number for number, *_ in ALONE} == set(range(1, 7))


def test_constraints_broken_together_are_all_reported() -> None:
    stages = [(0, 1, "a", 3), (1, 2, "c", 1), (0, 2, "b", 1)]
    found = evaluate(data(micro_batches=2), decision(*stages))
    assert found.objective is None
    assert found.violations == (
        "stages[2] begins with layer 0, expected 2",
        "the stages end at layer 2, expected 3",
        "stages[0].devices is 3, expected a power of two up to 2",
        "3 devices of type a are used, expected at most 2",
        "3 stages, expected at most micro_batches (2)",
        "stages[1].type is 'c', expected one of a, b",
    )


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("device_types", 0, "devices_per_node"), 3, "expected a power of two"),
        (("device_types", 1, "devices_per_node"), 4, "expected 2 everywhere"),
        (("device_types", 1, "name"), "a", "repeats"),
        (("device_types", 0, "forward_seconds"), [], "expected 1 to"),
        (("device_types", 1, "forward_seconds"), [1.0], "expected one per layer"),
        (("device_types", 0, "allreduce_seconds"), {}, "expected 2"),
        (("device_types", 0, "allreduce_seconds"), {"2": [0.1] * 3, "4": [0.1] * 3}, "expected 2"),
        (("memory", "device_bytes"), {"a": 1.0}, "lacks device type 'b'"),
        (("memory", "layer_state_bytes"), [1.0], "expected one per layer"),
        (("micro_batches",), 0, "at least 1"),
    ],
)
def test_unusable_data_is_refused_in_one_line(
    path: tuple[Any, ...], value: Any, message: str
) -> None:
    document = copy.deepcopy(DOCUMENT)
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(InputError, match=message) as error:
        parse(DittoData, document, where="test")
    assert "\n" not in str(error.value)


def test_the_price_can_rise_when_the_slowest_stage_gets_faster() -> None:
    # k* jumps to the end: this is why T does not decompose.
    before, after = (evaluation_of(8, [t, 1.0, 1.0, 10.0]).objective for t in (10.0, 9.9))
    assert before is not None and after is not None and after > before


@settings(max_examples=10)
@given(st.integers(0, 40), st.integers(1, 5))
def test_another_micro_batch_or_node_changes_the_optimum_the_right_way(
    seed: int, more: int
) -> None:
    instance = middle_instance(seed)
    optimum = solve(FAMILY, instance, "exact").objective
    longer = instance.model_copy(update={"micro_batches": instance.micro_batches + more})
    kinds = [
        k.model_copy(update={"nodes": k.nodes + (i == 0)})
        for i, k in enumerate(instance.device_types)
    ]
    wider = instance.model_copy(update={"device_types": kinds})
    slower, faster = (solve(FAMILY, one, "exact").objective for one in (longer, wider))
    assert optimum is not None and slower is not None and faster is not None
    assert faster * (1 - 1e-6) <= optimum <= slower * (1 + 1e-6)
