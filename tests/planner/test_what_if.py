"""What changes of the cluster are worth: changes by hand, gains that cannot be negative where
nothing is taken away."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from fakes.noting import Noting
from fakes.workloads import cluster_document, one_thread, small
from hetplan.cli.changes import what_if_table
from hetplan.clock import CLOCK
from hetplan.errors import InputError
from hetplan.planner.candidate import Candidate
from hetplan.planner.criteria import Criteria
from hetplan.planner.joint import Joint
from hetplan.planner.ranking import make_plans
from hetplan.planner.search import on_devices
from hetplan.planner.strategy import Problem, make_strategies
from hetplan.planner.what_if import (
    FOUND_FOR,
    GIVEN,
    LEAST_PRECISION,
    Change,
    ChangeResult,
    WhatIf,
    addition,
    changed_workload,
    compared,
    faster_network,
    marginal,
    plan_as_it_is,
    removal,
    what_if,
)
from hetplan.plans.plan import Plan
from hetplan.profiling.hardware.cluster import GBIT, Cluster
from hetplan.profiling.workload import Workload
from hetplan.replays.replay import replay
from hetplan.solvers.run import CUT, Options, Run
from hetplan.text import percent_text
from present import present

NODES = cluster_document()["nodes"]
A100 = "A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("make", "text", "counts", "links"),
    [
        (addition, "4xT4", {"V100-SXM2-16GB": 2, "T4": 6}, (50, 50)),  # as those of its kind
        (addition, f"1x{A100}", {"V100-SXM2-16GB": 2, "T4": 2, A100: 1}, (170, 50)),  # as the best
        (addition, "1xV100-SXM2-16GB@node0", {"T4": 2, "V100-SXM2-16GB": 3}, (170, 10)),
        (removal, "node0", {"T4": 2}, (50, 50)),
        (removal, "1xT4", {"V100-SXM2-16GB": 2, "T4": 1}, (50, 50)),
        (removal, "2xT4", {"V100-SXM2-16GB": 2}, (170, 10)),
    ],
)
def test_changed_clusters(
    workload: Workload,
    make: Callable[[str, Cluster], Change],
    text: str,
    counts: dict[str, int],
    links: tuple[int, int],
) -> None:
    changed = make(text, workload.cluster).cluster
    last = changed.nodes[-1]
    assert changed.counts() == counts and set(changed.specs) == set(counts)
    assert (last.intra_bandwidth, last.network_bandwidth) == tuple(g * GBIT for g in links)


@pytest.mark.parametrize(
    ("make", "asked", "message"),
    [
        (addition, "A100", "--add: not usable (got 'A100', expected COUNTxDEVICE"),
        (addition, "0xT4", "--add: not usable"),
        (addition, "2xA1000", "--add: unknown device 'A1000'"),
        (addition, "1xT4@node7", "no such node (got 'node7', expected node0 to node1)"),
        (addition, "1xT4@node0", "expected 1xV100-SXM2-16GB@node0"),
        (removal, "node7", "no such node (got 'node7', expected node0 to node1)"),
        (removal, "3xT4", "more than there are (got '3xT4', expected at most 2)"),
        (removal, "1xP100-PCIE-16GB", "expected at most 0"),
        *((faster_network, g, "--network-gbit-per-s") for g in (0.0, -1.0, 1e999, float("nan"))),
    ],
)
def test_nonsense(
    workload: Workload, make: Callable[..., Change], asked: Any, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        make(asked, workload.cluster)
    assert message in str(caught.value)


def test_what_is_asked_without_changes(workload: Workload) -> None:
    """Each with its links: (inside, network) of the first node and of the second, Gbit/s."""
    clusters = {change.name: change.cluster for change in marginal(workload.cluster)}
    links = {
        name: [(n.intra_bandwidth / GBIT, n.network_bandwidth / GBIT) for n in cluster.nodes]
        for name, cluster in clusters.items()
    }
    assert links == {
        "add 2xV100-SXM2-16GB": [(170, 10), (50, 50), (170, 10)],
        "remove node0": [(50, 50)],
        "add 2xT4": [(170, 10), (50, 50), (50, 50)],
        "remove node1": [(170, 10)],
        "network at 100 Gbit/s": [(170, 100), (50, 100)],
        "network of V100-SXM2-16GB nodes at 20 Gbit/s": [(170, 20), (50, 50)],
        "links inside V100-SXM2-16GB nodes at 340 Gbit/s": [(340, 10), (50, 50)],
        "network of T4 nodes at 100 Gbit/s": [(170, 10), (50, 100)],
        "links inside T4 nodes at 100 Gbit/s": [(170, 10), (100, 50)],
    }
    slower = faster_network(25, workload.cluster)  # the second node had 50
    assert slower.name == "network at 25 Gbit/s (node 1: less than now)"
    assert [n.network_bandwidth / GBIT for n in slower.cluster.nodes] == [25, 25]
    alone = workload.cluster.part([1])
    with pytest.raises(InputError, match="nothing is left"):
        removal("2xT4", alone)
    names = [change.name for change in marginal(alone)]
    assert names == ["add 2xT4", "links inside T4 nodes at 100 Gbit/s"]


def one_change(workload: Workload, change: Change) -> ChangeResult:
    """What data parallelism makes of it."""
    (changed,) = what_if(
        workload, [change], one_thread(), strategies=make_strategies(["dp"])
    ).variants
    return changed


def test_gains() -> None:
    """A network that is faster, and devices that need not be used, can only help; a loss of half
    cannot. Nodes are about equally fast, so that the best plan uses both."""
    nodes = [NODES[0], NODES[1] | {"device": "V100-PCIE-16GB"}]
    workload = small(global_batch=32, nodes=nodes)
    asked = [*marginal(workload.cluster), addition("1xT4", workload.cluster)]
    answer = what_if(workload, asked, one_thread(), strategies=make_strategies(["amp", "dp"]))
    before = present(present(answer.base.best).predicted_seconds)
    assert present(present(answer.base.best).plan).world_size == 4
    for variant in answer.variants:
        gain = present(variant.gain)
        assert gain == before - present(present(variant.best).predicted_seconds)
        assert gain <= 0 if variant.change.name.startswith("remove") else gain >= 0
    (faster,) = (v for v in answer.variants if v.change.name.startswith("network at"))
    assert present(faster.gain) > 0
    document = answer.document()["variants"]
    assert [v["change"] for v in document] == [change.name for change in asked]
    assert answer.precision == 0.0  # nothing here depends on how long is searched
    assert not any(v.within_precision for v in answer.variants)


def test_what_is_faster_without_a_node_leaves_it_idle() -> None:
    """Over a slow network data parallelism on all devices is slower than on the fast node alone."""
    workload = small(nodes=[node | {"network_gbit_per_s": 1} for node in NODES])
    change = removal("node1", workload.cluster)
    answer = what_if(workload, [change], one_thread(), strategies=make_strategies(["dp"]))
    best = present(answer.base.best)
    assert best.message == f"{FOUND_FOR}remove node1" and answer.variants[0].gain == 0.0
    assert present(best.plan).world_size == 2 and len(present(best.plan).devices) == 4


def test_a_measured_profile_knows_no_new_devices(workload: Workload) -> None:
    kind = workload.profile.provenance.model_copy(update={"kind": "measured"})
    profile = workload.profile.model_copy(update={"provenance": kind})
    measured, cluster = replace(workload, profile=profile), workload.cluster
    with pytest.raises(InputError, match="the measured profile has no table for 'A100-SXM4-80GB'"):
        changed_workload(measured, addition(f"1x{A100}", cluster).cluster)
    assert changed_workload(measured, addition("2xT4", cluster).cluster).profile is profile


def test_devices_of_no_use_cost_nothing(workload: Workload) -> None:
    """Eight samples do not divide over five devices: the plan as it is stays, with the new one
    idle."""
    variant = one_change(workload, addition("1xT4", workload.cluster))
    best = present(variant.best)
    assert (variant.gain, best.message) == (0.0, "the plan as it is")
    assert variant.same_plan and variant.reasons == ()
    assert len(present(best.plan).devices) == 5 and present(best.plan).world_size == 4


def test_a_change_without_a_plan_says_why(workload: Workload) -> None:
    """Eight samples do not divide over three devices."""
    variant = one_change(workload, removal("1xT4", workload.cluster))
    assert variant.best is None and variant.gain is None
    (reason,) = variant.reasons
    assert reason.startswith("dp/enumeration: ") and "divides 8 samples over 3 devices" in reason


@pytest.mark.parametrize("gbit", [1.0, 100.0])
def test_the_plan_as_it_is_takes_what_the_changed_network_makes_of_it(
    workload: Workload, gbit: float
) -> None:
    variant = one_change(workload, faster_network(gbit, workload.cluster))
    best = present(variant.best)
    assert best.predicted_seconds == replay(present(best.plan), variant.workload).seconds
    assert (present(variant.gain) > 0) == (gbit > 10)


@pytest.mark.parametrize(("text", "stays"), [("node1", True), ("1xT4", True), ("node0", False)])
def test_the_plan_as_it_is_stays_where_only_idle_devices_go(
    workload: Workload, text: str, stays: bool
) -> None:
    planning = make_plans(
        workload, make_strategies(["dp"]), one_thread(), criteria=Criteria(on_parts=True)
    )
    fast = next(c for c in planning.candidates if c.name.endswith("@V100-SXM2-16GB"))
    change = removal(text, workload.cluster)
    changed = changed_workload(workload, change.cluster)
    again = plan_as_it_is(fast, workload, changed, change)
    assert (again is not None) == stays
    if again is not None:
        assert again.predicted_seconds == fast.predicted_seconds
        assert len(present(again.plan).devices) == len(changed.cluster.devices)
        assert again.bound is None and again.objective is None


def test_devices_in_a_node_that_is_there(workload: Workload) -> None:
    """The plan as it is keeps its devices; the node that grows gets the last numbers."""
    change = addition("1xV100-SXM2-16GB@node0", workload.cluster)
    assert change.numbers == (2, 3, 0, 1) and [n.devices for n in change.cluster.nodes] == [2, 3]
    variant = one_change(workload, change)
    plan = present(present(variant.best).plan)
    assert variant.same_plan and sorted(plan.ranks) == [0, 1, 2, 3]
    assert plan.devices[4].type == "V100-SXM2-16GB"


def test_every_search_begins_with_the_first_plan(workload: Workload) -> None:
    """The cluster as it is is searched a second time, too; a plan is not moved where a device that
    it uses is gone."""
    joint, cluster = Noting(), workload.cluster
    changes = [addition("2xT4", cluster), removal("1xV100-SXM2-16GB", cluster)]
    answer = what_if(workload, changes, one_thread(), strategies=[joint])
    begun = [noted for noted in joint.noted if noted]
    assert [len(plan.devices) for (plan,) in begun] == [4, 6]
    (first,), (moved,) = begun
    assert moved.replicas == first.replicas and 0 in first.ranks and 1 in first.ranks
    slower = (
        replay(first, workload).seconds / present(present(answer.base.best).predicted_seconds) - 1
    )
    assert answer.precision == max(LEAST_PRECISION, slower)
    assert answer.document()["precision"] == answer.precision
    assert present(answer.variants[0].gain) >= 0


class Budgets(Noting):
    """Notes the budget of every run in which it poses a workload, and uses it up if told so."""

    def __init__(self, uses_up: bool = False) -> None:
        super().__init__()
        self.uses_up = uses_up
        self.budgets: list[float | None] = []

    def beginning_with(self, plans: Iterable[Plan]) -> Joint:
        return self

    def pose(self, workload: Workload, run: Run) -> list[Problem]:
        self.budgets.append(run.budget)
        if self.uses_up:
            run.count(run.remaining)
        return super().pose(workload, run)


@pytest.mark.parametrize("uses_up", [True, False])
def test_plannings_have_equal_shares_of_a_counted_budget(workload: Workload, uses_up: bool) -> None:
    """Two for the cluster as it is, and one for the change. What a planning leaves is shared by
    those behind it, but no planning gets more than its own part of the whole."""
    joint, run = Budgets(uses_up), Run(Options(threads=1), budget=3.0)
    answer = what_if(workload, [addition("2xT4", workload.cluster)], run, strategies=[joint])
    first, *others = joint.budgets[:: len(Joint.methods)]
    assert first is not None and 0 < first < 1.0 and len(others) == 2
    assert others == pytest.approx([first, first], rel=1e-6)
    assert answer.cut == () and answer.document()["cut"] == []


def test_what_the_time_limit_cut_is_named(workload: Workload) -> None:
    run = Run(Options(threads=1, time_limit=1.0), started=CLOCK.seconds() - 2.0, budget=1e6)
    change = addition("2xT4", workload.cluster)
    answer = what_if(workload, [change], run, strategies=[Noting()])
    assert answer.cut == ("as it is", change.name)
    assert answer.document()["cut"] == list(answer.cut)
    notes = what_if_table(answer).notes
    assert [note for note in notes if CUT in note] == [f"{name}: {CUT}" for name in answer.cut]


def test_a_gain_within_the_precision_is_said(workload: Workload) -> None:
    """Two devices more save some time, and so does a faster network with the same plan. Neither can
    be told from none where the search is further than that from its best."""
    dp, posed = make_strategies(["dp"]), replace(workload, global_batch=24)
    base = what_if(posed, [], one_thread(), strategies=dp).base
    within = {}
    for change in (addition("2xT4", posed.cluster), faster_network(100.0, posed.cluster)):
        changed = changed_workload(posed, change.cluster)
        planning = make_plans(changed, dp, one_thread())
        for precision in (0.0, 0.01, 0.9):
            result = compared(base, change, changed, planning, precision)
            before = present(present(base.best).predicted_seconds)
            assert present(result.relative_gain) == present(result.gain) / before > 0.01
            assert result.document()["within_precision"] == result.within_precision
            within[result.change.added_devices, precision] = result.within_precision
            table = what_if_table(WhatIf(base, (result,), precision))
            said = f"within the search's precision of {percent_text(precision)}"
            assert any(said in note.replace("\n  ", " ") for note in table.notes) == (
                result.within_precision
            )
    assert [key for key, value in within.items() if value] == [(2, 0.9), (0, 0.9)]


def test_a_given_plan_is_a_candidate_of_every_row(workload: Workload) -> None:
    """Whatever strategies are named: here none of them finds the given plan, which is faster."""
    quick, slow = make_strategies(["amp"]), make_strategies(["dp"])
    better = present(present(make_plans(workload, quick, one_thread()).best).plan)
    seconds = replay(better, workload).seconds
    worse = present(make_plans(workload, slow, one_thread()).best)
    assert seconds < present(worse.predicted_seconds)
    changes = [addition("2xT4", workload.cluster), faster_network(100.0, workload.cluster)]
    answer = what_if(workload, changes, one_thread(), strategies=slow, known=[better])
    base = present(answer.base.best)
    assert present(base.predicted_seconds) == seconds and base.message == GIVEN
    assert present(base.plan).replicas == better.replicas and not answer.left_out
    for result in answer.variants:
        assert present(present(result.best).predicted_seconds) <= seconds
        assert present(result.gain) == seconds - present(present(result.best).predicted_seconds)
    notes = " ".join(what_if_table(answer).notes)
    assert f"as it is: {GIVEN}" in notes


def test_a_given_plan_stays_a_candidate_where_the_best_one_is_gone() -> None:
    """Of two given plans the faster one needs a node of A100, the other one leaves it idle."""
    a100s = {"device": A100, "devices": 4, "count": 1}
    fast_node = a100s | {"intra_node_gbit_per_s": 2400, "network_gbit_per_s": 10}
    workload = small(nodes=[*NODES, fast_node], global_batch=32)
    best_on: dict[tuple[int, ...], Candidate] = {}
    for nodes in ((0, 1), (2,)):
        on_part = replace(workload, cluster=workload.cluster.part(nodes))
        best_on[nodes] = present(make_plans(on_part, make_strategies(["amp"]), one_thread()).best)
    known = [
        present(on_devices(best, workload, workload.cluster.devices_of(nodes)).plan)
        for nodes, best in best_on.items()
    ]
    dp, change = make_strategies(["dp"]), removal("node2", workload.cluster)
    answer = what_if(workload, [change], one_thread(), strategies=dp, known=known)
    assert max(present(present(answer.base.best).plan).ranks) >= 4  # is gone with node 2
    (result,) = answer.variants
    by_dp = present(make_plans(result.workload, dp, one_thread()).best).predicted_seconds
    seconds = present(best_on[0, 1].predicted_seconds)
    assert present(result.best).predicted_seconds == seconds < present(by_dp)


def test_a_given_plan_that_is_left_out_is_named(workload: Workload) -> None:
    """One of another batch, and one that does not fit in memory."""
    dp = make_strategies(["dp"])
    plan = present(present(make_plans(workload, dp, one_thread()).best).plan)
    other, full = replace(workload, global_batch=16), replace(workload, reserved_bytes=15.5 * 2**30)
    for posed, reason in ((other, "global_batch"), (full, "does not fit in memory")):
        answer = what_if(posed, [], one_thread(), strategies=dp, known=[plan])
        (left_out,) = answer.left_out
        assert reason in left_out and answer.document()["left_out"] == [left_out]
        notes = " ".join(" ".join(what_if_table(answer).notes).split())
        assert "the plan that was given is left out" in notes and reason in notes
