"""Plans in which ZeRO's shards are unequal, and devices that hold shards without taking samples."""

from __future__ import annotations

from typing import Any

import pytest

from hetplan.errors import InputError
from hetplan.runtime.plan import parse_plan


def plan(**changes: Any) -> dict[str, Any]:
    """Two of three devices as replicas, four samples each."""
    return {
        "format": "hetplan-plan",
        "version": 1,
        "name": "shards",
        "workload": {
            "model": "m",
            "cluster": "c",
            "global_batch": 8,
            "precision": "fp16",
            "layers": ["a"],
        },
        "devices": [{"type": "A", "node": 0} for _ in range(3)],
        "zero": 1,
        "replicas": [
            {
                "stages": [{"layers": [[0, 1]], "devices": [[d]]}],
                "micro_batches": [{"count": 2, "samples": 2}],
            }
            for d in (0, 1)
        ],
    } | changes


def test_shares_are_kept_and_left_out_where_equal() -> None:
    read = parse_plan(plan(zero_shares=[0.75, 0.25, 0.0]), where="p")
    assert read.zero_shares == [0.75, 0.25, 0.0]
    assert read.model_dump(mode="json")["zero_shares"] == [0.75, 0.25, 0.0]
    assert "zero_shares" not in parse_plan(plan(), where="p").model_dump(mode="json")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"zero_shares": [0.5, 0.5]}, r"zero_shares has 2 entries, expected one per device \(3\)"),
        (
            {"zero_shares": [0.5, 0.25, 0.25]},
            r"zero_shares\[2\] is 0.25, expected 0, not being in use",
        ),
        (
            {"zero_shares": [1.0, 0.0, 0.0]},
            r"zero_shares\[1\] is 0.0, expected more than 0, being in use",
        ),
        ({"zero_shares": [0.5, 0.5, 0.0], "zero": 0}, "expected null under ZeRO 0"),
        ({"zero_shares": [-1.0, 2.0, 0.0]}, r"zero_shares\[0\]: not usable"),
    ],
)
def test_shares_go_with_the_devices(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        parse_plan(plan(**changes), where="p")


def test_a_replica_without_samples_needs_shards() -> None:
    idle = {
        "stages": [{"layers": [[0, 1]], "devices": [[2]]}],
        "micro_batches": [{"count": 1, "samples": 0}],
    }
    replicas = [*plan()["replicas"], idle]
    assert parse_plan(plan(replicas=replicas), where="p").world_size == 3
    with pytest.raises(InputError, match="expected at least 1 under ZeRO 0"):
        parse_plan(plan(replicas=replicas, zero=0), where="p")
