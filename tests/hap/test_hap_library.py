"""Packaged instances of real networks are what their generator makes; methods end at their time
limit on them, and the gap study says what is predicted."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest

from evidence.papers import hap as papers
from evidence.speed.hap_theories import chain, theory_named
from hetplan.formulations import family
from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.family import FAMILY
from hetplan.instances.library import library, load_from_library
from hetplan.solvers.registry import evaluate, solve
from hetplan.solvers.run import Options, Run
from present import present

METHODS = ("exact", "deepspeed", "tag", "dp-proportional", "dp-even")
ENTRIES = {entry.name: entry for entry in library("hap")}


@pytest.mark.parametrize(
    "name", ["hap-vgg19-6", "hap-bert-moe-6", "hap-vgg19-6-segments2", "hap-gpt2-6-memory"]
)
def test_instances_are_those_of_the_networks(name: str) -> None:
    """Triple for triple; and no baseline is better than the record."""
    data, best = theory_named(name).data, ENTRIES[name].best_known()
    stored = ENTRIES[name].load().data
    assert isinstance(stored, HapData) and best is not None
    assert stored == data
    for method in ("dp-even", "dp-proportional"):
        objective = solve(family("hap"), data, method).objective
        assert objective is None or best.objective <= objective
        assert (objective is None) == (data.memory is not None), (
            "data parallelism fits without limit"
        )
    decision = HapDecision.model_validate(best.decision)
    assert evaluate(family("hap"), data, decision).objective == pytest.approx(
        best.objective, rel=1e-9
    )


CHAIN = "chain of 48 layers"


@cache
def packaged(name: str) -> Any:
    """An instance on which the method would be busy for seconds or minutes."""
    return chain(48, 4) if name == CHAIN else load_from_library(name).data


@pytest.mark.parametrize("method", ["exact", "milp", "cp-sat", "cp-sat-linear", "pyomo", "paper"])
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
    (CHAIN, 700),  # of its nearly hundred cells, the first ones
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


def test_experiments_are_those_of_the_paper() -> None:
    moe = papers.network("bert-moe", papers.mixed(16))
    assert [d.name for d in papers.devices(papers.mixed(8))] == ["V100"] * 2 + ["P100"] * 6
    assert moe.program.node("b1.moe.up.weight").shape[0] == 16 == len(moe.data.devices)
    assert moe.program.nodes[0].shape[0] == 32 * 16
    odd = papers.experts(6, 8)
    assert odd.program.node("b1.moe.up.weight").shape[0] == 8 and len(odd.data.devices) == 4


def test_baselines_of_the_paper() -> None:
    """DeepSpeed's even shares of any program, TAG's data parallelism, from the best on."""
    data = papers.network("vgg19", papers.mixed(8)).data
    cost = {m: present(papers.solved(data, m).objective) for m in METHODS}
    assert cost["exact"] <= cost["deepspeed"] * (1 + 1e-9) < cost["tag"] / 2
    assert cost["tag"] <= cost["dp-proportional"] * (1 + 1e-9) < cost["dp-even"] * (1 + 1e-9)
    even = solve(FAMILY, data, "deepspeed").decision
    assert even is not None and even.ratios[0] == pytest.approx([1 / 8] * 8)
