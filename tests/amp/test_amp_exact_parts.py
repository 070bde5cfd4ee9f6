"""The parts of the exact method: cells, cuts, row bounds, label search."""

from __future__ import annotations

from itertools import combinations, pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amp.cases import CASES, data_of, optimum_of
from amp.generate import instance
from amp.mixed import mixed_cluster
from amp.oracle import Enumeration, degrees
from hetplan.formulations.amp.cells import find_cells
from hetplan.formulations.amp.chain import cut_chain
from hetplan.formulations.amp.evaluate import evaluate
from hetplan.formulations.amp.exact.columns import decision, make_grid, search
from hetplan.formulations.amp.exact.joint import Search, solve
from hetplan.formulations.amp.exact.layout import lay_out
from hetplan.formulations.amp.exact.rows import (
    SyncBox,
    bound_configuration,
    bound_stages,
    row_model,
)
from hetplan.formulations.amp.exchange import improved
from hetplan.formulations.amp.orders import first_strategy, placements, try_placement
from hetplan.formulations.amp.problem import compile_problem
from hetplan.solvers.run import Run

FEASIBLE = [case for case in CASES[:120] if case[1] is None]


def never() -> bool:
    return False


@pytest.mark.parametrize("case", FEASIBLE)
def test_devices_of_a_cell_are_interchangeable(case: tuple[int, int | None]) -> None:
    """Swapping two devices of a cell, or two cells of a class, changes nothing that the objective
    sees."""
    problem = compile_problem(data_of(case))
    cells = find_cells(problem)
    assert sorted(d for members in cells.members for d in members) == list(range(problem.devices))
    for k, members in enumerate(cells.members):
        for d in members:
            assert problem.device_type[d] == cells.type[k]
            for other, others in enumerate(cells.members):
                for e in others:
                    if d != e:
                        assert problem.bandwidth[d, e] == cells.bandwidth[k, other]
    for u, v in pairwise(range(cells.count)):
        if cells.kind[u] == cells.kind[v]:
            rest = [k for k in range(cells.count) if k not in (u, v)]
            assert (cells.bandwidth[u, rest] == cells.bandwidth[v, rest]).all()
            assert (cells.size[u], cells.bandwidth[u, u]) == (cells.size[v], cells.bandwidth[v, v])


def brute_cut(
    gas: int, times: np.ndarray, links: np.ndarray, sync: np.ndarray, params: np.ndarray
) -> float:
    stages, width = times.shape
    best = np.inf
    for inner in combinations(range(1, width - 1), stages - 1):
        ends = [0, *inner, width - 1]
        spans = list(enumerate(pairwise(ends)))
        t = [times[j, b] - times[j, a] for j, (a, b) in spans]
        total = (gas - 1) * max(t) + sum(t) + sum(links[j, ends[j + 1]] for j in range(stages - 1))
        best = min(best, total + max(sync[j] * (params[b] - params[a]) for j, (a, b) in spans))
    return float(best)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=150)
def test_cut_equals_enumeration(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(1, 9))
    stages = int(rng.integers(1, min(layers, 5) + 1))
    gas = int(rng.integers(1, 9))
    times = np.concatenate(
        [np.zeros((stages, 1)), np.cumsum(rng.random((stages, layers)), axis=1)], axis=1
    )
    links = rng.random((stages, layers + 1))
    sync = rng.random(stages) * rng.integers(0, 2)
    params = np.r_[0.0, np.cumsum(rng.integers(0, 3, layers))]
    cut = cut_chain(gas, times, links, sync=sync, params=params)
    assert cut is not None
    assert cut.seconds == pytest.approx(brute_cut(gas, times, links, sync, params), rel=1e-9)
    assert cut_chain(gas, times, links, sync=sync, params=params, limit=cut.seconds) is None


@pytest.mark.parametrize("case", FEASIBLE)
def test_row_bounds_never_exceed_the_optimum_of_a_configuration(
    case: tuple[int, int | None],
) -> None:
    data = data_of(case)
    problem = compile_problem(data)
    cells = find_cells(problem)
    configs = {(c.pipeline, c.data, c.tensor, c.micro_batch): c for c in problem.configurations()}
    for chosen in degrees(data):
        found = Enumeration(data, chosen).best(float("inf"))
        layout = lay_out(problem, cells, configs[chosen[:4]])
        model = row_model(layout)
        boxes = bound_configuration(model, lambda: np.inf, never)
        if found is None:
            continue
        best, _ = found
        assert boxes
        assert min(box.bound for box in boxes) <= best * (1 + 1e-9) + 1e-12
        least = bound_stages(model, float(model.sync_values[-1]), np.inf, never).bound
        assert least <= best * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("case", FEASIBLE[::3])
