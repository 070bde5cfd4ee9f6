"""ZeRO 0 and 1: the time of one device's share, and a time that surely suffices for the batch."""

from __future__ import annotations

import numpy as np

from hetplan.formulations.poplar.kernels import SAME_TIME
from hetplan.formulations.poplar.problem import Group, PoplarProblem


def share_time(group: Group, samples: int) -> float:
    """h(samples) of one device, without a table."""
    return fastest(group, samples)[0]


def fastest(group: Group, samples: int) -> tuple[float, int]:
    """h(samples) and the largest micro-batch that attains it."""
    if samples == 0:
        return 0.0, 0
    batches = np.arange(1, min(group.largest, samples) + 1)
    times = samples // batches * group.seconds[batches] + group.seconds[samples % batches]
    least = float(times.min())
    return least, 1 + int(np.flatnonzero(times <= least * (1 + SAME_TIME))[-1])


def sufficient_time(problem: PoplarProblem) -> float:
    """A time by which G is reached for certain: shares by peak speed, rounded either way, or one
    group alone.

    The latter where some device is so slow that a single sample takes longer than all of them
    elsewhere.
    """
    ideal = problem.total / problem.speed
    floors = [int(ideal * group.peak) for group in problem.groups]
    proportional = max(_either(group, g) for group, g in zip(problem.groups, floors, strict=True))
    return min(
        proportional, *(_either(group, problem.total // group.count) for group in problem.groups)
    )


def _either(group: Group, samples: int) -> float:
    """The longer of a share and the next larger one."""
    return max(share_time(group, samples), share_time(group, samples + 1))


def largest_shares(problem: PoplarProblem, limit: float) -> list[int]:
    """Per group a share that no device exceeds within `limit` seconds: h(g) >= g / p."""
    return [min(problem.total, int(limit * g.peak * (1 + 1e-12)) + 1) for g in problem.groups]
