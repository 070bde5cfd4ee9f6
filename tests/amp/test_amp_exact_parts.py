"""The parts of the exact method: cells, cuts, row bounds, label search."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from amp.cases import CASES, data_of, optimum_of
from amp.generate import instance
from amp.mixed import mixed_cluster
from amp.oracle import Enumeration
from hetplan.formulations.amp.evaluate import evaluate
from hetplan.formulations.amp.exact import Parameters, solve
from hetplan.formulations.amp.group_labels import GroupLabels, GroupLimits
from hetplan.formulations.amp.label_children import Completions, least_together
from hetplan.formulations.amp.layout import lay_out
from hetplan.formulations.amp.problem import compile_problem, find_cells
from hetplan.formulations.amp.rows import (
    RowModel,
    SyncBox,
    bound_stages,
    halves,
    root_bound,
    row_model,
)
from hetplan.solvers.labels import KeptLabels
from hetplan.solvers.run import Options, Run, Stop
from quick import rest_wide
from stopping import cancelled_after

FEASIBLE = [case for case in CASES[:120] if case[1] is None]


def never() -> None:
    """Nobody stops the search."""


def models(case: tuple[int, int | None]) -> Iterator[tuple[RowModel, float | None]]:
    """The row bound of every configuration, with the configuration's optimum by enumeration."""
    data = data_of(case)
    problem = compile_problem(data)
    cells = find_cells(problem)
    for config in problem.configurations():
        c = (config.pipeline, config.data, config.tensor, config.micro_batch, config.gas)
        best = Enumeration(data, c).best(float("inf"))
        yield row_model(lay_out(problem, cells, config)), None if best is None else best[0]


@pytest.mark.parametrize("case", rest_wide(FEASIBLE, 8))
def test_row_bounds_never_exceed_the_optimum_of_a_configuration(
    case: tuple[int, int | None],
) -> None:
    for model, best in models(case):
        low, high = float(model.sync_values[0]), float(model.sync_values[-1])
        boxes = [SyncBox(low, high, bound_stages(model, high, np.inf, never).bound)]
        for _ in range(3):
            boxes = [part for box in boxes for part in halves(model, box, np.inf, never)]
        if best is not None:
            assert min(box.bound for box in boxes) <= best * (1 + 1e-9) + 1e-12
            assert root_bound(model, never) <= best * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("case", rest_wide(FEASIBLE[::3], 8))
