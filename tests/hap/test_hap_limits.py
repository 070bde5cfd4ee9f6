"""Methods end at their time limit, with what they have, wherever it finds them."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest

from hetplan.formulations.hap.family import FAMILY
from hetplan.formulations.hap.theories import chain
from hetplan.instances.library import load_from_library
from hetplan.solvers.options import Options
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Run

CHAIN = "chain of 96 layers"


@cache
def packaged(name: str) -> Any:
    """An instance on which the method would be busy for seconds or minutes."""
    return chain(96, 4) if name == CHAIN else load_from_library(name).data


@pytest.mark.parametrize("method", ["exact", "milp", "cp-sat", "pyomo", "paper"])
@pytest.mark.parametrize("name", ["hap-vit-2blocks-6-segments2", "hap-gpt2-6-memory"])
def test_a_limit_that_has_passed_leaves_a_program(method: str, name: str) -> None:
    """The first program found, and the bound that needs no search."""
    result = solve(FAMILY, packaged(name), method, Run(Options(threads=1, time_limit=1e-9)))
    assert result.status == "feasible" and result.objective is not None
    if method == "paper":
        assert result.bound is None
    else:
        assert result.bound is not None and 0 < result.bound < result.objective


MOMENTS = [
    *itertools.product(
        ("hap-vit-2blocks-6-segments2", "hap-gpt2-6-memory", "hap-bert-moe-6"), (3, 200)
    ),
    (CHAIN, 1600),  # of its hundreds of cells, the first ones
]


@pytest.mark.parametrize(("name", "ticks"), MOMENTS)
def test_the_search_stops_at_any_moment(
    name: str, ticks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that moves with each look at it, so that the limit comes after so many: from then
    on only those look who are about to stop."""
    looks, begun = 0, dict[int, tuple[Run, int]]()

    def elapsed(run: Run) -> float:
        nonlocal looks
        looks += 1
        _, since = begun.setdefault(id(run), (run, looks))
        return (looks - since) / ticks

    data = packaged(name)
    monkeypatch.setattr(Run, "elapsed", property(elapsed))
    result = solve(FAMILY, data, "exact", Run(Options(threads=1, time_limit=1.0)))
    assert looks < ticks + 100
    assert result.objective is not None and result.bound is not None
    assert 0 < result.bound <= result.objective
    assert name != CHAIN or result.status == "feasible"
