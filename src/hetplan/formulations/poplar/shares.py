"""ZeRO 0 and 1: the seconds of one device's share, and a time that surely suffices for the batch.

A share of g samples in micro-batches of b takes w(g, b) = floor(g / b) t(b) + t(g mod b) seconds,
added as the evaluator adds it, so that both agree to the bit; h(g) = min_b w(g, b).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hetplan.formulations.poplar.problem import SAME_TIME, Floats, Group, Ints, PoplarProblem


def _by_micro_batch(seconds: Floats, most: int) -> Iterator[tuple[int, Floats]]:
    """(b, w(b..most, b)) for every micro-batch, the largest first; seconds [mbs + 1]: t."""
    for b in range(min(len(seconds) - 1, most), 0, -1):
        shares = np.arange(b, most + 1)
        yield b, shares // b * seconds[b] + seconds[shares % b]


def share_seconds(seconds: Floats, most: int) -> tuple[Floats, Ints]:
    """h(g) for g = 0..most, and the largest micro-batch within SAME_TIME of it."""
    best, batch = np.full(most + 1, np.inf), np.zeros(most + 1, np.int64)
    best[0] = 0.0
    for b, work in _by_micro_batch(seconds, most):
        np.minimum(best[b:], work, out=best[b:])
    for b, work in _by_micro_batch(seconds, most):
        batch[b:][(work <= best[b:] * (1 + SAME_TIME)) & (batch[b:] == 0)] = b
    return best, batch


def busiest(seconds: Floats, most: int, limit: float) -> tuple[Floats, Ints]:
    """H(g) = max_b w(g, b) within limit for g = 0..most, and the largest b that attains it.

    -inf and 0 where no b keeps within the limit. Both comparisons allow SAME_TIME of the limit.
    """
    best, batch = np.full(most + 1, -np.inf), np.zeros(most + 1, np.int64)
    best[0], slack = 0.0, SAME_TIME * limit
    for b, work in _by_micro_batch(seconds, most):
        longer = (work <= limit + slack) & (work > best[b:] + slack)
        best[b:][longer] = work[longer]
        batch[b:][longer] = b
    return best, batch


def fastest(group: Group, samples: int) -> tuple[float, int]:
    """h(samples) and the largest micro-batch that attains it, without a table."""
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

    def either(group: Group, samples: int) -> float:
        return max(fastest(group, samples)[0], fastest(group, samples + 1)[0])

    ideal = problem.total / problem.speed
    proportional = max(either(group, int(ideal * group.peak)) for group in problem.groups)
    alone = [either(group, problem.total // group.count) for group in problem.groups]
    return min(proportional, *alone)


def largest_shares(problem: PoplarProblem, limit: float) -> list[int]:
    """Per group a share that no device exceeds within `limit` seconds: h(g) >= g / p."""
    return [min(problem.total, int(limit * g.peak * (1 + 1e-12)) + 1) for g in problem.groups]
