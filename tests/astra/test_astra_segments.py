"""The exact methods of problem `astra` against brute force, each other and the properties of the problem."""

from __future__ import annotations

from functools import cache

import pytest

from astra.cases import oracle, random_instance
from hetplan.formulations import family
from hetplan.formulations.astra.data import AstraData
from hetplan.solvers.options import Options
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Run

ASTRA = family("astra")
EXACT = [method.name for method in ASTRA.methods if method.exact and method.name != "auto"]
best_of = cache(oracle_of := lambda seed: oracle(random_instance(seed)))


def run_one(data: AstraData, method: str, **options: object):  # type: ignore[no-untyped-def]
    return solve(ASTRA, data, method, Run(Options(threads=1, time_limit=60, **options)))  # type: ignore[arg-type]


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("block", range(10))
def test_equal_to_brute_force(method: str, block: int) -> None:
    for seed in range(22 * block, 22 * (block + 1)):
        result, best = run_one(random_instance(seed), method), best_of(seed)
        if best is None:
            assert result.status == "infeasible" and result.message, (seed, result)
        else:
            assert result.status == "optimal", (seed, result)
            assert result.objective == pytest.approx(best, rel=1e-6, abs=1e-9), seed


def test_the_oracle_sees_every_kind_of_instance() -> None:
    instances = [random_instance(seed) for seed in range(220)]
    infeasible = sum(best_of(seed) is None for seed in range(220))
    assert 30 <= infeasible <= 110
    assert any(best_of(s) is None and i.equal_layers_per_type for s, i in enumerate(instances))
    assert any(best_of(s) is None and not i.equal_layers_per_type for s, i in enumerate(instances))


@pytest.mark.parametrize("block", range(4))
def test_paper_is_exact_under_its_own_restriction_and_never_better(block: int) -> None:
    for seed in range(55 * block, 55 * (block + 1)):
        data = random_instance(seed)
        result, best = run_one(data, "paper"), best_of(seed)
        if best is None:
            assert result.objective is None
        elif data.equal_layers_per_type:
            assert result.status == "optimal" and result.objective == pytest.approx(best, rel=1e-9)
        elif result.objective is not None:
            assert result.bound is None and result.objective >= best * (1 - 1e-9)
