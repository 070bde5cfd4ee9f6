"""The nearest plan that a framework runs: the fewest changes, then the shortest replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from export.by_hand import plan_of
from hetplan.adapters.exports import export
from hetplan.cli.main import main
from hetplan.errors import UnsupportedError
from hetplan.planner.nearest import nearest, single_changes
from hetplan.plans.plan import Plan
from hetplan.profiling.hardware.cluster import example_cluster
from hetplan.profiling.workload import make_workload
from hetplan.replays.replay import Replayer


def small_plan(**changes: Any) -> Plan:
    """Two replicas of two stages of GPT-2 on the first four of sixteen T4."""
    stages = [[(0, 7)], [(7, 14)]]
    document = plan_of(stages, data=2).model_dump(mode="json")
    document["devices"] = [{"type": "T4", "node": device // 4} for device in range(16)]
    document["workload"] |= {"model": "gpt2", "cluster": "g4dn-4", "precision": "fp32"}
    return Plan.model_validate(document | changes)


@pytest.fixture(scope="module")
def replayer() -> Replayer:
    cluster = example_cluster("g4dn-4")
    return Replayer(make_workload("gpt2", cluster, 32, sequence=128, precision="fp32"))


def test_fewest_changes_then_the_shortest_replay(replayer: Replayer) -> None:
    plan = small_plan(zero=1)
    found = nearest(plan, replayer, lambda other: other.zero != 1)
    assert found is not None
    (change,) = found.changes
    seconds = {
        zero: replayer.seconds(small_plan(zero=zero)) for zero in (0, 2, 3)
    }  # each of them is one change away
    best = min(seconds, key=lambda zero: seconds[zero])
    assert change == f"ZeRO 1 -> {best}" and found.plan.zero == best
    assert found.seconds == pytest.approx(seconds[best])
    assert found.before == pytest.approx(replayer.seconds(plan))


def test_two_changes_where_one_does_not_do(replayer: Replayer) -> None:
    plan = small_plan(zero=2, recomputation="selective")
    found = nearest(plan, replayer, lambda p: (p.zero, p.recomputation) == (3, "full"))
    assert found is not None
    assert set(found.changes) == {"ZeRO 2 -> 3", "recomputation selective -> full"}


def test_what_is_never_changed(replayer: Replayer) -> None:
    plan = small_plan()
    assert nearest(plan, replayer, lambda other: other.workload != plan.workload) is None


def test_unequal_batches_become_equal_ones(replayer: Replayer) -> None:
    document = small_plan().model_dump(mode="json")
    document["replicas"][0]["micro_batches"] = [{"count": 3, "samples": 6}]
    document["replicas"][1]["micro_batches"] = [{"count": 7, "samples": 2}]
    found = nearest(Plan.model_validate(document), replayer, lambda p: expressible(p, "megatron"))
    assert found is not None
    (change,) = found.changes
    batches = [replica.micro_batches for replica in found.plan.replicas]
    assert batches[0] == batches[1] and change.endswith("everywhere")
    assert found.plan.workload.global_batch == 32 == sum(r.samples for r in found.plan.replicas)


def expressible(plan: Plan, to: str) -> bool:
    """Whether a framework can run the plan."""
    try:
        export(plan, to)
    except UnsupportedError:
        return False
    return True


def test_every_change_is_one_property() -> None:
    plan = small_plan(zero=1)
    document = plan.model_dump(mode="json")
    changes = dict(single_changes(plan, document))
    assert {"ZeRO 1 -> 0", "recomputation none -> full", "schedule 1f1b -> gpipe"} <= {*changes}
    assert all(set(fields) <= {"zero", "zero_shares", "recomputation", "schedule"}
               for fields in changes.values())  # fmt: skip


def test_the_command_says_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(small_plan(zero=1).model_dump(mode="json", exclude_none=True)))
    assert main(["export", str(file), "--to", "torchtitan"]) == 2
    assert "zero 1 (only 0, 3)" in capsys.readouterr().err
    assert main(["export", str(file), "--to", "torchtitan", "--nearest", "--without-model"]) == 0
    said = capsys.readouterr()
    assert "zero 1 (only 0, 3)" in said.err
    assert "the nearest plan has ZeRO 1 -> " in said.err
    assert "per iteration, replayed, in place of" in said.err
    assert "PARALLELISM = {" in said.out
    assert main(["export", str(file), "--to", "megatron", "--nearest"]) == 0
    assert "nearest" not in capsys.readouterr().err


def test_no_plan_of_a_tied_model_in_a_pipeline_is_near(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchtitan has no pipelines of models whose head shares the embedding's weights."""
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(small_plan().model_dump(mode="json", exclude_none=True)))
    assert main(["export", str(file), "--to", "torchtitan", "--nearest"]) == 2
    assert "a head that shares the embedding's weights in a pipeline" in capsys.readouterr().err
