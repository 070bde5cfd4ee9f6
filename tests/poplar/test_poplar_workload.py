"""ZeRO memory and collectives, predicted and measured, workloads posed, the paper's experiments,
packaged optima, the report."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evidence.papers import poplar as papers
from evidence.papers.poplar import paper_workload
from evidence.speed.poplar_instances import experiments
from hetplan.errors import InputError
from hetplan.formulations import family
from hetplan.formulations.poplar.data import PoplarDecision
from hetplan.formulations.poplar.pose import Assumptions, pose
from hetplan.formulations.poplar.zero import communication, parts
from hetplan.instances.library import Entry, library
from hetplan.planner.poplar import PoplarSettings
from hetplan.profiling.hardware.cluster import example_cluster
from hetplan.profiling.models.model import load_model
from hetplan.profiling.profiles.measured_collectives import Collectives
from hetplan.profiling.profiles.predict import PREDICTOR
from hetplan.profiling.workload import Workload, make_workload
from hetplan.replays.collectives import collective_seconds
from hetplan.replays.model_states import States
from hetplan.solvers.registry import evaluate, solve
from present import present

POPLAR = family("poplar")


@pytest.fixture(scope="module")
def cluster_a() -> Workload:
    return paper_workload("poplar-a", "llama-0.5b")


def test_states_are_those_of_the_zero_paper() -> None:
    """ZeRO, Figure 1: 7.5 billion parameters, 64 devices, K = 12: 120, 31.4, 16.6 and 1.9 GB."""
    params = 7.5e9
    states = States(2 * params, 2 * params, 12 * params, layer=0.0, per_sample=1.0, layers=32)
    held = [states.resident(stage, 1 / 64) / 1e9 for stage in range(4)]
    assert held == pytest.approx([120.0, 31.4, 16.6, 1.9], abs=0.05)


def test_volumes_are_those_of_the_zero_paper() -> None:
    """ZeRO, Section 7: 2 Psi for stages 0 to 2, 3 Psi for stage 3 (in one step)."""
    cluster = example_cluster("poplar-c")
    states = States(1e9, 1e9, 6e9, layer=0.0, per_sample=1.0, layers=1)
    held = parts([1.0] * 8, "equal")
    found = [communication(states, stage, cluster, held) for stage in range(4)]
    volumes = [c.per_step + c.per_iteration for c in found]
    assert volumes[1] == volumes[2] == pytest.approx(volumes[0])
    assert volumes[3] == pytest.approx(1.5 * volumes[0])
    assert [c.per_step > 0 for c in found] == [False, False, True, True]
    # 100 Gbit/s between the nodes
    assert volumes[0] == pytest.approx(2 * 7 / 8 * 1e9 / 12.5e9, rel=0.01)


def test_the_ring_goes_through_those_who_take_part() -> None:
    """Stage 0 leaves out what holds no sample; from stage 1 on every device holds shards and is in
    the ring."""
    cluster = example_cluster("poplar-c")  # 4 + 4 devices, the nodes joined at 100 Gbit/s
    states = States(1e9, 1e9, 6e9, layer=0.0, per_sample=1.0, layers=1)
    held = parts([1.0] * 8, "equal")
    first = cluster.nodes[0].intra_bandwidth
    inside = communication(states, 0, cluster, held, [0, 1, 2, 3])
    assert inside.per_iteration == pytest.approx(2 * 3 / 4 * 1e9 / first, rel=0.01)
    everyone = communication(states, 0, cluster, held)
    assert everyone.per_iteration > inside.per_iteration
    assert communication(states, 0, cluster, held, [5]).per_iteration == 0.0
    assert communication(states, 0, cluster, held, []).per_iteration == 0.0
    for stage in (1, 2, 3):
        assert communication(states, stage, cluster, held, [0, 1]) == communication(
            states, stage, cluster, held
        )


def test_a_device_that_holds_no_sample_is_in_the_ring_from_stage_1_on() -> None:
    """7B states of 16 bytes a parameter: the 40 GB cards hold no sample at stage 0 of a 2.x GB
    model's size."""
    workload = paper_workload("poplar-c", "llama-1.1b")
    # 16 GiB left of 32: 17.6 GB of states do not fit
    tight = replace(workload, reserved_bytes=16 * 2**30)
    posed = pose(tight, 0)
    holding = [i for i, device in enumerate(posed.data.devices) if device.step_seconds]
    assert holding == [0, 1, 2, 3]
    inside = communication(posed.states, 0, tight.cluster, posed.parts, holding)
    assert posed.data.comm_seconds == inside.per_iteration


def test_unequal_shards_cost_the_better_of_padding_and_broadcasts() -> None:
    skewed = np.array([0.7, 0.1, 0.1, 0.1])
    assert collective_seconds(1e9, skewed, 1e9, 0.0) == pytest.approx(1.0)
    assert collective_seconds(1e9, np.full(4, 0.25), 1e9, 0.0) == pytest.approx(0.75)
    assert collective_seconds(1e3, skewed, 1e9, 1e-3) == pytest.approx(3e-3, rel=0.01)
    assert collective_seconds(1e9, np.ones(1), 1e9, 1e-3) == 0.0


