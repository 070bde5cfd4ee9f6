"""What is ranked: the replay's seconds and memory, beside the closed forms; plans of nearly equal
price that only the replay tells apart; and what explains the winner."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fakes.workloads import small
from hetplan.formulations import family
from hetplan.formulations.amp.data import AmpDecision
from hetplan.formulations.amp.pose import pose
from hetplan.planner.amp import AUTO, Amp, AmpProblem, DataParallel, decision_of, placements
from hetplan.planner.explain import explain
from hetplan.planner.ranking import Planning
from hetplan.planner.search import Search, simulated
from hetplan.planner.strategy import Candidate, Method, propose
from hetplan.profiling.cluster import example_cluster
from hetplan.profiling.workload import Workload, make_workload
from hetplan.solvers.registry import evaluate
from hetplan.solvers.run import Run
from present import present


@pytest.fixture(scope="module")
def floor(workload: Workload) -> Candidate:
    """Data parallelism, not replayed."""
    return propose(DataParallel(), workload, Run())[0]


def test_a_plan_that_only_the_closed_form_lets_fit_never_wins(
    workload: Workload, floor: Candidate
) -> None:
    """On devices with a byte less than the replay needs, by a strategy that thinks that half is
    enough; what was tried on the device, though, is more than a prediction."""
    held = max(present(simulated(floor, workload).peak_bytes))
    gib = (held - 1 + workload.reserved_bytes) / 2**30
    little = small(devices={name: {"memory_gib": gib} for name in workload.cluster.types})
    judged = simulated(replace(floor, peak_bytes=(held / 2,) * 4), little)
    assert judged.fits_memory is False
    assert "does not fit when replayed: device " in judged.message
    assert simulated(replace(floor, peak_bytes=(2 * held,) * 4), little).fits_memory is True


def test_what_cannot_be_replayed_keeps_its_closed_form() -> None:
    """Four million micro-batches would take minutes and gigabytes."""
    many = small(4_000_000)
    (huge,) = propose(DataParallel(), many, Run())
    judged = simulated(huge, many)
    assert (judged.closed_form_seconds, judged.replayed) == (None, None)
    assert judged.predicted_seconds == huge.predicted_seconds
    assert "not replayed" in judged.message and "too many micro-batches" in judged.message


# Groups of two: eight on two nodes of A100, of two stages, and four on a node of H100.
A100 = [[d, d + 1] for d in range(8, 24, 2)]
H100 = [[d, d + 1] for d in range(0, 8, 2)]


def decision(first: list[list[int]], second: list[list[int]]) -> AmpDecision:
    """Three stages of four data ranks of two tensor ranks."""
    return AmpDecision(
        pipeline=3,
        data=4,
        tensor=2,
        micro_batch=1,
        placement=[first, second, H100],
        stages=[(0, 6), (6, 12), (12, 26)],
    )


APART, MIXED = decision(A100[:4], A100[4:]), decision(A100[::2], A100[1::2])


@pytest.fixture(scope="module")
def large() -> Workload:
    """gpt2-medium on a node of eight H100 and two of eight A100."""
    return make_workload("gpt2-medium", example_cluster("company").part((0, 4, 5)), 32)


@pytest.mark.parametrize("chosen_one", [APART, MIXED])
def test_devices_are_handed_out_in_order_and_groups_keep_their_types(
    chosen_one: AmpDecision, large: Workload
) -> None:
    def types(placement: list[list[list[int]]]) -> list[list[list[str]]]:
        return [[[devices[d].type for d in group] for group in row] for row in placement]

    devices, others = large.cluster.devices, list(placements(large, chosen_one))
    assert others and chosen_one.placement not in others
    assert APART.placement in others or chosen_one is APART
    for placement in others:
        assert sorted(d for row in placement for group in row for d in group) == list(range(24))
        assert types(placement) == types(chosen_one.placement)


def test_the_shorter_replay_is_found(large: Workload) -> None:
    """With its price by AMP's evaluator, and the optimum's bound; not beyond what it may be
    dearer."""
    data, run = pose(large, memory=False), Run()

    def optimum(decision: AmpDecision) -> Candidate:
        """As if AMP's exact method had found it."""
        price = evaluate(family("amp"), data, decision).objective
        candidate = Candidate(
            strategy="amp",
            method=AUTO,
            status="optimal",
            objective=price,
            bound=price,
            fits_memory=True,
            predicted_seconds=price,
            plan=AmpProblem(large, data).to_plan(decision),
        )
        return simulated(candidate, large)

    both = [optimum(APART), optimum(MIXED)]
    faster, slower = sorted(both, key=lambda c: present(c.predicted_seconds))
    assert present(faster.predicted_seconds) < present(slower.predicted_seconds) * 0.999
    search = Search(Amp(near=1.0), large, run)
    (other,) = search.rearranged(slower, large, run)
    plan = present(other.plan)
    assert other.name == plan.origin == "amp/rearranged" and other.fits_memory and other.tables
    assert present(other.predicted_seconds) <= present(faster.predicted_seconds)
    assert (other.status, other.bound) == ("feasible", slower.bound)
    price = evaluate(family("amp"), data, decision_of(plan)).objective
    assert other.closed_form_seconds == other.objective == price
    for candidate in (replace(other, method=AUTO), other):
        assert search.rearranged(candidate, large, run) == []
    assert Search(Amp(near=-1.0), large, run).rearranged(slower, large, run) == []


def test_the_deciding_chain_is_the_whole_iteration(planning: Planning, workload: Workload) -> None:
    explained, run = present(planning.explanation), present(planning.candidates[0].replayed)
    assert sum(explained.critical.values()) == pytest.approx(run.seconds, rel=1e-9)
    busiest, tightest = present(explained.busiest).facts, present(explained.tightest).facts
    assert busiest["busy_share"] == pytest.approx(max(run.timeline.busy) / run.seconds)
    unit = run.owners.index((busiest["replica"], busiest["stage"]))
    assert run.timeline.busy[unit] == max(run.timeline.busy)
    shares = [p / q for p, q in zip(run.peak_bytes, run.limit_bytes, strict=True)]
    assert tightest["bytes"] / tightest["limit_bytes"] == max(shares) == shares[tightest["device"]]
    assert explained.runner_up in planning.candidates[1:]
    assert [c.name for c in explained.papers] == ["amp/paper"]
    lines = {"decides the iteration", "closed form", "busiest", "tightest memory", "papers' own"}
    assert lines <= {row[0] for row in explained.table(workload).rows}


def test_the_same_plan_under_another_name_is_no_runner_up(
    planning: Planning, workload: Workload
) -> None:
    best = planning.candidates[0]
    twin = replace(best, method=Method("twin"))
    slow = replace(best, strategy="slow", plan=planning.candidates[-1].plan)
    assert explain([best, twin, slow], 0, workload).runner_up is slow


def test_a_winner_without_a_replay_is_still_ranked(workload: Workload, planning: Planning) -> None:
    explained = explain([replace(planning.candidates[0], replayed=None)], 0, workload)
    assert (explained.critical, explained.card) == ({}, None)
    document = explained.document()
    assert (document["bottleneck"], document["runner_up"]) == (None, None)
    assert explained.table(workload).rows
