"""Packaged instances of real networks are what their generator makes."""

from __future__ import annotations

import pytest

from hetplan.errors import InputError
from hetplan.formulations import family
from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.experiments import theory_named
from hetplan.instances.library import library
from hetplan.solvers.registry import evaluate, solve

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


def test_unknown_networks_are_refused() -> None:
    with pytest.raises(InputError, match="no such packaged network"):
        theory_named("hap-chain-2x2")
