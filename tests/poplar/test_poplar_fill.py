"""Sums that have to be hit exactly, against enumeration; and grouping, which must not change
anything."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations_with_replacement, product

import numpy as np
import pytest

from hetplan.formulations import family
from hetplan.formulations.poplar.data import Device, PoplarData
from hetplan.formulations.poplar.fill import Pool, capacity, fill, least_losses
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run
from poplar.poplar_cases import curve

POPLAR = family("poplar")


def random_pools(rng: random.Random) -> list[Pool]:
    pools = []
    for _ in range(rng.randint(1, 3)):
        most = rng.randint(0, 5)
        worth = np.array([rng.uniform(0, 9) for _ in range(most + 1)])
        admissible = np.array([i in (0, most) or rng.random() < 0.6 for i in range(most + 1)])
        pools.append(Pool.of(rng.randint(1, 4), worth, admissible))
    return pools


def enumerated(pools: list[Pool]) -> dict[int, float]:
    """Least loss of every deficit that can be hit."""
    rows = [
        [
            c
            for c in combinations_with_replacement(range(p.most + 1), p.copies)
            if np.isfinite(p.loss[list(c)]).all()
        ]
        for p in pools
    ]
    best: dict[int, float] = {}
    for choice in product(*rows):
        deficit = sum(sum(c) for c in choice)
        loss = sum(float(p.loss[list(c)].sum()) for p, c in zip(pools, choice, strict=True))
        best[deficit] = min(best.get(deficit, np.inf), loss)
    return best


def loss_of(pools: list[Pool], losses: list[Counter[int]]) -> float:
    for pool, row in zip(pools, losses, strict=True):
        assert row.total() == pool.copies and min(row.values()) >= 0
    return sum(
        float(p.loss[d]) * n
        for p, row in zip(pools, losses, strict=True)
        for d, n in row.items()
        if n
    )


@pytest.mark.parametrize("seed", range(60))
def test_fill_equals_enumeration(seed: int) -> None:
    pools = random_pools(random.Random(seed))
    best = enumerated(pools)
    most = capacity(pools)
    table = least_losses(pools, most)
    for deficit in range(most + 1):
        losses = fill(pools, most - deficit)
        assert (losses is not None) == (deficit in best)
        assert table[deficit] == pytest.approx(best.get(deficit, np.inf))
        if losses is not None:
            assert sum(d * n for row in losses for d, n in row.items()) == deficit
            assert loss_of(pools, losses) == pytest.approx(best[deficit])
    assert fill(pools, most + 1) is None and fill(pools, -1) is None


@pytest.mark.parametrize(
    ("count", "batch", "methods"),
    [(120, 907, ["cp-sat", "cp-sat-linear"]), (8, 200, ["cp-sat", "cp-sat-linear", "milp"])],
)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("shape", ["convex", "tiles", "wild"])
def test_groups_agree_with_general_solvers(
    stage: int, shape: str, count: int, batch: int, methods: list[str]
) -> None:
    """Devices of three kinds: counting per group, against the model of general solvers."""
    rng = random.Random(stage)
    kinds = [
        Device(name=n, step_seconds=curve(rng, m, shape))
        for n, m in zip("xyz", (12, 7, 16), strict=True)
    ]
    devices = [kinds[i % 3] for i in range(count)]
    data = PoplarData(zero_stage=stage, global_batch=batch, comm_seconds=0.3, devices=devices)
    best = solve(POPLAR, data, "exact")
    for method in methods:
        general = solve(POPLAR, data, method, Run(Options(threads=1, time_limit=600)))
        assert best.status == general.status == "optimal"
        assert best.objective == pytest.approx(general.objective, rel=1e-6)


def test_equal_steps_are_grouped() -> None:
    """Thousands of steps stand in the decision as a few."""
    curve_ = [0.5 + 0.1 * b for b in range(1, 9)]
    devices = [Device(name="x", step_seconds=curve_)] * 3
    data = PoplarData(zero_stage=3, global_batch=50_001, comm_seconds=0.1, devices=devices)
    for method in ("exact", "cp-sat", "cp-sat-linear", "paper"):
        decision = solve(POPLAR, data, method, Run(Options(threads=1, time_limit=600))).decision
        assert decision is not None and len(decision.steps) <= 4, method
