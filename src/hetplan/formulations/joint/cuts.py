"""Even cuts: cuts of a chain of layers that make its slowest virtual stage as fast as possible.

They are found by a binary search over the seconds of the slowest virtual stage. For each limit the
virtual stages, one after the other, take as many layers as the limit allows (`cuts_within`). This
is optimal, since it leaves the fewest layers to the later ones.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence

HALVINGS = 20  # halvings of the interval of seconds; a millionth of its width remains


def even_cuts(sums: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """[V - 1] the cuts that minimise the seconds of the slowest of V virtual stages, to a
    millionth; a cut is the first layer of a virtual stage.

    sums: [V][L + 1] seconds of layers 0 to l - 1 on each virtual stage; V is at most L.
    """
    if len(sums) == 1:
        return ()
    low, high = 0.0, max(seconds[-1] for seconds in sums)  # at most: all layers on any one
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
    """[V - 1] cuts with which every virtual stage takes at most `limit` seconds; None where there
    are none. sums: see `even_cuts`."""
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
