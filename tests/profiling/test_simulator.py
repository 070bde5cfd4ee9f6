"""The simulator against an interpreter of the same rules, closed forms, and what must hold of every
timeline."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hetplan.plans.passes import WholeSchedule
from hetplan.replays.simulator.pipeline import (
    Collective,
    Replica,
    Sends,
    order,
    simulate_replicas,
    simulate_stages,
    warm_up,
)
from hetplan.replays.simulator.tasks import (
    Kind,
    TaskList,
    Tasks,
    Timeline,
    Traffic,
    path_to_end,
    simulate,
)

SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 7))
SCHEDULES: tuple[WholeSchedule, ...] = ("gpipe", "1f1b", "interleaved-1f1b")


@st.composite
def random_tasks(draw: st.DrawFn) -> Tasks:
    """Tasks in a random order without circles, some with ports."""
    count = draw(st.integers(1, 12))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    tasks = TaskList()
    uses = [
        tasks.use(
            tuple(
                (int(p), float(rng.choice([0.5, 1.0])))
                for p in rng.choice(3, rng.integers(0, 3), replace=False)
            )
        )
        for _ in range(count)
    ]
    tasks.add(
        (count,),
        kind=Kind.FORWARD,
        unit=0,
        seconds=rng.integers(0, 4, count),
        delay=rng.integers(0, 2, count),
        use=uses,
    )
    before = [(a, b) for b in range(count) for a in range(b) if rng.random() < 0.2]
    tasks.order([a for a, _ in before], [b for _, b in before])
    return tasks.build(1)


@given(random_tasks())
def test_rules_hold_for_random_tasks(tasks: Tasks) -> None:
    timeline = simulate(tasks)
    start, end = timeline.start, timeline.end
    assert np.array_equal(end, start + tasks.seconds)
    ready = np.zeros(len(tasks))
    np.maximum.at(ready, tasks.after, (end + tasks.delay)[tasks.before])
    assert (start >= ready).all()
    task, port, seconds = tasks.holds
    held = sorted(
        (p, start[t], start[t] + s) for t, p, s in zip(task, port, seconds, strict=True) if s > 0
    )
    assert all(a[2] <= b[1] for a, b in pairwise(held) if a[0] == b[0])
    let_go = {(p, end) for p, _, end in held}
    for t in np.flatnonzero(start > ready):  # nobody waits while its ports are free
        assert any((p, start[t]) in let_go for p in port[task == t])


def test_a_port_serves_in_the_order_of_asking() -> None:
    tasks = TaskList()
    uses = [tasks.use(((0, 1.0),)), tasks.use(((0, 1.0), (1, 1.0))), tasks.use(((1, 1.0),))]
    tasks.add((3,), kind=Kind.TRANSFER, unit=0, seconds=2.0, use=uses)
    timeline = simulate(tasks.build(1))
    # The second asks for a port held by the first; the third takes the other port meanwhile.
    assert timeline.start.tolist() == [0.0, 2.0, 0.0]


def test_a_port_is_held_for_its_share() -> None:
    tasks = TaskList()
    fast, slow = (tasks.use(((0, 0.25), (port, 1.0))) for port in (1, 2))
    tasks.add((2,), kind=Kind.TRANSFER, unit=0, seconds=8.0, use=[fast, slow])
    timeline = simulate(tasks.build(1))
    assert timeline.start.tolist() == [0.0, 2.0]
    assert timeline.port_seconds.tolist() == [4.0, 8.0, 8.0]
    assert path_to_end(timeline).tolist() == [0, 1]


def test_who_asks_at_one_moment_is_served_by_micro_batch() -> None:
    tasks = TaskList()
    use, late = tasks.use(((0, 1.0),)), 5.0 * (1 + 1e-9)
    work = tasks.add((3,), kind=Kind.FORWARD, unit=0, seconds=[5.0, late, 5.001])
    moves = tasks.add((3,), kind=Kind.TRANSFER, unit=0, seconds=1.0, use=use, micro_batch=[2, 1, 0])
    tasks.order(work, moves)
    # 5 and a little more are one moment, 5.001 is another.
    assert simulate(tasks.build(1)).start[3:].tolist() == [late + 1, late, pytest.approx(late + 2)]


def test_a_circle_is_refused() -> None:
    tasks = TaskList()
    tasks.add((3,), kind=Kind.FORWARD, unit=0, seconds=1.0, micro_batch=[0, 1, 2])
    tasks.order([1, 2], [2, 1])
    with pytest.raises(ValueError, match="2 of 3 tasks wait for each other; the first is task 1"):
        simulate(tasks.build(1))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("stages", "batches", "chunks"), [(1, 1, 1), (3, 6, 2), (4, 4, 1), (4, 12, 3)]
)
def test_every_pass_is_done_once_and_backward_after_forward(
    schedule: WholeSchedule, stages: int, batches: int, chunks: int
) -> None:
    chunks = chunks if schedule == "interleaved-1f1b" else 1
    for s in range(stages):
        backward, chunk, batch = order(schedule, stages, s, batches, chunks)
        passes = list(zip(backward.tolist(), chunk.tolist(), batch.tolist(), strict=True))
        assert len(set(passes)) == len(passes) == 2 * chunks * batches
        for c, m in product(range(chunks), range(batches)):
            assert passes.index((0, c, m)) < passes.index((1, c, m))
        assert not backward[: warm_up(schedule, stages, s, batches, chunks)].any()


@given(SHAPES, st.floats(0.1, 5), st.floats(0.1, 5), st.sampled_from(["gpipe", "1f1b"]))
def test_even_pipelines_take_the_closed_form(
    shape: tuple[int, int], forward: float, backward: float, schedule: WholeSchedule
) -> None:
    stages, batches = shape
    replica = Replica(
        stages=stages, micro_batches=batches, forward=forward, backward=backward, schedule=schedule
    )
    timeline = simulate_replicas([replica])
    assert timeline.seconds == pytest.approx((batches + stages - 1) * (forward + backward))
    assert timeline.bubble == pytest.approx((stages - 1) / (batches + stages - 1))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_interleaving_divides_the_bubble_by_the_chunks(
    stages: int, rounds: int, chunks: int
) -> None:
    batches = rounds * stages
    replica = Replica(
        stages=stages,
        micro_batches=batches,
        chunks=chunks,
        schedule="interleaved-1f1b",
        forward=1.0 / chunks,
        backward=2.0 / chunks,
    )
    # Narayanan et al. 2021 (SC), Section 2.2.2: t_pb = (p - 1)(t_f + t_b) / v.
    expected = 3.0 * batches + 3.0 * (stages - 1) / chunks
    assert simulate_replicas([replica]).seconds == pytest.approx(expected)


def random_replica(
    rng: np.random.Generator,
    stages: int,
    batches: int,
    chunks: int = 1,
    *,
    schedule: WholeSchedule = "1f1b",
    sends: Sends = "asynchronous",
    ports: bool = True,
) -> Replica:
    """Times between 0 and 1; neighbours' messages hold the sides of their cards."""
    grid = (stages, chunks, batches)

    def message(source: int, target: int) -> Traffic:
        sides = ((2 * source, 1.0), (2 * target + 1, float(rng.choice([0.5, 1.0]))))
        return Traffic(rng.random(), rng.random(), sides if ports else ())

    hops = [(h % stages, (h + 1) % stages) for h in range(stages * chunks - 1)]
    return Replica(
        stages=stages,
        micro_batches=batches,
        chunks=chunks,
        schedule=schedule,
        sends=sends,
        forward=rng.random(grid),
        backward=rng.random(grid),
        hops=[
            [[message(*(hop if way else hop[::-1])) for _ in range(batches)] for hop in hops]
            for way in (1, 0)
        ],
    )


