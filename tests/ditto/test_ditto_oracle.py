"""Every exact method against brute force, and every heuristic never below it."""

from __future__ import annotations

from collections import Counter

import pytest

from ditto.ditto_cases import SEEDS, data_of, optimum_of
from hetplan.formulations.ditto.evaluate import evaluate
from hetplan.formulations.ditto.family import FAMILY
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run, Stop
from quick import rest_wide

EXACT = [method.name for method in FAMILY.methods if method.exact and method.name != "auto"]
HEURISTICS = [method.name for method in FAMILY.methods if not method.exact]


def equals_enumeration(name: str, seed: int) -> None:
    """Status, objective and bound of an exact method against brute force."""
    best = optimum_of(seed)
    result = solve(FAMILY, data_of(seed), name, Run(Options(threads=1, time_limit=600)))
    if best is None:
        assert (result.status, result.stop) == ("infeasible", Stop.INFEASIBLE) and result.message
        return
    assert result.status == "optimal"
    assert result.objective == pytest.approx(best.objective, rel=1e-6, abs=1e-12)
    assert result.bound is not None
    assert result.bound <= best.objective * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("seed", SEEDS)
def test_exact_methods_equal_enumeration(name: str, seed: int) -> None:
    equals_enumeration(name, seed)


# Seeds whose templates have several stages, groups, memory that binds, memory that nothing fits
# into, few micro-batches, and a place of the slowest stage that is neither end.
TELLING = (3, 5, 9, 11, 14, 21, 24, 29, 43, 44)


@pytest.mark.parametrize("instance", TELLING)
def test_the_constraint_model_on_telling_instances(instance: int) -> None:
    equals_enumeration("cp-sat", instance)


@pytest.mark.parametrize("name", HEURISTICS)
@pytest.mark.parametrize("seeds", rest_wide([SEEDS[::3], SEEDS], 1), ids=len)
def test_heuristics_never_fall_below_the_optimum(name: str, seeds: range) -> None:
    found = 0
    for seed in seeds:
        best = optimum_of(seed)
        result = solve(FAMILY, data_of(seed), name, Run(Options(threads=1)))
        assert (result.bound, result.stop) == (None, Stop.DONE)
        if result.objective is None:
            assert result.message, f"seed {seed} says nothing of why it has no template"
            continue
        found += 1
        assert best is not None
        assert result.objective >= best.objective * (1 - 1e-9)
    assert found > len(seeds) / 10


@pytest.mark.parametrize("seed", SEEDS)
def test_evaluator_agrees_with_the_oracle(seed: int) -> None:
    best = optimum_of(seed)
    if best is not None:
        assert evaluate(data_of(seed), best.decision).objective == pytest.approx(
            best.objective, rel=1e-12
        )


def test_the_seeds_cover_what_they_claim() -> None:
    kinds = Counter[str]()
    for seed in SEEDS:
        data, best = data_of(seed), optimum_of(seed)
        devices = sum(kind.nodes for kind in data.device_types) * data.devices_per_node
        kinds["infeasible"] += best is None
        kinds["no devices"] += devices == 0
        kinds["memory"] += data.memory is not None
        kinds["memory, nothing fits"] += data.memory is not None and best is None and devices > 0
        kinds["few micro-batches"] += min(devices, data.layers) > data.micro_batches
        kinds["several stages"] += best is not None and len(best.decision.stages) > 1
        kinds["groups"] += best is not None and any(
            stage.devices > 1 for stage in best.decision.stages
        )
    assert min(kinds.values()) >= 5, kinds
