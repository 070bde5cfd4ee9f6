"""The constraint models of method `cp-sat`: each configuration by itself against enumeration, and
the search over configurations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from amp.cases import CASES, QUICK, SMALL, data_of
from amp.mixed import mixed_cluster
from amp.oracle import Enumeration
from hetplan.formulations.amp.cp import Programme, read
from hetplan.formulations.amp.cp_search import Parameters, seconds_of, solve_by
from hetplan.formulations.amp.cp_tables import (
    Case,
    classes_of,
    configurations,
    equal_nodes,
    links_between,
    simple_bound,
)
from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.amp.evaluate import evaluate
from hetplan.formulations.amp.family import FAMILY
from hetplan.solvers import general
from hetplan.solvers.general import minimise
from hetplan.solvers.model import ModelAnswer
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Progress, Run, Stop
from quick import rest_wide

Named = tuple[int, int | None]  # seed and devices
# 34, 111, 112 and 148 tell whether ranks are ordered once for all stages or, wrongly, in each stage
# by itself.
HELD: list[Named] = [(34, None), (111, None), (112, None), (148, None), *SMALL[:20], (5, 6)]


def run(**options: object) -> Run:
    return Run(Options(**{"threads": 1, "time_limit": 120.0, **options}))  # type: ignore[arg-type]


def cases_of(data: AmpData) -> Iterator[Case]:
    """One per configuration, without a bound."""
    rates = np.array(data.bandwidth)
    levels = np.unique(rates[~np.eye(len(rates), dtype=bool)]).tolist() or [1.0]
    classes = classes_of(data, run())
    for chosen in configurations(data):
        yield Case(data, chosen, levels, 0.0, classes, links_between(data, classes))


def cheapest(case: Case) -> float | None:
    """The optimum of one configuration by enumeration."""
    c = case.chosen
    degrees = (c.pipeline, c.data, c.tensor, c.micro_batch, c.gas)
    found = Enumeration(case.data, degrees).best(math.inf)
    return None if found is None else found[0]


def ask(case: Case, largest: float) -> tuple[ModelAnswer, AmpDecision | None]:
    """The answer to one model, and its decision."""
    programme = Programme(replace(case, bound=simple_bound(case)), largest, run())
    answer = minimise("cp-sat", programme.model, run(), lambda incumbent, bound: None)
    return answer, read(programme, answer) if answer.has_solution else None


@pytest.mark.parametrize("named", rest_wide(HELD, 8), ids=str)
def test_model_of_each_configuration_equals_enumeration(named: Named) -> None:
    for case in cases_of(data_of(named)):
        best = cheapest(case)
        answer, decision = ask(case, case.slowest())
        if best is None:
            assert answer.stop is Stop.INFEASIBLE
            continue
        assert answer.stop is Stop.OPTIMAL, answer.message
        assert decision is not None and answer.bound is not None
        objective = evaluate(case.data, decision).objective
        assert objective == pytest.approx(best, rel=1e-6, abs=1e-9)
        assert seconds_of(case.data, decision) == pytest.approx(objective, rel=1e-12, abs=1e-15)
        assert best * (1 - 1e-6) - 1e-9 <= answer.bound <= best * (1 + 1e-12)


@pytest.mark.parametrize("named", rest_wide(HELD, 6), ids=str)
def test_nothing_is_found_below_the_optimum_and_the_optimum_is_found_at_it(named: Named) -> None:
    for case in cases_of(data_of(named)):
        best = cheapest(case)
        if best is not None and best > 0:
            assert ask(case, best * (1 - 1e-6))[0].stop is Stop.INFEASIBLE
            assert ask(case, best * (1 + 1e-9))[1] is not None


@pytest.mark.parametrize("named", rest_wide(CASES[::4], 8), ids=str)
def test_simple_bounds_are_below_and_the_slowest_total_above_every_configuration(
    named: Named,
) -> None:
    for case in cases_of(data_of(named)):
        best = cheapest(case)
        if best is not None:
            assert 0 <= simple_bound(case) <= best
            assert case.slowest() >= best


def test_devices_and_nodes_that_may_be_exchanged() -> None:
    data = mixed_cluster(nodes=5, per_node=3, layers=4)
    classes = classes_of(data, run())
    assert [each.devices for each in classes] == [tuple(range(d, d + 3)) for d in range(0, 15, 3)]
    links = links_between(data, classes)
    assert equal_nodes(classes, links) == [([0], [2]), ([1], [3]), ([2], [4])]
    rates = [list(row) for row in data.bandwidth]
    rates[0][3] = rates[3][0] = 5e9  # one link sets apart a device of each of two nodes
    data = data.model_copy(update={"bandwidth": rates})
    classes = classes_of(data, run())
    assert [each.devices for each in classes][:4] == [(0,), (1, 2), (3,), (4, 5)]
    assert equal_nodes(classes, links_between(data, classes)) == [([4], [6])]


@pytest.mark.parametrize("named", QUICK[:3], ids=str)
def test_without_any_gap_the_search_ends(named: Named) -> None:
    exact = solve(FAMILY, data_of(named), "exact", run())
    result = solve(FAMILY, data_of(named), "cp-sat", run(gap=0.0))
    assert result.status == exact.status and result.stop is exact.stop
    if exact.objective is not None:
        assert result.objective == pytest.approx(exact.objective, rel=1e-7)


def test_a_cancelled_search_keeps_decision_and_bound() -> None:
    """The user stops the run once it has an incumbent."""
    going = run(time_limit=None)

    def watch(progress: Progress) -> None:
        if progress.incumbent is not None:
            going.cancel.set()

    going.watch = watch
    result = solve(FAMILY, mixed_cluster(nodes=2, per_node=4, layers=12), "cp-sat", going)
    assert (result.stop, result.status) == (Stop.INTERRUPTED, "feasible")
    assert result.bound is not None and result.objective is not None
    assert 0 < result.bound < result.objective


def test_huge_models_are_given_up() -> None:
    data = mixed_cluster(nodes=2, per_node=2, layers=6)
    outcome = solve_by("cp-sat", data, run(), Parameters(most_terms=100))
    assert outcome.stop is Stop.LIMIT and "more than 100 entries" in outcome.message
    assert outcome.bound is not None and outcome.decision is None


def test_an_option_that_ends_models_early_ends_the_search() -> None:
    native = {"cp-sat": {"stop_after_first_solution": True}}
    data = mixed_cluster(nodes=2, per_node=2, layers=6)
    outcome = solve_by("cp-sat", data, run(native=native, time_limit=None))
    best = solve(FAMILY, data, "exact", run()).objective
    assert outcome.decision is not None and outcome.bound is not None and best is not None
    assert outcome.bound <= best


def test_a_failing_back_end_is_an_error_that_keeps_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = ModelAnswer(stop=Stop.ERROR, message="broken")
    monkeypatch.setattr(general, "minimise", lambda *arguments: answer)
    data = mixed_cluster(nodes=2, per_node=2, layers=6)
    outcome = solve_by("cp-sat", data, run())
    assert outcome.stop is Stop.ERROR and "broken" in outcome.message
    assert outcome.bound is not None and outcome.bound > 0


def test_the_models_of_all_configurations_are_handed_over() -> None:
    models: list[object] = []
    data = mixed_cluster(nodes=2, per_node=2, layers=6)
    solve(FAMILY, data, "cp-sat", replace(run(), tap=models.append))
    assert len(models) == len(list(configurations(data)))