@given(
    SHAPES,
    st.integers(0, 2**32 - 1),
    st.sampled_from(["gpipe", "1f1b"]),
    st.booleans(),
)
def test_no_timeline_beats_its_work_and_waiting_never_helps(
    shape: tuple[int, int], seed: int, schedule: WholeSchedule, ports: bool
) -> None:
    replica = random_replica(np.random.default_rng(seed), *shape, schedule=schedule, ports=ports)
    free, late, blocking, both = (
        simulate_replicas([replace(replica, sends=sends)]) for sends in get_args(Sends)
    )
    assert free.seconds >= free.busy.max() - 1e-9
    assert blocking.busy == pytest.approx(free.busy)
    if not ports:
        assert both.seconds >= max(late.seconds, blocking.seconds) - 1e-9
        assert min(late.seconds, blocking.seconds) >= free.seconds - 1e-9
    for timeline in (free, late, blocking, both):
        chain = path_to_end(timeline)
        assert timeline.start[chain[0]] == 0.0
        assert timeline.end[chain[-1]] + timeline.tasks.delay[chain[-1]] == timeline.seconds


def test_what_a_send_means() -> None:
    """Two stages, two micro-batches, messages of 1 s between passes of 1 and 4 s; by hand."""
    replica = Replica(
        stages=2,
        micro_batches=2,
        schedule="gpipe",
        forward=[[[1.0]], [[4.0]]],
        backward=0.0,
        hops=[[[Traffic(1.0)] * 2], [[Traffic(0.0)] * 2]],
    )
    begins = {
        sends: simulate_replicas([replace(replica, sends=sends)]).start[[1, 5]].tolist()
        for sends in get_args(Sends)
    }
    # the second forward pass of the first stage, and that of the second
    assert begins == {
        "asynchronous": [1.0, 6.0],
        "waiting": [1.0, 7.0],
        "blocking": [2.0, 6.0],
        "rendezvous": [2.0, 7.0],
    }
    host = simulate_replicas([replace(replica, exchange_seconds=0.5)])
    assert host.start[[1, 5]].tolist() == [1.5, 2.5 + 4.5]


