"""Packaged instances of real networks: their best decisions run on simulated devices as one device
does."""

from __future__ import annotations

import numpy as np
import pytest

from hetplan.errors import InputError
from hetplan.formulations import family
from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.library_networks import NETWORKS, theory_named
from hetplan.formulations.hap.spmd.execute import execute, random_values, reference
from hetplan.instances.library import library
from hetplan.solvers.registry import evaluate, solve

ENTRIES = {entry.name: entry for entry in library("hap")}
# as `vit`, twice as deep
PARAMETERS = [
    pytest.param(n, marks=pytest.mark.slow) if n == "hap-vit-24-6" else n for n in NETWORKS
]


@pytest.mark.parametrize("name", PARAMETERS)
def test_best_decisions_run_as_one_device_does(name: str) -> None:
    """The record's program, found for the published size, on small tensors: loss and all gradients,
    fp64."""
    best = ENTRIES[name].best_known()
    assert best is not None
    decision = HapDecision.model_validate(best.decision)
    theory = theory_named(name, tiny=True)
    data = ENTRIES[name].load().data
    assert isinstance(data, HapData)
    assert [t.instruction for t in data.triples] == [t.instruction for t in theory.data.triples]
    values = random_values(theory.program, 11)
    expected, found = reference(theory.program, values), execute(theory, decision, values)
    assert found.loss == pytest.approx(expected.loss, rel=1e-10)
    largest = max(float(np.abs(g).max()) for g in expected.gradients.values())
    assert set(found.gradients) == set(expected.gradients)
    for parameter, gradient in expected.gradients.items():
        assert float(np.abs(found.gradients[parameter] - gradient).max()) <= 1e-10 * largest, (
            parameter
        )


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
