"""Even cuts: where a chain of layers is cut so that its slowest virtual stage is as fast as can be.

A binary search over the seconds of the slowest virtual stage; for each limit, every virtual stage
takes as many layers as keep within the limit (`cuts_within`), which is best for those behind it.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence

HALVINGS = 20  # of the interval of the slowest stage's seconds: a millionth of it is left


def even_cuts(sums: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Cuts [V - 1] with which the slowest virtual stage is, to a millionth, as fast as can be.

    sums [V][L + 1]: of each virtual stage the seconds of the layers up to each one. There are at
    least as many layers as virtual stages.
    """
    if len(sums) == 1:
        return ()
    low, high = 0.0, max(seconds[-1] for seconds in sums)
    best = cuts_within(sums, math.inf)
    assert best is not None, "there are at least as many layers as virtual stages"
    for _ in range(HALVINGS):
        limit = (low + high) / 2
        cuts = cuts_within(sums, limit)
        if cuts is None:
            low = limit
        else:
            high, best = limit, cuts
    return tuple(best)


def cuts_within(sums: Sequence[Sequence[float]], limit: float) -> list[int] | None:
    """Cuts with which every virtual stage takes at most `limit` seconds; None if there are none."""
    layers = len(sums[0]) - 1
    begin, ends = 0, list[int]()
    for v, seconds in enumerate(sums):
        stages_behind = len(sums) - 1 - v  # each of them needs a layer
        end = bisect_right(seconds, seconds[begin] + limit) - 1
        if end <= begin:
            return None
        begin = min(end, layers - stages_behind)
        ends.append(begin)
    return ends[:-1] if begin == layers else None
