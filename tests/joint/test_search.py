"""The local search: against enumeration on tiny instances, its moves, memory, and repeatability."""

from collections.abc import Iterator
from itertools import combinations, product
from random import Random
from typing import Any

import pytest
from pydantic import ValidationError

from hetplan.formulations.joint.annealing import Parameters
from hetplan.formulations.joint.constructions import constructions
from hetplan.formulations.joint.data import JointData, JointDecision
from hetplan.formulations.joint.design import (
    SCHEDULES,
    SPLIT_SCHEDULES,
    Design,
    Pipeline,
    design_of,
)
from hetplan.formulations.joint.evaluate import decision_of, evaluate, plan_of
from hetplan.formulations.joint.moves import Moves
from hetplan.formulations.joint.search import search
from hetplan.formulations.joint.space import Space
from hetplan.plans.plan import Plan
from hetplan.replays.chains import ChainReplayer
from hetplan.solvers.run import Options, Run, Stop
from joint.enumeration import random_data, random_plan
from quick import rest_wide


def run(seed: int = 0) -> Run:
    return Run(Options(seed=seed, time_limit=None))


def with_memory(data: JointData, share: float) -> JointData:
    """Devices of another size."""
    types = {
        name: kind.model_copy(update={"memory_bytes": share * kind.memory_bytes})
        for name, kind in data.types.items()
    }
    return data.model_copy(update={"types": types})


def arrangements(space: Space) -> Iterator[list[Any]]:
    """Groups of stages of all replicas, of one or two devices."""
    one = [(((e,),),) for e in range(len(space.device_types))]
    yield from ([each] for each in one)
    if len(one) < 2:
        return
    yield list(one)
    yield from ([one[a] + one[b]] for a, b in ((0, 1), (1, 0)))
    if space.device_types[0] == space.device_types[1]:
        yield [(((0,), (1,)),)]
        if space.node[0] == space.node[1] and 2 in space.tensor_degrees:
            yield [(((0, 1),),)]


def all_seconds(data: JointData) -> Iterator[float]:
    """Of every plan with equal shares that fits on one or two devices."""
    space, L, G = Space(data), len(data.layers), data.global_batch
    for groups, (schedule, chunks) in product(arrangements(space), SCHEDULES):
        splits = [(G,)] if len(groups) == 1 else [(g, G - g) for g in range(1, G)]
        cuts = [list(combinations(range(1, L), len(each) * chunks - 1)) for each in groups]
        micros = product(range(1, G + 1), repeat=len(groups))
        for samples, size, ends in product(splits, micros, product(*cuts)):
            pipelines = tuple(map(Pipeline, groups, ends, size, samples))
            if any(pipeline.micro_batch > pipeline.samples for pipeline in pipelines):
                continue
            for zero, mode in product(range(4), space.modes):
                try:
                    plan = space.plan(Design(pipelines, schedule, chunks, zero, mode))
                except ValidationError:
                    continue
                if not space.replayer.excess(plan):
                    yield space.replayer.seconds(plan)


@pytest.mark.parametrize("seed", rest_wide(range(12), 5))
def test_the_search_equals_enumeration(seed: int) -> None:
    data = random_data(Random(seed), devices=2, layers=4, batch=4)
    best = min(all_seconds(data), default=None)
    outcome = search(data, run(), parameters=Parameters(steps=1500))
    if best is None:
        assert outcome.decision is None
    else:
        assert outcome.decision is not None
        assert evaluate(data, outcome.decision).objective == pytest.approx(best, rel=1e-9)


def free(data: JointData, *, messages: bool) -> JointData:
    """With layers that take no seconds; messages: whether their messages and updates take some."""
    nothing = [0.0] * len(data.layers)
    rows = ("forward_seconds", "backward_seconds", "forward_host_seconds", "backward_host_seconds")
    tables = [table.model_copy(update=dict.fromkeys(rows, nothing)) for table in data.tables]
    changes: dict[str, Any] = {"tables": tables}
    if not messages:
        sizes = ("param_bytes", "tied_param_bytes", "activation_bytes", "tensor_bytes")
        bare = dict.fromkeys(sizes, 0.0)
        changes["layers"] = [layer.model_copy(update=bare) for layer in data.layers]
        still = {"intra_latency": 0.0, "network_latency": 0.0}
        changes["nodes"] = [node.model_copy(update=still) for node in data.nodes]
        update = next(iter(data.types.values())).update.model_copy(update={"start_seconds": 0.0})
        changes["types"] = {
            name: kind.model_copy(update={"update": update}) for name, kind in data.types.items()
        }
    return data.model_copy(update=changes)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("messages", [True, False])
