"""Shares: what one device does in an iteration under ZeRO 0 and 1, and how long it takes.

A share of g samples in micro-batches of b takes w(g, b) = floor(g / b) t(b) + t(g mod b) seconds,
added as the evaluator adds it, so that both agree to the bit; h(g) = min_b w(g, b).
"""

from collections.abc import Iterator

import numpy as np

from hetplan.formulations.poplar.problem import SAME_TIME, Floats, Ints, PoplarProblem


def _by_micro_batch(seconds: Floats, most: int) -> Iterator[tuple[int, Floats]]:
    """(b, w(b..most, b)) for every micro-batch, the largest first; seconds [mbs + 1]: t."""
    for b in range(min(len(seconds) - 1, most), 0, -1):
        shares = np.arange(b, most + 1)
        yield b, shares // b * seconds[b] + seconds[shares % b]


def share_seconds(seconds: Floats, most: int) -> Floats:
    """[most + 1] h(g), the least seconds of a share of g samples."""
    best = np.full(most + 1, np.inf)
    best[0] = 0.0
    for b, work in _by_micro_batch(seconds, most):
        np.minimum(best[b:], work, out=best[b:])
    return best


def busiest(seconds: Floats, most: int, limit: float) -> tuple[Floats, Ints]:
    """[most + 1] H(g), the most seconds within `limit` that a share of g samples takes in
    micro-batches of some b, and the largest such b.

    -inf and 0 where no b keeps within the limit. Both comparisons allow SAME_TIME of the limit.
    """
    best, batch = np.full(most + 1, -np.inf), np.zeros(most + 1, np.int64)
    best[0], slack = 0.0, SAME_TIME * limit
    for b, work in _by_micro_batch(seconds, most):
        longer = (work <= limit + slack) & (work > best[b:] + slack)
        best[b:][longer] = work[longer]
        batch[b:][longer] = b
    return best, batch


def largest_shares(problem: PoplarProblem, limit: float) -> list[int]:
    """[groups] a share that no device exceeds within `limit` seconds: h(g) >= g / p."""
    return [
        min(problem.total, int(limit * group.peak * (1 + 1e-12)) + 1) for group in problem.groups
    ]
