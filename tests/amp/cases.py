"""The tiny instances that every method is held against, with their optima by enumeration (computed
once)."""

from __future__ import annotations

from functools import cache

from amp.generate import instance
from amp.oracle import Optimum, solve
from hetplan.formulations.amp.data import AmpData
from hetplan.formulations.amp.family import FAMILY
from hetplan.solvers.registry import Method

# (seed, devices): up to four devices, then six.
SMALL = [(seed, None) for seed in range(220)]
# 213, 223 and 306: groups slower than every zone of the row bound, once pruned by mistake.
LARGER = [(seed, 6) for seed in (*range(20), 213, 223, 306)]
# What every method is held against by default, six small ones and two larger ones; the rest is
# marked wide.
QUICK: list[tuple[int, int | None]] = [*SMALL[:6], *LARGER[:2]]
CASES: list[tuple[int, int | None]] = [*QUICK, *SMALL[6:], *LARGER[2:]]


@cache
def data_of(case: tuple[int, int | None]) -> AmpData:
    """The instance of a case."""
    return instance(*case)


@cache
def optimum_of(case: tuple[int, int | None]) -> Optimum | None:
    """Its optimum, None where it is infeasible."""
    return solve(data_of(case))


def exact_methods() -> list[Method]:
    """The family's exact methods."""
    return [method for method in FAMILY.methods if method.exact]


def heuristics() -> list[Method]:
    """The family's other methods."""
    return [method for method in FAMILY.methods if not method.exact]
