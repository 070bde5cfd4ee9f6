"""The best order of passes: against all orders, against the replay, constraint by constraint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import get_args

import numpy as np
import pytest

from hetplan.errors import InputError
from hetplan.formulations.joint.schedule import cp, period
from hetplan.formulations.joint.schedule.bounds import lower_bound, one_machine
from hetplan.formulations.joint.schedule.data import Message, Pass, PassProblem
from hetplan.formulations.joint.schedule.dispatch import (
    best_dispatched,
    dispatch,
    improve,
    judged,
    rules,
)
from hetplan.formulations.joint.schedule.evaluate import DeadLock, evaluate
from hetplan.formulations.joint.schedule.pose import named_order, pose, problem_of
from hetplan.formulations.joint.schedule.solve import Parameters, best_order, longest
from hetplan.plans.passes import WholeSchedule
from hetplan.replays.chains import ChainReplayer
from hetplan.replays.simulator.pipeline import Replica, simulate_replicas
from hetplan.replays.simulator.splits import SplitSchedule
from hetplan.replays.simulator.tasks import Traffic
from hetplan.solvers.general import minimise
from hetplan.solvers.run import Options, Run, Stop
from joint.enumeration import random_data, random_plan
from joint.orders import drawn, least_seconds

QUICK = Parameters(steps=20)


def run_of(seconds: float = 30.0) -> Run:
    return Run(Options(time_limit=seconds, threads=1))


def pipeline(
    stages: int, micros: int, *, split: bool = False, room: float | None = None
) -> PassProblem:
    """Equal stages whose passes take 1 s each; whole backward passes take 2 s."""
    ones = ((1.0,) * micros,) * stages
    twos = ((2.0,) * micros,) * stages
    return PassProblem(
        place=tuple(range(stages)),
        forward=ones,
        backward=ones if split else twos,
        weight=ones if split else (),
        kept=ones,
        kept_for_weight=ones if split else (),
        room=None if room is None else (room,) * stages,
    )


@pytest.mark.parametrize("seed", range(12))
def test_the_best_order_is_that_of_all_orders(seed: int) -> None:
    problem = drawn(seed, split=seed % 2 == 0)
    least = least_seconds(problem)
    best = best_order(problem, run_of(), (), QUICK)
    assert (best.found and best.found.seconds) == least
    assert best.proven == (least is not None)
    assert best.stop is (Stop.INFEASIBLE if least is None else Stop.OPTIMAL)


@pytest.mark.parametrize("seed", range(8))
def test_cp_sat_alone_finds_the_least_seconds(seed: int) -> None:
    problem = drawn(seed, stages=3, split=False)
    least = least_seconds(problem)
    v = cp.build(problem, run_of(), longest(problem), 0.5)
    answer = minimise("cp-sat", v.model, run_of())
    if least is None:
        assert answer.stop is Stop.INFEASIBLE
        return
    assert answer.bound == pytest.approx(least, rel=1e-6)
    found = judged(problem, cp.read(v, answer))
    assert found is not None
    assert found.seconds == least


@pytest.mark.parametrize("seed", range(12))
def test_bounds_are_below_and_heuristics_above_the_least_seconds(seed: int) -> None:
    problem = drawn(seed, split=False)
    least = least_seconds(problem)
    found = best_dispatched(problem, run_of())
    if least is None:
        assert found is None
        return
    assert lower_bound(problem) <= least
    if found is not None:
        assert improve(problem, found, run_of(), 50).seconds >= least


@pytest.mark.parametrize("seed", range(12))
def test_dispatched_orders_keep_to_the_room(seed: int) -> None:
    problem = drawn(seed, stages=3, micros=4)
    for rule in rules():
        order = dispatch(problem, rule)
        if order is not None:
            assert evaluate(problem, order).violations == ()


@pytest.mark.parametrize("times", [2.4, 3.5])
@pytest.mark.parametrize("seed", range(12))
def test_dispatching_leaves_room_for_gradients_of_products(seed: int, times: float) -> None:
    """Between its two parts, a backward pass keeps more than the forward pass."""
    problem = drawn(seed, stages=3, micros=4)
    more = tuple(tuple(1.5 * kept for kept in row) for row in problem.kept)
    room = tuple(times * row[0] for row in problem.kept)
    problem = replace(problem, kept_for_weight=more, room=room)
    found = [dispatch(problem, rule) for rule in rules()]
    assert all(order is not None for order in found)
    assert not any(evaluate(problem, order).violations for order in found if order)


SCHEDULES: list[tuple[WholeSchedule | SplitSchedule, int]] = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved-1f1b", 2),
    ("zb-h1", 1),
    ("zb-h2", 1),
    ("zbv", 2),
    ("v-half", 2),
]


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("sends", ["waiting", "asynchronous"])
def test_named_orders_take_the_seconds_of_the_replay(
    schedule: WholeSchedule | SplitSchedule, chunks: int, sends: str
) -> None:
    """Split passes, too: with the seconds and the bytes of their passes of weights."""
    stages, draw = 3, np.random.default_rng(1)
    shape, split = (stages, chunks, 2), schedule in get_args(SplitSchedule)
    folded = split and chunks == 2

    def traffic(hop: int, side: int) -> list[Traffic]:
        # hops of both directions share port 9 for a part of their seconds
        ports = ((2 * hop + side, 1.0), (9, 0.4))
        return [Traffic(float(draw.uniform(0.1, 0.4)), 0.05, ports) for _ in range(2)]

    hops = [[traffic(hop, side) for hop in range(stages * chunks - 1)] for side in range(2)]
    if folded:  # both chunks of the last stage
        for messages in hops:
            messages[stages - 1] = [Traffic(), Traffic()]
    reduces = [[[[Traffic(0.1 + s, 0.01)] * 2 for _ in range(chunks)] for s in range(stages)]] * 2
    replica = Replica(
        stages=stages,
        micro_batches=6,
        chunks=chunks,
        schedule=schedule,
        folded=folded,
        sends=sends,  # type: ignore[arg-type]
        forward=draw.uniform(1, 2, shape),
        backward=draw.uniform(1, 3, shape),
        kinds=np.array([0, 0, 0, 0, 0, 1]),
        optimizer=[0.5, 0.1, 0.2],
        weights=draw.uniform(0.5, 1, shape),
        saved_bytes=draw.uniform(1, 2, shape),
        held_bytes=draw.uniform(2, 3, shape),
        hops=hops,
        reduces=reduces,
    )
    problem = problem_of(replica, split=split)
    verdict = evaluate(problem, named_order(problem, schedule))
    timeline = simulate_replicas([replica])
    assert verdict.seconds == pytest.approx(timeline.seconds, rel=1e-12)
    assert verdict.peak_bytes == pytest.approx(timeline.peak_bytes, rel=1e-12)


def test_a_posed_plan_has_the_replays_passes_of_weights() -> None:
    """The profile's shares of weights differ by layer, and so do those of a plan's stages."""
    seen, rng = 0, Random(3)
    while seen < 3:
        data = random_data(rng, devices=4, layers=6, batch=8)
        layers = range(len(data.layers))
        tables = [
            table.model_copy(update={"weight_shares": [rng.uniform(0.0, 0.9) for _ in layers]})
            for table in data.tables
        ]
        data = data.model_copy(update={"tables": tables})
        plan = random_plan(rng, data)
        if plan is None or plan.schedule != "1f1b" or len(plan.replicas) > 1 or plan.zero > 1:
            continue
        if len(plan.replicas[0].stages) < 2 or plan.recomputation == "full":
            continue
        seen += 1
        [problem] = pose(plan, ChainReplayer.of(data))
        verdict = evaluate(problem, named_order(problem, "zb-h1"))
        replayed = ChainReplayer.of(data).replay(plan.model_copy(update={"schedule": "zb-h1"}))
        assert verdict.seconds == pytest.approx(replayed.seconds, rel=1e-9)
        assert verdict.peak_bytes == pytest.approx(replayed.timeline.peak_bytes)


def test_a_dead_lock_is_refused_with_its_circle() -> None:
    problem = pipeline(2, 1)
    late = problem.read([["D0", "F0"], ["F0", "D0"]])
    with pytest.raises(DeadLock, match="D0 of virtual stage 0 needs D0 of virtual stage 1"):
        evaluate(problem, late)
    with pytest.raises(DeadLock, match="F0 of virtual stage 1 needs F0 of virtual stage 0, which"):
        evaluate(problem, late)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([["F0", "D0"], ["F0"]], r"passes\[1\]: D0 of virtual stage 1 .*0 times"),
        ([["F0", "D0", "F0"], ["F0", "D0"]], r"passes\[0\]: F0 .*2 times"),
        ([["F0", "D0"]], "passes: wrong length"),
        ([["F0", "X0"], ["F0", "D0"]], r"passes\[0\]\[1\]: no pass"),
        ([["F0", "D0.1"], ["F0", "D0"]], r"passes\[0\]\[1\]: unknown chunk"),
        ([["F0", "B0"], ["F0", "D0"]], r"passes\[0\]: B0 "),
    ],
)
def test_an_order_without_every_pass_once_is_refused(texts: list[list[str]], said: str) -> None:
    problem = pipeline(2, 1)
    with pytest.raises(InputError, match=said):
        evaluate(problem, problem.read(texts))


def test_texts_of_an_order_are_read_back() -> None:
    problem = replace(drawn(7, split=False), room=None)
    assert problem.place == (0, 1, 1, 0)
    best = best_order(problem, run_of(), (), QUICK)
    assert best.found is not None
    texts = problem.texts(best.found.order)
    assert {"F0.0", "F0.1", "D1.1"} <= set(texts[0])
    assert problem.read(texts) == best.found.order


def test_split_passes_fill_the_drain() -> None:
    """Zero bubble: three stages, six micro-batches; 1F1B takes (6 + 2) 3 s."""
    whole, split = pipeline(3, 6), pipeline(3, 6, split=True)
    assert evaluate(whole, named_order(whole, "1f1b")).seconds == 24.0
    best = best_order(split, run_of(), (), QUICK)
    assert best.proven
    assert best.found is not None
    assert best.found.seconds == 6 * 3 + 2


# What the least seconds are without one constraint, on a pipeline where it matters.
ROOMLESS = pipeline(2, 3, room=1.0)
SLOW = replace(
    pipeline(2, 3),
    activations=((Message(5.0, 0.0, ((0, 1.0),)),) * 3,),
    gradients=((Message(5.0, 0.0, ((0, 1.0),)),) * 3,),
    receiver_waits=False,
)
BREAKS = [
    (cp.use_stages_once, pipeline(2, 3)),
    (cp.send_messages, pipeline(2, 3)),
    (cp.hold_ports, SLOW),
    (cp.fit_in_memory, replace(ROOMLESS, kinds=(0, 1, 2))),
    (cp.outlast_passes, replace(pipeline(2, 2), tails=(0.0, 20.0))),
]


@pytest.mark.parametrize(("constraint", "problem"), BREAKS)
def test_the_model_is_too_fast_without_a_constraint(
    constraint: cp.Constraint, problem: PassProblem
) -> None:
    def least(constraints: Sequence[cp.Constraint]) -> float:
        v = cp.build(problem, run_of(), longest(problem), 0.5, constraints)
        answer = minimise("cp-sat", v.model, run_of())
        assert answer.objective is not None
        return answer.objective

    due = least(cp.CONSTRAINTS)
    others = [each for each in cp.CONSTRAINTS if each is not constraint]
    assert least(others) < due * 0.999


@pytest.mark.parametrize("constraint", [cp.keep_micros_in_order, cp.take_turns_in_memory])
@pytest.mark.parametrize("seed", range(3))
def test_symmetry_and_implied_constraints_lose_nothing(
    constraint: cp.Constraint, seed: int
) -> None:
    problem = replace(drawn(seed, split=False), room=(4.0, 4.0))
    with_it = best_order(problem, run_of(), (), QUICK)
    others = [each for each in cp.CONSTRAINTS if each is not constraint]
    without = best_order(problem, run_of(), (), replace(QUICK, constraints=others))
    assert with_it.found is not None
    assert without.found is not None
    assert with_it.found.seconds == without.found.seconds


def test_the_hint_is_an_answer_of_the_model() -> None:
    problem = drawn(1, split=False)
    found = best_dispatched(replace(problem, room=None), run_of())
    assert found is not None
    problem = replace(problem, room=None)
    v = cp.build(problem, run_of(), longest(problem))
    cp.hint(v, found.order, found.verdict)
    for variable, value in zip(
        v.model.cp.proto.solution_hint.vars, v.model.cp.proto.solution_hint.values, strict=True
    ):
        one = v.model.cp.get_int_var_from_proto_index(variable)
        v.model.cp.add(one == value)
    answer = minimise("cp-sat", v.model, run_of())
    assert answer.objective == pytest.approx(found.seconds, rel=1e-6)


def test_a_period_is_the_work_of_the_busiest_stage() -> None:
    problem = pipeline(2, 4, split=True, room=2.0)
    found = period.shortest_period(problem, run_of())
    assert found is not None
    assert found.seconds == pytest.approx(period.least_period(problem))
    repeated = judged(problem, period.unrolled(problem, found))
    assert repeated is not None
    one_micro_batch = 1 + 1 + 1 + 1 + 1  # F, F, B, B, W
    assert repeated.seconds == 3 * 3.0 + one_micro_batch


def test_a_period_keeps_to_the_room() -> None:
    """Where one micro-batch fits, the next one begins when it is done."""
    problem = pipeline(2, 4, room=1.0)
    found = period.shortest_period(problem, run_of())
    assert found is not None
    assert found.seconds >= 6.0 * (1 - 1e-6)
    repeated = judged(problem, period.unrolled(problem, found))
    assert repeated is not None
    assert repeated.seconds == 4 * 6.0


def test_one_machine_interrupts_its_work() -> None:
    # job 0 is interrupted at 1 by the job with the longer tail, and goes on at 2
    assert one_machine([(0.0, 4.0, 0.0), (1.0, 1.0, 9.0)]) == 11.0
    assert one_machine([(0.0, 0.1, 0.0)] * 3 + [(0.3, 0.1, 0.2)]) == pytest.approx(0.6)


def test_passes_before_the_backward_pass_count_as_kept() -> None:
    problem = pipeline(1, 2, split=True)
    order = [[Pass(kind, 0, m) for kind in "FBW" for m in range(2)]]  # type: ignore[arg-type]
    assert evaluate(problem, order).peak_bytes == (2.0,)
    half = replace(problem, kept_for_weight=((0.25, 0.25),))
    in_turns = half.read([["F0", "B0", "F1", "B1", "W0", "W1"]])
    assert evaluate(half, in_turns).peak_bytes == (1.25,)