def test_tensor_ranks_meet_behind_their_pass() -> None:
    met = [[[[Traffic(3.0, 0.0, ((0, 1.0),))]]]] * 2
    alone = Replica(stages=1, micro_batches=1, forward=1.0, backward=2.0, reduces=met)
    timeline = simulate_replicas([alone])
    assert timeline.seconds == 1 + 3 + 2 + 3
    assert timeline.busy.tolist() == [9.0]
    # two replicas share a card: their passes meet one after the other
    assert simulate_replicas([alone, alone]).seconds == 1 + 4 * 3
    split = Collective(members=[(0, 0), (1, 0)], seconds=0.0, buckets=2)
    assert simulate_replicas([alone, alone], [split]).seconds == 1 + 4 * 3


@pytest.mark.parametrize(("stages", "batches"), [(4, 9), (4, 2), (1, 3)])
def test_1f1b_keeps_as_many_activations_as_it_warms_up(stages: int, batches: int) -> None:
    flushed = Replica(
        stages=stages, micro_batches=batches, forward=1.0, backward=2.0, saved_bytes=10.0
    )
    kept = simulate_replicas([flushed]).peak_bytes
    assert kept.tolist() == [10.0 * min(stages - s, batches) for s in range(stages)]
    piped = simulate_replicas([replace(flushed, schedule="gpipe")]).peak_bytes
    assert piped.tolist() == [10.0 * batches] * stages


def test_gradients_are_joined_after_the_slowest_member() -> None:
    replicas = [
        Replica(stages=1, micro_batches=2, forward=f, backward=f, optimizer=0.5) for f in (1.0, 3.0)
    ]
    gradients = Collective(members=[(0, 0), (1, 0)], seconds=4.0)
    parameters = replace(gradients, seconds=1.0, when="parameters")
    assert simulate_replicas(replicas, [gradients]).seconds == pytest.approx(16.5)
    assert simulate_replicas(replicas, [gradients, parameters]).seconds == pytest.approx(17.5)


def test_overlap_hides_all_but_the_last_bucket() -> None:
    replica = Replica(stages=1, micro_batches=1, forward=1.0, backward=8.0)

    def joined(buckets: int, seconds: float) -> float:
        group = Collective(members=[(0, 0), (1, 0)], seconds=seconds, buckets=buckets)
        return simulate_replicas([replica, replica], [group]).seconds

    assert joined(1, 4.0) == pytest.approx(13.0)
    assert joined(4, 4.0) == pytest.approx(10.0)  # 9 + the last of four
    assert joined(4, 16.0) == pytest.approx(
        1.0 + 2.0 + 16.0
    )  # from the first part on the network is the limit


def test_collectives_that_share_a_card_go_one_after_the_other() -> None:
    replica = Replica(stages=2, micro_batches=1, forward=0.0, backward=0.0)
    groups = [
        Collective(members=[(0, s), (1, s)], seconds=3.0, ports=((0, 1.0),)) for s in range(2)
    ]
    assert simulate_replicas([replica, replica], groups).seconds == pytest.approx(6.0)
    apart = [Collective(members=group.members, seconds=3.0) for group in groups]
    assert simulate_replicas([replica, replica], apart).seconds == pytest.approx(3.0)


def test_every_step_waits_for_the_slowest() -> None:
    work = np.array([[1.0, 5.0, 2.0], [4.0, 1.0, 2.0]])
    replicas = [Replica(stages=1, micro_batches=3, forward=row, backward=0.0) for row in work]
    every = Collective(members=[(0, 0), (1, 0)], seconds=1.5, when="step")
    plain = simulate_replicas(replicas, [every]).seconds
    assert plain == pytest.approx((4 + 5 + 2) + 3 * 1.5)


def test_a_collective_of_every_step_needs_equal_steps() -> None:
    replicas = [Replica(stages=1, micro_batches=m, forward=1.0, backward=1.0) for m in (2, 3)]
    every = Collective(members=[(0, 0), (1, 0)], seconds=1.0, when="step")
    with pytest.raises(ValueError, match="equally many micro-batches"):
        simulate_replicas(replicas, [every])


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_spmd_stages_add_up(devices: int, stages: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    compute, together = rng.random((stages, devices)), rng.random(stages)
    timeline = simulate_stages(compute, together.tolist())
    assert timeline.seconds == pytest.approx(compute.max(axis=1).sum() + together.sum())
    assert timeline.busy == pytest.approx(compute.sum(axis=0))


def test_events_are_sorted_and_named() -> None:
    replica = Replica(
        stages=2, micro_batches=1, forward=1.0, backward=1.0, hops=[[[Traffic(0.5)]]] * 2
    )
    timeline: Timeline = simulate_replicas([replica])
    assert [event["kind"] for event in timeline.events()] == [
        "forward",
        "transfer",
        "forward",
        "backward",
        "transfer",
        "backward",
    ]
    assert timeline.spent(Kind.TRANSFER).tolist() == [0.5, 0.5]
    assert timeline.idle.tolist() == [3.0, 3.0]
