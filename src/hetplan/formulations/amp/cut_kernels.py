"""Compiled inner loop of AMP's own programme; stage j of a cut is layers cut[j] to cut[j + 1] -
1."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetplan.compiled import kernel
from hetplan.formulations.amp.problem import Floats, Ints


@kernel
def tolerance_stage(
    before: Floats,
    after: Floats,
    choice: NDArray[np.uint16],
    values: Floats,
    rank: Ints,
    link: Floats,
    wait: float,
    stage: int,
    dropped: bool,
    begin: int,
    end: int,
    best: Floats,
) -> None:
    """One stage of the programme over tolerances: AMP's eq. 8 for boundaries begin to end - 1,
    every tolerance m.

    before, after [L + 1, M]: entries with `stage` stages (read) and one more (written; +inf where
    none). choice [L + 1, M]: the last boundary chosen. values [M] ascending: the tolerances,
    seconds. rank [L + 1, L + 1]: index in `values` of the seconds of layers c to i - 1. link [L +
    1]: seconds of the link at each boundary. wait: gas - 1. dropped: store costs without the link,
    as the released code does. best [M]: scratch.
    """
    count = values.size
    for i in range(begin, end):
        for m in range(count):
            best[m] = after[i, m] = np.inf
        for c in range(stage, i):
            r = rank[c, i]
            seconds = values[r]
            for m in range(count):
                # the stage's own excess over m; the prefix is then held to the larger of the two
                cost = before[c, max(m, r)] + wait * max(0.0, seconds - values[m]) + seconds
                if cost + link[c] < best[m]:
                    best[m] = cost + link[c]
                    after[i, m] = cost if dropped else best[m]
                    choice[i, m] = c


def interval_ranks(seconds: Floats) -> tuple[Floats, Ints]:
    """All tolerances, ascending from 0, and which of them each interval of layers takes.

    seconds [L] -> values [M], rank [L + 1, L + 1] (rank[c, i] for layers c to i - 1, 0 elsewhere).
    Each interval is summed from its own start, so that equal runs of equal layers give one value.
    """
    layers = seconds.size
    sums = np.zeros((layers + 1, layers + 1))
    for c in range(layers):
        sums[c, c + 1 :] = np.cumsum(seconds[c:])
    values, rank = np.unique(sums, return_inverse=True)
    return values, np.ascontiguousarray(rank.reshape(sums.shape), dtype=np.int64)
