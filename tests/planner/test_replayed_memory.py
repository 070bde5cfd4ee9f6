"""Problems within the replay's memory: never looser than the replay, and for AMP exactly as
tight."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import get_args

import pytest

from fakes.workloads import small
from hetplan.formulations import family
from hetplan.formulations.amp.breakdown import peak_bytes
from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.poplar.pose import pose as pose_poplar
from hetplan.planner.amp import to_plan
from hetplan.planner.candidates import Search
from hetplan.planner.recomputation import recomputed
from hetplan.planner.replayed_memory import amp_optimum, amp_problems, ditto_optimum, ditto_problem
from hetplan.planner.strategies import STRATEGIES
from hetplan.profiling.recomputation import Recomputation
from hetplan.profiling.workload import Workload
from hetplan.runtime.replay import replay
from hetplan.solvers.options import Options
from hetplan.solvers.registry import evaluate, solve
from hetplan.solvers.run import Run

MODES: tuple[Recomputation, ...] = get_args(Recomputation)
AMP = family("amp")


def a_run(seconds: float = 300.0) -> Run:
    """One thread."""
    return Run(Options(time_limit=seconds, threads=1))


def with_memory(gib: float) -> Workload:
    """gpt2 on two fast and two slow devices of that much memory."""
    return small(devices={name: {"memory_gib": gib} for name in ("V100-SXM2-16GB", "T4")})


def decisions(data: AmpData) -> Iterator[AmpDecision]:
    """Every division of four devices into stages, replicas and ranks in their order, with several
    cuts."""
    layers = len(data.layers)
    for tensor, size in sorted({(entry.tensor, entry.micro_batch) for entry in data.layer_seconds}):
        for pipeline in (1, 2, 4):
            ranks = 4 // tensor // pipeline
            if ranks < 1 or data.global_batch % (ranks * size):
                continue
            groups = [list(range(g * tensor, (g + 1) * tensor)) for g in range(4 // tensor)]
            placement = [groups[j * ranks : (j + 1) * ranks] for j in range(pipeline)]
            for shift in (-1, 0, 1):
                ends = [0, *(j * layers // pipeline + shift for j in range(1, pipeline)), layers]
                yield AmpDecision(
                    pipeline=pipeline, data=ranks, tensor=tensor, micro_batch=size, placement=placement,
                    stages=list(pairwise(ends)),
                )  # fmt: skip


def replayed(
    workload: Workload, data: AmpData, decision: AmpDecision, mode: Recomputation
) -> tuple[float, ...]:
    """Bytes that the replay of a decision holds on every device."""
    plan = to_plan(workload, data, decision, "test").model_copy(update={"recomputation": mode})
    return replay(plan, workload).peak_bytes


@pytest.mark.parametrize("mode", MODES)
def test_amps_problems_count_what_the_replay_counts(mode: Recomputation) -> None:
    """Of every decision the bytes beside the working memory are the replay's; a lone stage is
    charged twice for tied weights, which is more."""
    workload = with_memory(16)
    capacity = workload.device_bytes()["T4"]
    compared = 0
    for data in amp_problems(recomputed(workload, mode)):
        assert data.memory is not None
        beside = capacity - data.memory.device_bytes["T4"]
        for decision in decisions(data):
            own, held = peak_bytes(data, decision), replayed(workload, data, decision, mode)
            assert own is not None
            for mine, real in zip(own, held, strict=True):
                assert mine + beside >= real * (1 - 1e-9)
                if decision.pipeline > 1 and mode == "none":
                    assert mine == pytest.approx(real, rel=1e-9)
                compared += 1
    assert compared > 50


@pytest.mark.parametrize(("mode", "gib"), [("none", 3.4), ("full", 2.6), ("selective", 3.0)])
def test_amps_optimum_is_the_best_that_the_replay_has_room_for(
    mode: Recomputation, gib: float
) -> None:
    workload = with_memory(gib)
    posed = recomputed(workload, mode)
    (found,) = amp_optimum(posed, a_run(), None)
    assert found.status == "optimal" and found.objective is not None and found.plan is not None
    plan = found.plan.model_copy(update={"recomputation": mode})
    assert replay(plan, workload).fits
    for data in amp_problems(posed):
        for decision in decisions(data):
            objective = evaluate(AMP, data, decision).objective
            if objective is not None:
                assert found.bound is not None and found.bound <= objective * (1 + 1e-9)


def test_a_known_bound_ends_it() -> None:
    workload = with_memory(16)
    (whole,) = amp_optimum(workload, a_run(), None)
    (again,) = amp_optimum(workload, a_run(), whole.bound)
    assert (
        again.status == "optimal"
        and again.objective == whole.objective
        and again.bound == whole.bound
    )


def test_what_has_no_room_at_all_is_infeasible() -> None:
    (found,) = amp_optimum(with_memory(1.51), a_run(), None)
    assert found.status == "infeasible" and found.plan is None
    (none,) = ditto_optimum(with_memory(1.51), a_run(), None)
    assert none.status == "infeasible" and none.plan is None


def test_a_stop_is_no_proof() -> None:
    stopped = a_run()
    stopped.cancel.set()
    (one,) = amp_optimum(with_memory(16), stopped, None)
    (other,) = ditto_optimum(with_memory(16), stopped, None)
    assert (one.status, one.plan) == (other.status, other.plan) == ("unknown", None)


@pytest.mark.parametrize("mode", MODES)
def test_dittos_best_fits_when_replayed(mode: Recomputation) -> None:
    workload = with_memory(3.2)
    posed = recomputed(workload, mode)
    (found,) = ditto_optimum(posed, a_run(), None)
    assert found.plan is not None
    assert replay(found.plan.model_copy(update={"recomputation": mode}), workload).fits
    assert (
        found.bound is not None
        and found.objective is not None
        and found.bound <= found.objective * (1 + 1e-9)
    )


def test_dittos_widths_are_held() -> None:
    data = ditto_problem(small(), 1, 1)
    found = solve(family("ditto"), data, "auto", a_run())
    assert found.decision is not None
    assert {stage.devices for stage in found.decision.stages} == {1}
    wide, narrow = ditto_problem(small(), 1, 2).memory, data.memory
    assert wide is not None and narrow is not None
    assert sum(wide.layer_activation_bytes) > sum(narrow.layer_activation_bytes)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_poplars_curves_end_where_the_replays_memory_does(mode: Recomputation, stage: int) -> None:
    workload = with_memory(5.0)
    search = Search(STRATEGIES["poplar"], workload, a_run(), {"zero": stage}, methods=("auto",))
    posed = pose_poplar(recomputed(workload, mode), stage)
    seen = 0
    for candidate in search.proposed(mode, ("auto",)):
        if candidate.plan is None:
            continue
        assert candidate.replayed is not None and candidate.replayed.fits
        assert "tightened" not in candidate.message
        largest = {
            r.stages[0].devices[0][0]: max(b.samples for b in r.micro_batches)
            for r in candidate.plan.replicas
        }
        for device, batch in largest.items():
            assert candidate.replayed.peak_bytes[device] == pytest.approx(
                posed.device_bytes(device, batch), rel=1e-9
            )
            seen += 1
    assert seen


@pytest.mark.parametrize("mode", MODES)
def test_data_parallelism_keeps_to_what_the_replay_holds(mode: Recomputation) -> None:
    workload = with_memory(16)
    (candidate,) = STRATEGIES["dp"].propose(recomputed(workload, mode), a_run())
    assert candidate.plan is not None and candidate.peak_bytes is not None
    plan = candidate.plan.model_copy(update={"recomputation": mode})
    assert candidate.peak_bytes == pytest.approx(replay(plan, workload).peak_bytes, rel=1e-9)
