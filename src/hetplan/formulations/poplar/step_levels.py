"""ZeRO 2 and 3: what a step of a given time may take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetplan.formulations.poplar.fill import Pool
from hetplan.formulations.poplar.kernels import SAME_TIME
from hetplan.formulations.poplar.problem import Floats, Ints, PoplarProblem

# Table entries of one knapsack (16 bytes each) and its additions (some seconds).
MAX_ENTRIES = 5e7
MAX_WORK = 5e9
# Times of two plans that differ by less are equal: sums of the same terms in another order.
SAME = 1e-12


@dataclass(frozen=True)
class Level:
    """What a step of time `limit` may take: one pool per group, `most` samples in all."""

    limit: float
    pools: tuple[Pool, ...]

    @property
    def most(self) -> int:
        """M(T)."""
        return sum(pool.copies * pool.most for pool in self.pools)


def step_sizes(problem: PoplarProblem) -> tuple[Floats, Ints]:
    """Every time T of a step at which M grows, ascending, and min(M(T), G): [J] seconds, [J]
    samples."""
    curves = [group.seconds[: problem.total + 1] for group in problem.groups]
    times = np.unique(np.concatenate([seconds[1:] for seconds in curves]))
    most = np.zeros(len(times), np.int64)
    for group, seconds in zip(problem.groups, curves, strict=True):
        falling = np.minimum.accumulate(seconds[::-1])[::-1]
        most += group.count * (np.searchsorted(falling, times, side="right") - 1)
    capped = np.minimum(most, problem.total)
    keep = np.diff(capped, prepend=0) > 0
    return times[keep], capped[keep]


def level_of(problem: PoplarProblem, limit: float) -> Level:
    """The admissible micro-batches of each group in a step of time `limit`, worth busy time at peak
    speed."""
    pools = []
    for group in problem.groups:
        seconds = group.seconds[: problem.total + 1]
        within = seconds <= limit * (1 + SAME_TIME)
        most = int(np.flatnonzero(within)[-1])
        pools.append(Pool.of(group.count, group.peak * seconds[: most + 1], within[: most + 1]))
    return Level(limit, tuple(pools))
