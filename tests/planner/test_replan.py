"""What moves from one plan to the next: by hand, and as properties of random plans."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from fakes.workloads import cluster_document, one_thread, small
from hetplan.errors import InputError
from hetplan.planner.amp import Amp, DataParallel
from hetplan.planner.candidate import Candidate, StrategyMethod
from hetplan.planner.proposals import propose
from hetplan.planner.replan import (
    KINDS,
    Choice,
    Moves,
    holdings,
    in_place,
    least_moved,
    moves,
    parse_lost,
    replan,
    state_sizes,
)
from hetplan.planner.strategy import Problem, Strategy, make_strategies
from hetplan.planner.variants import renumbered
from hetplan.plans.making import new_plan
from hetplan.plans.plan import Plan
from hetplan.profiling.hardware.cluster import example_cluster
from hetplan.profiling.workload import Workload, make_workload
from hetplan.replays.replay import replay
from hetplan.solvers.run import Run
from present import present

LAYERS = 14


@cache
def workload() -> Workload:
    """gpt2 on node 0 with two V100 and node 1 with two T4, global batch 8."""
    return small()


def made(replicas: list[list[tuple[tuple[int, int], list[int]]]], **changes: Any) -> Plan:
    """Replicas of (layers, tensor group) stages, equal shares of the batch."""
    w = workload()
    document = {
        "name": "by hand",
        "workload": {
            "model": w.model.name,
            "cluster": w.cluster.name,
            "global_batch": 8,
            "sequence": w.sequence,
            "precision": w.precision,
            "layers": [layer.name for layer in w.profile.layers],
        },
        "devices": [{"type": d.type, "node": d.node} for d in w.cluster.devices],
        "replicas": [
            {
                "stages": [
                    {"layers": [cut], "devices": [group], "tensor_shares": [1.0] * len(group)}
                    for cut, group in stages
                ],
                "micro_batches": [{"count": 8 // len(replicas), "samples": 1}],
            }
            for stages in replicas
        ],
    }
    return Plan.model_validate(document | changes)


ALL = (0, LAYERS)
TWO_STAGES = [((0, 7), [0]), ((7, 14), [1])]


def bytes_of(first: int, last: int, *kinds: str) -> float:
    """Bytes of some layers."""
    sizes = state_sizes(workload())
    return sum(sizes[l, kind] for l in range(first, last) for kind in kinds or KINDS)


WHOLE, HALF = bytes_of(*ALL), bytes_of(7, 14)


@pytest.mark.parametrize(
    ("before", "after", "gone", "links", "lost"),
    [
        pytest.param([TWO_STAGES], [TWO_STAGES], [], {}, {}, id="nothing changes"),
        pytest.param(
            [TWO_STAGES],
            [[((0, 7), [0]), ((7, 14), [2])]],
            [],
            {(1, 2): HALF},
            {},
            id="a stage takes its layers along",
        ),
        pytest.param(
            [[((0, 7), [0]), ((7, 14), [2])]],
            [TWO_STAGES],
            [2, 3],
            {},
            {1: HALF},
            id="what nobody holds comes from a checkpoint",
        ),
        pytest.param(
            [[(ALL, [0])], [(ALL, [2])]],
            [[(ALL, [d])] for d in range(4)],
            [],
            {(0, 1): WHOLE, (2, 3): WHOLE},
            {},
            id="a neighbour in the node is asked first",
        ),
        pytest.param(
            [[(ALL, [0])]],
            [[(ALL, [0, 1])]],
            [],
            {(0, 1): WHOLE / 2},
            {},
            id="ranks' halves",
        ),
        pytest.param(
            [[(ALL, [0, 1])]], [[(ALL, [0])]], [], {(1, 0): WHOLE / 2}, {}, id="halves back again"
        ),
    ],
)
def test_moves_by_hand(
    before: Any, after: Any, gone: list[int], links: dict[Any, float], lost: dict[int, float]
) -> None:
    needed = moves(made(before), made(after), workload(), gone)
    assert needed.links == pytest.approx(links) and needed.lost == pytest.approx(lost)
    assert needed.total == pytest.approx(sum(links.values()))


def test_moves_take_as_long_as_the_slowest_card() -> None:
    before, after = made([TWO_STAGES]), made([[((0, 7), [0]), ((7, 14), [2])]])
    needed = moves(before, after, workload())
    assert needed.between_nodes(workload()) == {(0, 1): pytest.approx(HALF)}
    assert needed.least_seconds(workload()) == pytest.approx(HALF / (10e9 / 8))


@pytest.mark.parametrize(
    ("zero", "kinds"), [(1, ("states",)), (2, ("states",)), (3, ("weights", "states"))]
)
def test_shards_move_as_parts(zero: int, kinds: tuple[str, ...]) -> None:
    """From two devices to four: the first half stays on device 0, of which device 1 needs the
    second quarter."""
    before, after = (made([[(ALL, [d])] for d in range(n)], zero=zero) for n in (2, 4))
    needed = moves(before, after, workload())
    quarter, weights = bytes_of(*ALL, *kinds) / 4, bytes_of(*ALL, "weights")
    assert needed.links[0, 1] == pytest.approx(quarter)
    assert min(needed.links[1, 2], needed.links[1, 3]) >= quarter * (1 - 1e-9)
    expected = 3 * quarter + (2 * weights if "weights" not in kinds else 0.0)
    assert needed.total == pytest.approx(expected)


def test_unequal_shards_follow_memory() -> None:
    plan = made([[(ALL, [0])], [(ALL, [1])]], zero=1, zero_shares=[3.0, 1.0, 0.0, 0.0])
    held = holdings(plan, set(), workload())[0, "states"]
    assert held == [(0, (0.0, 0.75)), (1, (0.75, 1.0))]


plans = st.sampled_from(
    [
        made([[((0, 7), [0]), ((7, 14), [1])]]),
        made([[((0, 3), [2]), ((3, 14), [0])]]),
        made([[(ALL, [0, 1])]]),
        made([[(ALL, [0, 1])], [(ALL, [2, 3])]]),
        made([[(ALL, [d])] for d in range(4)]),
        made([[(ALL, [d])] for d in range(4)], zero=1),
        made([[(ALL, [d])] for d in range(4)], zero=3),
        made([[((0, 5), [3, 2]), ((5, 14), [0])]]),
    ]
)


@settings(max_examples=30)
@given(plans, plans, st.sets(st.integers(0, 3), max_size=3))
def test_what_moves_is_what_is_missing(before: Plan, after: Plan, gone: set[int]) -> None:
    needed, sizes = moves(before, after, workload(), gone), state_sizes(workload())
    had, missing = holdings(before, gone, workload()), 0.0
    for key, wanted in holdings(after, set(), workload()).items():
        for device, (begin, end) in wanted:
            own = [interval for other, interval in had.get(key, []) if other == device]
            kept = sum(max(0.0, min(end, q) - max(begin, p)) for p, q in own)
            missing += (end - begin - kept) * sizes[key]
    assert needed.total + needed.from_checkpoint == pytest.approx(missing, abs=1.0)
    assert not any(source in gone for source, _ in needed.links)
    assert gone or needed.from_checkpoint == 0.0


def test_replanning_leaves_the_lost_idle() -> None:
    w, run = workload(), one_thread()
    before = present(propose(Amp(), w, run)[0].plan)
    answer = replan(before, w, [1], run, strategies=[Amp(), DataParallel()])
    assert answer.best is not None and answer.before == replay(before, w).seconds
    for candidate in (choice.candidate for choice in answer.choices):
        plan = present(candidate.plan)
        assert all(plan.devices[d].node == 0 for d in plan.ranks)
        assert plan.workload == before.workload and "@" not in candidate.name
        assert replay(plan, w).seconds == candidate.predicted_seconds
    document = answer.document()
    assert document["lost_nodes"] == [1] and document["winner"] == answer.winner
    assert {"bytes_to_move", "links", "move_seconds"} <= set(document["candidates"][0])


def alike_nodes() -> Workload:
    """gpt2 on three nodes of two V100 each, alike, and one of two T4."""
    first, other = cluster_document()["nodes"]
    return small(nodes=[first | {"count": 3}, other])


def on_stages(w: Workload, *groups: list[int]) -> Plan:
    """A pipeline with two layers on each of the first groups of devices, and the rest on the
    last."""
    cuts = [*range(0, 2 * len(groups), 2), LAYERS]
    stages = [
        {"layers": [cut], "devices": [group], "tensor_shares": [1.0] * len(group)}
        for cut, group in zip(pairwise(cuts), groups, strict=True)
    ]
    return new_plan(w, [{"stages": stages, "micro_batches": [{"count": 8, "samples": 1}]}])


def test_alike_devices_keep_what_they_hold() -> None:
    """The same pipeline on alike devices under other numbers moves nothing; T4 stay T4, and what
    was on the lost node goes to the free place."""
    w = alike_nodes()
    old, new = on_stages(w, [4], [0, 1], [5], [6]), on_stages(w, [0], [2, 3], [1], [7])
    places = in_place(old, new, w, [])
    assert sorted(places) == list(range(8)) and places[:4] == [4, 5, 0, 1] and places[7] == 6
    assert moves(old, renumbered(new, w, places), w).all_bytes == 0.0
    old, new = on_stages(w, [4], [2, 3], [5], [6]), on_stages(w, [0], [4, 5], [1], [7])
    places = in_place(old, new, w, [1])
    assert places == [4, 5, 2, 3, 0, 1, 7, 6], "lost nodes are no places"


class Fixed(Strategy, Problem):
    """Always the same plan."""

    name = "fixed"
    methods = (StrategyMethod("auto", exact=True),)

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def pose(self, workload: Workload, run: Run) -> list[Problem]:
        return [self]

    def solve(self, method: StrategyMethod, run: Run) -> Candidate:
        return Candidate(
            strategy="fixed", method=method, status="feasible", fits_memory=True, plan=self.plan
        )


def test_replanning_leaves_alike_devices_what_they_hold() -> None:
    """A plan on what is left, whose devices are numbered otherwise than those that run now."""
    w = alike_nodes()
    rest = replace(w, cluster=w.cluster.part([0, 2, 3]))
    fixed = Fixed(on_stages(rest, [0], [2, 3], [1], [5]))
    answer = replan(on_stages(w, [4], [0, 1], [5], [6]), w, [1], one_thread(), strategies=[fixed])
    best = present(answer.best)
    assert best.moves.all_bytes == 0.0 and best.document(w)["bytes_to_move"] == 0.0
    plan = present(best.candidate.plan)
    assert [s.devices for s in plan.replicas[0].stages] == [[[4]], [[0, 1]], [[5]], [[6]]]
    assert replay(plan, w).seconds == best.candidate.predicted_seconds


def test_the_least_moved_of_the_nearly_fastest() -> None:
    base = propose(DataParallel(), workload(), one_thread())[0]
    choices = [
        Choice(replace(base, predicted_seconds=seconds), Moves({(0, 1): moved}, {}))
        for seconds, moved in ((1.0, 50.0), (1.04, 10.0), (1.2, 0.0))
    ]
    assert [least_moved(choices, within) for within in (0.0, 5.0, 20.0)] == [0, 1, 2]
    assert least_moved([], 5.0) is None


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["node2"], "no such node (got 'node2', expected node0 to node1)"),
        (["1"], "no such node"),
        ([], "no lost node named"),
        (["node0", "node1"], "nothing is left"),
    ],
)
def test_nonsense_losses(texts: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_lost(texts, workload())
    assert message in str(caught.value)


def test_programs_hold_what_they_read() -> None:
    """Data parallelism as an SPMD program moves what it does as ZeRO 0: nothing, and to a sliced
    program less."""
    on = make_workload("gpt2", example_cluster("home"), 16)
    plans = {
        c.name: c.plan
        for strategy, method in zip(
            make_strategies(["hap", "poplar"]), ("dp-even", "auto"), strict=True
        )
        for c in propose(strategy, on, Run(), [m for m in strategy.methods if m.name == method])
        if c.plan is not None
    }
    whole, zero = plans["hap/dp-even"], plans["poplar/auto-zero0"]
    for before, after in ((whole, whole), (whole, zero), (zero, whole)):
        assert moves(before, after, on, [2]).from_checkpoint == pytest.approx(0.0, abs=1.0)
        assert moves(before, after, on).total == pytest.approx(0.0, abs=1.0)
    sizes = sum(state_sizes(on).values())
    assert moves(plans["poplar/auto-zero3"], whole, on).total == pytest.approx(2 * sizes, rel=1e-6)
