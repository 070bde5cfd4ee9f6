"""Counted paths of the exact method: the number of stages, and memory that depends on it, against
enumeration."""

from __future__ import annotations

import math
from functools import cache
from random import Random

import pytest

from ditto.ditto_cases import SEEDS, data_of, middle_instance
from ditto.ditto_oracle import Optimum
from ditto.ditto_oracle import solve as enumerated
from ditto.test_ditto_exact import bounds_hold, by_theta
from hetplan.formulations.ditto.data import DittoData, Memory
from hetplan.formulations.ditto.exact.relaxer import Relaxer
from hetplan.formulations.ditto.exact.space import Space
from hetplan.formulations.ditto.family import FAMILY
from hetplan.formulations.ditto.problem import compile_problem
from hetplan.solvers.options import Options
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Run

EXACT = "hetplan.formulations.ditto.exact"


@pytest.fixture(params=(1.0, 1.2, 1e9), ids=("values", "narrow", "wide"))
def counting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """States of instances of any size go without a count; stages are counted on intervals up to
    this ratio.

    Poor prices and no better fees leave more to count.
    """
    monkeypatch.setattr(f"{EXACT}.search.FEW_VECTORS", 0)
    monkeypatch.setattr(f"{EXACT}.search.MANY_VECTORS", 0)
    monkeypatch.setattr(f"{EXACT}.relaxer.FEES", 1)
    monkeypatch.setattr(f"{EXACT}.relaxer.STEPS", 1)
    monkeypatch.setattr(f"{EXACT}.relaxer.WIDE_STEPS", 1)
    monkeypatch.setattr(f"{EXACT}.relaxer.NARROW", request.param)


@cache
def few(seed: int) -> tuple[DittoData, Optimum | None] | None:
    """The instance of `seed` with fewer micro-batches than stages would be possible, and its
    optimum."""
    data = data_of(seed)
    devices = sum(kind.nodes for kind in data.device_types) * data.devices_per_node
    most = min(devices, data.layers)
    if most < 2:
        return None
    data = data.model_copy(update={"micro_batches": Random(seed).randint(1, most - 1)})
    return data, enumerated(data)


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize("block", range(3))
def test_counted_paths_equal_enumeration(block: int) -> None:
    counted = binding = memory = 0
    for seed in range(block, len(SEEDS), 3):
        case = few(seed)
        if case is None:
            continue
        data, best = case
        result = solve(FAMILY, data, "exact", Run(Options(threads=1)))
        assert result.status == ("infeasible" if best is None else "optimal"), seed
        counted += bool(result.details.get("counted"))
        if best is not None:
            assert result.objective == pytest.approx(best.objective, rel=1e-6, abs=1e-12), seed
            assert result.bound is not None
            assert result.bound <= best.objective * (1 + 1e-9) + 1e-12
            binding += len(best.decision.stages) == data.micro_batches
            memory += data.memory is not None
    assert min(counted, binding, memory) >= 3, (counted, binding, memory)


def tight(seed: int) -> DittoData:
    """A middle instance with few micro-batches, with memory that binds, or with both."""
    data, rng = middle_instance(seed), Random(seed)
    if seed % 3:
        data = data.model_copy(update={"micro_batches": rng.randint(2, 6)})
    if seed % 3 == 1:
        return data
    state, activation = [1.0] * data.layers, [rng.choice((0.2, 0.6)) for _ in range(data.layers)]
    room = {kind.name: sum(state) * rng.choice((0.25, 0.4, 0.6)) for kind in data.device_types}
    memory = Memory(device_bytes=room, layer_state_bytes=state, layer_activation_bytes=activation)
    return data.model_copy(update={"memory": memory})


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize("seed", range(24))
def test_counted_paths_equal_counted_states(seed: int) -> None:
    """For every θ by itself and for intervals: the same least cost as where the states count the
    stages."""
    problem = compile_problem(tight(seed))
    states, labels = (
        Relaxer(Space(problem, counted=c), Run(Options(gap=0.0))) for c in (True, False)
    )
    values, rng = states.space.candidates, Random(seed)
    for low, high in [
        (float(theta), float(theta)) for theta in values[:: max(1, len(values) // 40)]
    ]:
        exact, found = states(low, high, math.inf), labels(low, high, math.inf)
        assert (exact.bound is None) == (found.bound is None)
        if exact.bound is None or found.bound is None:
            continue
        assert found.objective == pytest.approx(exact.objective, rel=1e-9)
        # A cut-off just above it is still beaten, one below it is proven.
        above, below = exact.bound * (1 + 1e-6), exact.bound * (1 - rng.choice((1e-6, 0.01)))
        assert labels(low, high, above).objective == pytest.approx(exact.objective, rel=1e-9)
        proof = labels(low, high, below)
        assert proof.bound is not None and proof.bound >= below * (1 - 1e-9)


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize("seed", range(18))
def test_bounds_of_counted_intervals_hold(seed: int) -> None:
    problem = compile_problem(tight(seed))
    each = by_theta(Space(problem))
    if each:
        bounds_hold(Space(problem, counted=False), each, Random(seed))


def test_states_out_of_reach_stay_so() -> None:
    """Ragged tables are narrowed while they are filled: vectors without states must not gain
    any."""
    empty = 0
    for seed in range(60):
        problem = compile_problem(data_of(seed))
        if problem.options == 0:
            continue
        space = Space(problem, counted=False)
        relaxer = Relaxer(space, Run())
        for theta in space.candidates:
            windows = space.windows(float(theta), float(theta))
            states = space.states(windows)
            if states is None:
                continue
            _, charge, prices = relaxer._best_charge(windows, math.inf, 5)
            relaxed = relaxer._cheapest(windows, states, charge, prices, math.inf)
            if relaxed is not None:
                out = states.first > states.last
                empty += int((states.first > states.last + 1).sum())
                assert (relaxed.first[out] > relaxed.last[out]).all()
    assert empty > 100


@pytest.mark.parametrize("seed", range(12))
def test_the_search_survives_labels_that_do_not_fit(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tight(seed)
    counted = solve(FAMILY, data, "exact", Run(Options(threads=1)))
    monkeypatch.setattr(f"{EXACT}.search.FEW_VECTORS", 0)
    monkeypatch.setattr(f"{EXACT}.relaxer.FEW_LABELS", 2)
    monkeypatch.setattr(f"{EXACT}.relaxer.MOST_LABELS", 3)
    short = solve(FAMILY, data, "exact", Run(Options(threads=1)))
    assert short.status == counted.status
    if counted.objective is not None:
        assert short.objective == pytest.approx(counted.objective, rel=2e-6)
    monkeypatch.setattr(f"{EXACT}.search.MANY_VECTORS", 0)
    alone = solve(FAMILY, data, "exact", Run(Options(threads=1)))
    if counted.objective is not None and alone.bound is not None:
        assert alone.bound <= counted.objective * (1 + 1e-9)
        assert alone.objective is None or alone.objective >= counted.objective * (1 - 1e-9)
