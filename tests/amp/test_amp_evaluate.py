"""The evaluator of `amp`: objectives worked out by hand, each constraint broken alone and with
others, and inconsistent data."""

from __future__ import annotations

from typing import Any

import pytest

from hetplan.errors import InputError
from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.amp.evaluate import evaluate, price
from hetplan.schema import parse


def document() -> dict[str, Any]:
    """Two nodes of two devices, fast and slow; three layers; bandwidth 100 inside and 10 across."""
    nodes = (0, 0, 1, 1)
    rows = [
        [0.0 if a == b else 100.0 if nodes[a] == nodes[b] else 10.0 for b in range(4)]
        for a in range(4)
    ]
    sizes = [(40.0, 5.0, 10.0), (20.0, 10.0, 0.0), (60.0, 0.0, 30.0)]
    keys = ("param_bytes", "activation_bytes", "tensor_bytes")
    return {
        "devices": [{"type": "fast" if node == 0 else "slow", "node": node} for node in nodes],
        "bandwidth": rows,
        "layers": [
            {"name": f"l{i}", **dict(zip(keys, row, strict=True))} for i, row in enumerate(sizes)
        ],
        "layer_seconds": [
            {"type": "fast", "tensor": 1, "micro_batch": 1, "seconds": [1.0, 2.0, 3.0]},
            {"type": "slow", "tensor": 1, "micro_batch": 1, "seconds": [2.0, 4.0, 6.0]},
            {"type": "fast", "tensor": 2, "micro_batch": 2, "seconds": [1.0, 5.0, 2.0]},
            {"type": "slow", "tensor": 2, "micro_batch": 2, "seconds": [2.0, 3.0, 4.0]},
            {"type": "fast", "tensor": 4, "micro_batch": 1, "seconds": [1.0, 1.0, 1.0]},
        ],
        "global_batch": 8,
    }


def data(**changes: Any) -> AmpData:
    return AmpData.model_validate(document() | changes)


def pipelined(**changes: Any) -> AmpDecision:
    """pp 2, dp 2, tp 1: fast node first, slow node second, cut behind layer 1."""
    decision: dict[str, Any] = {
        "pipeline": 2,
        "data": 2,
        "tensor": 1,
        "micro_batch": 1,
        "placement": [[[0], [1]], [[2], [3]]],
        "stages": [[0, 2], [2, 3]],
    }
    return AmpDecision.model_validate(decision | changes)


def tensored(**changes: Any) -> AmpDecision:
    """pp 1, dp 2, tp 2: each tensor group holds a fast and a slow device."""
    decision: dict[str, Any] = {
        "pipeline": 1,
        "data": 2,
        "tensor": 2,
        "micro_batch": 2,
        "placement": [[[0, 2], [1, 3]]],
        "stages": [[0, 3]],
    }
    return AmpDecision.model_validate(decision | changes)


def test_pipeline_terms_by_hand() -> None:
    """gas 4: 3 x 6 waiting, 3 + 6 filling, 10 bytes over a link of 10, 60 bytes of gradients over
    100."""
    found = evaluate(data(), pipelined())
    assert found.violations == ()
    assert found.objective == pytest.approx(18 + 9 + 1 + 0.6, rel=1e-15)
    expected = {"pipeline": 28, "bottleneck": 18, "fill": 9, "links": 1, "synchronisation": 0.6}
    assert dict(found.parts) == pytest.approx(expected | {"tensor_all_reduce": 0})


def test_tensor_terms_by_hand() -> None:
    """gas 2: layers at the slower type, 2 + 5 + 4; 40 bytes x 2 samples over 10; 60 bytes over
    100."""
    found = evaluate(data(), tensored())
    stage = 11 + 2 * (1 / 2) * 40 * 2 / 10
    assert found.objective == pytest.approx(stage + stage + 2 * (1 / 2) * (120 / 2) / 100)
    assert found.parts["tensor_all_reduce"] == pytest.approx(8)
    assert found.parts["links"] == 0


def test_synchronisation_takes_the_slowest_group_and_its_lowest_bandwidth() -> None:
    """Data groups across nodes: stage 1 has 60 bytes, stage 0 too; both over 10 bytes/s."""
    across = evaluate(data(), pipelined(placement=[[[0], [2]], [[1], [3]]]))
    assert across.parts["synchronisation"] == pytest.approx(6)
    shifted = evaluate(
        data(), pipelined(stages=[[0, 1], [1, 3]], placement=[[[0], [1]], [[2], [3]]])
    )
    assert shifted.parts["synchronisation"] == pytest.approx(0.8)  # 80 bytes on stage 1


def test_the_slowest_pipeline_counts_not_the_slowest_terms() -> None:
    """Pipeline 0 runs fast-slow over a slow link, pipeline 1 slow-fast: T is the larger whole."""
    mixed = data(bandwidth=[[0, 10, 10, 10], [10, 0, 10, 1], [10, 10, 0, 10], [10, 1, 10, 0]])
    found = price(mixed, pipelined(placement=[[[0], [3]], [[2], [1]]]))
    assert found.stages == ((3, 6), (6, 3))
    assert found.links == ((1,), (10,))
    assert found.pipelines == (18 + 9 + 1, 18 + 9 + 10)
    assert found.slowest == 1


