"""The parts of a step: cases by hand, and that they are all of the step."""

from __future__ import annotations

import random

import pytest

from hetplan.errors import InputError
from hetplan.replays.observed.kernels import Kernel, RankStep, rank_parts
from hetplan.replays.observed.steps import Pass, PassKind, make_step
from hetplan.replays.observed.what_if import Message, WhatIf
from traces.run_cases import even, step_of, two_stages


def test_an_even_pipeline_waits_for_its_schedule_alone() -> None:
    # three micro-batches of 3 s on each stage; the other stage's 1 s before and 2 s behind
    parts = WhatIf(step_of(two_stages(even), after=0.5)).parts()
    assert parts.computing == pytest.approx(9.0)
    assert parts.schedule == pytest.approx(3.0)
    assert parts.after == pytest.approx(0.5)
    rest = (parts.messages, parts.slow_workers, parts.spread, parts.unexplained)
    assert rest == pytest.approx((0.0, 0.0, 0.0, 0.0))


def test_messages_are_what_a_step_without_them_saves() -> None:
    step = step_of(two_stages(even, message=0.25))
    what_if = WhatIf(step)
    assert tuple(what_if.messages["forward", 1]) == pytest.approx((0.25, 0.0))
    parts = what_if.parts()
    assert parts.messages == pytest.approx(step.seconds - 12.0)
    assert parts.unexplained == pytest.approx(0.0)
    assert max(what_if.message_effects().values()) > 0.2


def test_a_message_that_arrives_while_its_stage_computes_costs_nothing() -> None:
    def late(stage: int, kind: PassKind, batch: int) -> float:
        return even(stage, kind, batch) * (3.0 if stage == 1 else 1.0)

    # the second stage waits for the first message alone; the others have arrived before
    what_if = WhatIf(step_of(two_stages(late, message=0.25, batches=6)))
    assert tuple(what_if.messages["forward", 1]) == pytest.approx((0.25, 0.0))


def test_a_slow_worker_is_named() -> None:
    def slow(stage: int, kind: PassKind, batch: int) -> float:
        return even(stage, kind, batch) * (2.0 if stage == 1 else 1.0)

    replicas = [two_stages(even), two_stages(even, replica=1), two_stages(slow, replica=2)]
    what_if = WhatIf(step_of(*replicas))
    parts = what_if.parts()
    # the mean of stage 1 is 4/3 of the others', the slow worker's passes are twice as long
    assert parts.computing == pytest.approx(12.0)
    assert parts.slow_workers > 5.0
    assert parts.spread == pytest.approx(0.0)
    effects = what_if.worker_effects()
    assert max(effects, key=effects.__getitem__) == "stage 1 of replica 2"


def test_unequal_micro_batches_are_spread() -> None:
    def uneven(stage: int, kind: PassKind, batch: int) -> float:
        return even(stage, kind, batch) * (0.5, 2.0, 0.5)[batch]

    parts = WhatIf(step_of(two_stages(uneven))).parts()
    assert parts.computing == pytest.approx(9.0)
    assert parts.slow_workers == pytest.approx(0.0)
    assert parts.spread > 0.5


def test_what_may_differ_is_no_slowness() -> None:
    def slow(stage: int, kind: PassKind, batch: int) -> float:
        return even(stage, kind, batch) * 2.0

    step = step_of(two_stages(even), two_stages(slow, replica=1))
    parts = WhatIf(step, lambda worker, one: (worker.replica, one.kind)).parts()
    assert parts.slow_workers == pytest.approx(0.0)
    assert parts.computing == pytest.approx(18.0)


@pytest.mark.parametrize("seed", range(5))
def test_all_parts_together_are_the_step(seed: int) -> None:
    rng = random.Random(seed)

    def drawn(stage: int, kind: PassKind, batch: int) -> float:
        return rng.uniform(0.5, 3.0)

    replicas = [
        two_stages(drawn, message=rng.uniform(0, 0.5), replica=r, batches=4) for r in range(2)
    ]
    step = step_of(*replicas, after=rng.uniform(0, 1))
    assert WhatIf(step).parts().seconds == pytest.approx(step.seconds)


@pytest.mark.parametrize("seed", range(5))
def test_the_replay_of_its_own_seconds_is_the_step(seed: int) -> None:
    rng = random.Random(seed)

    def drawn(stage: int, kind: PassKind, batch: int) -> float:
        return rng.uniform(0.5, 3.0)

    what_if = WhatIf(step_of(two_stages(drawn, message=0.2, batches=5)))
    known = dict.fromkeys(what_if.messages, Message(0.2, 0.0))
    assert what_if.replay(what_if.own, known) == pytest.approx(what_if.step.seconds)


def test_passes_of_several_devices_are_one() -> None:
    passes = [(0, 0, Pass("forward", 0, 0, 0.0, 1.0)), (0, 0, Pass("forward", 0, 0, 0.5, 2.0))]
    step = make_step(0, passes, None, "test")
    assert step.workers[0].passes == (Pass("forward", 0, 0, 0.0, 2.0),)


def test_a_step_without_passes_is_refused() -> None:
    with pytest.raises(InputError, match="no forward or backward passes"):
        make_step(0, [], None, "test")


def test_passes_that_wait_for_each_other_are_refused() -> None:
    passes = [
        (0, 0, Pass("forward", 0, 0, 0.0, 1.0)),
        (0, 0, Pass("backward", 0, 1, 1.0, 2.0)),
        (0, 0, Pass("forward", 0, 1, 2.0, 3.0)),
        (0, 1, Pass("forward", 1, 1, 1.0, 2.0)),
        (0, 1, Pass("backward", 1, 1, 2.0, 3.0)),
    ]
    with pytest.raises(InputError, match="wait for each other"):
        WhatIf(make_step(0, passes, None, "test")).parts()


def test_waiting_for_ranks_is_told_from_transfers() -> None:
    # rank 0 computes 2 s, rank 1 computes 5 s; the collective then takes 1 s
    first = RankStep(
        0, 0.0, 7.0, (Kernel("gemm", False, 0.0, 2.0), Kernel("ncclAllReduce", True, 2.0, 6.0))
    )
    second = RankStep(
        1,
        10.0,
        17.0,
        (Kernel("gemm", False, 10.0, 15.0), Kernel("ncclAllReduce", True, 15.0, 16.0)),
    )
    of_first, of_second = rank_parts([first, second])
    assert (of_first.computing, of_first.transfers) == pytest.approx((2.0, 1.0))
    assert (of_first.waiting, of_first.idle) == pytest.approx((3.0, 1.0))
    assert (of_second.computing, of_second.transfers) == pytest.approx((5.0, 1.0))
    assert (of_second.waiting, of_second.idle) == pytest.approx((0.0, 1.0))


def test_kernels_beside_each_other_count_once() -> None:
    kernels = (
        Kernel("a", False, 0.0, 3.0),
        Kernel("b", False, 1.0, 2.0),
        Kernel("c", False, 2.0, 4.0),
        Kernel("d", False, 6.0, 7.0),
    )
    (parts,) = rank_parts([RankStep(0, 0.0, 7.0, kernels)])
    assert (parts.computing, parts.idle) == pytest.approx((5.0, 2.0))


def test_hidden_collectives_are_no_part() -> None:
    step = RankStep(0, 0.0, 4.0, (Kernel("gemm", False, 0.0, 4.0), Kernel("nccl", True, 1.0, 3.0)))
    (parts,) = rank_parts([step])
    assert (parts.computing, parts.transfers, parts.waiting, parts.idle) == (4.0, 0.0, 0.0, 0.0)
