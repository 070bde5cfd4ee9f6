"""Every exact method of the family table against enumeration."""

from __future__ import annotations

import pytest

from amp.cases import CASES, QUICK, data_of, exact_methods, optimum_of
from hetplan.formulations.amp.family import FAMILY
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run, Stop


def pairs() -> list[object]:
    """(method, case); on most cases only with `-m wide`."""
    return [
        pytest.param(
            method.name,
            case,
            id=f"{method.name}-{case[0]}{'' if case[1] is None else f'x{case[1]}'}",
            marks=() if case in QUICK else pytest.mark.wide,
        )
        for method in exact_methods()
        for case in CASES
    ]


@pytest.mark.parametrize(("method", "case"), pairs())
def test_exact_method_equals_enumeration(method: str, case: tuple[int, int | None]) -> None:
    best = optimum_of(case)
    result = solve(FAMILY, data_of(case), method, Run(Options(time_limit=120, threads=1)))
    if best is None:
        assert (result.stop, result.status) == (Stop.INFEASIBLE, "infeasible"), result.message
        assert result.decision is None
        assert result.bound is None
        return
    assert (result.stop, result.status) == (Stop.OPTIMAL, "optimal"), result.message
    assert result.objective == pytest.approx(best.objective, rel=1e-6, abs=1e-9)
    assert result.bound is not None
    assert result.bound <= best.objective * (1 + 1e-9) + 1e-12
