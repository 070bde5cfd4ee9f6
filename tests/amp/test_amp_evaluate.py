"""The evaluator of `amp`: hand-computed prices, every rejection, and what must not change a
price."""

from __future__ import annotations

from typing import Any

import pytest

from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.amp.evaluate import evaluate, price


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


REJECTED = [
    (pipelined(data=1), "pipeline 2 x data 1 x tensor 1 is 2, expected the number of devices (4)"),
    (pipelined(micro_batch=3), "global_batch 8 is no multiple of data 2 x micro_batch 3 = 6"),
    (pipelined(micro_batch=2), "no layer_seconds of type 'fast' for tensor 1, micro_batch 2"),
    (
        tensored(data=1, tensor=4, micro_batch=1, placement=[[[0, 1, 2, 3]]]),
        "no layer_seconds of type 'slow'",
    ),
    (pipelined(placement=[[[0], [1]]]), "placement has 1 stages, expected pipeline (2)"),
    (pipelined(placement=[[[0], [1]], [[2]]]), "placement[1] has 1 data ranks, expected data (2)"),
    (
        pipelined(placement=[[[0], [1]], [[2], []]]),
        "placement[1][1] has 0 devices, expected tensor (1)",
    ),
    (
        pipelined(placement=[[[0], [1]], [[2], [4]]]),
        "placement[1][1][0] is device 4, expected one of 0..3",
    ),
    (
        pipelined(placement=[[[0], [1]], [[2], [1]]]),
        "placement[1][1][0] repeats device 1 of placement[0][1][0]",
    ),
    (
        pipelined(data=1, placement=[[[0]], [[2]]]),
        "placement leaves device 1 unused (2 in all)",
    ),
    (pipelined(stages=[[0, 3]]), "stages has 1 ranges, expected pipeline (2)"),
    (pipelined(stages=[[1, 2], [2, 3]]), "stages[0] begins at layer 1, expected 0"),
    (pipelined(stages=[[0, 1], [2, 3]]), "stages[1] begins at layer 2, expected 1"),
    (pipelined(stages=[[0, 2], [1, 3]]), "stages[1] begins at layer 1, expected 2"),
    (pipelined(stages=[[0, 3], [3, 3]]), "stages[1] is empty: [3, 3)"),
    (pipelined(stages=[[0, 1], [1, 2]]), "stages end at layer 2, expected 3"),
    (pipelined(stages=[[0, 2], [2, 4]]), "stages end at layer 4, expected 3"),
]


@pytest.mark.parametrize(
    ("decision", "message"), REJECTED, ids=[message[:48] for _, message in REJECTED]
)
def test_rejects(decision: AmpDecision, message: str) -> None:
    found = evaluate(data(), decision)
    assert found.objective is None
    assert any(message in violation for violation in found.violations), found.violations
    assert not any("\n" in violation for violation in found.violations)
