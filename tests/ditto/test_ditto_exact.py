"""The exact method beyond enumeration: against every θ by itself, with other parameters, ties,
stops and limits."""

from __future__ import annotations

import math
from random import Random

import pytest

from ditto.ditto_cases import SEEDS, data_of, middle_instance, optimum_of
from hetplan.formulations.ditto import exact
from hetplan.formulations.ditto.data import DittoData, Memory
from hetplan.formulations.ditto.exact import Parameters, TemplateSearch, ThetaInterval
from hetplan.formulations.ditto.family import FAMILY
from hetplan.formulations.ditto.intervals import CuttingPlanes
from hetplan.formulations.ditto.problem import compile_problem
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run, Stop
from stopping import cancelled_after

EVERY = 10**9  # labels per bucket that nothing is cut with


def tight(seed: int) -> DittoData:
    """A middle instance as it is, with few micro-batches, with memory that binds, or with both."""
    data, rng = middle_instance(seed), Random(seed)
    if seed % 2:
        data = data.model_copy(update={"micro_batches": rng.randint(2, 6)})
    if seed % 4 < 2:
        return data
    state, activation = [1.0] * data.layers, [rng.choice((0.2, 0.6)) for _ in range(data.layers)]
    room = {kind.name: sum(state) * rng.choice((0.25, 0.4, 0.6)) for kind in data.device_types}
    memory = Memory(device_bytes=room, layer_state_bytes=state, layer_activation_bytes=activation)
    return data.model_copy(update={"memory": memory})


def by_theta(data: DittoData) -> dict[int, float]:
    """The least T for every candidate θ by its number, without intervals, bounds or incumbent."""
    costs = {}
    for number in range(len(TemplateSearch(compile_problem(data), Run()).space.candidates)):
        search = TemplateSearch(compile_problem(data), Run())
        node = ThetaInterval(number, number, EVERY)
        priced = search.price(node, math.inf)
        search.incumbent.objective = math.inf  # what was met while prices were sought
        if math.isfinite(priced.bound):
            cost, cut, _ = search.label(node, priced)
            assert math.isinf(cut)
            if math.isfinite(cost):
                costs[number] = cost
    return costs


# Trying every theta takes four and ten seconds on the instances of these seeds.
SLOW = [0, 5]


@pytest.mark.parametrize("seed", [s for s in range(32) if s not in SLOW] + SLOW)
def test_the_search_equals_trying_every_theta(seed: int) -> None:
    data = tight(seed)
    costs = by_theta(data)
    result = solve(FAMILY, data, "exact", Run(Options(threads=1)))
    assert result.status == ("optimal" if costs else "infeasible")
    if not costs:
        return
    assert result.objective == pytest.approx(min(costs.values()), rel=2e-7)
    rng = Random(seed)
    for _ in range(10):  # bounds of intervals hold for every θ inside
        first, last = sorted(rng.choice(list(costs)) for _ in range(2))
        search = TemplateSearch(compile_problem(data), Run())
        priced = search.price(ThetaInterval(first, last, EVERY), math.inf)
        inside = min(cost for number, cost in costs.items() if first <= number <= last)
        assert priced.bound <= inside * (1 + 1e-9)
        cost, cut, _ = search.label(ThetaInterval(first, last, 2), priced)
        assert min(cost, cut, search.incumbent.threshold) <= inside * (1 + 1e-9)
        check_expansion(data, ThetaInterval(first, last, 2), costs)


def check_expansion(data: DittoData, node: ThetaInterval, costs: dict[int, float]) -> None:
    """With few labels per bucket, most of which are cut off, bounds of a node's parts hold."""
    search = TemplateSearch(compile_problem(data), Run(), Parameters(narrow=1e9))
    expansion = search.expand(node, math.inf)
    whole = [(expansion.dropped_bound, node)]
    for bound, part in list(expansion.children) or whole:
        inside = [cost for number, cost in costs.items() if part.first <= number <= part.last]
        least = min(inside, default=math.inf)
        assert min(bound, search.incumbent.threshold) <= least * (1 + 1e-9)