def test_a_narrow_search_leaves_a_valid_bound_behind(case: tuple[int, int | None]) -> None:
    """Width 1: whatever is cut away, the smaller of the cost found and the bound dropped is no more
    than the best."""
    data = data_of(case)
    problem = compile_problem(data)
    cells = find_cells(problem)
    configs = {(c.pipeline, c.data, c.tensor, c.micro_batch): c for c in problem.configurations()}
    for chosen in degrees(data):
        best = Enumeration(data, chosen).best(float("inf"))
        if best is None:
            continue
        layout = lay_out(problem, cells, configs[chosen[:4]])
        model = row_model(layout)
        most = float(model.sync_values[-1])
        stages = bound_stages(model, most, np.inf, never)
        found = search(
            make_grid(model, stages, most),
            SyncBox(0.0, most, 0.0),
            width=1,
            most_leaves=3,
            tolerance=1e-9,
            incumbent=np.full(1, np.inf),
            stop=np.zeros(1, dtype=np.int64),
        )
        assert min(found.cost, found.dropped) <= best[0] * (1 + 1e-9) + 1e-12
        assert found.finished
        if np.isfinite(found.cost):
            evaluation = evaluate(
                data, decision(layout, layout.shape_cells[found.shapes], found.ends)
            )
            assert evaluation.objective == pytest.approx(found.cost, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("seed", range(30))
def test_orders_are_priced_as_the_evaluator_does(seed: int) -> None:
    data = instance(seed, Random(seed).choice((2, 4, 6)))
    problem = compile_problem(data)
    cells = find_cells(problem)
    for config in problem.configurations():
        for array in placements(cells, config):
            found = try_placement(problem, config, array)
            if found is not None:
                evaluation = evaluate(data, found[1].decision())
                assert evaluation.objective == pytest.approx(found[0], rel=1e-9, abs=1e-12)


def test_some_cases_are_feasible_and_some_are_not() -> None:
    known = [optimum_of(case) for case in FEASIBLE]
    assert any(known)
    assert not all(known)


@pytest.mark.parametrize("seed", range(12))
def test_exchanges_never_harm_and_end_where_no_exchange_helps(seed: int) -> None:
    data = instance(seed, devices=6)
    problem = compile_problem(data)
    cells = find_cells(problem)
    for configuration in problem.configurations():
        found = first_strategy(problem, cells, configuration, lambda: False)
        if found is None:
            continue
        seconds, strategy = improved(problem, cells, found[1], found[0], lambda: False)
        assert seconds <= found[0]
        assert evaluate(data, strategy.decision()).objective == pytest.approx(seconds, rel=1e-9)
        again, _ = improved(problem, cells, strategy, seconds, lambda: False)
        assert again == seconds
        assert improved(problem, cells, found[1], found[0], lambda: True) == (found[0], found[1])


def test_exchanges_find_what_orders_do_not() -> None:
    """Six unlike devices in a random matrix: the exchanges of all seeds together save something."""
    saved = 0
    for seed in range(12):
        data = instance(seed, devices=6)
        problem = compile_problem(data)
        cells = find_cells(problem)
        for configuration in problem.configurations():
            found = first_strategy(problem, cells, configuration, lambda: False)
            if found is not None:
                better = improved(problem, cells, found[1], found[0], lambda: False)
                saved += better[0] < found[0] * (1 - 1e-6)
    assert saved > 0


def test_a_search_that_is_stopped_at_once_has_a_bound() -> None:
    data = mixed_cluster(nodes=2, per_node=2, layers=6)
    optimum = solve(data, Run())
    state = Search(compile_problem(data), find_cells(compile_problem(data)), Run())
    state.stop[0] = 1
    state.execute()
    assert state.bound is not None and optimum.bound is not None
    assert 0 < state.bound <= optimum.bound and not state.finished
