"""Measured collectives in place of the cluster's links: a ring that takes as long, stage by
stage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hetplan.errors import InputError
from hetplan.formulations.poplar.pose import Assumptions, pose
from hetplan.formulations.poplar.zero import States, communication
from hetplan.planner.poplar import PoplarSettings
from hetplan.profiling.cluster import example_cluster
from hetplan.profiling.collectives import Collectives
from hetplan.profiling.models import load_model
from hetplan.profiling.workload import Workload, make_workload

LATENCY = {"all-reduce": 6e-4, "all-gather": 2e-4, "reduce-scatter": 3e-4}
RATE = {"all-reduce": 5e9, "all-gather": 2e9, "reduce-scatter": 8e9}


def measured(ranks: int = 4, operations: tuple[str, ...] = tuple(LATENCY)) -> Collectives:
    """Lines of latency and bandwidth on all ranks."""
    points = [{"bytes": 1e3, "seconds": 1e-3, "median_seconds": 1e-3}] * 2
    fits = [
        {"operation": name, "group": "all", "ranks": ranks, "latency_seconds": LATENCY[name],
         "bytes_per_second": RATE[name], "r_squared": 0.99, "points": points}
        for name in operations
    ]  # fmt: skip
    provenance = {"kind": "measured", "source": "a test", "date": "2026-01-01"}
    document = {
        "backend": "gloo",
        "device": "T4",
        "ranks": ranks,
        "provenance": provenance,
        "fits": fits,
    }
    return Collectives.model_validate(document)


def workload() -> Workload:
    """BERT-large on two V100 and two T4."""
    return make_workload(load_model("bert-large"), example_cluster("poplar-b"), 64)


def seconds(name: str, size: float) -> float:
    """What was measured for that many bytes of every rank."""
    return LATENCY[name] + size / RATE[name]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_four_ranks_take_what_was_measured_on_four(stage: int) -> None:
    w = workload()
    states, equal = States.of(w), np.full(4, 0.25)
    found = communication(states, stage, w.cluster, equal, range(4), measured=measured())
    layers = states.layers if stage == 3 else 1
    # All-gather: of each rank's own shard. The others: of the bytes that every rank holds.
    gather = seconds("all-gather", states.weights / 4) + (layers - 1) * LATENCY["all-gather"]
    reduce = seconds("reduce-scatter", states.gradients) + (layers - 1) * LATENCY["reduce-scatter"]
    expected = {
        0: (0.0, seconds("all-reduce", states.gradients)),
        1: (0.0, reduce + gather),
        2: (reduce, gather),
        3: (2 * gather + reduce, 0.0),
    }[stage]
    assert (found.per_step, found.per_iteration) == pytest.approx(expected, rel=1e-9)


def test_a_posed_workload_says_so_and_pays_it() -> None:
    posed = pose(workload(), 3, Assumptions(collectives=measured()))
    assert "collectives as measured on 4 ranks of T4 by gloo" in posed.notes
    assert posed.data.comm_seconds != pose(workload(), 3).data.comm_seconds
    assert posed.data.comm_seconds == pytest.approx(posed.communication.per_step)


def test_what_was_not_measured_is_refused() -> None:
    with pytest.raises(InputError, match=r"not measured on all ranks \(got 'reduce-scatter'"):
        pose(workload(), 1, Assumptions(collectives=measured(operations=("all-gather",))))


def test_the_setting_reads_the_file(tmp_path: Path) -> None:
    path = tmp_path / "collectives.json"
    measured().save(path)
    assert PoplarSettings(collectives=str(path)).assumptions().collectives == measured()
    with pytest.raises(InputError, match="no such file"):
        PoplarSettings(collectives=str(tmp_path / "none.json")).assumptions()
