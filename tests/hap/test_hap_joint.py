"""The joint search on chains, residual and wide theories, and what must not change its optimum."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hap.hap_cases import instance
from hetplan.formulations.hap.data import Compute, Device, HapData, HapDecision, Triple
from hetplan.formulations.hap.evaluate import evaluate
from hetplan.formulations.hap.exact.solve import Parameters
from hetplan.formulations.hap.exact.solve import solve as exact
from hetplan.formulations.hap.family import FAMILY
from hetplan.formulations.hap.theories import chain, residual
from hetplan.solvers.options import Options
from hetplan.solvers.registry import solve
from hetplan.solvers.result import Result, Stop
from hetplan.solvers.run import Run


def run(data: HapData, method: str = "auto", limit: float = 60) -> Result[object]:
    """`method` with one thread."""
    return solve(FAMILY, data, method, Run(Options(threads=1, time_limit=limit)))


@pytest.mark.parametrize(("layers", "types"), [(1, 3), (2, 2), (3, 2), (2, 3)])
def test_chains_agree_with_the_programme_and_beat_the_paper(layers: int, types: int) -> None:
    for seed in range(3):
        data = chain(layers, types, seed)
        exact = run(data)
        assert exact.status == "optimal" and exact.objective is not None
        assert run(data, "milp").objective == pytest.approx(exact.objective, rel=2e-6)
        for method in ("paper", "dp-even", "dp-proportional"):
            other = run(data, method)
            assert other.objective is not None and other.objective >= exact.objective * (1 - 1e-9)


def test_one_residual_block_is_proven() -> None:
    exact = run(residual(1, 2, operators=10))
    assert exact.status == "optimal"
    assert run(residual(1, 2, operators=10), "milp").objective == pytest.approx(
        exact.objective, rel=2e-6
    )


def test_wide_theories_tell_their_gap() -> None:
    """Without room for all states the bound is relaxed, still valid, and the message says so."""
    data = residual(1, 2, operators=16)
    best = run(data).objective
    assert best is not None
    for limits in (Parameters(states=50, patience=0), Parameters(states=1, canonical_states=5)):
        found = exact(data, Run(Options(threads=1)), limits)
        assert found.decision is not None and found.bound is not None
        objective = evaluate(data, found.decision).objective
        assert objective is not None and objective >= best * (1 - 1e-9)
        assert 0 < found.bound <= best * (1 + 1e-9)
        assert found.stop is Stop.OPTIMAL or "too wide" in found.message


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.floats(0.01, 100.0))
def test_scaling_all_times_scales_the_optimum(seed: int, factor: float) -> None:
    data = instance(seed, 1)
    best = run(data).objective
    changed = []
    for t in data.triples:
        names = (
            ("fixed_flops", "shared_flops")
            if isinstance(t, Compute)
            else ("fixed_seconds", "shared_seconds")
        )
        changed.append(t.model_copy(update={name: getattr(t, name) * factor for name in names}))
    scaled = run(data.model_copy(update={"triples": changed})).objective
    assert scaled == (None if best is None else pytest.approx(best * factor, rel=3e-6))


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_another_triple_never_hurts(seed: int, other: int) -> None:
    data, more = instance(seed, 1), instance(other, 1)
    best = run(data).objective
    richer = run(data.model_copy(update={"triples": [*data.triples, *more.triples[:2]]})).objective
    if best is not None:
        assert richer is not None and richer <= best * (1 + 3e-6)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(0, 1000))
def test_order_of_triples_and_devices_is_irrelevant(seed: int, shuffle: int) -> None:
    data = instance(seed, 1)
    triples, devices = list(data.triples), list(data.devices)
    random.Random(shuffle).shuffle(triples)
    random.Random(shuffle + 1).shuffle(devices)
    best = run(data).objective
    other = run(data.model_copy(update={"triples": triples, "devices": devices})).objective
    assert other == (None if best is None else pytest.approx(best, rel=3e-6))


@pytest.mark.parametrize("seed", range(20))
def test_a_twin_cluster_halves_shared_work(seed: int) -> None:
    """Every device twice, shared computation and communication doubled: the same optimum, equal
    ratios."""
    data = instance(seed, 1)
    triples: list[Triple] = []
    for t in data.triples:
        name = "shared_flops" if isinstance(t, Compute) else "shared_seconds"
        triples.append(t.model_copy(update={name: 2 * getattr(t, name)}))
    twins = [
        d
        for device in data.devices
        for d in (device, Device(name="twin", flops_per_second=device.flops_per_second))
    ]
    best, twice = run(data), run(data.model_copy(update={"devices": twins, "triples": triples}))
    assert twice.objective == (
        None if best.objective is None else pytest.approx(best.objective, rel=3e-6)
    )
    assert twice.details.get("states") == best.details.get("states")


def test_the_paper_keeps_one_communication_per_tensor() -> None:
    """Its program never gathers and scatters the same tensor, nor communicates it twice."""
    data = chain(3, 2)
    decision = run(data, "paper").decision
    assert isinstance(decision, HapDecision)
    told = [
        data.triples[i].pre[0].split("|")[0]
        for i in decision.program
        if data.triples[i].kind == "comm"
    ]
    assert told and len(told) == len(set(told))
