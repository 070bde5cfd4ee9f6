"""What a framework cannot say is refused by name, with what would be lost."""

from __future__ import annotations

from typing import Any

import pytest

from export.by_hand import UNEVEN, cut, plan_of
from hetplan.errors import InputError, UnsupportedError
from hetplan.runtime.export import export
from hetplan.runtime.plan import Plan


def changed(plan: Plan, change: Any) -> Plan:
    """The plan with its document edited."""
    document = plan.model_dump(mode="json")
    change(document)
    return Plan.model_validate(document)


def unequal_batches(document: dict[str, Any]) -> None:
    """One replica takes more samples than the other."""
    first, second = (replica["micro_batches"][0] for replica in document["replicas"])
    first["samples"], second["samples"] = 3, 1


def unequal_steps(document: dict[str, Any]) -> None:
    """One replica takes more micro-batches."""
    first, second = (replica["micro_batches"][0] for replica in document["replicas"])
    first["count"], second["count"] = 10, 6


def other_cut(document: dict[str, Any]) -> None:
    """One replica is cut elsewhere."""
    stages = document["replicas"][1]["stages"]
    stages[0]["layers"], stages[1]["layers"] = [[0, 4]], [[4, 6]]


def row_groups(document: dict[str, Any]) -> None:
    """One stage divides rows 3 to 1."""
    stage = document["replicas"][0]["stages"][0]
    stage["devices"], stage["tensor_shares"] = [[d] for d in stage["devices"][0]], [1.0]
    stage["row_shares"] = [3.0, 1.0]


def tensor_shares(document: dict[str, Any]) -> None:
    """One stage shards unequally."""
    document["replicas"][0]["stages"][0]["tensor_shares"] = [3.0, 1.0]


def in_fp32(document: dict[str, Any]) -> None:
    """Of another precision."""
    document["workload"]["precision"] = "fp32"


PIPES = plan_of(UNEVEN, data=2, tensor=2)
FLAT = plan_of([[(0, 14)]], data=2)


@pytest.mark.parametrize(
    ("to", "plan", "message"),
    [
        ("megatron", changed(FLAT, unequal_batches), "micro-batches of different sizes (1, 3)"),
        ("megatron", changed(FLAT, unequal_steps), "different numbers of micro-batches (6, 10)"),
        ("megatron", changed(PIPES, other_cut), "replicas with different stages"),
        ("megatron", changed(PIPES, row_groups), "the division of every micro-batch as 3, 1"),
        ("megatron", changed(PIPES, tensor_shares), "unequal tensor shards"),
        (
            "megatron",
            plan_of(cut(5, 7), tensor=[1, 2]),
            "stages of different tensor degrees (1, 2)",
        ),
        ("megatron", plan_of(UNEVEN, schedule="gpipe"), "schedule gpipe"),
        ("megatron", plan_of([[(0, 14)]], data=2, zero=3), "zero 3 (only 0, 1)"),
        (
            "megatron",
            plan_of([[(0, 14)]], data=2, zero=1, zero_shares=[1.0, 3.0]),
            "unequal ZeRO shards",
        ),
        ("deepspeed", PIPES, "pipelines (replicas[0] has 4 stages)"),
        ("deepspeed", plan_of([[(0, 14)]], data=2, tensor=2), "tensor parallelism of degree 2"),
        ("deepspeed", plan_of([[(0, 14)]], recomputation="full"), "recomputation full"),
        (
            "deepspeed",
            changed(FLAT, unequal_batches),
            "the samples that each device takes by its speed",
        ),
        ("torchtitan", plan_of(UNEVEN, recomputation="selective"), "recomputation selective"),
        ("torchtitan", plan_of([[(0, 14)]], data=2, zero=1), "zero 1 (only 0, 3)"),
        (
            "torchtitan",
            changed(plan_of(UNEVEN, data=2, by_stage=False, per_node=2, zero=3), in_fp32),
            "node 0 has ranks 0,2",
        ),
        (
            "torchtitan",
            changed(PIPES, in_fp32),
            "ZeRO 0 on 2 replicas beside a pipeline or tensor groups",
        ),
        (
            "torchtitan",
            changed(plan_of([[(0, 14)]], data=2, tensor=2), in_fp32),
            "ZeRO 0 on 2 replicas beside a pipeline or tensor groups (its DDP stands alone; "
            "ZeRO 3 would do)",
        ),
        (
            "torchtitan",
            plan_of(UNEVEN),
            "bf16 on a pipeline or tensor groups without FSDP (fp32, or ZeRO 3 on several "
            "replicas, would do)",
        ),
        (
            "torchtitan",
            plan_of([[(0, 14)]], tensor=2, zero=3),
            "bf16 on a pipeline or tensor groups",
        ),
        ("flagscale", plan_of([[(0, 1)], [(1, 14)]]), "a stage without blocks (stage 0)"),
        (
            "flagscale",
            plan_of(cut(6, 6), data=2, types=["A", "B", "B", "B"]),
            "several device types (stage 0: A, B)",
        ),
        ("flagscale", plan_of([[(0, 14)]], data=2, zero=2), "zero 2"),
    ],
)
def test_what_cannot_be_said_is_refused_by_name(to: str, plan: Plan, message: str) -> None:
    with pytest.raises(UnsupportedError, match=r"what would be lost: .+ --to torchrun") as caught:
        export(plan, to)
    assert message in str(caught.value)


def test_other_chains_are_refused() -> None:
    plan = changed(FLAT, lambda d: d["workload"].update(layers=[f"conv-{i}" for i in range(14)]))
    with pytest.raises(
        UnsupportedError, match="layers other than one embedding, blocks and one head"
    ):
        export(plan, "megatron")


def test_unknown_frameworks_are_named() -> None:
    with pytest.raises(InputError, match="unknown framework 'megatorn'; did you mean megatron"):
        export(FLAT, "megatorn")
