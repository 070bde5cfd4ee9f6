"""`hetplan plan order`: the best order of a plan's passes, written into a plan."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from fakes.cli import Call
from fakes.workloads import small
from hetplan.plans.making import new_plan, with_inputs
from hetplan.plans.plan import MicroBatches, Replica, Stage, load_plan
from hetplan.profiling.inputs.inputs import Inputs


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A plan file of two stages under 1F1B."""
    workload = small()
    ends = (0, 7, len(workload.profile.layers))
    stages = [
        Stage(layers=[(first, last)], devices=[[device]])
        for device, (first, last) in enumerate(pairwise(ends))
    ]
    plan = new_plan(
        workload, [Replica(stages=stages, micro_batches=[MicroBatches(count=4, samples=2)])]
    )
    with_inputs(plan, Inputs.of(workload)).save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_an_order_is_written_and_shown(hetplan: Call, written: Path) -> None:
    ordered = written.with_name("ordered.json")
    ran = hetplan("plan", "order", written, "-q", "-t", 20, "-o", ordered)
    assert (ran.code, ran.err) == (0, f"hetplan: written: {ordered}\n")
    assert "best order  " in ran.out and "no order of split passes is faster" in ran.out
    assert load_plan(ordered).splits_backward
    again = hetplan("plan", "order", ordered, "-q", "-t", 20)
    assert "best order  not faster" in again.out
    assert "explicit" in hetplan("plan", "simulate", ordered).out
    found = hetplan("plan", "order", written, "--whole", "-q", "-t", 20, "--json").json
    assert set(found) == {"schedule", "seconds_before", "seconds", "bound", "split"}
    assert not found["split"]