def test_layers_may_take_no_seconds(seed: int, messages: bool) -> None:
    drawn = random_data(Random(seed), devices=2, layers=2, batch=2)
    data = with_memory(free(drawn, messages=messages), 1e3)
    assert list(constructions(Space(data)))
    best = min(all_seconds(data))
    outcome = search(data, run(), parameters=Parameters(steps=100))
    assert outcome.decision is not None
    assert evaluate(data, outcome.decision).objective == pytest.approx(best, rel=1e-9)
    assert messages or best == 0


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("seed", rest_wide(range(20, 30), 2))
def test_moves_keep_the_rules_and_nothing_replays_faster_than_computation(
    seed: int, split: bool
) -> None:
    """Under whole backward passes, and under split ones, with chunks on a V."""
    rng = Random(seed)
    data = random_data(rng, devices=8, layers=9, batch=16)
    roomy = with_memory(data, 1e6)
    space, names = Space(data, SPLIT_SCHEDULES if split else SCHEDULES), list(Parameters().shares)
    moves, design = Moves(space, rng), next(iter(constructions(space)))
    drawn, seen = set[str](), set[str]()
    for _ in range(400):
        name = rng.choice(names)
        changed = moves.draw(name, design)
        if changed is None:
            continue
        drawn.add(name)
        design, plan = changed, space.plan(changed)
        assert sum(pipeline.samples for pipeline in design.pipelines) == data.global_batch
        assert design_of(plan) == design
        seen.add(design.schedule)
        seconds = space.replayer.seconds(plan)
        if not design.splits_backward:
            evaluation = evaluate(roomy, decision_of(plan))
            assert evaluation.objective is not None, evaluation.violations
            seconds = evaluation.objective
        for least in (space.lower_bound(design), space.replayer.seconds(plan, 0.0)):
            assert 0 < least <= seconds * (1 + 1e-9)
        same = space.renaming.canonical(design)
        assert space.replayer.seconds(space.plan(same)) == pytest.approx(seconds)
    assert drawn
    assert not split or len(seen & {name for name, _ in SPLIT_SCHEDULES}) >= 3


def test_a_seed_and_a_number_of_steps_have_one_result() -> None:
    data = random_data(Random(31), devices=6, layers=7, batch=12)
    parameters = Parameters(steps=400)
    first, again, other = (search(data, run(seed), parameters=parameters) for seed in (1, 1, 2))
    assert first.decision == again.decision
    assert first.details == again.details != other.details
    assert first.stop is Stop.DONE


def starts(data: JointData, rng: Random, count: int) -> list[JointDecision]:
    """Their smaller micro-batch is the first one, which no design says."""
    plans = (random_plan(rng, data) for _ in range(count))
    decisions = [decision_of(plan) for plan in plans if plan is not None]
    for replica in (replica for decision in decisions for replica in decision.replicas):
        replica.micro_batches.reverse()
    return [d for d in decisions if any(len(r.micro_batches) > 1 for r in d.replicas)]


@pytest.mark.parametrize("seed", [42, 51, 63, 64, 68])
def test_the_result_is_no_slower_than_any_start_that_fits(seed: int) -> None:
    rng = Random(seed)
    data = with_memory(random_data(rng), 100.0)
    given = starts(data, rng, 60)
    values = [v for start in given if (v := evaluate(data, start).objective) is not None]
    outcome = search(data, run(), given, Parameters(steps=0, replayed=0))
    assert values and outcome.decision is not None
    reached = evaluate(data, outcome.decision).objective
    assert reached is not None and reached <= min(values)


def test_more_steps_never_make_the_result_slower() -> None:
    data = with_memory(random_data(Random(53), devices=8), 100.0)
    reached = []
    for steps in (0, 100, 1200, 2000):
        parameters = Parameters(steps=steps, robust_from=1.0)  # noise of 2 % counts nowhere
        decision = search(data, run(), parameters=parameters).decision
        assert decision is not None
        reached.append(evaluate(data, decision).objective or 1e9)
    assert reached == sorted(reached, reverse=True) and reached[0] > reached[-1]


def test_robust_seconds_count_where_they_differ_by_more_than_a_hundredth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = with_memory(random_data(Random(53), devices=3), 100.0)
    free = search(data, run(), parameters=Parameters(steps=600)).decision
    assert free is not None
    exact = ChainReplayer.seconds

    def noisy(by: float, replayer: ChainReplayer, plan: Plan) -> float:
        return exact(replayer, plan) * (by if plan.schedule == free.schedule else 1.0)

    for by, same in ((1.009, True), (1.9, False)):
        monkeypatch.setattr(ChainReplayer, "robust_seconds", lambda *a, by=by: noisy(by, *a))
        other = search(data, run(), parameters=Parameters(steps=600)).decision
        assert other is not None and (other.schedule == free.schedule) == same


def test_tight_memory_is_respected_and_too_little_is_said() -> None:
    data = random_data(Random(62), devices=6, layers=7, batch=12)
    free = search(data, run(), parameters=Parameters(steps=600))
    assert free.decision is not None
    held = Space(data).replayer.replay(plan_of(data, free.decision)).peak_bytes
    room = max(kind.memory_bytes for kind in data.types.values())
    tight = with_memory(data, 0.999 * max(held) / room)
    assert evaluate(tight, free.decision).objective is None
    outcome = search(tight, run(), parameters=Parameters(steps=600))
    assert outcome.decision is not None and evaluate(tight, outcome.decision).objective is not None
    none = search(with_memory(data, 1e-9), run(), parameters=Parameters(steps=50))
    assert none.decision is None and none.message.endswith("plans fits in memory")


def test_chunks_of_one_stage_are_one_run() -> None:
    """Interleaved 1F1B of replicas of one stage is 1F1B, which frameworks can say."""
    data = random_data(Random(3), devices=2, layers=6)
    pipeline = Pipeline((((0,),),), (1,), 1, data.global_batch)
    made = Space(data).repaired(Design((pipeline,), "interleaved-1f1b", 2))
    assert made is not None
    assert (made.schedule, made.chunks, made.pipelines[0].cuts) == ("1f1b", 1, ())
