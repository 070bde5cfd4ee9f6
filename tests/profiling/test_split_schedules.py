"""Schedules with split backward passes: their rules, their closed forms, and the replay against
seconds and bytes that are added up pass by pass."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any, get_args

import numpy as np
import pytest

from hetplan.plans.passes import (
    FLAT_SPLIT,
    Order,
    Orders,
    Pass,
    circle,
    order_faults,
    virtual_stages,
)
from hetplan.replays.simulator.pipeline import (
    Collective,
    OrderKey,
    Replica,
    orders_of,
    simulate_replicas,
)
from hetplan.replays.simulator.splits import SplitSchedule, listed, split_orders
from hetplan.replays.simulator.tasks import Traffic

NAMED: tuple[SplitSchedule, ...] = get_args(SplitSchedule)


def chunks_of(schedule: str) -> int:
    return 1 if schedule in FLAT_SPLIT else 2


@pytest.mark.parametrize("schedule", NAMED)
@pytest.mark.parametrize(("stages", "batches"), [(1, 2), (2, 4), (3, 1), (3, 7), (6, 12), (5, 30)])
def test_named_orders_are_complete_and_go_on(
    schedule: SplitSchedule, stages: int, batches: int
) -> None:
    if schedule == "dualpipev":
        batches = max(batches, 2 * stages)
    chunks, orders = chunks_of(schedule), split_orders(schedule, stages, batches)
    for order in orders:
        assert not list(order_faults(order, chunks, batches, schedule))
    assert circle(orders, chunks, folded=chunks == 2) is None


@pytest.mark.parametrize("stages", range(1, 6))
@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_orders_of_a_v_are_those_of_torch(schedule: SplitSchedule, stages: int) -> None:
    schedules: Any = pytest.importorskip("torch.distributed.pipelining.schedules")
    made = schedules.ScheduleZBVZeroBubble if schedule == "zbv" else schedules.ScheduleDualPipeV
    kinds = {schedules.F: "F", schedules.I: "B", schedules.W: "W", schedules.B: "D"}
    for batches in (2 * stages, 3 * stages + 1):
        shape = type("Shape", (), {})()
        shape.pp_group_size, shape.num_stages = stages, 2 * stages
        shape._n_microbatches = batches
        orders = split_orders(schedule, stages, batches)
        for stage in range(stages):
            passes: list[tuple[str, int, int]] = []
            for action in made._calculate_single_rank_operations(shape, stage):
                for one in (action.sub_actions or [action]) if action else []:
                    chunk = int(one.stage_index >= stages)
                    passes.append((kinds[one.computation_type], chunk, one.microbatch_index))
            assert list(orders[stage]) == passes


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_equal_stages_take_the_closed_forms(stages: int) -> None:
    """Passes of 1 s each: Qi et al. 2023, Table 2, and 2024, Table 1."""
    batches = 4 * stages

    def run(schedule: Any, chunks: int) -> tuple[float, float]:
        replica = Replica(
            stages=stages,
            micro_batches=batches,
            chunks=chunks,
            folded=chunks == 2,
            schedule=schedule,
            forward=1.0,
            backward=2.0,
            weights=1.0,
            saved_bytes=1.0,
            held_bytes=1.0,
        )
        timeline = simulate_replicas([replica])
        return timeline.seconds, float(timeline.peak_bytes.max())

    assert run("1f1b", 1) == (3 * (batches + stages - 1), stages)
    # the last stage begins after stages - 1 passes and is never idle
    assert run("zb-h1", 1) == (3 * batches + stages - 1, stages)
    seconds, kept = run("zb-h2", 1)
    assert seconds == 3 * batches + stages - 1 and stages < kept <= 2 * stages - 1
    # every stage works from stage 0's first passes on; a chunk is half of a stage
    seconds, kept = run("zbv", 2)
    assert seconds <= 6 * batches + stages and kept <= 2 * stages
    half, least = run("v-half", 2), run("v-min", 2)
    assert half[1] <= stages + 3 and least[1] <= 2 * stages / 3 + 4
    assert least[1] <= half[1] <= kept


def random_order(rng: Random, stages: int, batches: int, chunks: int, folded: bool) -> Orders:
    """Passes in the order in which they happen to run, whole and split ones."""
    along = virtual_stages(stages, chunks, folded=folded)
    number = {place: v for v, place in enumerate(along)}
    whole = {(v, m): rng.random() < 0.3 for v in range(len(along)) for m in range(batches)}
    orders: list[list[Pass]] = [[] for _ in range(stages)]
    done: set[tuple[str, int, int]] = set()
    left = [
        (kind, v, m) for kind in ("F", "B", "W") for v in range(len(along)) for m in range(batches)
    ]
    while left:
        kind, v, m = rng.choice(left)
        needs = {
            "F": [("F", v - 1, m)] if v else [],
            "B": [("B", v + 1, m) if v + 1 < len(along) else ("F", v, m), ("F", v, m)],
            "W": [("B", v, m)],
        }[kind]
        if not done.issuperset(needs):
            continue
        left.remove((kind, v, m))
        done.add((kind, v, m))
        stage, chunk = along[v]
        assert number[stage, chunk] == v
        if not whole[v, m]:
            orders[stage].append(Pass(kind, chunk, m))  # type: ignore[arg-type]
        elif kind != "W":
            orders[stage].append(Pass("F" if kind == "F" else "D", chunk, m))
    return tuple(map(tuple, orders))


def added_up(replica: Replica, orders: Orders) -> tuple[float, list[float]]:
    """(seconds until the last update, most bytes of each stage), by recursion over the passes.
    Messages hold no ports."""
    along = replica.placed
    number = {place: v for v, place in enumerate(along)}
    seconds = {name: np.asarray(getattr(replica, name)) for name in ("forward", "backward")}
    weights, saved = np.asarray(replica.weights), np.asarray(replica.saved_bytes)
    held = np.asarray(replica.held_bytes)
    place_of = {
        (s, one.kind == "F", one.chunk, one.batch): i
        for s, order in enumerate(orders)
        for i, one in enumerate(order)
        if one.kind != "W"
    }

    @cache
    def end(s: int, i: int) -> float:
        if i < 0:
            return 0.0
        kind, c, m = orders[s][i]
        begin, v = end(s, i - 1), number[s, c]
        other = v - 1 if kind == "F" else v + 1
        if kind != "W" and 0 <= other < len(along):
            sender, chunk = along[other]
            message = replica.hop(int(kind != "F"), min(v, other), m)
            sent = end(sender, place_of[sender, kind == "F", chunk, m])
            begin = max(begin, sent + message.seconds + message.latency)
        takes = {
            "F": seconds["forward"][s, c, m],
            "D": seconds["backward"][s, c, m],
            "B": seconds["backward"][s, c, m] - weights[s, c, m],
            "W": weights[s, c, m],
        }
        return begin + float(takes[kind])

    def most(s: int, order: Order) -> float:
        kept = highest = 0.0
        for kind, c, m in order:
            if kind == "F":
                kept += saved[s, c, m]
            elif kind == "W":
                kept -= held[s, c, m]
            else:
                kept -= saved[s, c, m] - (held[s, c, m] if kind == "B" else 0.0)
            highest = max(highest, kept)
        return highest

    ends = [end(s, len(order) - 1) for s, order in enumerate(orders)]
    return max(ends), [most(s, order) for s, order in enumerate(orders)]


@pytest.mark.parametrize("seed", range(30))
def test_the_replay_adds_up_what_the_passes_take(seed: int) -> None:
    rng, draw = Random(seed), np.random.default_rng(seed)
    stages, batches, chunks = rng.randint(1, 4), rng.randint(1, 5), rng.choice([1, 2, 3])
    folded, schedule = rng.random() < 0.5, rng.choice([*NAMED, "explicit"])
    explicit = None
    if schedule == "explicit":
        explicit = random_order(rng, stages, batches, chunks, folded)
    else:
        chunks = chunks_of(schedule)
        folded = chunks == 2
        batches = max(batches, 2 * stages) if schedule == "dualpipev" else batches
    orders = orders_of(OrderKey(schedule, stages, batches, chunks, explicit))  # type: ignore[arg-type]
    assert circle(orders, chunks, folded=folded) is None
    grid = stages, chunks, batches
    backward = draw.random(grid)
    hops = [
        [[Traffic(draw.random(), draw.random()) for _ in range(batches)] for _ in hop]
        for hop in [range(stages * chunks - 1)] * 2
    ]
    replica = Replica(
        stages=stages,
        micro_batches=batches,
        chunks=chunks,
        folded=folded,
        schedule=schedule,  # type: ignore[arg-type]
        explicit=explicit,
        sends="asynchronous",
        forward=draw.random(grid),
        backward=backward,
        weights=backward * draw.random(grid),
        saved_bytes=draw.random(grid),
        held_bytes=draw.random(grid),
        hops=hops if stages * chunks > 1 else (),
    )
    timeline = simulate_replicas([replica])
    seconds, kept = added_up(replica, orders)
    assert timeline.seconds == pytest.approx(seconds)
    assert timeline.peak_bytes == pytest.approx(kept)
    assert timeline.busy == pytest.approx(replica.pass_seconds.sum(axis=(1, 2, 3)))
    reach, way_out = replica.reach
    assert float((reach + way_out).max()) <= seconds * (1 + 1e-9)


def test_gradients_are_reduced_behind_the_last_pass_of_weights() -> None:
    """One stage that computes F, B, W of 1 s each, in two replicas: reduced and updated at the
    end, in parts while the last pass is computed."""
    replica = Replica(
        stages=1, micro_batches=1, schedule="zb-h1", forward=1.0, backward=2.0, weights=1.0,
        optimizer=5.0,
    )  # fmt: skip
    both = [(0, 0), (1, 0)]
    whole = simulate_replicas([replica] * 2, [Collective(members=both, seconds=1.0)])
    halves = simulate_replicas([replica] * 2, [Collective(members=both, seconds=1.0, buckets=2)])
    assert (whole.seconds, halves.seconds) == (9.0, 8.5)


def test_a_list_heuristic_prefers_what_shortens_unequal_stages() -> None:
    """A slow last stage: the first one may keep more micro-batches, and is never in its way."""
    seconds = [(1.0, 1.0, 1.0), (2.0, 2.0, 2.0)]

    def run(orders: Orders) -> float:
        table = np.array(seconds)[:, :, None, None]
        replica = Replica(
            stages=2, micro_batches=4, schedule="explicit", explicit=orders,
            forward=table[:, 0], backward=table[:, 1] + table[:, 2], weights=table[:, 2],
        )  # fmt: skip
        return simulate_replicas([replica]).seconds

    # the last stage is busy from the end of the first forward pass on, for 4 (2 + 2 + 2) s
    assert run(listed(seconds, 4, [4, 4])) == 25.0
    assert run(split_orders("zb-h1", 2, 4)) >= 25.0
    kept = [sum((p.kind == "F") - (p.kind == "W") for p in o[:i])
            for o in listed(seconds, 4, [2, 1]) for i in range(13)]  # fmt: skip
    assert max(kept) == 2