def test_links_take_the_slowest_tensor_rank() -> None:
    """pp 2, tp 2: rank 0 has a link of 100, rank 1 one of 4; layer 0 sends 5 bytes a sample, 2
    samples."""
    rows = [[0, 50, 100, 9], [50, 0, 9, 4], [100, 9, 0, 50], [9, 4, 50, 0]]
    decision = tensored(pipeline=2, data=1, placement=[[[0, 1]], [[2, 3]]], stages=[[0, 1], [1, 3]])
    found = price(data(bandwidth=rows), decision)
    assert found.links == ((5 * 2 / 4,),)
    assert found.synchronisation == ((0, 0), (0, 0))
    assert found.tensor == ((10 * 2 / 50, 30 * 2 / 50),)
    assert found.stages == ((1 + 10 * 2 / 50, 7 + 30 * 2 / 50),)


def memory(fast: float, slow: float) -> dict[str, Any]:
    return {
        "device_bytes": {"fast": fast, "slow": slow},
        "state_bytes_per_param_byte": 2.0,
        "layer_bytes_per_sample": [1.0, 2.0, 4.0],
    }


def test_memory_by_hand() -> None:
    """Stage 0: 2 x 60 + 2 micro-batches x 3 = 126; stage 1: 2 x 60 + 1 x 4 = 124."""
    found = price(data(memory=memory(126, 124)), pipelined())
    assert found.peak_bytes == (126, 126, 124, 124)
    assert evaluate(data(memory=memory(126, 124)), pipelined()).violations == ()
    assert price(data(), pipelined()).peak_bytes is None
    for fast, slow, device in ((125, 124, 0), (126, 123, 2)):
        result = evaluate(data(memory=memory(fast, slow)), pipelined())
        assert result.objective is None
        assert len(result.violations) == 2
        assert result.violations[0].startswith(f"device {device} (placement[")


def test_memory_falls_with_few_micro_batches_and_is_shared_by_tensor_ranks() -> None:
    """gas 1: stage 0 keeps one micro-batch, 2 x 60 + 3. Tensor ranks: (2 x 120 + 2 x 7) / 2."""
    few = price(data(memory=memory(1e3, 1e3), global_batch=2), pipelined())
    assert (few.gas, few.bottleneck, few.peak_bytes) == (1, (0, 0), (123, 123, 124, 124))
    assert price(data(memory=memory(1e3, 1e3)), tensored()).peak_bytes == (127,) * 4


TIGHT = memory(126, 123)  # stage 1 of `pipelined` takes 124 bytes per device
# Decisions that break the constraint of that number alone, and the data where it is not `data()`.
ALONE: list[tuple[int, AmpDecision, AmpData, list[str]]] = [
    (
        1,
        pipelined(data=1, placement=[[[0]], [[2]]]),
        data(),
        ["pipeline 2 x data 1 x tensor 1 is 2, expected the number of devices (4)"],
    ),
    (
        2,
        pipelined(),
        data(global_batch=7),
        ["global_batch 7 is no multiple of data 2 x micro_batch 1 = 2"],
    ),
    (2, pipelined(), data(global_batch=1), ["global_batch 1 is no multiple of data 2 x micro_ba"]),
    (
        3,
        pipelined(micro_batch=2),
        data(),
        [
            "no layer_seconds of type 'fast' for tensor 1, micro_batch 2",
            "no layer_seconds of type 'slow' for tensor 1, micro_batch 2",
        ],
    ),
    (
        3,
        tensored(data=1, tensor=4, micro_batch=1, placement=[[[0, 1, 2, 3]]]),
        data(),
        ["no layer_seconds of type 'slow' for tensor 4, micro_batch 1"],
    ),
    (4, pipelined(placement=[[[0], [1]]]), data(), ["placement has 1 stages, expected pipeline"]),
    (
        4,
        pipelined(placement=[[[0], [1, 3]], [[2]]]),
        data(),
        [
            "placement[0][1] has 2 devices, expected tensor (1)",
            "placement[1] has 1 data ranks, expected data (2)",
        ],
    ),
    (
        4,
        pipelined(placement=[[[0], [9]], [[2], [4]]]),
        data(),
        [
            "placement[0][1][0] is device 9, expected one of 0..3",
            "placement[1][1][0] is device 4, expected one of 0..3",
        ],
    ),
    (
        4,
        pipelined(placement=[[[0], [1]], [[1], [1]]]),
        data(),
        [
            "placement[1][0][0] repeats device 1 of placement[0][1][0]",
            "placement[1][1][0] repeats device 1 of placement[0][1][0]",
        ],
    ),
    (5, pipelined(stages=[[0, 3]]), data(), ["stages has 1 ranges, expected pipeline (2)"]),
    (
        5,
        pipelined(stages=[[1, 2], [1, 3]]),
        data(),
        [
            "stages[0] begins at layer 1, expected 0",
            "stages[1] begins at layer 1, expected 2",
        ],
    ),
    (5, pipelined(stages=[[0, 1], [2, 3]]), data(), ["stages[1] begins at layer 2, expected 1"]),
    (5, pipelined(stages=[[0, 3], [3, 3]]), data(), ["stages[1] is empty: [3, 3)"]),
    (5, pipelined(stages=[[0, 1], [1, 2]]), data(), ["stages end at layer 2, expected 3"]),
    (5, pipelined(stages=[[0, 2], [2, 4]]), data(), ["stages end at layer 4, expected 3"]),
    (
        6,
        pipelined(),
        data(memory=TIGHT),
        [
            "device 2 (placement[1][0][0], type 'slow') holds 124 bytes, has 123",
            "device 3 (placement[1][1][0], type 'slow') holds 124 bytes, has 123",
        ],
    ),
]
# Decisions that break several constraints: each of (1) to (5) is checked, whatever the others say.
TOGETHER: list[tuple[AmpDecision, AmpData, list[str]]] = [
    (
        pipelined(data=1, micro_batch=3, placement=[[[0]], [[2]]]),
        data(),
        [
            "pipeline 2 x data 1 x tensor 1 is 2",
            "global_batch 8 is no multiple of data 1 x micro_batch 3 = 3",
            "no layer_seconds of type 'fast'",
            "no layer_seconds of type 'slow'",
        ],
    ),
    (
        pipelined(placement=[[[0], [1]], [[2], [1]]], stages=[[0, 0], [0, 2]]),
        data(),
        [
            "placement[1][1][0] repeats device 1 of placement[0][1][0]",
            "stages[0] is empty: [0, 0)",
            "stages end at layer 2, expected 3",
        ],
    ),
    # memory is counted only for a decision that keeps (1) to (5)
    (pipelined(), data(global_batch=7, memory=TIGHT), ["global_batch 7 is no multiple of"]),
]


