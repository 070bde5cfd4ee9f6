"""What is ranked: the replay's seconds and memory, beside the closed forms; what explains the
winner."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fakes.workloads import small
from hetplan.errors import UnsupportedError
from hetplan.planner.candidate import Candidate
from hetplan.planner.explain import explain, explanation_table
from hetplan.planner.ranking import Planning, make_plans
from hetplan.planner.simulated import check_size, simulated
from hetplan.planner.strategies import STRATEGIES
from hetplan.profiling.workload import Workload
from hetplan.runtime.replay import replay
from hetplan.solvers.options import Options
from hetplan.solvers.run import Run


@pytest.fixture(scope="module")
def workload() -> Workload:
    """gpt2 on two fast and two slow devices."""
    return small()


@pytest.fixture(scope="module")
def planning(workload: Workload) -> Planning:
    """Pipelines and the floor."""
    return make_plans(workload, ["amp", "dp"], Run(Options(time_limit=30, threads=1)))


def test_the_ranking_is_by_the_replay(planning: Planning, workload: Workload) -> None:
    for candidate in planning.candidates:
        assert candidate.plan is not None and candidate.replayed is not None
        again = replay(candidate.plan, workload)
        assert candidate.predicted_seconds == again.seconds
        assert candidate.peak_bytes == again.peak_bytes
        assert candidate.closed_form_seconds != candidate.predicted_seconds
        assert candidate.optimism == pytest.approx(
            again.seconds / (candidate.closed_form_seconds or 0)
        )
        told = candidate.plan.prediction
        assert told is not None and (told.strategy, told.method) == (
            candidate.strategy,
            candidate.method,
        )
        assert (told.predicted_seconds, told.objective, told.bound) == (
            candidate.predicted_seconds,
            candidate.objective,
            candidate.bound,
        )
    seconds = [c.predicted_seconds for c in planning.candidates]
    assert seconds == sorted(s for s in seconds if s is not None)


def test_a_plan_that_only_the_closed_form_lets_fit_never_wins(workload: Workload) -> None:
    (floor,) = STRATEGIES["dp"].propose(workload, Run())
    held = max(simulated(floor, workload).peak_bytes or ())
    # Devices with a byte less than the replay needs, and a strategy that thinks that it needs less.
    tight = {
        t: {"memory_gib": (held - 1 + workload.reserved_bytes) / 2**30}
        for t in workload.cluster.types
    }
    little = small(devices=tight)
    claimed = replace(floor, fits_memory=True, peak_bytes=tuple(held / 2 for _ in range(4)))
    judged = simulated(claimed, little)
    assert judged.fits_memory is False
    assert "does not fit when replayed: device " in judged.message
    tried = replace(claimed, peak_bytes=tuple(2 * held for _ in range(4)))  # measured on the device
    assert simulated(tried, little).fits_memory is True


def test_what_cannot_be_replayed_keeps_its_closed_form(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(plan: object, workload: object) -> None:
        raise UnsupportedError("not this one")

    monkeypatch.setattr("hetplan.planner.simulated.replay", refuse)
    (floor,) = STRATEGIES["dp"].propose(workload, Run())
    judged = simulated(floor, workload)
    assert judged.predicted_seconds == floor.predicted_seconds
    assert judged.closed_form_seconds is None and judged.replayed is None
    assert "not replayed" in judged.message and "not this one" in judged.message


def test_plans_of_too_many_passes_are_not_replayed(workload: Workload) -> None:
    (floor,) = STRATEGIES["dp"].propose(small(4_000_000), Run())
    assert floor.plan is not None
    with pytest.raises(UnsupportedError, match="too many micro-batches to replay"):
        check_size(floor.plan)


def test_the_deciding_chain_is_the_whole_iteration(planning: Planning, workload: Workload) -> None:
    explained = explain(planning)
    assert explained.seconds == planning.candidates[0].predicted_seconds
    assert sum(part.seconds for part in explained.critical) == pytest.approx(
        explained.seconds, rel=1e-9
    )
    found = planning.candidates[0].replayed
    assert found is not None and explained.busiest is not None and explained.tightest is not None
    replica, stage, share = explained.busiest
    unit = found.owners.index((replica, stage))
    assert share == pytest.approx(max(found.timeline.busy) / found.seconds)
    assert found.timeline.busy[unit] == max(found.timeline.busy)
    _, held, limit = explained.tightest
    assert held / limit == max(
        p / q for p, q in zip(found.peak_bytes, found.limit_bytes, strict=True)
    )
    assert explained.runner_up in planning.candidates[1:]
    assert [c.name for c in explained.papers] == ["amp/paper"]
    rows = {row[0] for row in explanation_table(explained, workload).rows}
    assert {
        "decides the iteration",
        "closed form",
        "busiest",
        "tightest memory",
        "papers' own",
    } <= rows


def test_the_same_plan_under_another_name_is_no_runner_up(
    planning: Planning, workload: Workload
) -> None:
    best = planning.candidates[0]
    twin = replace(best, method="twin")
    slow = replace(best, strategy="slow", predicted_seconds=9.0, plan=planning.candidates[-1].plan)
    explained = explain(Planning(workload, (best, twin, slow), 0))
    assert explained.runner_up is slow


def test_a_winner_without_a_replay_is_still_ranked(workload: Workload, planning: Planning) -> None:
    bare = replace(planning.candidates[0], replayed=None)
    explained = explain(Planning(workload, (bare,), 0))
    assert explained.critical == () and explained.card is None
    document = explained.document()
    assert document["bottleneck"] is None and document["runner_up"] is None


def test_candidates_are_told_as_they_are_found(workload: Workload) -> None:
    found: list[Candidate] = []
    planning = make_plans(workload, ["dp"], found_one=found.append)
    assert [c.name for c in found] == ["dp/enumeration"]
    assert found[0].predicted_seconds == planning.candidates[0].predicted_seconds
