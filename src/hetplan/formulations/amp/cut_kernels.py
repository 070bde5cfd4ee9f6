"""Compiled inner loops of the cuts; stage j of a cut is layers cut[j] to cut[j + 1] - 1."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.amp.problem import Floats, Ints
from hetplan.solvers.compiled import kernel


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
) -> None:
    """One stage of the programme over tolerances: AMP's eq. 8 for every boundary i and tolerance m.

    before, after [L + 1, M]: entries with `stage` stages (read) and one more (written; +inf where none).
    choice [L + 1, M]: the last boundary chosen. values [M] ascending: the tolerances, seconds.
    rank [L + 1, L + 1]: index in `values` of the seconds of layers c to i - 1. link [L + 1]: seconds of the
    link at each boundary. wait: gas - 1. dropped: store costs without the link, as the released code does.
    """
    layers, count = rank.shape[0] - 1, values.size
    stored = np.empty(count)
    best = np.empty(count)
    for i in range(stage + 1, layers + 1):
        best[:] = np.inf
        stored[:] = np.inf
        for c in range(stage, i):
            r = rank[c, i]
            seconds = values[r]
            for m in range(count):
                # the stage's own excess over m; the prefix is then held to the larger of the two
                cost = before[c, max(m, r)] + wait * max(0.0, seconds - values[m]) + seconds
                if cost + link[c] < best[m]:
                    best[m] = cost + link[c]
                    stored[m] = cost if dropped else best[m]
                    choice[i, m] = c
        after[i] = stored


@kernel
def bounded_cut(
    prefix: Floats, links: Floats, weights: Floats, limits: Floats, theta: float, cut: Ints
) -> float:
    """Cheapest sum of stages and links with no stage above `theta` seconds and every stage within its memory.

    prefix [k, L + 1]: seconds of the first l layers on stage j. links [k - 1, L + 1]: seconds of stage j's
    link at each boundary. weights [k, L + 1], limits [k]: prefix sums of bytes and capacities.
    cut [k + 1]: written. Returns the sum, +inf when no cut is possible. O(k L^2).
    """
    stages, layers = prefix.shape[0], prefix.shape[1] - 1
    cost = np.full(layers + 1, np.inf)
    cost[0] = 0.0
    choice = np.zeros((stages, layers + 1), dtype=np.int64)
    for j in range(stages):
        following = np.full(layers + 1, np.inf)
        for i in range(j + 1, layers - (stages - 1 - j) + 1):
            link = links[j, i] if j < stages - 1 else 0.0
            for c in range(i - 1, j - 1, -1):
                seconds = prefix[j, i] - prefix[j, c]
                if seconds > theta or weights[j, i] - weights[j, c] > limits[j]:
                    break
                if cost[c] + seconds + link < following[i]:
                    following[i] = cost[c] + seconds + link
                    choice[j, i] = c
        cost = following
    i = layers
    for j in range(stages - 1, -1, -1):
        cut[j + 1] = i
        i = choice[j, i]
    cut[0] = 0
    return float(cost[layers])


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
