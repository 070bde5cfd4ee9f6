"""A workload planned by the strategy `poplar`: plans that say per rank what to process."""

from __future__ import annotations

import pytest

from hetplan.formulations.poplar.data import Device, PoplarData, PoplarDecision, Share, Step
from hetplan.formulations.poplar.describe import describe, pieces_of
from hetplan.formulations.poplar.experiments import paper_workload
from hetplan.planner.candidate import Candidate
from hetplan.planner.poplar import propose
from hetplan.profiling.cluster import example_cluster
from hetplan.profiling.workload import Workload
from hetplan.runtime.plan import Plan
from hetplan.solvers.run import Run


@pytest.fixture(scope="module")
def workload() -> Workload:
    return paper_workload(example_cluster("poplar-b"), "llama-1.1b")


@pytest.fixture(scope="module")
def candidates(workload: Workload) -> dict[str, Candidate]:
    return {candidate.method: candidate for candidate in propose(workload, Run())}


def test_every_stage_is_tried(candidates: dict[str, Candidate]) -> None:
    """1.1B on 16 GB cards: no sample fits at stage 0, later stages get a proven plan and the paper's."""
    assert set(candidates) == {f"{m}-zero{s}" for s in range(4) for m in ("auto", "paper")}
    assert candidates["auto-zero0"].status == "infeasible" and candidates["auto-zero0"].message
    for stage in (1, 2, 3):
        best, paper = candidates[f"auto-zero{stage}"], candidates[f"paper-zero{stage}"]
        assert best.status == "optimal" and best.gap is not None and best.gap <= 1e-6
        assert best.predicted_seconds is not None and paper.predicted_seconds is not None
        assert best.predicted_seconds <= paper.predicted_seconds * (1 + 1e-9)


def test_plans_give_each_rank_its_batches(workload: Workload, candidates: dict[str, Candidate]) -> None:
    usable = workload.device_bytes()
    for name, candidate in candidates.items():
        if candidate.plan is None:
            continue
        plan = Plan.model_validate_json(candidate.plan.model_dump_json())
        assert plan.zero == int(name[-1])
        assert sum(replica.samples for replica in plan.replicas) == workload.global_batch
        assert candidate.fits_memory and candidate.peak_bytes is not None
        for device, peak in zip(workload.cluster.devices, candidate.peak_bytes, strict=True):
            assert 0 < peak <= usable[device.type]
    fast = candidates["auto-zero1"].plan
    assert fast is not None
    assert fast.replicas[0].samples > fast.replicas[2].samples  # V100 before T4


def test_what_devices_process_is_told_in_order() -> None:
    devices = [Device(name="a", step_seconds=[1.0, 2.0, 3.0]), Device(name="b", step_seconds=[2.0])]
    whole = PoplarData(zero_stage=0, global_batch=8, comm_seconds=0.0, devices=devices)
    shares = PoplarDecision(devices=[Share(samples=8, micro_batch=3), Share(samples=0, micro_batch=0)])
    assert pieces_of(whole, shares) == [((2, 3), (1, 2)), ()]
    stepwise = PoplarData(zero_stage=3, global_batch=8, comm_seconds=0.0, devices=devices)
    steps = PoplarDecision(steps=[Step(count=2, micro_batches=[3, 0]), Step(count=1, micro_batches=[1, 1])])
    assert pieces_of(stepwise, steps) == [((2, 3), (1, 1)), ((2, 0), (1, 1))]
    (table,) = describe(stepwise, steps)
    assert table.rows[0][:3] == ("1 a (0)", "7", "2 x 3 + 1 x 1")


def test_a_model_that_is_too_large_is_refused_with_reasons() -> None:
    workload = paper_workload(example_cluster("poplar-b"), "llama2-13b")
    found = propose(workload, Run())
    assert all(candidate.plan is None and candidate.status == "infeasible" for candidate in found)
    assert any("cannot hold its part" in candidate.message for candidate in found)
