"""Memory per device: the constraint, every exact method against enumeration, heuristics, what is infeasible."""

from __future__ import annotations

from collections import Counter

import pytest

from hap.hap_cases import all_programs, known_limited, oracle
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


def without(data: HapData) -> HapData:
    """The same without memory."""
    triples = [t.model_copy(update={"fixed_bytes": None, "shared_bytes": None}) for t in data.triples]
    return data.model_copy(update={"memory": None, "triples": triples})


def test_the_cases_reach_what_they_should() -> None:
    """Infeasible by memory alone, dearer by it, several segments, equal speeds of unequal memory."""
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        data, best = known_limited(seed)
        plain = oracle(without(data), all_programs(without(data)))
        assert data.memory is not None
        seen["infeasible"] += best is None
        seen["only for memory"] += best is None and plain is not None
        if best is None or plain is None:
            continue
        seen["dearer"] += best > plain * (1 + 1e-6)
        seen["dearer in several segments"] += best > plain * (1 + 1e-6) and data.segments > 1
        seen["as cheap"] += best <= plain * (1 + 1e-9)
        speeds = Counter(d.flops_per_second for d in data.devices)
        seen["equal speeds"] += max(speeds.values()) > 1
    print(seen)
    assert all(n >= 15 for n in seen.values()) and len(seen) == 6, seen


@pytest.mark.parametrize("method", ["auto", "milp", "pyomo", "cp-sat"])
def test_exact_methods_equal_enumeration(method: str) -> None:
    for seed in SEEDS[:60] if method == "pyomo" else SEEDS:
        data, best = known_limited(seed)
        result = run(data, method)
        if best is None:
            assert result.status == "infeasible" and result.message, (seed, result)
            continue
        assert result.objective == pytest.approx(best, rel=1e-6, abs=1e-9), seed
        assert result.bound is not None and result.bound <= best * (1 + 1e-7) + 1e-12, seed
        if method == "cp-sat":  # its ratios are rounded, its bound with them
            assert result.bound >= best * (1 - 1e-3) - 1e-9, seed
        else:
            assert result.status == "optimal", (seed, result.gap)
