"""AMP's plans on rearranged devices: of nearly equal price the one whose replay is shorter."""

from __future__ import annotations

import pytest

from hetplan.formulations import family
from hetplan.formulations.amp.data import AmpDecision
from hetplan.formulations.amp.pose import pose
from hetplan.planner.amp import to_plan
from hetplan.planner.candidate import Candidate
from hetplan.planner.rearranged import decision_of, placements, rearranged
from hetplan.planner.simulated import simulated
from hetplan.profiling.cluster import example_cluster
from hetplan.profiling.workload import Workload, make_workload
from hetplan.solvers.registry import evaluate
from hetplan.solvers.run import Run

# Groups of two: eight on two nodes of A100, of two stages, and four on a node of H100.
A100 = [[d, d + 1] for d in range(8, 24, 2)]
H100 = [[d, d + 1] for d in range(0, 8, 2)]


def decision(first: list[list[int]], second: list[list[int]]) -> AmpDecision:
    """Three stages of four data ranks of two tensor ranks."""
    return AmpDecision(
        pipeline=3, data=4, tensor=2, micro_batch=1, placement=[first, second, H100], stages=[(0, 6), (6, 12), (12, 26)]
    )  # fmt: skip


APART, MIXED = decision(A100[:4], A100[4:]), decision(A100[::2], A100[1::2])


@pytest.fixture(scope="module")
def workload() -> Workload:
    """gpt2-medium on a node of eight H100 and two of eight A100."""
    return make_workload("gpt2-medium", example_cluster("company").part((0, 4, 5)), 32)


def candidate(workload: Workload, chosen: AmpDecision) -> Candidate:
    """As if AMP's exact method had found it."""
    data = pose(workload, memory=False)
    objective = evaluate(family("amp"), data, chosen).objective
    assert objective is not None
    return simulated(
        Candidate(
            strategy="amp", method="auto", status="optimal", objective=objective, bound=objective, fits_memory=True,
            predicted_seconds=objective, plan=to_plan(workload, data, chosen, "by hand"),
        ),
        workload,
    )  # fmt: skip


def test_devices_are_handed_out_in_order_and_groups_keep_their_types(workload: Workload) -> None:
    types = [device.type for device in workload.cluster.devices]
    for chosen in (APART, MIXED):
        found = list(placements(workload, chosen))
        assert found and chosen.placement not in found
        for placement in found:
            assert sorted(d for row in placement for group in row for d in group) == list(range(24))
            for row, before in zip(placement, chosen.placement, strict=True):
                assert [[types[d] for d in group] for group in row] == [
                    [types[d] for d in g] for g in before
                ]
    assert APART.placement in list(placements(workload, MIXED))


def test_the_shorter_replay_is_found_from_either(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its price by AMP's evaluator, and the optimum's bound; not beyond what it may be
    dearer."""
    monkeypatch.setattr("hetplan.planner.rearranged.NEAR", 1.0)
    both = [candidate(workload, chosen) for chosen in (APART, MIXED)]
    faster, slower = sorted(both, key=lambda c: c.predicted_seconds or 0.0)
    assert faster.predicted_seconds is not None and slower.predicted_seconds is not None
    assert faster.predicted_seconds < slower.predicted_seconds * 0.999
    found = rearranged(workload, slower, Run())
    assert found is not None and found.plan is not None and found.predicted_seconds is not None
    assert (
        found.name == "amp/rearranged"
        and found.status == "feasible"
        and found.bound == slower.bound
    )
    assert found.predicted_seconds <= faster.predicted_seconds and found.fits_memory
    data = pose(workload, memory=False)
    assert found.objective == evaluate(family("amp"), data, decision_of(found.plan)).objective
    assert found.closed_form_seconds == found.objective and found.tables
    assert rearranged(workload, found, Run()) is None
    monkeypatch.setattr("hetplan.planner.rearranged.NEAR", -1.0)
    assert rearranged(workload, slower, Run()) is None
