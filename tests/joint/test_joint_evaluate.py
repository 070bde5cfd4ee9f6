"""The evaluator of `joint`: each constraint broken alone and with others, every rule of a plan file
that a decision can break, and inconsistent data."""

from __future__ import annotations

from typing import Any

import pytest

from hetplan.errors import InputError
from hetplan.formulations.joint.data import JointData, JointDecision
from hetplan.formulations.joint.evaluate import evaluate
from hetplan.profiling.frameworks import HETPLAN
from hetplan.schema import parse

LAYERS = 6


def node(device: str) -> dict[str, Any]:
    """Four devices."""
    return {
        "device": device,
        "devices": 4,
        "intra_bandwidth": 1e9,
        "intra_latency": 0.0,
        "network_bandwidth": 1e8,
        "network_latency": 0.0,
    }


def kind(memory_bytes: float = 1e9) -> dict[str, Any]:
    move = {"start_seconds": 0.0, "bytes_per_second": 1e11, "log2_bytes": [10.0], "share": [1.0]}
    return {"memory_bytes": memory_bytes, "update": move}


def table(device: str, tensor: int = 1, **changes: Any) -> dict[str, Any]:
    """Every layer takes 1 ms forward and 2 ms backward."""
    return {
        "type": device,
        "tensor": tensor,
        "micro_batch": 1,
        "forward_seconds": [1e-3] * LAYERS,
        "backward_seconds": [2e-3] * LAYERS,
        "forward_host_seconds": [0.0] * LAYERS,
        "backward_host_seconds": [0.0] * LAYERS,
        "repeated": {"full": [1.0] * LAYERS},
        **changes,
    }


def layer(l: int, *modes: str) -> dict[str, Any]:
    return {
        "name": f"layer{l}",
        "param_bytes": 1e6,
        "activation_bytes": 1e4,
        "tensor_bytes": 0.0,
        "kept": {mode: {"saved_bytes": 1e5} for mode in modes or ("none", "full")},
    }


# Devices 0-3 and 4-7 are of type a, 8-11 of type b.
DOCUMENT: dict[str, Any] = {
    "global_batch": 4,
    "element_bytes": 2,
    "gradient_bytes": 2,
    "framework": HETPLAN.model_dump(mode="json"),
    "tensor_degrees": [1, 2],
    "nodes": [node("a"), node("a"), node("b")],
    "types": {"a": kind(), "b": kind()},
    "layers": [layer(l) for l in range(LAYERS)],
    "tables": [table(device, tensor) for device in "ab" for tensor in (1, 2)],
}


def data(**changes: Any) -> JointData:
    return parse(JointData, {**DOCUMENT, **changes}, where="test")


def stage(
    layers: list[list[int]], devices: list[list[int]], tensor_shares: list[float] | None = None
) -> dict[str, Any]:
    """Row groups of equal shares."""
    return {
        "layers": layers,
        "devices": devices,
        "row_shares": [1.0] * len(devices),
        "tensor_shares": tensor_shares or [1.0] * len(devices[0]),
    }


def whole(devices: list[list[int]], tensor_shares: list[float] | None = None) -> dict[str, Any]:
    """A stage with all layers."""
    return stage([[0, LAYERS]], devices, tensor_shares)


FIRST, LAST = stage([[0, 3]], [[0]]), stage([[3, 6]], [[8]])


def decision(
    *stages: dict[str, Any], batches: tuple[tuple[int, int], ...] = ((2, 2),), **changes: Any
) -> JointDecision:
    """One replica with (count, samples) micro-batches."""
    micro_batches = [{"count": count, "samples": samples} for count, samples in batches]
    replica = {"stages": list(stages), "micro_batches": micro_batches}
    return JointDecision.model_validate({"replicas": [replica], **changes})


def replicas(*parts: tuple[dict[str, Any], int, int], **changes: Any) -> JointDecision:
    """Replicas of one stage each, and the count and the samples of their micro-batches."""
    documents = [
        {"stages": [one], "micro_batches": [{"count": count, "samples": samples}]}
        for one, count, samples in parts
    ]
    return JointDecision.model_validate({"replicas": documents, **changes})


