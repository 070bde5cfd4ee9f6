"""A workload planned by the strategy `poplar`: plans that say per rank what to process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from evidence.papers.poplar import paper_workload
from hetplan.errors import InputError
from hetplan.formulations import family
from hetplan.formulations.poplar.data import Device, PoplarData, PoplarDecision, Share, Step
from hetplan.formulations.poplar.evaluate import describe, pieces_of
from hetplan.formulations.poplar.pose import Assumptions, pose
from hetplan.planner.candidate import Candidate
from hetplan.planner.poplar import Poplar, PoplarSettings, ZeroStageProblem
from hetplan.planner.proposals import propose
from hetplan.planner.ranking import make_plans
from hetplan.plans.plan import Plan
from hetplan.profiling.profiles.batch_curve import BatchCurve
from hetplan.profiling.workload import Workload
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Run
from present import present


@pytest.fixture(scope="module")
def workload() -> Workload:
    return paper_workload("poplar-b", "llama-1.1b")


@pytest.fixture(scope="module")
def candidates(workload: Workload) -> dict[str, Candidate]:
    return {candidate.label: candidate for candidate in propose(Poplar(), workload, Run())}


def test_every_stage_is_tried(candidates: dict[str, Candidate]) -> None:
    """1.1B on 16 GB cards: no sample fits at stage 0, later stages get a proven plan and the
    paper's."""
    tried = {f"{m}-zero{s}" for s in range(1, 4) for m in ("auto", "paper")}
    assert set(candidates) == {"auto-zero0"} | tried
    assert candidates["auto-zero0"].status == "infeasible"
    assert (
        "no device holds its model states and one sample at ZeRO 0"
        in candidates["auto-zero0"].message
    )
    for stage in (1, 2, 3):
        best, paper = candidates[f"auto-zero{stage}"], candidates[f"paper-zero{stage}"]
        assert best.status == "optimal" and best.gap is not None and best.gap <= 1e-6
        assert best.closed_form_seconds is not None and paper.closed_form_seconds is not None
        assert best.closed_form_seconds <= paper.closed_form_seconds * (1 + 1e-9)


def test_iteration_and_bound_stand_on_one_footing(
    workload: Workload, candidates: dict[str, Candidate]
) -> None:
    """The all-gather that ZeRO 2 pays once per iteration is in objective, bound and iteration
    alike."""
    posed = pose(workload, 2)
    inner = solve(family("poplar"), posed.data, "auto")
    assert posed.once_seconds > 0 and inner.objective is not None and inner.bound is not None
    found = candidates["auto-zero2"]
    assert (
        found.closed_form_seconds
        == found.objective
        == pytest.approx(inner.objective + posed.once_seconds)
    )
    assert found.bound == pytest.approx(inner.bound + posed.once_seconds)
    assert "once per iteration" in found.message
    waste = found.document(workload)["details"]["under_utilisation"]  # Equation 4
    assert waste == pytest.approx(inner.details["under_utilisation"]) and waste > 0
    for other in ("auto-zero1", "auto-zero3"):
        assert candidates[other].closed_form_seconds == candidates[other].objective
        assert candidates[other].message == ""


def test_plans_give_each_rank_its_batches(
    workload: Workload, candidates: dict[str, Candidate]
) -> None:
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
    fast = present(candidates["auto-zero1"].plan)
    assert fast.replicas[0].samples > fast.replicas[2].samples  # V100 before T4


def test_what_devices_process_is_told_in_order() -> None:
    devices = [Device(name="a", step_seconds=[1.0, 2.0, 3.0]), Device(name="b", step_seconds=[2.0])]
    whole = PoplarData(zero_stage=0, global_batch=8, comm_seconds=0.0, devices=devices)
    shares = PoplarDecision(
        devices=[Share(samples=8, micro_batch=3), Share(samples=0, micro_batch=0)]
    )
    assert pieces_of(whole, shares) == [((2, 3), (1, 2)), ()]
    stepwise = PoplarData(zero_stage=3, global_batch=8, comm_seconds=0.0, devices=devices)
    steps = PoplarDecision(
        steps=[Step(count=2, micro_batches=[3, 0]), Step(count=1, micro_batches=[1, 1])]
    )
    assert pieces_of(stepwise, steps) == [((2, 3), (1, 1)), ((2, 0), (1, 1))]
    (table,) = describe(stepwise, steps)
    assert table.rows[0][:3] == ("1 a (0)", "7", "2 x 3 + 1 x 1")


