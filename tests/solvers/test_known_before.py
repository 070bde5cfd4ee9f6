"""What general methods know before they build: bounds below every optimum, plans that hold and cost
what is said."""

from __future__ import annotations

import pytest

from astra.cases import oracle as astra_oracle
from astra.cases import random_instance
from ditto import ditto_cases
from hetplan.formulations.astra import model as astra_model
from hetplan.formulations.astra.evaluate import evaluate as evaluate_astra
from hetplan.formulations.ditto import model as ditto_model
from hetplan.formulations.ditto.evaluate import evaluate as evaluate_ditto
from hetplan.formulations.ditto.problem import compile_problem as compile_ditto
from hetplan.formulations.ditto.problem import infeasible_because as ditto_infeasible
from hetplan.formulations.poplar import plans
from hetplan.formulations.poplar.data import Device, PoplarData
from hetplan.formulations.poplar.evaluate import evaluate as evaluate_poplar
from hetplan.formulations.poplar.problem import compile_problem as compile_poplar
from hetplan.instances.library import Entry, library
from hetplan.solvers.result import Outcome
from hetplan.solvers.run import Run
from poplar.poplar_cases import instance, oracle


@pytest.mark.parametrize("seed", range(120))
def test_poplar_bound_and_plan(seed: int) -> None:
    data = instance(seed)
    problem, best = compile_poplar(data), oracle(data)
    if best is None:
        return
    known = plans.known_before(problem)
    assert known.bound is not None and 0 < known.bound <= best[0]
    assert known.decision is not None
    assert evaluate_poplar(data, known.decision).objective == pytest.approx(
        known.objective, rel=1e-12
    )


@pytest.mark.parametrize("entry", library("poplar"), ids=lambda entry: entry.name)
def test_poplar_bound_and_plan_of_the_packaged_instances(entry: Entry) -> None:
    data, record = entry.load().data, entry.best_known()
    known = plans.known_before(compile_poplar(data))
    assert record is not None and record.objective is not None
    assert known.bound is not None and known.bound <= record.objective * (1 + 1e-12)
    assert known.decision is not None and known.objective is not None
    assert evaluate_poplar(data, known.decision).objective == pytest.approx(
        known.objective, rel=1e-12
    )
    assert known.objective >= record.objective * (1 - 1e-9)


@pytest.mark.parametrize("total", [1, 3, 7, 9, 21, 49, 63, 70, 99, 147])
def test_poplar_shares_add_up_where_speeds_round_badly(total: int) -> None:
    """Speeds of 1/0.1 and 1/0.3 make shares that floats put on the wrong side of a whole number."""
    devices = [Device(name=n, step_seconds=[t]) for n, t in (("a", 0.1), ("b", 0.3), ("c", 0.7))]
    data = PoplarData(
        zero_stage=0,
        global_batch=total,
        comm_seconds=0.0,
        devices=[d for d in devices for _ in (0, 1)],
    )
    decision, seconds = plans.shares_by_speed(compile_poplar(data))
    assert evaluate_poplar(data, decision).objective == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("seed", range(80))
def test_astra_bound_and_decision(seed: int) -> None:
    data = random_instance(seed)
    posed, best = astra_model.formulate(data, Run()), astra_oracle(data)
    if isinstance(posed, Outcome) or best is None:
        return
    known = posed.known
    assert known.bound is not None and known.bound <= best
    if known.decision is not None:
        assert evaluate_astra(data, known.decision).objective == pytest.approx(
            known.objective, rel=1e-12
        )


@pytest.mark.parametrize("seed", ditto_cases.SEEDS)
def test_ditto_bound_and_template(seed: int) -> None:
    data, best = ditto_cases.data_of(seed), ditto_cases.optimum_of(seed)
    problem = compile_ditto(data)
    if ditto_infeasible(problem) is not None or best is None:
        return
    posed = ditto_model.formulate(data, Run())
    assert not isinstance(posed, Outcome)
    known = posed.known
    assert known.bound is not None and known.bound <= best.objective
    if known.decision is not None:
        assert evaluate_ditto(data, known.decision).objective == pytest.approx(
            known.objective, rel=1e-12
        )
