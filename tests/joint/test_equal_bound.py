"""No bound of plans with equal replicas is above the replay of such a plan."""

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from hetplan.formulations.joint.bound.driver import lower_bounds, seconds_alone
from hetplan.formulations.joint.bound.equal import equal_bound, equal_parts
from hetplan.formulations.joint.bound.nodes import NodeModel
from hetplan.formulations.joint.bound.replicas import STANDARD
from hetplan.formulations.joint.bound.tables import Relaxation
from hetplan.formulations.joint.data import JointData
from hetplan.plans.alike import has_equal_replicas
from hetplan.plans.plan import Plan
from hetplan.replays.chains import ChainReplayer
from hetplan.solvers.run import Options, Run
from joint.enumeration import random_data
from joint.test_bound import even_data, plans_of_all_schedules, replica, with_slower_links
from quick import rest_wide
from stopping import cancelled_after


def equal_plans(rng: Random, data: JointData) -> Iterator[Plan]:
    """Plans with random equal replicas, under every schedule that they allow."""
    G, layers = data.global_batch, len(data.layers)
    free: dict[str, list[int]] = {}
    for number, (kind, _) in enumerate(data.devices):
        free.setdefault(kind, []).append(number)
    most = max(map(len, free.values()))
    alike = rng.choice([R for R in range(1, most + 1) if G % R == 0])
    groups: list[list[list[int]]] = []  # [stage, replica, tensor rank]
    for _ in range(rng.randint(1, layers)):
        kinds = [kind for kind, devices in free.items() if len(devices) >= alike]
        if kinds:
            devices = free[rng.choice(kinds)]
            groups.append([[devices.pop(0)] for _ in range(alike)])
    chunks = rng.choice((1, 2))
    virtual = len(groups) * chunks
    if virtual > layers:
        return
    at = [0, *sorted(rng.sample(range(1, layers), virtual - 1)), layers]
    runs = [
        [(at[v], at[v + 1]) for v in range(s, virtual, len(groups))] for s in range(len(groups))
    ]
    samples = G // alike
    b = rng.randint(1, samples)
    replicas: list[dict[str, Any]] = [
        replica([stage[i] for stage in groups], runs, samples, b) for i in range(alike)
    ]
    schedules = ("interleaved-1f1b",) if chunks > 1 else ("gpipe", "1f1b", "interleaved-1f1b")
    yield from plans_of_all_schedules(data, replicas, schedules)


def assert_not_slower(data: JointData, plans: list[Plan]) -> None:
    """The part of each plan does not refute the plan's own seconds, nor do its nodes."""
    of, replayer = Relaxation(data), ChainReplayer.of(data)
    run = Run(Options(threads=1))
    alone = seconds_alone(of, run)
    nodes = NodeModel(of, alone, run)
    parts = equal_parts(of, run, alone, STANDARD, (False, True))
    for plan in plans:
        assert has_equal_replicas(plan)
        seconds = replayer.seconds(plan) * (1 + 1e-9)
        chunks = len(plan.replicas[0].stages[0].layers) > 1 and len(plan.replicas[0].stages) > 1
        here = [p for p in parts if p.alike == len(plan.replicas) and p.chunks == chunks]
        assert len(here) == 1, plan.model_dump_json()
        assert not here[0].is_slower(seconds), plan.model_dump_json()
        assert nodes.seconds(here[0].homes, here[0].several, chunks) <= seconds


@pytest.mark.parametrize(("network", "inside"), [(1, 1), (30, 100)])
@pytest.mark.parametrize("seed", range(60))
def test_no_plan_with_equal_replicas_is_faster_than_its_part(
    seed: int, network: float, inside: float
) -> None:
    rng = Random(seed)
    data = with_slower_links(random_data(rng, batch=8), network, inside)
    assert_not_slower(data, [plan for _ in range(4) for plan in equal_plans(rng, data)])


@pytest.mark.parametrize("nodes", [(4,), (2, 2)])
def test_the_bound_is_near_data_parallel_plans_whose_joins_take_long(
    nodes: tuple[int, ...],
) -> None:
    """Four replicas of one stage join their weights inside a node, or through the cards."""
    data = even_data(nodes, 2, 4, network=2e8, inside=2e8, tied=False)
    of = Relaxation(data)
    every = [replica([[device]], [[(0, 2)]], 1, 1) for device in range(4)]
    plans = list(plans_of_all_schedules(data, every, ("1f1b",)))
    assert_not_slower(data, plans)
    run = Run(Options(threads=1))
    (part,) = [p for p in equal_parts(of, run, 1e-3, STANDARD, (False,)) if p.alike == 4]
    seconds = min(ChainReplayer.of(data).seconds(plan) for plan in plans)
    assert part.is_slower(0.8 * seconds)


@pytest.mark.parametrize("seed", rest_wide(range(10), 2))
def test_the_bounds_rise_and_stay_below_equal_replicas(seed: int) -> None:
    rng = Random(seed)
    data = random_data(rng, batch=6)
    of, replayer = Relaxation(data), ChainReplayer.of(data)
    best = min(replayer.seconds(p) for _ in range(60) for p in equal_plans(rng, data))
    bounds = lower_bounds(of, cancelled_after(300))
    equal = equal_bound(of, cancelled_after(300))
    plain = equal_bound(of, cancelled_after(300), cases=(False,))
    assert 0 < bounds.alone <= bounds.nodes <= bounds.every <= best
    assert equal is not None
    assert plain is not None
    assert 0.02 * best < equal <= best


def test_replicas_that_differ_in_one_thing_are_not_equal() -> None:
    data = even_data((4,), 4, 4, network=1e9, inside=1e9, tied=False)

    def plan(*replicas: dict[str, Any]) -> Plan:
        return data.plan(list(replicas), schedule="1f1b", zero=0, recomputation="none")

    def halves(first: int, cut: int, samples: int, b: int) -> dict[str, Any]:
        return replica([[first], [first + 1]], [[(0, cut)], [(cut, 4)]], samples, b)

    assert has_equal_replicas(plan(halves(0, 2, 2, 1), halves(2, 2, 2, 1)))
    assert not has_equal_replicas(plan(halves(0, 2, 2, 1), halves(2, 1, 2, 1)))
    assert not has_equal_replicas(plan(halves(0, 2, 2, 1), halves(2, 2, 2, 2)))
    assert not has_equal_replicas(plan(halves(0, 2, 3, 1), halves(2, 2, 1, 1)))
    assert not has_equal_replicas(plan(replica([[0, 1]], [[(0, 4)]], 4, 2)))