def test_a_model_that_is_too_large_is_refused_with_reasons() -> None:
    workload = paper_workload("poplar-b", "llama2-13b")
    found = propose(Poplar(), workload, Run())
    assert [candidate.label for candidate in found] == [f"auto-zero{stage}" for stage in range(4)]
    assert all(candidate.plan is None and candidate.status == "infeasible" for candidate in found)
    assert any("cannot hold its part" in candidate.message for candidate in found)
    lowest, _ = propose(Poplar(PoplarSettings(zero="lowest")), workload, Run())
    assert lowest.status == "infeasible" and "at any ZeRO stage" in lowest.message


def test_stages_can_be_chosen(workload: Workload) -> None:
    """The lowest stage at which every device holds a sample, as Algorithm 1 finds it, or one by
    number."""
    lowest = propose(Poplar(PoplarSettings(zero="lowest")), workload, Run())
    assert {candidate.label for candidate in lowest} == {"auto-zero1", "paper-zero1"}
    third = propose(Poplar(PoplarSettings(zero=3)), workload, Run())
    assert {candidate.label for candidate in third} == {"auto-zero3", "paper-zero3"}


def test_shards_by_memory_gain() -> None:
    """Cluster A: 80 and 40 GB. The plan says who holds how much."""
    workload = paper_workload("poplar-a", "llama2-7b")
    (best, _) = propose(Poplar(PoplarSettings(zero=2, shards="memory")), workload, Run())
    (equal, _) = propose(Poplar(PoplarSettings(zero=2)), workload, Run())
    assert best.closed_form_seconds is not None and equal.closed_form_seconds is not None
    assert equal.closed_form_seconds / best.closed_form_seconds > 1.2
    assert best.plan is not None and best.plan.zero_shares is not None
    usable = workload.device_bytes()
    memory = [usable[device.type] for device in workload.cluster.devices]
    assert best.plan.zero_shares == pytest.approx([m / sum(memory) for m in memory])
    assert best.fits_memory and best.peak_bytes is not None
    assert equal.plan is not None and equal.plan.zero_shares is None


@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (1, 4), (2, 4), (3, 4)])
def test_devices_without_samples_keep_their_shards(stage: int, ranks: int) -> None:
    """Two samples for four devices: from ZeRO 1 on the idle ones stay in the plan, under ZeRO 0
    they do not."""
    workload = replace(paper_workload("poplar-b", "llama-0.5b"), global_batch=2)
    best = propose(Poplar(PoplarSettings.model_validate({"zero": stage})), workload, Run())[0]
    assert best.plan is not None and best.peak_bytes is not None and best.fits_memory
    assert best.plan.world_size == sum(held > 0 for held in best.peak_bytes) == ranks


def curve_of(workload: Workload, **changes: object) -> BatchCurve:
    """A measured curve of T4: 0.1 s per sample, up to 3 samples at stage 2 and 9 at stage 3."""
    values: dict[str, object] = {
        "model": workload.model.name,
        "sequence": workload.model.sequence,
        "precision": workload.model.precision,
        "device": "T4",
        "devices": len(workload.cluster.devices),
        "memory_bytes": 1e10,
        "provenance": {"kind": "measured", "source": "test", "date": "2026-01-01"},
        "zero_stage": 2,
        "largest": [0, 0, 3, 9],
        "points": [{"micro_batch": b, "seconds": 0.1 * b} for b in (1, 2, 4, 8, 9)],
    }
    return BatchCurve.model_validate(values | changes)


def test_measured_curves_replace_times_and_memory(workload: Workload, tmp_path: Path) -> None:
    curve_of(workload).save(tmp_path / "t4.json")
    settings = PoplarSettings(zero=3, curves=str(tmp_path / "t4.json"))
    posed = pose(workload, 3, settings.assumptions())
    slow = [device for device in posed.data.devices if device.name == "T4"]
    assert slow[0].step_seconds == pytest.approx([0.1 * b for b in range(1, 10)])
    fast = [device for device in posed.data.devices if device.name != "T4"]
    assert fast[0].step_seconds == pose(workload, 3).data.devices[0].step_seconds
    best = propose(Poplar(settings), workload, Run())[0]
    assert best.plan is not None and best.status == "optimal"
    at_two = pose(workload, 2, settings.assumptions())
    assert {len(device.step_seconds) for device in at_two.data.devices if device.name == "T4"} == {
        3
    }