def check_violations(decision: AmpDecision, instance: AmpData, expected: list[str]) -> None:
    """Each violation begins as expected, and there are no others."""
    found = evaluate(instance, decision)
    assert found.objective is None
    assert len(found.violations) == len(expected), found.violations
    for violation, beginning in zip(found.violations, expected, strict=True):
        assert violation.startswith(beginning) and "\n" not in violation


@pytest.mark.parametrize(
    ("decision", "instance", "expected"),
    [case[1:] for case in ALONE],
    ids=[f"({number}) {expected[0][:40]}" for number, _, _, expected in ALONE],
)
def test_a_constraint_broken_alone_is_reported_alone_at_all_places(
    decision: AmpDecision, instance: AmpData, expected: list[str]
) -> None:
    check_violations(decision, instance, expected)


def test_every_constraint_has_a_case_that_breaks_it_alone() -> None:
    assert {number for number, *_ in ALONE} == set(range(1, 7))


@pytest.mark.parametrize(("decision", "instance", "expected"), TOGETHER)
def test_constraints_broken_together_are_all_reported(
    decision: AmpDecision, instance: AmpData, expected: list[str]
) -> None:
    check_violations(decision, instance, expected)


def table(**changes: Any) -> dict[str, Any]:
    """The first of the tables with other entries."""
    first: dict[str, Any] = document()["layer_seconds"][0]
    return first | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bandwidth": [[0.0] * 4] * 3}, "bandwidth has 3 rows, expected one per device (4)"),
        (
            {"bandwidth": [[0.0] * 4, [0.0] * 3, *[[0.0] * 4] * 2]},
            "bandwidth[1] has 3 entries, expected one per device (4)",
        ),
        (
            {"bandwidth": [[0, 1, 1, 1], [2, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 0]]},
            "bandwidth[1][0] is 2.0 but bandwidth[0][1] is 1.0, expected a symmetric matrix",
        ),
        (
            {"bandwidth": [[0, 1, 1, 1], [1, 0, 1, 0], [1, 1, 0, 1], [1, 0, 1, 0]]},
            "bandwidth[3][1] is 0.0, expected more than 0 (at least 1e-30)",
        ),
        (
            {"layer_seconds": [table(), table(type="slow", seconds=[1.0])]},
            "layer_seconds[1].seconds has 1 entries, expected one per layer (3)",
        ),
        (
            {"layer_seconds": [table(), table(type="slow"), table()]},
            "layer_seconds[2] repeats layer_seconds[0] (same type, tensor, micro_batch)",
        ),
        (
            {"layer_seconds": [table()]},
            "layer_seconds has no table for device type 'slow', expected one for each type",
        ),
        (
            {"memory": memory(1, 1) | {"layer_bytes_per_sample": [1.0]}},
            "memory.layer_bytes_per_sample has 1 entries, expected one per layer (3)",
        ),
        (
            {"memory": memory(1, 1) | {"device_bytes": {"fast": 1.0}}},
            "memory.device_bytes lacks device type 'slow', expected every type",
        ),
    ],
)
def test_inconsistent_data_is_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        parse(AmpData, document() | changes, where="test")
    assert message in str(error.value) and "\n" not in str(error.value)
