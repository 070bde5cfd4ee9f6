"""What is carried over from proven problems is what solving would have given, and nothing else is
carried over."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from fakes.workloads import cluster_document, one_thread, small
from hetplan.formulations import family
from hetplan.formulations.amp.data import AmpData
from hetplan.formulations.amp.pose import pose as pose_amp
from hetplan.formulations.ditto.data import DittoData
from hetplan.formulations.ditto.pose import pose as pose_ditto
from hetplan.planner.known import (
    FEWER,
    MEMORY,
    NONE_LEFT,
    SAME,
    SLOWER,
    Known,
    carried,
    remembering,
    solved,
)
from hetplan.planner.ranking import Criteria, make_plans
from hetplan.planner.strategy import chosen
from hetplan.planner.what_if import as_before, changed_workload, faster_network, removal, what_if
from hetplan.profiling.workload import Workload
from hetplan.runtime.replay import replay
from hetplan.solvers.registry import solve
from hetplan.solvers.result import Result
from stopping import cancelled_after

NODES = cluster_document()["nodes"]


def wide(global_batch: int = 8, **changes: Any) -> Workload:
    """Two nodes of each kind."""
    return small(global_batch, nodes=[{**node, "count": 2} for node in NODES], **changes)


def little() -> dict[str, Any]:
    """Devices that hold nothing."""
    return {name: {"memory_gib": 2} for name in ("T4", "V100-SXM2-16GB")}


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
        return carried(self.family, self.data, data, self.result)

    def check(self, data: Any, seen: Counter[str]) -> None:
        """A known answer is that of solving."""
        known = self.of(data)
        if known is None:
            seen["solved"] += 1
            return
        fresh = solve(self.family, data, "auto", one_thread())
        assert known.status == fresh.status and known.seconds == 0.0
        if fresh.objective is not None:
            assert known.objective == pytest.approx(fresh.objective, rel=1e-6)
            assert known.bound is not None and known.bound <= fresh.objective * (1 + 1e-9)
        seen[known.message] += 1


def test_dittos_templates_on_fewer_nodes() -> None:
    seen: Counter[str] = Counter()
    for batch in (2, 8):  # two micro-batches: no more than two stages, so that nodes are left over
        data = pose_ditto(wide(batch), 1)
        proven = Proven("ditto", data)
        for counts in ([2, 2], [1, 2], [2, 1], [1, 1], [2, 0], [0, 2], [3, 2]):
            proven.check(with_nodes(data, counts), seen)
        more = data.model_copy(update={"micro_batches": data.micro_batches + 1})
        assert proven.of(more) is None
    assert seen[SAME] == 2 and seen[FEWER] >= 1 and seen["solved"] >= 2
    data, none = pose_ditto(wide(8, devices=little()), 1), Counter[str]()
    Proven("ditto", data).check(with_nodes(data, [1, 2]), none)
    assert none == {NONE_LEFT: 1}


def test_amps_decisions_on_a_slower_network() -> None:
    data, random, seen = pose_amp(small()), Random(3), Counter[str]()
    proven = Proven("amp", data)
    for changed in (data, *(slower(data, random) for _ in range(16))):
        proven.check(changed, seen)
    faster = [[2 * value for value in row] for row in data.bandwidth]
    assert proven.of(data.model_copy(update={"bandwidth": faster})) is None
    assert proven.of(data.model_copy(update={"global_batch": 16})) is None
    assert seen[SAME] == 1 and seen[SLOWER] >= 1 and seen["solved"] >= 3
    none = pose_amp(small(model="gpt2-xl", devices=little()))
    known = Proven("amp", none).of(none.model_copy(update={"bandwidth": faster}))
    assert known is not None and (known.status, known.message) == ("infeasible", MEMORY)


def test_only_what_is_proven_is_kept() -> None:
    data, known, slow = pose_amp(small()), Known(), cancelled_after(0)
    with remembering(known):
        assert solved(family("amp"), data, "auto", slow).status not in ("optimal", "infeasible")
        assert known.proven == []
        first = solved(family("amp"), data, "auto", one_thread())
        again = solved(family("amp"), data, "auto", one_thread())
    assert again.decision == first.decision and known.decided == [f"amp: {SAME}"]
    solved(family("amp"), data, "auto", one_thread())
    assert len(known.decided) == 1  # outside nothing is remembered


def test_what_if_solves_less_and_finds_the_same() -> None:
    workload = wide(8)
    changes = [removal("node3", workload.cluster), faster_network(20, workload.cluster)]
    names = ["ditto", "astra"]
    found = what_if(workload, changes, one_thread(), strategies=chosen(names))
    counts = Counter(found.decided)
    assert counts[f"astra/only-V100-SXM2-16GB: {SAME}"] == 1  # T4 alone went
    assert any(text.startswith("ditto: ") for text in counts)
    for variant in found.variants:
        alone = what_if(variant.workload, [], one_thread(), strategies=chosen(names))
        assert alone.base.best is not None and variant.best is not None
        assert variant.best.predicted_seconds is not None
        assert variant.best.predicted_seconds <= (alone.base.best.predicted_seconds or 0.0)
    assert found.document()["decided_without_solving"] == list(found.decided)


@pytest.mark.parametrize("gbit", [1.0, 100.0])
def test_the_plan_as_it_is_takes_what_the_changed_network_makes_of_it(gbit: float) -> None:
    workload = small()
    changes = [faster_network(gbit, workload.cluster)]
    (variant,) = what_if(workload, changes, one_thread(), strategies=chosen(["dp"])).variants
    assert variant.best is not None and variant.best.plan is not None and variant.gain is not None
    seconds = replay(variant.best.plan, variant.workload).seconds
    assert variant.best.predicted_seconds == seconds
    assert (variant.gain > 0) == (gbit > 10)


@pytest.mark.parametrize(("text", "stays"), [("node1", True), ("1xT4", True), ("node0", False)])
def test_the_plan_as_it_is_stays_where_only_idle_devices_go(text: str, stays: bool) -> None:
    workload = small()
    planning = make_plans(workload, chosen(["dp"]), one_thread(), criteria=Criteria(on_parts=True))
    fast = next(c for c in planning.candidates if c.name.endswith("@V100-SXM2-16GB"))
    change = removal(text, workload.cluster)
    changed = changed_workload(workload, change.cluster)
    again = as_before(fast, workload, changed, change)
    assert (again is not None) == stays
    if again is not None:
        assert again.plan is not None and again.predicted_seconds == fast.predicted_seconds
        assert len(again.plan.devices) == len(changed.cluster.devices)
        assert again.bound is None and again.objective is None
