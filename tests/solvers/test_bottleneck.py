"""The θ search against enumeration: random staircases, random pipelines, time limits, cut-offs."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.solvers.bottleneck import (
    Candidates,
    Continuum,
    Grid,
    Probe,
    Relaxation,
    minimise,
    search,
)
from hetplan.solvers.options import Options
from hetplan.solvers.run import Run

EXACT = Options(gap=0.0)


class Stairs:
    """A non-increasing step function given by (θ from which it holds, value); counts its
    evaluations."""

    def __init__(self, steps: list[tuple[float, float]]) -> None:
        self.steps = steps
        self.calls = 0

    def __call__(self, theta: float) -> Probe[int] | None:
        self.calls += 1
        usable = [
            (value, reached, i) for i, (reached, value) in enumerate(self.steps) if reached <= theta
        ]
        if not usable:
            return None
        value, reached, i = min(usable)
        return Probe(value, reached, i)


def stairs(draws: list[tuple[int, int]]) -> Stairs:
    return Stairs([(float(theta), float(value)) for theta, value in draws])


def least(slope: float, f: Stairs) -> float:
    return min(slope * reached + value for reached, value in f.steps)


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=60),
    st.integers(0, 9),
    st.booleans(),
)
def test_minimise_equals_enumeration(
    draws: list[tuple[int, int]], slope: int, listed: bool
) -> None:
    f = stairs(draws)
    candidates: Candidates = Grid(np.arange(1.0, 61.0)) if listed else Continuum()
    found = minimise(float(slope), f, candidates, (1.0, 60.0), Run(EXACT))
    assert found.finished
    assert found.objective == least(slope, f)
    assert found.bound == pytest.approx(found.objective, rel=1e-12)
    assert found.decision is not None
    reached, value = f.steps[found.decision]
    assert slope * reached + value == found.objective


def test_minimise_needs_far_fewer_evaluations_than_there_are_candidates() -> None:
    f = Stairs([(theta, 1e5 / theta) for theta in np.linspace(1.0, 1000.0, 5000)])
    found = minimise(
        1.0, f, Grid([theta for theta, _ in f.steps]), (1.0, 1000.0), Run(Options(gap=1e-6))
    )
    assert found.objective == pytest.approx(2 * math.sqrt(1e5), rel=1e-4)
    assert f.calls == found.evaluations < 400


@pytest.mark.parametrize("seed", range(40))
def test_minimise_on_dense_staircases(seed: int) -> None:
    rng = random.Random(seed)
    values = sorted((rng.uniform(0, 300) for _ in range(80)), reverse=True)
    f = Stairs([(float(i + 1), value) for i, value in enumerate(values)])
    found = minimise(3.0, f, Grid(range(1, 81)), (1.0, 80.0), Run(EXACT))
    assert found.objective == least(3.0, f)


def test_nothing_feasible_is_proven_empty() -> None:
    found = minimise(1.0, Stairs([(50.0, 1.0)]), Grid([1.0, 2.0, 3.0]), (0.0, 10.0), Run(EXACT))
    assert found.proven_empty
    assert found.finished
    assert found.objective is None
    assert found.bound is None
    assert minimise(1.0, Stairs([(1.0, 1.0)]), Grid([]), (0.0, 10.0), Run(EXACT)).proven_empty


def test_a_cutoff_below_the_optimum_finds_nothing_and_is_the_bound() -> None:
    f = stairs([(2, 9), (4, 5), (9, 1)])
    at = least(1.0, f)
    above = minimise(1.0, f, Grid([2.0, 4.0, 9.0]), (2.0, 9.0), Run(EXACT), cutoff=at + 1)
    below = minimise(1.0, f, Grid([2.0, 4.0, 9.0]), (2.0, 9.0), Run(EXACT), cutoff=at)
    assert above.objective == at
    assert below.objective is None
    assert below.bound == at
    assert not below.proven_empty


def costs(rng: random.Random) -> list[tuple[float, float]]:
    """(θ, total) of a dozen decisions whose total does not fall with θ in any orderly way."""
    return [
        (float(theta), theta * 3.0 + rng.randint(0, 40))
        for theta in (rng.randint(1, 30) for _ in range(20))
    ]


def relaxed(decisions: list[tuple[float, float]], calls: list[tuple[float, float]]):  # type: ignore[no-untyped-def]
    """Charges every decision of the interval the interval's low end: exact on single values."""

    def relax(low: float, high: float, cutoff: float) -> Relaxation[int]:
        calls.append((low, high))
        inside = [
            (total - 3 * (theta - low), i)
            for i, (theta, total) in enumerate(decisions)
            if low <= theta <= high
        ]
        if not inside:
            return Relaxation(None)
        bound, i = min(inside)
        return Relaxation(bound, decisions[i][1], i, split=decisions[i][0] if i % 2 else None)

    return relax


@pytest.mark.parametrize("seed", range(200))
def test_search_equals_enumeration(seed: int) -> None:
    decisions = costs(random.Random(seed))
    calls: list[tuple[float, float]] = []
    found = search(
        relaxed(decisions, calls), (0.0, 99.0), Grid([t for t, _ in decisions]), Run(EXACT)
    )
    assert found.objective == min(total for _, total in decisions)
    assert found.bound == found.objective
    assert found.evaluations == len(calls) <= 2 * len({t for t, _ in decisions})


class Impatient(Run):
    """Stops after a number of looks at the clock."""

    looks: int

    @property
    def should_stop(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.mark.parametrize(("seed", "looks"), list(itertools.product(range(10), range(6))))
def test_a_stopped_search_keeps_a_valid_bound(seed: int, looks: int) -> None:
    decisions = costs(random.Random(seed))
    run = Impatient(EXACT)
    run.looks = looks
    found = search(relaxed(decisions, []), (0.0, 99.0), Grid([t for t, _ in decisions]), run)
    optimum = min(total for _, total in decisions)
    assert (found.bound is None) == (looks == 0)
    if found.bound is not None:
        assert found.bound <= optimum
    if found.objective is not None:
        assert found.objective >= optimum


@settings(max_examples=50)
@given(
    st.lists(st.floats(0, 100), min_size=2, max_size=20),
    st.floats(0, 100),
    st.one_of(st.none(), st.floats(0, 100)),
)
def test_splits_part_the_candidates(values: list[float], low: float, at: float | None) -> None:
    for candidates in (Grid(values), Continuum()):
        parts = candidates.split(low, 100.0, at)
        snapped = candidates.snap(low, 100.0)
        if parts is None:
            assert snapped is None or snapped[0] == snapped[1]
            continue
        (a, b), (c, d) = parts
        assert low <= a <= b < c <= d <= 100.0
        if isinstance(candidates, Grid):
            inside = {v for v in values if low <= v <= 100.0}
            assert all(a <= v <= b or c <= v <= d for v in inside)
