"""What formulations know before any model is built: bounds below every optimum, plans that hold and
cost what is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from astra.cases import oracle as astra_oracle, random_instance
from ditto import ditto_cases
from hetplan.formulations import family
from hetplan.formulations.poplar.data import Device, PoplarData
from hetplan.formulations.poplar.evaluate import evaluate as evaluate_poplar
from hetplan.formulations.poplar.paper import prior_result
from hetplan.formulations.poplar.problem import compile_problem as compile_poplar
from hetplan.solvers.general import Formulation
from hetplan.solvers.registry import evaluate, load
from hetplan.solvers.run import Run
from poplar.poplar_cases import instance, oracle


def of_poplar(seed: int) -> tuple[Any, float | None]:
    best = oracle(instance(seed))
    return instance(seed), None if best is None else best[0]


def of_astra(seed: int) -> tuple[Any, float | None]:
    return random_instance(seed), astra_oracle(random_instance(seed))


def of_ditto(seed: int) -> tuple[Any, float | None]:
    best = ditto_cases.optimum_of(seed)
    return ditto_cases.data_of(seed), None if best is None else best.objective


CASES: dict[str, Callable[[int], tuple[Any, float | None]]] = {
    "poplar": of_poplar,
    "astra": of_astra,
    "ditto": of_ditto,
}


def check(problem: str, data: Any, best: float) -> None:
    """The bound and the decision that the formulation of `data` begins with."""
    posed = load(family(problem).method("milp").target)(data, Run())
    if not isinstance(posed, Formulation):
        return
    known = posed.prior
    assert known.bound is not None and 0 <= known.bound <= best * (1 + 1e-12)
    if known.decision is not None:
        price = evaluate(family(problem), data, known.decision).objective
        assert price == pytest.approx(known.objective, rel=1e-12)
        assert price is not None and price >= best * (1 - 1e-9)


@pytest.mark.parametrize("problem", CASES)
@pytest.mark.parametrize("seed", ditto_cases.SEEDS)
def test_what_is_known_of_tiny_instances(problem: str, seed: int) -> None:
    data, best = CASES[problem](seed)
    if best is not None:
        check(problem, data, best)


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
    known = prior_result(data, compile_poplar(data))
    assert known.decision is not None
    assert evaluate_poplar(data, known.decision).objective == pytest.approx(known.objective)
