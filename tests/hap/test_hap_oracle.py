"""Every exact method against enumeration on tiny theories, and every method against the optimum."""

from __future__ import annotations

from collections import Counter

import pytest

from hap.hap_cases import known, programs
from hetplan.formulations.hap.data import HapData
from hetplan.formulations.hap.family import FAMILY
from hetplan.solvers.options import Options
from hetplan.solvers.registry import solve
from hetplan.solvers.result import Result
from hetplan.solvers.run import Run

SEEDS = range(240)


def run(data: HapData, method: str) -> Result[object]:
    """`method` with one thread."""
    return solve(FAMILY, data, method, Run(Options(threads=1, time_limit=60)))


def test_the_cases_reach_what_they_should() -> None:
    """Infeasible ones, several segments, many programs, all numbers of types."""
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        data, best = known(seed)
        seen["infeasible"] += best is None
        seen["several segments"] += data.segments > 1 and best is not None
        seen["many programs"] += len(programs(seed)) >= 5
        seen["costs nothing"] += best == 0
        seen[f"{len({d.flops_per_second for d in data.devices})} types"] += best is not None
    assert all(seen[key] >= 15 for key in ("infeasible", "several segments", "many programs")), seen
    assert all(seen[f"{n} types"] >= 15 for n in range(1, 5)), seen


@pytest.mark.parametrize("method", ["auto", "milp", "pyomo", "cp-sat"])
def test_exact_methods_equal_enumeration(method: str) -> None:
    for seed in SEEDS[:80] if method == "pyomo" else SEEDS:
        data, best = known(seed)
        result = run(data, method)
        if best is None:
            assert result.status == "infeasible" and result.message, seed
            continue
        assert result.objective == pytest.approx(best, rel=1e-6, abs=1e-9), seed
        assert result.bound is not None and result.bound <= best * (1 + 1e-9) + 1e-12, seed
        if method == "cp-sat":  # its ratios are rounded, its bound with them
            assert result.bound >= best * (1 - 2e-4), seed
        else:
            assert result.status == "optimal", (seed, result.gap)


@pytest.mark.parametrize("method", ["paper", "dp-even", "dp-proportional"])
def test_heuristics_are_feasible_and_never_better(method: str) -> None:
    ratios = []
    for seed in SEEDS:
        data, best = known(seed)
        result = run(data, method)
        assert result.bound is None
        if best is None:
            assert result.status == "infeasible"
            continue
        assert result.objective is not None, (seed, result.message)
        assert result.objective >= best * (1 - 1e-7), seed
        if best > 0:
            ratios.append(result.objective / best)
    assert min(ratios) < 1 + 1e-6 and max(ratios) > 1.01
