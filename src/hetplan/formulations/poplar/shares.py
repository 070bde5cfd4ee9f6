"""Shares: the samples of one device in an iteration under ZeRO 0 and 1, and their seconds.

A share of g samples in micro-batches of b takes w(g, b) = floor(g / b) t(b) + t(g mod b) seconds.
The terms are added in the evaluator's order, so that both results are equal to the bit. Its least
seconds are h(g) = min_b w(g, b).
"""

from collections.abc import Iterator

import numpy as np

from hetplan.formulations.poplar.problem import ROUNDING, SAME_TIME, Floats, Ints, PoplarProblem


def _by_micro_batch(seconds: Floats, most: int) -> Iterator[tuple[int, Floats]]:
    """(b, [most + 1 - b] the seconds w(g, b) of the shares g = b, ..., most) for every micro-batch
    b, the largest first. seconds: [mbs + 1] t."""
    for b in range(min(len(seconds) - 1, most), 0, -1):
        shares = np.arange(b, most + 1)
        yield b, shares // b * seconds[b] + seconds[shares % b]


def share_seconds(seconds: Floats, most: int) -> Floats:
    """[most + 1] h(g), the least seconds of a share of g samples. seconds: [mbs + 1] t."""
    best = np.full(most + 1, np.inf)
    best[0] = 0.0
    for b, work in _by_micro_batch(seconds, most):
        np.minimum(best[b:], work, out=best[b:])
    return best


def busiest(seconds: Floats, most: int, limit: float) -> tuple[Floats, Ints]:
    """([most + 1] the most seconds within `limit` of a share of g samples over all micro-batches b,
    [most + 1] the largest such b).

    They are -inf and 0 where no b keeps within the limit. Both comparisons allow SAME_TIME of the
    limit. seconds: [mbs + 1] t.
    """
    best = np.full(most + 1, -np.inf)
    batch = np.zeros(most + 1, np.int64)
    best[0] = 0.0
    slack = SAME_TIME * limit
    for b, work in _by_micro_batch(seconds, most):
        longer = (work <= limit + slack) & (work > best[b:] + slack)
        best[b:][longer] = work[longer]
        batch[b:][longer] = b
    return best, batch


def largest_shares(problem: PoplarProblem, limit: float) -> list[int]:
    """[groups] samples that no device of the group exceeds within `limit` seconds.

    A share of g samples takes at least g / p seconds at the group's peak speed p.
    """
    shares = []
    for group in problem.groups:
        at_peak = int(limit * group.peak * (1 + ROUNDING)) + 1  # one more does no harm
        shares.append(min(problem.total, at_peak))
    return shares