def test_unequal_memory_of_equal_devices_gives_unequal_micro_batches(cluster_a: Workload) -> None:
    """The paper's first case: A100 of 80 and of 40 GB."""
    largest = {}
    for stage in range(4):
        posed = pose(cluster_a, stage)
        sizes = {device.name: len(device.step_seconds) for device in posed.data.devices}
        assert sizes["A100-SXM4-80GB"] > 1.8 * sizes["A100-PCIE-40GB"]
        largest[stage] = sizes
        usable = cluster_a.device_bytes()
        for i, device in enumerate(posed.data.devices):
            batch = len(device.step_seconds)
            assert (
                posed.device_bytes(i, batch)
                <= usable[device.name]
                < posed.device_bytes(i, batch + 1)
            )
    assert largest[3]["A100-PCIE-40GB"] > largest[0]["A100-PCIE-40GB"]


def test_options_of_a_posed_workload(cluster_a: Workload) -> None:
    plain = pose(cluster_a, 2)
    # the all-gather of the weights
    assert plain.once_seconds == pytest.approx(plain.data.comm_seconds)
    assert pose(cluster_a, 3).once_seconds == 0.0
    with pytest.raises(InputError, match="ZeRO stage"):
        pose(cluster_a, 4)


@pytest.mark.wide
def test_the_packaged_experiments_are_complete_and_what_the_code_gives_today() -> None:
    """Every combination but the two that do not fit: 1.1B on 16 GB cards without sharing
    anything. Curves are compared with those of the predictor that the origin names."""
    prediction = re.compile(r"hetplan's [\w ]*prediction [\w ]*\(predictor (\d+)\)")
    packaged, missing = {entry.name: entry for entry in library("poplar")}, set()
    assert sum("to" in name for name in packaged) == 24
    for experiment in experiments():
        posed = experiment.posed
        if experiment.name not in packaged:
            assert posed.unfit is not None
            missing.add(experiment.name)
            continue
        stored = packaged[experiment.name].load()
        assert prediction.sub("", stored.origin) == prediction.sub("", experiment.origin)
        versions = [present(prediction.search(o))[1] for o in (stored.origin, experiment.origin)]
        assert 1 <= int(versions[0]) <= int(versions[1]) == PREDICTOR
        for a, b in zip(stored.data.devices, posed.data.devices, strict=True):
            assert (a.name, a.flops_per_second) == (b.name, b.flops_per_second)
            if versions[0] == versions[1]:
                assert a.step_seconds == pytest.approx(b.step_seconds, rel=1e-9)
        assert stored.data.comm_seconds == pytest.approx(posed.data.comm_seconds)
    assert missing == {"poplar-b-llama-1.1b-zero0", "poplar-b-bert-1.1b-zero0"}


@pytest.mark.parametrize("entry", library("poplar"), ids=lambda entry: entry.name)
def test_exact_keeps_the_packaged_optima(entry: Entry) -> None:
    record, data = present(entry.best_known()), entry.load().data
    result = solve(POPLAR, data, "exact")
    assert result.status == "optimal" and result.details["tie_break"] == "proven"
    assert result.objective == pytest.approx(record.objective, rel=1e-9)
    kept, found = (
        evaluate(POPLAR, data, decision).parts["under_utilisation"]
        for decision in (PoplarDecision.model_validate(record.decision), result.decision)
    )
    assert kept == pytest.approx(found, rel=1e-6, abs=1e-6)


def test_the_report_prices_every_method_alike() -> None:
    """ZeRO 2's all-gather is in every method's seconds; one type alone pays no others' links."""
    found = papers.seconds_by_method("poplar-c", "llama-0.5b", (), 2)
    posed = pose(paper_workload("poplar-c", "llama-0.5b"), 2)
    best = solve(POPLAR, posed.data, "exact").objective
    assert best is not None and found["optimum"] == pytest.approx(best + posed.once_seconds)
    assert found["optimum"] <= found["Poplar"] * (1 + 1e-9) < found["DeepSpeed"]
    workload = paper_workload("poplar-c", "llama-0.5b")
    strong = replace(workload, cluster=workload.cluster.part([0]))
    alone = present(solve(POPLAR, pose(strong, 0).data, "deepspeed").objective)
    row = papers.tflops({}, {"cluster": "poplar-c", "model": "llama-0.5b", "ZeRO": 0})
    assert row["strong only"] == pytest.approx(workload.flops_per_iteration / alone / 1e12)
    assert row["weak only"] < row["DeepSpeed"] < row["strong only"] < row["Poplar"]
    single = {"cluster": "poplar-c", "model": "llama-0.5b", "ZeRO": 0, "A800:V100S": "1:4"}
    fewer = papers.tflops({}, single)
    assert fewer["weak only"] == row["weak only"]
    assert fewer["strong only"] == pytest.approx(row["strong only"] / 4, rel=0.02)
    assert papers.seconds_by_method("poplar-b", "llama-1.1b", (), 0) == {}


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
