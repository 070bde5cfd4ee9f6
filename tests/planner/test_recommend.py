"""Recommended nodes: branch and bound over choices against enumeration, bounds below plans."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from hetplan.cli.recommend import notes
from hetplan.clock import CLOCK
from hetplan.planner.recommend import (
    AvailableNodes,
    Choice,
    Counts,
    Goal,
    document_of,
    frontier,
    recommend,
    recommendation,
)
from hetplan.profiling.hardware.cluster import ClusterFile, build_cluster
from hetplan.profiling.workload import Workload, make_workload
from hetplan.solvers.run import CUT, Options, Run

SEQUENCE = 64  # tokens
HOUR = 3600.0  # seconds


class Catalogue:
    """A random catalogue: speeds, devices and prices of nodes. The bound of a choice is that of its
    speed; its plan is slower by a random factor, or there is none."""

    def __init__(self, seed: int) -> None:
        rng = Random(seed)
        kinds = rng.randint(1, 3)
        self.most = tuple(rng.randint(1, 3) for _ in range(kinds))
        self.speed = [rng.uniform(0.5, 4.0) for _ in range(kinds)]
        self.devices = [rng.choice((1, 2, 4)) for _ in range(kinds)]
        self.price = [rng.choice((0.5, 1.0, 1.5, 3.0)) for _ in range(kinds)]
        self.factor = {counts: rng.uniform(1.0, 2.5) for counts in self.every()}
        self.without_plan = {counts for counts in self.every() if rng.random() < 0.15}
        self.goals = [
            Goal(least, seconds=rng.choice((0.2, 0.4, 0.8, math.inf)), iterations=10.0 * HOUR)
            for least in ("gpus", "money", "time")
        ]
        self.goals.append(Goal("money", seconds=rng.choice((0.2, 0.5))))
        self.goals.append(Goal("time", iterations=3600.0, budget=rng.uniform(0.2, 3.0)))
        self.planned_choices = 0

    def every(self) -> list[Counts]:
        """All choices."""
        return list(itertools.product(*(range(n + 1) for n in self.most)))

    def choice(self, counts: Counts) -> Choice:
        """A choice with its bound."""
        speed = sum(n * s for n, s in zip(counts, self.speed, strict=True))
        devices = sum(n * d for n, d in zip(counts, self.devices, strict=True))
        per_hour = sum(n * p for n, p in zip(counts, self.price, strict=True))
        return Choice(counts, devices, per_hour, 1 / speed if speed else math.inf)

    def planned(self, choice: Choice) -> Choice:
        """The choice with its plan's seconds."""
        self.planned_choices += 1
        if choice.counts in self.without_plan:
            return choice
        seconds = choice.bound * self.factor[choice.counts]
        return replace(choice, seconds=seconds)

    def least(self, goal: Goal) -> float:
        """The least objective of all choices, if their plans were as fast as their bounds."""
        choices = [self.choice(counts) for counts in self.every() if any(counts)]
        return min(self.value(goal, replace(c, seconds=c.bound)) for c in choices)

    def value(self, goal: Goal, choice: Choice) -> float:
        """The objective; infinite where the choice has no plan or misses the target."""
        if choice.seconds is None or choice.per_hour is None:
            return math.inf
        money = choice.per_hour
        if goal.iterations is not None:
            money *= choice.seconds * goal.iterations / 3600
        if choice.seconds > goal.seconds or money > goal.budget:
            return math.inf
        return {"gpus": float(choice.devices), "money": money, "time": choice.seconds}[goal.least]


@pytest.mark.parametrize("number", range(50))
def test_equal_to_enumeration(number: int) -> None:
    catalogue = Catalogue(number)
    planned = [catalogue.planned(catalogue.choice(c)) for c in catalogue.every() if any(c)]
    for goal in catalogue.goals:
        catalogue.planned_choices = 0
        searched = recommend(catalogue.most, goal, catalogue.choice, catalogue.planned, Run())
        choices, winner, least = searched.choices, searched.winner, searched.least
        assert searched.left == 0
        best = min(catalogue.value(goal, choice) for choice in planned)
        found = math.inf if winner is None else catalogue.value(goal, choices[winner])
        assert found == pytest.approx(best, rel=1e-9)
        assert least <= best * (1 + 1e-9)
        # a faster plan than the one that is found is possible, down to the bound: the winner's too
        assert least <= catalogue.least(goal) * (1 + 1e-9)
        assert catalogue.planned_choices == len({choice.counts for choice in choices})
        for i in searched.undecided:
            assert catalogue.value(goal, choices[i]) >= best


@pytest.mark.parametrize("number", range(20))
def test_a_stopped_search_tells_what_is_left(number: int) -> None:
    catalogue = Catalogue(number)
    every = [catalogue.planned(catalogue.choice(c)) for c in catalogue.every() if any(c)]
    for goal in catalogue.goals:
        run = Run()

        def first_one(choice: Choice, run: Run = run) -> Choice:
            run.cancel.set()
            return catalogue.planned(choice)

        searched = recommend(catalogue.most, goal, catalogue.choice, first_one, run)
        choices, winner, left = searched.choices, searched.winner, searched.left
        least = searched.least
        assert len(choices) <= 1 and len(choices) + left <= len(every)
        best = min(catalogue.value(goal, choice) for choice in every)
        assert least <= best * (1 + 1e-9)
        if best < math.inf and winner is None:
            assert left > 0


