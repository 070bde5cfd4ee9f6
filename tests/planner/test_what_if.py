"""What changes of the cluster are worth: changes by hand, gains that cannot be negative where
nothing is taken away. What is carried over from proven problems is what solving would have given,
and nothing else is carried over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from fakes.workloads import cluster_document, one_thread, small
from hetplan.errors import InputError
from hetplan.formulations import family
from hetplan.formulations.amp.data import AmpData
from hetplan.formulations.amp.pose import pose as pose_amp
from hetplan.formulations.ditto.data import DittoData
from hetplan.formulations.ditto.pose import pose as pose_ditto
from hetplan.planner import known as theorems
from hetplan.planner.ranking import Criteria, make_plans
from hetplan.planner.strategy import chosen
from hetplan.planner.what_if import (
    Change,
    Changed,
    addition,
    as_before,
    changed_workload,
    faster_network,
    marginal,
    removal,
    what_if,
)
from hetplan.profiling.cluster import GBIT, Cluster
from hetplan.profiling.workload import Workload
from hetplan.runtime.replay import replay
from hetplan.solvers.registry import solve
from hetplan.solvers.result import Result
from present import present
from stopping import cancelled_after

NODES = cluster_document()["nodes"]
A100 = "A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("make", "text", "counts", "links"),
    [
        (addition, "4xT4", {"V100-SXM2-16GB": 2, "T4": 6}, (50, 50)),  # as those of its kind
        (addition, f"1x{A100}", {"V100-SXM2-16GB": 2, "T4": 2, A100: 1}, (170, 50)),  # as the best
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
    alone = workload.cluster.part([1])
    with pytest.raises(InputError, match="nothing is left"):
        removal("2xT4", alone)
    names = [change.name for change in marginal(alone)]
    assert names == ["add 2xT4", "links inside T4 nodes at 100 Gbit/s"]


def one_change(workload: Workload, change: Change) -> Changed:
    """What data parallelism makes of it."""
    (changed,) = what_if(workload, [change], one_thread(), strategies=chosen(["dp"])).variants
    return changed


def test_gains(workload: Workload) -> None:
    """A network that is faster, and devices that need not be used, can only help; a loss of half
    cannot."""
    asked = [*marginal(workload.cluster), addition("1xT4", workload.cluster)]
    answer = what_if(workload, asked, one_thread(), strategies=chosen(["amp", "dp"]))
    before = present(present(answer.base.best).predicted_seconds)
    for variant in answer.variants:
        gain = present(variant.gain)
        assert gain == before - present(present(variant.best).predicted_seconds)
        assert gain <= 0 if variant.change.name.startswith("remove") else gain >= 0
    (faster,) = (v for v in answer.variants if v.change.name.startswith("network at"))
    assert present(faster.gain) > 0
    document = answer.document()["variants"]
    assert [v["change"] for v in document] == [change.name for change in asked]
    assert document[0]["seconds_saved_per_device"] == document[0]["seconds_saved"] / 2


def test_what_is_faster_without_a_node_leaves_it_idle() -> None:
    """Over a slow network data parallelism on all devices is slower than on the fast node alone."""
    workload = small(nodes=[node | {"network_gbit_per_s": 1} for node in NODES])
    change = removal("node1", workload.cluster)
    answer = what_if(workload, [change], one_thread(), strategies=chosen(["dp"]))
    best = present(answer.base.best)
    assert best.label == "enumeration@idle: node1" and answer.variants[0].gain == 0.0
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
    assert len(present(best.plan).devices) == 5 and present(best.plan).world_size == 4


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
    planning = make_plans(workload, chosen(["dp"]), one_thread(), criteria=Criteria(on_parts=True))
    fast = next(c for c in planning.candidates if c.name.endswith("@V100-SXM2-16GB"))
    change = removal(text, workload.cluster)
    changed = changed_workload(workload, change.cluster)
    again = as_before(fast, workload, changed, change)
    assert (again is not None) == stays
    if again is not None:
        assert again.predicted_seconds == fast.predicted_seconds
        assert len(present(again.plan).devices) == len(changed.cluster.devices)
        assert again.bound is None and again.objective is None


# What is carried over


def wide(global_batch: int = 8, **changes: Any) -> Workload:
    """Two nodes of each kind."""
    return small(global_batch, nodes=[{**node, "count": 2} for node in NODES], **changes)


# Devices that hold nothing.
LITTLE = {name: {"memory_gib": 2} for name in ("T4", "V100-SXM2-16GB")}


def with_nodes(data: DittoData, counts: list[int]) -> DittoData:
    """Other numbers of nodes by type; 0: without the type."""
    kinds = [
        kind.model_copy(update={"nodes": count})
        for kind, count in zip(data.device_types, counts, strict=True)
        if count
    ]
    return data.model_copy(update={"device_types": kinds})


def slower(data: AmpData, random: Random) -> AmpData:
    """One or two links at a half of their bandwidth, sometimes another at twice its own."""
    rows = [list(row) for row in data.bandwidth]
    for _ in range(random.choice((1, 2))):
        i, j = random.sample(range(len(data.devices)), 2)
        rows[i][j] = rows[j][i] = rows[i][j] / 2
    if random.random() < 0.2:
        rows[0][1] = rows[1][0] = 2 * data.bandwidth[0][1]
    return data.model_copy(update={"bandwidth": rows})


class Proven:
    """A problem solved, and what its proven result says of others."""

    def __init__(self, name: str, data: Any) -> None:
        self.family, self.data = family(name), data
        self.result = solve(self.family, data, "auto", one_thread())

    def of(self, data: Any) -> Result[Any] | None:
        """What is known of changed data."""
        return theorems.carried(self.family, self.data, data, self.result)

    def check(self, data: Any, seen: Counter[str]) -> None:
        """A known answer is that of solving."""
        known = self.of(data)
        seen["solved" if known is None else known.message] += 1
        if known is not None:
            fresh = solve(self.family, data, "auto", one_thread())
            assert known.status == fresh.status and known.seconds == 0.0
            assert (known.objective or 0.0) == pytest.approx(fresh.objective or 0.0, rel=1e-6)
            assert (known.bound or 0.0) <= (fresh.objective or 0.0) * (1 + 1e-9)


def test_dittos_templates_on_fewer_nodes() -> None:
    seen: Counter[str] = Counter()
    for batch in (2, 8):  # two micro-batches: no more than two stages, so that nodes are left over
        data = pose_ditto(wide(batch), 1)
        proven = Proven("ditto", data)
        for counts in ([2, 2], [1, 2], [2, 1], [1, 1], [2, 0], [0, 2], [3, 2]):
            proven.check(with_nodes(data, counts), seen)
        more = data.model_copy(update={"micro_batches": data.micro_batches + 1})
        assert proven.of(more) is None
    none = pose_ditto(wide(8, devices=LITTLE), 1)
    Proven("ditto", none).check(with_nodes(none, [1, 2]), seen)
    assert seen[theorems.SAME] == 2 and seen[theorems.NONE_LEFT] == 1
    assert seen[theorems.FEWER] >= 1 and seen["solved"] >= 2


def test_amps_decisions_on_a_slower_network() -> None:
    data, random, seen = pose_amp(small()), Random(3), Counter[str]()
    proven = Proven("amp", data)
    for changed in (data, *(slower(data, random) for _ in range(16))):
        proven.check(changed, seen)
    assert seen[theorems.SAME] == 1 and seen[theorems.SLOWER] >= 1 and seen["solved"] >= 3
    faster = {"bandwidth": [[2 * value for value in row] for row in data.bandwidth]}
    assert proven.of(data.model_copy(update=faster)) is None
    assert proven.of(data.model_copy(update={"global_batch": 16})) is None
    none = pose_amp(small(model="gpt2-xl", devices=LITTLE))
    known = present(Proven("amp", none).of(none.model_copy(update=faster)))
    assert (known.status, known.message) == ("infeasible", theorems.MEMORY)


def test_only_what_is_proven_is_kept() -> None:
    data, known, amp = pose_amp(small()), theorems.Known(), family("amp")
    with theorems.remembering(known):
        theorems.solved(amp, data, "auto", cancelled_after(0))
        assert known.proven == []
        first, again = (theorems.solved(amp, data, "auto", one_thread()) for _ in range(2))
    theorems.solved(amp, data, "auto", one_thread())  # outside nothing is remembered
    assert again.decision == first.decision and known.decided == [f"amp: {theorems.SAME}"]


def test_what_if_solves_less_and_finds_the_same() -> None:
    workload, strategies = wide(8), chosen(["ditto", "astra"])
    changes = [removal("node3", workload.cluster), faster_network(20, workload.cluster)]
    answer = what_if(workload, changes, one_thread(), strategies=strategies)
    # T4 alone went
    assert Counter(answer.decided)[f"astra/only-V100-SXM2-16GB: {theorems.SAME}"] == 1
    assert any(text.startswith("ditto: ") for text in answer.decided)
    for variant in answer.variants:
        alone = make_plans(variant.workload, strategies, one_thread()).best
        seconds = present(present(variant.best).predicted_seconds)
        assert seconds <= present(present(alone).predicted_seconds)
    assert answer.document()["decided_without_solving"] == list(answer.decided)
