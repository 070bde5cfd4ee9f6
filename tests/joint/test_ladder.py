"""No rung of the ladder of bounds is above the replay of a plan of its class."""

import math
from collections.abc import Iterable
from random import Random
from typing import Any

import pytest

from hetplan.formulations.joint import exact
from hetplan.formulations.joint.bound.driver import lower_bounds
from hetplan.formulations.joint.bound.equal import Shape, equal_bound
from hetplan.formulations.joint.bound.ladder import (
    KnownPlan,
    equal_rungs,
    ladder,
    shape_alone,
    shape_rungs,
)
from hetplan.formulations.joint.bound.replicas import STANDARD
from hetplan.formulations.joint.bound.tables import Relaxation
from hetplan.formulations.joint.data import JointData
from hetplan.formulations.joint.equal_search import equal_search
from hetplan.formulations.joint.evaluate import plan_of
from hetplan.plans.alike import has_equal_replicas, largest_micro_batch
from hetplan.plans.ladder import Rung
from hetplan.plans.plan import Plan
from hetplan.replays.chains import ChainReplayer
from hetplan.solvers.run import Options, Run
from joint.enumeration import all_plans, random_data
from joint.test_bound import even_data, plans_of_all_schedules, replica, with_slower_links
from joint.test_equal_bound import equal_plans
from quick import rest_wide

ROUNDED = 1 + 1e-9


def some_run(budget: float = 0.1) -> Run:
    """A run with so many counted seconds."""
    return Run(Options(threads=1), budget=budget)


def shape_of(plan: Plan) -> Shape:
    """Of a plan with equal replicas."""
    return Shape(len(plan.replicas), largest_micro_batch(plan))