HERE = "replicas[0].stages[0]"
# Decisions that break the constraint of that number alone.
ALONE: list[tuple[int, JointDecision, list[str]]] = [
    (
        1,
        decision(stage([[1, 3]], [[0]]), stage([[4, 4]], [[8]])),
        [
            f"{HERE}.layers[0] begins at layer 1, expected 0",
            "replicas[0].stages[1].layers[0] begins at layer 4, expected 3",
            "replicas[0].stages[1].layers[0] is [4, 4), expected one layer at least",
            "replicas[0].stages end at layer 4, expected 6",
        ],
    ),
    (
        1,
        decision(stage([[0, 3]], [[12]]), stage([[3, 6]], [[0], [0], [13]])),
        [
            f"{HERE}.devices[0][0] is 12, expected a device of 0..11",
            "replicas[0].stages[1].devices[1][0] is device 0, which "
            "replicas[0].stages[1].devices[0][0] uses already",
            "replicas[0].stages[1].devices[2][0] is 13, expected a device of 0..11",
        ],
    ),
    (
        1,
        decision(whole([[0]]) | {"row_shares": [1.0, 1.0]}),
        [f"{HERE}.row_shares has 2 entries, expected one per row group (1)"],
    ),
    (
        1,
        decision(whole([[0, 1], [2]])),
        [f"{HERE}.devices[1] has 1 devices, expected one per tensor share (2)"],
    ),
    (
        1,
        decision(FIRST, LAST, batches=((3, 1), (1, 0))),
        [
            "replicas[0].micro_batches[1].samples is 0, expected at least 1 under ZeRO 0",
            "replicas take 3 samples per iteration, expected workload.global_batch (4)",
        ],
    ),
    (
        1,
        replicas((whole([[0]]), 2, 1), (whole([[1]]), 1, 1), (whole([[2]]), 1, 1), zero=2),
        [
            "replicas[1].micro_batches are 1, expected as many as those of replicas[0] (2) under "
            "ZeRO 2",
            "replicas[2].micro_batches are 1, expected as many as those of replicas[0] (2) under "
            "ZeRO 2",
        ],
    ),
    (
        1,
        decision(stage([[0, 1], [1, 2]], [[0]]), stage([[2, 6]], [[8]])),
        [f"{HERE}.layers has 2 ranges, expected 1 under 1f1b"],
    ),
    (
        1,
        decision(
            stage([[0, 1], [2, 3]], [[0]]),
            stage([[1, 2]], [[1]]),
            stage([[3, 4], [4, 5], [5, 6]], [[2]]),
            batches=((4, 1),),
            schedule="interleaved-1f1b",
        ),
        [
            "replicas[0].stages[1].layers has 1 ranges, expected as many as stages[0] (2)",
            "replicas[0].stages[2].layers has 3 ranges, expected as many as stages[0] (2)",
            "replicas[0].micro_batches are 4, expected a multiple of the stages (3) under "
            "interleaved-1f1b",
        ],
    ),
    (
        1,
        decision(
            stage([[0, 1], [3, 4]], [[0]]),
            stage([[1, 2], [4, 5]], [[1]]),
            stage([[2, 3], [5, 6]], [[2]]),
            schedule="interleaved-1f1b",
        ),
        [
            "replicas[0].micro_batches are 2, expected a multiple of the stages (3) under "
            "interleaved-1f1b"
        ],
    ),
    (
        2,
        decision(FIRST, LAST, recomputation="operators"),
        ["recomputation operators, expected one of none, full"],
    ),
    (3, decision(whole([[0], [8]])), [f"{HERE}: devices of several types, expected one"]),
    (
        4,
        decision(whole([[0, 4], [1, 5], [2, 3]])),
        [
            f"{HERE}.devices[0]: a tensor group on several nodes, expected one",
            f"{HERE}.devices[1]: a tensor group on several nodes, expected one",
        ],
    ),
    (
        5,
        decision(stage([[0, 3]], [[0, 1, 2]]), stage([[3, 6]], [[8, 9, 10, 11]])),
        [
            f"{HERE}: tensor degree 3, expected one of [1, 2]",
            "replicas[0].stages[1]: tensor degree 4, expected one of [1, 2]",
        ],
    ),
    (
        6,
        decision(whole([[0, 1]], [1.0, 3.0])),
        [f"{HERE}: unequal tensor shares, expected equal ones"],
    ),
    (
        7,
        decision(
            stage([[0, 1], [1, 2], [2, 3], [3, 4], [4, 6]], [[0]]), schedule="interleaved-1f1b"
        ),
        [f"{HERE}: 5 chunks, expected at most 4"],
    ),
]