OTHERS = {
    "few labels": Parameters(width=1, widen=2, first_width=1),
    "all labels at once": Parameters(width=EVERY, narrow=1e9),
    "single values only": Parameters(narrow=1.0),
    "poor prices": Parameters(planes=CuttingPlanes(most=1)),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("seed", [*SEEDS[::4]])
def test_other_parameters_find_the_same_optimum(name: str, seed: int) -> None:
    best, outcome = optimum_of(seed), exact.solve(data_of(seed), Run(), OTHERS[name])
    assert outcome.stop == (Stop.INFEASIBLE if best is None else Stop.OPTIMAL)
    if best is not None:
        assert outcome.bound == pytest.approx(best.objective, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("seed", range(24))
def test_a_search_with_too_few_labels_says_so_and_keeps_a_bound(seed: int) -> None:
    data = tight(seed)
    optimum = solve(FAMILY, data, "exact").objective
    outcome = exact.solve(data, Run(), Parameters(width=1, most_width=1))
    assert outcome.stop in (Stop.OPTIMAL, Stop.INFEASIBLE, Stop.LIMIT)
    if outcome.stop is not Stop.OPTIMAL and optimum is not None:
        assert outcome.message
        assert outcome.bound is None or outcome.bound <= optimum * (1 + 1e-9)


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
    # Taken literally, the last stage is the slowest and 10.8 the price; within the tie it is the
    # first.
    result = solve(
        FAMILY, chain([1.0, 0.2, 0.2, 1.0 + 4e-10], 4, 8), method, Run(Options(threads=1))
    )
    assert result.status == "optimal"
    assert result.objective == pytest.approx(2.4 * 2 + 3.0, rel=1e-8)


@pytest.mark.parametrize("looks", [0, 1, 4, 40])
@pytest.mark.parametrize("seed", range(12))
def test_a_stopped_search_keeps_template_and_bound(seed: int, looks: int) -> None:
    data = middle_instance(seed)
    optimum = solve(FAMILY, data, "exact").objective
    result = solve(FAMILY, data, "exact", cancelled_after(looks))
    assert optimum is not None and result.objective is not None
    assert result.objective >= optimum * (1 - 1e-6)
    if result.stop is Stop.INTERRUPTED:
        assert result.bound is None or result.bound <= optimum * (1 + 1e-9)


def test_many_types_on_a_large_cluster_need_no_table_of_devices() -> None:
    kinds = [
        {
            "name": f"type{i}",
            "nodes": 50,
            "devices_per_node": 1,
            "forward_seconds": [1.0 + i] * 20,
            "backward_seconds": [1.0] * 20,
        }
        for i in range(5)
    ]
    data = DittoData.model_validate({"micro_batches": 300, "device_types": kinds})
    result = solve(FAMILY, data, "exact", Run(Options(threads=1)))
    assert result.status == "optimal"
    assert result.objective == pytest.approx(2.0 * (300 + 20 - 1))


def test_a_bound_above_every_template_is_infeasible_for_all() -> None:
    """One usable device whose memory holds no template: the bound of all layers exceeds what
    fitting stages cost."""
    seconds = ([2 / 3, 4 / 3, 2.0, 5 / 3, 2 / 3], [4 / 3, 8 / 3, 4.0, 10 / 3, 4 / 3])
    kinds = [
        {"name": name, "nodes": nodes, "devices_per_node": 1, "forward_seconds": seconds[0],
         "backward_seconds": seconds[1]}
        for name, nodes in (("none", 0), ("one", 1))
    ]  # fmt: skip
    memory = {
        "device_bytes": {"none": 16.0, "one": 10.0},
        "layer_state_bytes": [4.0, 2.0, 2.0, 2.0, 0.0],
        "layer_activation_bytes": [0.0, 2.0, 2.0, 1.0, 5.0],
    }
    data = DittoData.model_validate({"micro_batches": 3, "device_types": kinds, "memory": memory})
    for method in ("exact", "cp-sat", "cp-sat-linear", "milp", "pyomo"):
        assert solve(FAMILY, data, method, Run(Options(threads=1))).status == "infeasible", method