def fastest(pairs: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    """Class of plans -> the least seconds of its plans."""
    least: dict[Any, float] = {}
    for key, seconds in pairs:
        least[key] = min(seconds, least.get(key, math.inf))
    return least


def shape_bounds(of: Relaxation, shape: Shape) -> list[float]:
    """(2) to (4), with a known plan that is too slow to limit them."""
    rungs = shape_rungs(of, shape, 1e6, some_run(0.3), STANDARD)
    return [rung.bound for rung in rungs]


def assert_below(data: JointData, plans: Iterable[Plan]) -> None:
    """No bound is above a plan of its class."""
    of, replayer = Relaxation(data), ChainReplayer.of(data)
    replayed = [(plan, replayer.seconds(plan)) for plan in plans]
    equal = [(plan, seconds) for plan, seconds in replayed if has_equal_replicas(plan)]
    every = lower_bounds(of, some_run())
    best = min(seconds for _, seconds in replayed) * ROUNDED
    assert every.alone <= every.nodes <= every.every <= best
    for shape, least in fastest((shape_of(plan), seconds) for plan, seconds in equal).items():
        bounds = shape_bounds(of, shape)
        assert bounds == sorted(bounds), shape
        assert bounds[-1] <= least * ROUNDED, shape
    if equal:
        bound = equal_bound(of, some_run())
        assert bound is not None and bound <= min(seconds for _, seconds in equal) * ROUNDED


@pytest.mark.parametrize(
    ("seed", "devices"),
    [
        *((seed, 2) for seed in (1, 2)),
        *(pytest.param(seed, 2, marks=pytest.mark.wide) for seed in (0, *range(3, 60))),
        *(pytest.param(seed, 3, marks=pytest.mark.wide) for seed in range(60, 160)),
    ],
)
def test_no_rung_is_above_all_plans_of_its_class(seed: int, devices: int) -> None:
    data = random_data(Random(seed), devices=devices, layers=3, batch=3)
    assert_below(data, all_plans(data))


@pytest.mark.parametrize(("network", "inside"), [(1, 1), (30, 100)])
@pytest.mark.parametrize("seed", rest_wide((302, 300, 303, 301, *range(304, 400)), 3))
def test_no_rung_is_above_drawn_plans_of_its_class(
    seed: int, network: float, inside: float
) -> None:
    rng = Random(seed)
    data = with_slower_links(random_data(rng, batch=8), network, inside)
    plans = [plan for _ in range(5) for plan in equal_plans(rng, data)]
    if plans:
        assert_below(data, plans)


def chain_of_four(samples: int, b: int) -> tuple[JointData, Plan]:
    """Four nodes of one device each, and a pipeline through them whose messages take as long as its
    passes."""
    data = even_data((1, 1, 1, 1), 4, samples, network=1e9, inside=1e9, tied=False)
    runs = [[(s, s + 1)] for s in range(4)]
    pipe = replica([[s] for s in range(4)], runs, samples, b)
    return data, next(plans_of_all_schedules(data, [pipe], ("1f1b",)))


def test_each_rung_of_a_shape_adds_what_it_says() -> None:
    """Four stages and four micro-batches: computing alone takes 4 passes of a stage, a pipeline 7,
    and each message as long as a pass of one layer."""
    data, plan = chain_of_four(4, 1)
    alone, passes, links = shape_bounds(Relaxation(data), shape_of(plan))
    layer = 2.5e-3
    assert alone == pytest.approx(4 * layer)
    assert passes == pytest.approx(7 * layer, rel=0.01)
    assert 1.2 * passes < links <= ChainReplayer.of(data).seconds(plan)


@pytest.mark.parametrize(("rate", "joins"), [(1e12, False), (1e8, True)])
def test_the_rungs_of_data_parallel_plans_are_near_them(rate: float, joins: bool) -> None:
    """Two devices on each of two nodes compute a sample each. Where links are slow, only the rung
    with links is near the plan."""
    data = even_data((2, 2), 2, 4, network=rate, inside=rate, tied=False)
    every = [replica([[device]], [[(0, 2)]], 1, 1) for device in range(4)]
    plans = list(plans_of_all_schedules(data, every, ("1f1b",)))
    seconds = min(ChainReplayer.of(data).seconds(plan) for plan in plans)
    alone, passes, links = shape_bounds(Relaxation(data), Shape(4, 1))
    assert 0.6 * seconds < links <= seconds * ROUNDED
    assert alone == pytest.approx(2 * 2.5e-3)
    assert passes == pytest.approx(alone)
    assert (links > 1.5 * passes) == joins


def test_a_larger_micro_batch_computes_no_longer() -> None:
    """Where a micro-batch of two takes less than two of one, the rung of the shape says so."""
    data = random_data(Random(1), devices=1, layers=3, batch=8)
    first = {(table.type, table.tensor): table for table in data.tables}
    tables = [
        table.model_copy(
            update={
                "micro_batch": b,
                "forward_seconds": [(3 + b) * 1e-3 for _ in table.forward_seconds],
                "backward_seconds": [(3 + b) * 1e-3 for _ in table.forward_seconds],
            }
        )
        for table in first.values()
        for b in (1, 8)
    ]
    data = data.model_copy(update={"tables": tables, "global_batch": 8})
    of = Relaxation(data)
    one, four, eight = (shape_alone(of, Shape(1, b), some_run()) for b in (1, 4, 8))
    assert one > 1.5 * four > 1.5 * eight > 0


def test_the_ladder_is_monotone_and_names_its_shape() -> None:
    """A bound of all plans holds for plans with equal replicas, and theirs for one shape."""
    shape = {"replicas": 2, "micro_batch": 1}
    rungs = [
        Rung(rung="micro-batches", bound=2.0, best=9.0, **shape),
        Rung(rung="passes", bound=2.5, best=9.0, **shape),
        Rung(rung="links", bound=3.0, best=9.0, **shape),
        Rung(rung="equal", bound=4.0, best=9.0),
    ]
    names = ["alone", "micro-batches", "passes", "links", "equal", "all"]
    made = ladder(1.0, rungs, 5.0, 8.0, 8.5)
    assert [rung.rung for rung in made] == names
    assert [rung.bound for rung in made] == [1.0, 2.0, 2.5, 5.0, 5.0, 5.0]
    assert [rung.best for rung in made] == [8.0, 9.0, 9.0, 9.0, 8.5, 8.0]
    lower = ladder(1.0, rungs, 3.5, 8.0, 8.5)
    assert [rung.bound for rung in lower] == [1.0, 2.0, 2.5, 4.0, 4.0, 3.5]
    assert {rung.replicas for rung in made[1:4]} == {2}
    assert [rung.rung for rung in ladder(1.0, (), 3.5, None, None)] == ["alone", "all"]


def test_no_rung_is_above_the_known_plan() -> None:
    data, plan = chain_of_four(4, 1)
    known = KnownPlan(plan, ChainReplayer.of(data).seconds(plan))
    rungs = equal_rungs(Relaxation(data), known, some_run(1.0))
    assert [rung.rung for rung in rungs] == ["micro-batches", "passes", "links", "equal"]
    assert all(rung.bound <= known.seconds == rung.best for rung in rungs)
    assert [rung.rung for rung in equal_rungs(Relaxation(data), None, some_run())] == ["equal"]


@pytest.mark.parametrize("seed", rest_wide(range(40, 60), 3))
def test_the_search_of_the_class_stays_in_it(seed: int) -> None:
    """It is no slower than its starts, which may have unequal replicas."""
    rng = Random(seed)
    data = random_data(rng, devices=4, layers=5, batch=8)
    types = {k: t.model_copy(update={"memory_bytes": 1e12}) for k, t in data.types.items()}
    data = data.model_copy(update={"types": types})
    replayer = ChainReplayer.of(data)
    starts = [plan for _ in range(3) for plan in equal_plans(rng, data)]
    found = equal_search(data, some_run(0.15), starts)
    assert found is not None and has_equal_replicas(Plan.model_validate(dict(found)))
    best = min((replayer.seconds(plan) for plan in starts), default=math.inf)
    assert replayer.seconds(found) <= best * 1.01


def test_the_exact_method_tells_the_ladder_and_its_class() -> None:
    """With more devices than are enumerated. The incumbent is no slower than the class's best."""
    data = even_data((4, 4), 4, 8, network=1e8, inside=1e9, tied=False)
    outcome = exact.solve(data, some_run(0.4))
    rungs = {rung.rung: rung for rung in map(Rung.model_validate, outcome.details["ladder"])}  # type: ignore[call-overload]
    assert list(rungs) == ["alone", "micro-batches", "passes", "links", "equal", "all"]
    assert outcome.decision is not None
    seconds = ChainReplayer.of(data).seconds(plan_of(data, outcome.decision))
    assert rungs["all"].best == pytest.approx(seconds)
    assert rungs["all"].bound == outcome.bound
    assert rungs["equal"].best is not None and rungs["equal"].best >= seconds * (1 - 1e-9)
