"""Theories in which properties are needed for each other, round in circles, the goal among them."""

from __future__ import annotations

import itertools
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest

from hap.hap_cases import all_programs, oracle
from hetplan.formulations.hap.data import HapData
from hetplan.formulations.hap.family import FAMILY
from hetplan.formulations.hap.needs import graph_of_needs
from hetplan.formulations.hap.outcomes import reduced_or_answered
from hetplan.formulations.hap.paths import shortest
from hetplan.formulations.hap.theory import ReducedTheory
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run


@cache
def circular(seed: int) -> HapData:
    """2 to 5 properties and 3 to 8 triples between any of them, many of them free or alike."""
    draw = Random(seed)
    names = [f"p{i}" for i in range(draw.randint(2, 5))]
    segments = draw.choice((1, 1, 2))

    def size(most: float, usual: float) -> float:
        return draw.choice((0.0, usual, usual, draw.uniform(0.0, most), draw.uniform(0.0, most)))

    triples: list[dict[str, Any]] = []
    for number in range(draw.randint(3, 8)):
        triple: dict[str, Any] = {
            "instruction": f"i{number}",
            "pre": [] if draw.random() < 0.3 else draw.sample(names, draw.choice((1, 1, 2))),
            "post": draw.sample(names, draw.choice((1, 1, 2))),
            "segment": draw.randrange(segments),
        }
        if draw.random() < 0.5:
            triple |= {"kind": "comm", "fixed_seconds": size(0.5, 0.1)}
            triple |= {"shared_seconds": size(1.5, 0.0)}
        else:
            triple |= {"kind": "compute", "fixed_flops": size(1.0, 0.1)}
            triple |= {"shared_flops": size(5.0, 0.0)}
        triples.append(triple)
    devices = [
        {"name": f"d{i}", "flops_per_second": draw.uniform(1.0, 5.0)}
        for i in range(draw.choice((1, 2, 2, 3)))
    ]
    return HapData.model_validate(
        {"devices": devices, "segments": segments, "triples": triples, "goal": draw.choice(names)}
    )


# The cheapest program computes the goal from what another one needs the goal for.
GOAL_IN_A_CIRCLE = {
    "devices": [
        {"name": "fast", "flops_per_second": 4336492021.911856},
        {"name": "slow", "flops_per_second": 1359868890.345429},
    ],
    "segments": 1,
    "triples": [
        {"instruction": "a", "pre": ["p2"], "post": ["p0", "p4"], "segment": 0,
         "kind": "compute", "fixed_flops": 1e8, "shared_flops": 0.0},
        {"instruction": "b", "pre": ["p0"], "post": ["p1"], "segment": 0,
         "kind": "compute", "fixed_flops": 18628948.45, "shared_flops": 372372016.228},
        {"instruction": "c", "pre": ["p0", "p4"], "post": ["p1"], "segment": 0,
         "kind": "compute", "fixed_flops": 1e8, "shared_flops": 0.0},
        {"instruction": "d", "pre": ["p0", "p1"], "post": ["p2", "p1"], "segment": 0,
         "kind": "compute", "fixed_flops": 1e8, "shared_flops": 1683610790.16},
        {"instruction": "e", "pre": [], "post": ["p2"], "segment": 0,
         "kind": "compute", "fixed_flops": 958340529.864806, "shared_flops": 0.0},
        {"instruction": "f", "pre": ["p0"], "post": ["p4"], "segment": 0,
         "kind": "comm", "fixed_seconds": 0.278, "shared_seconds": 1.403},
        {"instruction": "g", "pre": [], "post": ["p0"], "segment": 0,
         "kind": "comm", "fixed_seconds": 0.1, "shared_seconds": 1.249},
    ],
    "goal": "p1",
}  # fmt: skip


@pytest.mark.parametrize("method", ["exact", "cp-sat", "cp-sat-linear", "milp"])
def test_the_goal_may_be_needed_on_the_way_to_itself(method: str) -> None:
    data = HapData.model_validate(GOAL_IN_A_CIRCLE)
    result = solve(FAMILY, data, method, Run(Options(threads=1, time_limit=600.0)))
    assert result.status == "optimal" or method == "cp-sat-linear"
    assert result.objective == pytest.approx(0.791965671, rel=1e-6)
    assert oracle(data, all_programs(data)) == pytest.approx(0.791965671, rel=1e-6)


@pytest.mark.parametrize("seed", range(400))
def test_paths_read_backward_lead_from_the_same_start(seed: int) -> None:
    """The least cost of what leads to a node, by steps from the start until nothing changes."""
    theory = reduced_or_answered(circular(seed), Run(Options(threads=1)))
    if not isinstance(theory, ReducedTheory):
        return
    graph = graph_of_needs(theory, 1000)
    assert graph is not None
    cost = np.random.default_rng(seed).uniform(0.1, 1.0, len(graph.head))
    least = np.full(graph.n, np.inf)
    least[graph.start] = 0.0
    for _ in range(graph.n):
        np.minimum.at(least, graph.head, least[graph.tail] + cost)
    backward, arcs = graph.backward
    found = shortest(backward, cost[arcs][:, None])[0][::-1, 0]
    assert found == pytest.approx(least)


@pytest.mark.parametrize(
    ("method", "seed"),
    [
        *itertools.product(("exact", "milp"), range(1000)),
        *(("cp-sat", seed) for seed in range(8)),
        *(pytest.param("cp-sat", seed, marks=pytest.mark.wide) for seed in range(8, 400)),
    ],
)
def test_the_optimum_is_that_of_enumeration(seed: int, method: str) -> None:
    data = circular(seed)
    best = oracle(data, all_programs(data))
    result = solve(FAMILY, data, method, Run(Options(threads=1, time_limit=600.0)))
    assert result.status == ("infeasible" if best is None else "optimal")
    assert result.objective == (None if best is None else pytest.approx(best, rel=2e-6, abs=1e-12))