def test_measured_curves_tell_what_they_are(workload: Workload) -> None:
    """What is measured, within how much memory, where trying stopped, what is extrapolated; in the
    plan file too."""
    others = [name for name in workload.cluster.types if name != "T4"]

    def notes(**changes: object) -> str:
        return "; ".join(
            pose(workload, 3, Assumptions(curves={"T4": curve_of(workload, **changes)})).notes
        )

    assert f"measured batch curves: T4; {others[0]} from the predicted profile" in notes()
    assert "extrapolated" not in notes() and "tried" not in notes()
    assert "T4: extrapolated beyond 9 samples, the largest measured, up to 100" in notes(
        largest=[0, 0, 3, 100]
    )
    assert "T4: no micro-batch beyond 9 was tried, more may fit" in notes(tried_up_to=9)
    assert "tried" not in notes(tried_up_to=10)
    with pytest.raises(InputError, match="memory_bytes is more than the cluster's device has"):
        notes(memory_bytes=20 * 2**30)
    with pytest.raises(ValueError, match="at most tried_up_to"):
        curve_of(workload, tried_up_to=5)
    assert pose(workload, 3).notes == ()
    curve = Assumptions(curves={"T4": curve_of(workload)})
    found = ZeroStageProblem(workload, pose(workload, 3, curve), curve).solve(
        Poplar.methods[0], Run()
    )
    assert (
        found is not None
        and found.plan is not None
        and "measured batch curves: T4" in found.message
    )
    assert "what a replay does not know of; measured batch curves: T4" in found.plan.origin


def test_measured_curves_decide(workload: Workload, tmp_path: Path) -> None:
    """An iteration takes what the curves say: in the ranking, in the plan file and in words, and no
    interval of a prediction is shown."""
    paths = []
    for name in workload.cluster.types:
        path = tmp_path / f"{name}.json"
        curve_of(workload, device=name).save(path)
        paths.append(str(path))
    settings = PoplarSettings(zero=3, curves=",".join(paths))
    best = present(make_plans(workload, [Poplar(settings)]).best)
    posed = pose(workload, 3, settings.assumptions())
    samples, ranks = workload.global_batch, len(workload.cluster.devices)
    assert best.predicted_seconds == best.objective
    assert present(best.objective) > 0.1 * samples / ranks + posed.data.comm_seconds
    assert best.replay is None and best.interval_seconds(workload) is None
    assert "the iteration is that of the measured curves, not replayed" in best.message
    prediction = present(present(best.plan).prediction)
    assert prediction.predicted_seconds == best.objective
    replayed = present(make_plans(workload, [Poplar(PoplarSettings(zero=3))]).best)
    assert replayed.replay is not None and replayed.interval_seconds(workload) is not None
    assert replayed.predicted_seconds != pytest.approx(best.objective, rel=0.01)


def test_a_measured_refusal_is_not_told_as_a_predicted_one(workload: Workload) -> None:
    """Where no sample fitted when it was tried, the reason is that, not a memory model that says
    otherwise."""
    nothing = {"largest": [0, 0, 0, 0], "zero_stage": None, "points": []}
    curves = {name: curve_of(workload, device=name, **nothing) for name in workload.cluster.types}
    reason = pose(workload, 3, Assumptions(curves=curves)).unfit or ""
    assert "measured so on T4 within 9.313 GiB" in reason and "free" not in reason


@pytest.mark.parametrize("zero", ["all", "lowest", 3])
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "gpt2"}, "model differs"),
        ({"devices": 3}, "devices differs"),
        ({"sequence": 7}, "sequence differs"),
        ({"device": "H100"}, "not in the cluster"),
    ],
)
def test_curves_of_other_workloads_are_refused(
    workload: Workload, tmp_path: Path, changes: dict[str, object], says: str, zero: object
) -> None:
    """An unusable file is never an infeasible stage."""
    path = tmp_path / "other.json"
    curve_of(workload, **changes).save(path)
    settings = PoplarSettings.model_validate({"zero": zero, "curves": str(path)})
    with pytest.raises(InputError, match=says):
        propose(Poplar(settings), workload, Run())


def test_curves_go_with_equal_shards_and_one_file_a_device(
    workload: Workload, tmp_path: Path
) -> None:
    curve = curve_of(workload)
    with pytest.raises(InputError, match="equal shards"):
        pose(workload, 3, Assumptions(shards="memory", curves={"T4": curve}))
    for name in ("a.json", "b.json"):
        curve.save(tmp_path / name)
    with pytest.raises(InputError, match="second batch curve"):
        PoplarSettings(curves=f"{tmp_path / 'a.json'},{tmp_path / 'b.json'}").assumptions()
