"""What moves from one plan to the next: by hand, and as properties of random plans."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.workloads import one_thread, small
from hetplan.errors import InputError
from hetplan.planner.amp import Amp, DataParallel
from hetplan.planner.ranking import make_plans
from hetplan.planner.replan import (
    Choice,
    Moves,
    holdings,
    least_moved,
    moves,
    parse_lost,
    replan,
    state_sizes,
)
from hetplan.planner.strategy import chosen, propose
from hetplan.profiling.cluster import example_cluster
from hetplan.profiling.workload import Workload, make_workload
from hetplan.runtime.plan import Plan
from hetplan.runtime.replay import replay
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


def bytes_of(first: int, last: int, *kinds: str) -> float:
    """Bytes of some layers."""
    sizes = state_sizes(workload())
    return sum(
        sizes[l, kind] for l in range(first, last) for kind in kinds or ("weights", "states")
    )


def test_nothing_moves_where_nothing_changes() -> None:
    plan = made([[((0, 7), [0]), ((7, 14), [1])]])
    found = moves(plan, plan, workload())
    assert (found.total, found.from_checkpoint, found.seconds(workload())) == (0.0, 0.0, 0.0)


def test_a_stage_that_moves_takes_its_layers_along() -> None:
    before, after = made([[((0, 7), [0]), ((7, 14), [1])]]), made([[((0, 7), [0]), ((7, 14), [2])]])
    found = moves(before, after, workload())
    assert found.links == {(1, 2): pytest.approx(bytes_of(7, 14))}
    assert found.between_nodes(workload()) == {(0, 1): pytest.approx(bytes_of(7, 14))}
    assert found.seconds(workload()) == pytest.approx(bytes_of(7, 14) / (10e9 / 8))


def test_what_nobody_holds_comes_from_a_checkpoint() -> None:
    before, after = made([[((0, 7), [0]), ((7, 14), [2])]]), made([[((0, 7), [0]), ((7, 14), [1])]])
    found = moves(before, after, workload(), gone=[2, 3])
    assert found.links == {}
    assert found.lost == {1: pytest.approx(bytes_of(7, 14))}


def test_a_neighbour_in_the_node_is_asked_first() -> None:
    before = made([[(ALL, [0])], [(ALL, [2])]])
    found = moves(
        before, made([[(ALL, [0])], [(ALL, [1])], [(ALL, [3])], [(ALL, [2])]]), workload()
    )
    assert found.links == {
        (0, 1): pytest.approx(bytes_of(*ALL)),
        (2, 3): pytest.approx(bytes_of(*ALL)),
    }


def test_tensor_ranks_move_halves() -> None:
    before, after = made([[(ALL, [0])]]), made([[(ALL, [0, 1])]])
    assert moves(before, after, workload()).links == {(0, 1): pytest.approx(bytes_of(*ALL) / 2)}
    assert moves(after, before, workload()).links == {(1, 0): pytest.approx(bytes_of(*ALL) / 2)}


@pytest.mark.parametrize(
    ("zero", "kinds"), [(1, ("states",)), (2, ("states",)), (3, ("weights", "states"))]
)
def test_shards_move_as_parts(zero: int, kinds: tuple[str, ...]) -> None:
    """From two devices to four: the first half stays on device 0, of which device 1 needs the
    second quarter."""
    before = made([[(ALL, [0])], [(ALL, [1])]], zero=zero)
    after = made([[(ALL, [d])] for d in range(4)], zero=zero)
    found = moves(before, after, workload())
    quarter, whole = bytes_of(*ALL, *kinds) / 4, bytes_of(*ALL, "weights")
    assert found.links[0, 1] == pytest.approx(quarter)
    assert found.links[1, 2] >= quarter * (1 - 1e-9) and found.links[1, 3] >= quarter * (1 - 1e-9)
    expected = 3 * quarter + (2 * whole if "weights" not in kinds else 0.0)
    assert found.total == pytest.approx(expected)


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


@settings(max_examples=60)
@given(plans, plans, st.sets(st.integers(0, 3), max_size=3))
def test_what_moves_is_what_is_missing(before: Plan, after: Plan, gone: set[int]) -> None:
    found = moves(before, after, workload(), gone)
    had, needs, sizes = (
        holdings(before, gone, workload()),
        holdings(after, set(), workload()),
        state_sizes(workload()),
    )
    missing = 0.0
    for key, wanted in needs.items():
        for device, (begin, end) in wanted:
            own = [interval for other, interval in had.get(key, []) if other == device]
            kept = sum(max(0.0, min(end, q) - max(begin, p)) for p, q in own)
            missing += (end - begin - kept) * sizes[key]
    assert found.total + found.from_checkpoint == pytest.approx(missing, abs=1.0)
    assert not any(source in gone for source, _ in found.links)
    if not gone:
        assert found.from_checkpoint == 0.0


def test_replanning_leaves_the_lost_idle() -> None:
    w, run = workload(), one_thread()
    before = present(propose(Amp(), w, run)[0].plan)
    found = replan(before, w, [1], run, strategies=[Amp(), DataParallel()])
    assert found.best is not None and found.before == replay(before, w).seconds
    for choice in found.choices:
        plan = choice.candidate.plan
        assert plan is not None and all(plan.devices[d].node == 0 for d in plan.ranks)
        assert plan.workload == before.workload
        assert replay(plan, w).seconds == choice.candidate.predicted_seconds
        assert "@" not in choice.candidate.name
    document = found.document()
    assert document["lost_nodes"] == [1] and document["winner"] == found.chosen
    assert {"bytes_to_move", "links", "move_seconds"} <= set(document["candidates"][0])


def test_the_least_moved_of_the_nearly_fastest() -> None:
    w, run = workload(), one_thread()
    base = propose(DataParallel(), w, run)[0]

    def choice(seconds: float, moved: float) -> Choice:
        return Choice(replace(base, predicted_seconds=seconds), Moves({(0, 1): moved}, {}))

    choices = [choice(1.0, 50.0), choice(1.04, 10.0), choice(1.2, 0.0)]
    assert least_moved(choices, 0.0) == 0
    assert least_moved(choices, 5.0) == 1
    assert least_moved(choices, 20.0) == 2
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
    planning = make_plans(on, chosen(["hap", "poplar"]), one_thread(3))
    plans = {c.name: c.plan for c in planning.candidates if c.plan is not None}
    whole, zero = plans["hap/dp-even"], plans["poplar/auto-zero0"]
    for before, after in ((whole, whole), (whole, zero), (zero, whole)):
        assert moves(before, after, on, [2]).from_checkpoint == pytest.approx(0.0, abs=1.0)
        assert moves(before, after, on).total == pytest.approx(0.0, abs=1.0)
    sizes = sum(state_sizes(on).values())
    assert moves(plans["poplar/auto-zero3"], whole, on).total == pytest.approx(2 * sizes, rel=1e-6)