@pytest.mark.parametrize("number", range(50))
def test_the_frontier_equals_enumeration(number: int) -> None:
    catalogue = Catalogue(number)
    planned = [catalogue.planned(catalogue.choice(c)) for c in catalogue.every() if any(c)]
    of_plans = [choice for choice in planned if choice.seconds is not None]
    points = {(choice.per_hour, choice.seconds) for choice in of_plans}
    front = {p for p in points if not any(dominates(q, p) for q in points)}
    choices = frontier(catalogue.most, catalogue.choice, catalogue.planned)
    assert front <= {(choice.per_hour, choice.seconds) for choice in choices}


def dominates(
    one: tuple[float | None, float | None], other: tuple[float | None, float | None]
) -> bool:
    """Whether one point costs no more and is no slower than another one."""
    cost, seconds = one
    assert cost is not None and seconds is not None
    assert other[0] is not None and other[1] is not None
    return one != other and cost <= other[0] and seconds <= other[1]


OFFERS: dict[str, Any] = {
    "format": "hetplan-cluster",
    "version": 1,
    "name": "offers",
    "nodes": [
        {"count": 2, "devices": 1, "device": "T4", "intra_node_gbit_per_s": 50,
         "network_gbit_per_s": 50},
        {"count": 1, "devices": 2, "device": "V100-SXM2-16GB", "intra_node_gbit_per_s": 170,
         "network_gbit_per_s": 10},
    ],
    "devices": {"T4": {"price_per_hour": 0.5}, "V100-SXM2-16GB": {"price_per_hour": 2.0}},
}  # fmt: skip
OWN = {"memory_gib": 16, "peak_tflops": {"fp16": 65, "fp32": 8}, "memory_gb_per_s": 320}


@pytest.fixture(scope="module")
def workload() -> Workload:
    """GPT-2 on two nodes with a T4 each and one with two V100."""
    cluster = build_cluster(ClusterFile.model_validate(OFFERS))
    return make_workload("gpt2", cluster, 4, sequence=SEQUENCE)


def test_costs_have_one_unit_where_a_price_is_unknown() -> None:
    """Devices then, also for choices whose nodes all have a price."""
    devices = {"T4": {"price_per_hour": 0.5}, "Own": OWN}
    nodes = [OFFERS["nodes"][0], {**OFFERS["nodes"][0], "device": "Own"}]
    file = ClusterFile.model_validate({**OFFERS, "nodes": nodes, "devices": devices})
    available = AvailableNodes(make_workload("gpt2", build_cluster(file), 4, sequence=SEQUENCE))
    both = available.choice((2, 1))
    assert available.choice((2, 0)).per_hour is None and both.per_hour is None
    assert (available.choice((2, 0)).cost, both.cost) == (2.0, 3.0)


def test_plans_of_a_workload(workload: Workload) -> None:
    available = AvailableNodes(workload, moves=20)
    run = Run(Options(threads=1))
    planned = {
        counts: available.planned(available.choice(counts), run)
        for counts in itertools.product(range(3), range(2))
        if any(counts)
    }
    for counts, choice in planned.items():
        assert choice.seconds is not None and choice.plan is not None
        assert 0 < choice.bound <= choice.seconds
        assert len(choice.plan.devices) == choice.devices == counts[0] + 2 * counts[1]
        assert choice.per_hour == 0.5 * counts[0] + 4.0 * counts[1]
    # a choice of more nodes is bounded by less
    assert planned[2, 1].bound < planned[1, 1].bound < planned[0, 1].bound
    speed = planned[1, 1].seconds
    assert speed is not None
    answer = recommendation(workload, Goal("money", seconds=speed * 1.001), moves=20)
    assert answer.best is not None and answer.best.per_hour is not None
    assert answer.best.per_hour <= 4.5


def test_a_counted_budget_ends_the_search_and_a_time_limit_is_told(workload: Workload) -> None:
    """The budget ends it after the same choices whatever the clock; where the time limit ends it
    before, the answer says so."""
    goal = Goal("time")
    whole = Run(Options(threads=1), budget=1e6)
    complete = recommendation(workload, goal, whole, moves=5)
    assert complete.left == 0 and not complete.cut and len(complete.choices) > 1
    longer = Run(Options(threads=1), budget=1e6)
    recommendation(workload, goal, longer, moves=10)
    assert 0 < whole.spent < longer.spent  # the moves count, too
    part = recommendation(workload, goal, Run(Options(threads=1), budget=1e-9), moves=5)
    assert part.left > 0 and not part.cut
    late = Run(Options(threads=1, time_limit=1.0), started=CLOCK.seconds() - 2.0, budget=1e6)
    cut = recommendation(workload, goal, late, moves=5)
    assert cut.left > 0 and cut.cut
    documents = [document_of(answer, workload) for answer in (complete, part, cut)]
    assert [document["cut"] for document in documents] == [False, False, True]
    assert CUT in list(notes(cut)) and CUT not in list(notes(part))