def test_a_narrow_search_leaves_a_valid_bound_behind(
    width: int, case: tuple[int, int | None]
) -> None:
    """Whatever is cut away, the smaller of the cost found and the bound dropped is no more than the
    best."""
    for model, best in models(case):
        if best is None:
            continue
        most = float(model.sync_values[-1])
        intervals = bound_stages(model, most, np.inf, never).intervals
        rules = GroupLabels(model, intervals, SyncBox(0.0, most, 0.0), GroupLimits())
        labelled = rules.search(Run(), width=width, limit=np.inf)
        seconds, strategy = rules.best(labelled) or (np.inf, None)
        assert min(seconds, labelled.cut_bound) <= best * (1 + 1e-9) + 1e-12
        if strategy is not None:
            evaluation = evaluate(data_of(case), strategy.decision())
            assert evaluation.objective == pytest.approx(seconds, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("looks", [20, 60, 100, 150, 200, 250])
def test_wherever_the_search_is_stopped_its_incumbent_is_kept(looks: int) -> None:
    """In the bound of a configuration, in its division into boxes, in a label search."""
    data = mixed_cluster(nodes=2, per_node=2, layers=6)
    stopped, optimum = solve(data, cancelled_after(looks)), solve(data, Run())
    assert stopped.stop is Stop.INTERRUPTED and stopped.decision is not None
    assert stopped.bound is not None and optimum.bound is not None
    assert 0 < stopped.bound <= optimum.bound


def test_without_time_there_is_a_decision_all_the_same() -> None:
    stopped = solve(mixed_cluster(nodes=2, per_node=2, layers=6), Run(Options(time_limit=1e-9)))
    assert stopped.stop is Stop.LIMIT
    assert stopped.decision is not None and stopped.bound is not None


def test_a_search_out_of_memory_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    search = GroupLabels.search

    def greedy(rules: GroupLabels, run: Run, *, width: int, limit: float) -> KeptLabels:
        if width > 1:
            raise MemoryError
        return search(rules, run, width=width, limit=limit)

    monkeypatch.setattr(GroupLabels, "search", greedy)
    short = solve(instance(0, devices=6), Run(), Parameters(first_width=1))
    assert short.stop is Stop.LIMIT and "memory" in short.message
    assert short.decision is not None and short.bound is not None


def test_searches_that_need_more_than_they_may_stay_open() -> None:
    """Without room for labels the answer is a bound and what the orders found, not a proof."""
    data = instance(0, devices=6)
    whole, short = solve(data, Run()), solve(data, Run(), Parameters(first_width=1, most_width=0))
    assert whole.stop is Stop.OPTIMAL and short.stop is Stop.LIMIT
    assert short.bound is not None and whole.bound is not None
    assert short.bound < whole.bound and "memory" in short.message


@pytest.mark.parametrize("seed", range(0, 40, 4))
def test_groups_laid_out_in_too_many_ways_are_searched_all_the_same(seed: int) -> None:
    """With only pure groups and halves listed at first, the optimum is the same."""
    data = instance(seed, devices=6)
    few = solve(data, Run(), Parameters(shapes=1))
    best = optimum_of((seed, 6))
    assert few.stop is (Stop.INFEASIBLE if best is None else Stop.OPTIMAL)
    if best is not None:
        assert few.bound == pytest.approx(best.objective, rel=1e-6)


def test_the_least_cost_at_which_rows_absorb_all_is_that_of_the_best_choice_of_levels() -> None:
    rng = np.random.default_rng(0)
    rows, burdens, levels = 3, 2, 3
    costs = np.sort(rng.integers(1, 9, (60, rows, burdens, levels)).astype(float), axis=-1)
    costs[:, :, :, 0] = costs[:, :, :1, 0]  # to absorb nothing costs the same for all burdens
    costs = np.maximum.accumulate(costs, axis=-1)
    costs[rng.random(costs.shape[:3]) < 0.2, -1] = np.inf  # a level that the row cannot absorb
    need, most = rng.integers(0, 9, (60, burdens)), np.array([2, 4])
    found = least_together(costs, need, most)
    absorbed = np.stack([np.zeros(2), np.ones(2), most])  # [A, H]
    for child in range(60):
        per_burden = [
            min(
                (
                    max(costs[child, row, h, level] for row, level in enumerate(chosen))
                    for chosen in product(range(levels), repeat=rows)
                    if absorbed[list(chosen), h].sum() >= need[child, h]
                ),
                default=np.inf,
            )
            for h in range(burdens)
        ]
        assert found[child] == max(per_burden)
    assert np.isinf(found).any() and np.isfinite(found).any()


def test_a_row_costs_what_its_best_interval_costs() -> None:
    """As Lemma 6 says it: over the intervals that the row's slowest stage so far leaves open."""
    rng = np.random.default_rng(1)
    waits, low, high = 3, np.array([1.0, 2.0, 5.0]), np.array([2.0, 4.0, 8.0])
    ahead = rng.integers(1, 30, (3, 2, 4, 1, 2)).astype(float)
    none = np.full((1, *ahead.shape[1:]), np.inf)
    from_low = (waits * low)[:, None, None, None, None] + ahead
    later = np.minimum.accumulate(np.concatenate([none, none, from_low[::-1]]))[::-1]
    tables = Completions(waits, np.append(low, 5.0), high, np.concatenate([ahead, none]), later)
    for top, state, end in product((0.0, 1.5, 2.0, 3.0, 4.5, 8.0, 9.0), range(2), range(4)):
        at = np.array([state]), np.array([end])
        found = tables.row_costs(*at, np.array([7.0]), np.array([top]))[0]
        open_ones = [q for q in range(3) if high[q] >= top]
        expected = [7.0 + waits * max(top, low[q]) + ahead[q, state, end] for q in open_ones]
        assert (found == np.min([*expected, none[0, 0, 0]], axis=0)).all()
