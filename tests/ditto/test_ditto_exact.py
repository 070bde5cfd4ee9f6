"""The exact method beyond enumeration: against every θ tried one by one, ties, stops, limits and growth."""

from __future__ import annotations

import math
from random import Random

import pytest

from ditto.ditto_cases import middle_instance
from hetplan.errors import UnsupportedError
from hetplan.formulations.ditto.data import DittoData
from hetplan.formulations.ditto.exact.search import Relaxer
from hetplan.formulations.ditto.exact.space import Space
from hetplan.formulations.ditto.family import FAMILY
from hetplan.formulations.ditto.problem import compile_problem
from hetplan.solvers.options import Options
from hetplan.solvers.registry import solve
from hetplan.solvers.result import Stop
from hetplan.solvers.run import Run


def by_theta(space: Space) -> list[tuple[float, float]]:
    """(θ, least T with such a k*) for every candidate θ, without intervals, incumbent or prices."""
    answers = [(float(theta), Relaxer(space, 0.0)(theta, theta, math.inf)) for theta in space.candidates]
    return [(theta, answer.bound) for theta, answer in answers if answer.bound is not None]


@pytest.mark.parametrize("seed", range(40))
def test_the_search_equals_trying_every_theta(seed: int) -> None:
    data = middle_instance(seed)
    space = Space(compile_problem(data))
    each = by_theta(space)
    result = solve(FAMILY, data, "exact", Run(Options(threads=1)))
    assert result.status == "optimal"
    assert result.objective == pytest.approx(min(cost for _, cost in each), rel=2e-7)
    bounds_hold(space, each, Random(seed))


def bounds_hold(space: Space, each: list[tuple[float, float]], rng: Random) -> None:
    """The bound of random intervals, as its slope raises it, is kept by the optimum of every θ inside."""
    relax = Relaxer(space, 0.0)
    for _ in range(10):
        low, high = sorted(rng.choice(each)[0] for _ in range(2))
        answer = relax(low, high, max(cost for _, cost in each))
        assert answer.bound is not None
        for theta, cost in each:
            if low <= theta <= high:
                assert cost >= answer.bound + answer.slope * (theta - low) - 1e-9


def chain(work: list[float], nodes: int, micro_batches: int) -> DittoData:
    """One type of single devices."""
    kind = {
        "name": "a",
        "nodes": nodes,
        "devices_per_node": 1,
        "forward_seconds": [0.0] * len(work),
        "backward_seconds": work,
    }
    return DittoData.model_validate({"micro_batches": micro_batches, "device_types": [kind]})


@pytest.mark.parametrize("method", [method.name for method in FAMILY.methods if method.exact])
def test_a_nearly_slowest_stage_counts_as_slowest(method: str) -> None:
    # Taken literally, the last stage is the slowest and 10.8 the price; within the tie it is the first.
    result = solve(FAMILY, chain([1.0, 0.2, 0.2, 1.0 + 4e-10], 4, 8), method, Run(Options(threads=1)))
    assert result.status == "optimal"
    assert result.objective == pytest.approx(2.4 * 2 + 3.0, rel=1e-8)


def test_a_uniform_pipeline_costs_what_it_must() -> None:
    result = solve(FAMILY, chain([1.0] * 6, 6, 10), "exact")
    assert result.objective == pytest.approx(10 + 6 - 1)


class Impatient(Run):
    """Stops after a number of looks at the clock."""

    looks: int

    @property
    def should_stop(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.mark.parametrize("looks", [0, 1, 2, 4])
def test_a_stopped_search_keeps_template_and_bound(looks: int) -> None:
    for seed in range(12):
        data = middle_instance(seed)
        optimum = solve(FAMILY, data, "exact").objective
        run = Impatient(Options(threads=1))
        run.looks = looks
        result = solve(FAMILY, data, "exact", run)
        assert optimum is not None
        assert result.objective is not None
        assert result.objective >= optimum * (1 - 1e-6)
        if result.stop is Stop.LIMIT:
            assert result.bound is None or result.bound <= optimum * (1 + 1e-9)


def test_too_many_device_vectors_are_refused_by_name() -> None:
    kinds = [
        {
            "name": f"type{i}",
            "nodes": 50,
            "devices_per_node": 1,
            "forward_seconds": [1.0 + i] * 60,
            "backward_seconds": [1.0] * 60,
        }
        for i in range(5)
    ]
    data = DittoData.model_validate({"micro_batches": 300, "device_types": kinds})
    with pytest.raises(UnsupportedError, match="vectors of devices"):
        solve(FAMILY, data, "exact")