def test_the_base_of_the_cases_breaks_nothing() -> None:
    for fits in (decision(FIRST, LAST), decision(whole([[0, 1], [2, 3]]))):
        found = evaluate(data(), fits)
        assert found.violations == () and found.objective is not None and found.objective > 0


@pytest.mark.parametrize(("number", "broken", "expected"), ALONE)
def test_a_constraint_broken_alone_is_reported_alone_at_all_places(
    number: int, broken: JointDecision, expected: list[str]
) -> None:
    found = evaluate(data(), broken)
    assert (found.objective, found.violations) == (None, tuple(expected))


def test_memory_broken_alone_is_reported_alone_on_all_devices() -> None:
    """(8); types have memory of their own."""
    found = evaluate(data(types={"a": kind(1.0), "b": kind()}), decision(FIRST, LAST))
    assert found.objective is None
    assert [line.split(" holds")[0] for line in found.violations] == ["device 0"]
    found = evaluate(data(types={"a": kind(1.0), "b": kind(2.0)}), decision(FIRST, LAST))
    assert [line.split(" holds")[0] for line in found.violations] == ["device 0", "device 8"]
    assert found.violations[1].endswith("expected at most 2 B")


def test_every_constraint_has_a_case_that_breaks_it_alone() -> None:
    assert {number for number, *_ in ALONE} == set(range(1, 8))


def test_constraints_broken_together_are_all_reported() -> None:
    broken = decision(
        stage([[0, 2]], [[0, 4]], [1.0, 2.0]),
        stage([[3, 6]], [[8], [1]]),
        batches=((1, 5),),
        recomputation="selective",
    )
    found = evaluate(data(types={"a": kind(1.0), "b": kind()}), broken)
    assert found.objective is None
    assert found.violations == (
        "replicas[0].stages[1].layers[0] begins at layer 3, expected 2",
        "replicas take 5 samples per iteration, expected workload.global_batch (4)",
        "recomputation selective, expected one of none, full",
        f"{HERE}.devices[0]: a tensor group on several nodes, expected one",
        f"{HERE}: unequal tensor shares, expected equal ones",
        "replicas[0].stages[1]: devices of several types, expected one",
    )


def test_more_devices_than_a_plan_file_has_are_a_violation() -> None:
    large = data(nodes=[node("a") | {"devices": 4096}, node("b")])
    found = evaluate(large, decision(FIRST, stage([[3, 6]], [[1]])))
    assert found.objective is None and len(found.violations) == 1
    assert found.violations[0].startswith("decision: devices: not usable")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": [layer(0, "full")] * LAYERS}, "layers[0].kept lacks the mode 'none'"),
        (
            {"layers": [layer(0), layer(1, "none"), *(layer(l) for l in range(2, LAYERS))]},
            "layers[1].kept has other modes than layers[0]",
        ),
        ({"types": {"a": kind()}}, "types lacks 'b', the device of a node"),
        ({"tables": [table("a")]}, "tables has none of 'b'"),
        ({"tables": [table("a"), table("b"), table("a")]}, "tables[2] repeats tables[0]"),
        (
            {"tables": [table("a"), table("b", backward_host_seconds=[0.0])]},
            "tables[1].backward_host_seconds has 1 entries, expected one per layer (6)",
        ),
        (
            {"tables": [table("a", repeated={}), table("b")]},
            "tables[0].repeated.full has 0 entries, expected one per layer (6)",
        ),
    ],
)
def test_inconsistent_data_is_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        data(**changes)
    assert message in str(error.value) and "\n" not in str(error.value)
