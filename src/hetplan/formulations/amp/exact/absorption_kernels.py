"""Compiled: what a row still costs, and how the rows of a configuration can share the thresholds'
groups out.

A row absorbs the tensor groups in it that hold a device of a set of slow types; all such groups
have to lie somewhere, for each of two sets ("thresholds", `layout`). costs [R, A, B]: least cost of
row r that absorbs a groups of the first set and b of the second; the tables' ends stand for "as
many as there are". `ahead` is the same for what is left of a row.
"""

from __future__ import annotations

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.amp.problem import Floats, Ints


@kernel
def least_ahead(
    gas: int,
    low: Floats,
    high: Floats,
    ahead: Floats,
    state: int,
    b: int,
    total: float,
    top: float,
    out: Floats,
) -> None:
    """out [A, B]: least cost of a whole row that has spent `total`, its slowest stage `top`, by
    groups to absorb.

    ahead [Q, S, L+1, A, B]: completions from the next stage on.
    """
    na, nb = out.shape
    for ka in range(na):
        for kb in range(nb):
            out[ka, kb] = np.inf
    for q in range(len(low)):
        if high[q] >= top:
            fixed = (gas - 1) * max(top, low[q]) + total
            for ka in range(na):
                for kb in range(nb):
                    out[ka, kb] = min(out[ka, kb], fixed + ahead[q, state, b, ka, kb])


@kernel
def most_taken(cost: Floats, axis: int, limit: float, most: int) -> int:
    """How many groups of a threshold a row of cost below `limit` can absorb; the tables' end means
    `most`."""
    top = cost.shape[axis] - 1
    taken = 0
    for k in range(1, top + 1):
        value = cost[k, 0] if axis == 0 else cost[0, k]
        if value < limit:
            taken = k
    return most if taken == top else taken


@kernel
def least_for(costs: Floats, axis: int, need: int, most: int, taken: Ints) -> float:
    """Least t such that the rows, each costing at most t, absorb `need` groups of one threshold;
    costs [R, A, B].

    taken [R]: scratch.
    """
    rows, na, nb = costs.shape
    top = (na if axis == 0 else nb) - 1
    level = 0.0
    for i in range(rows):
        level = max(level, costs[i, 0, 0])
    if need <= 0:
        return level
    for i in range(rows):
        taken[i] = 0
    while level < np.inf:
        sum_taken = 0
        cheapest = np.inf
        for i in range(rows):
            while taken[i] < top:
                k = taken[i] + 1
                value = costs[i, k, 0] if axis == 0 else costs[i, 0, k]
                if value > level:
                    cheapest = min(cheapest, value)
                    break
                taken[i] = k
            sum_taken += most if taken[i] == top else taken[i]
        if sum_taken >= need:
            break
        level = cheapest
    return level


@kernel
def fits_together(
    costs: Floats, need_a: int, need_b: int, most: int, limit: float, reach: Ints, after: Ints
) -> bool:
    """Whether rows of cost below `limit` can absorb both thresholds' groups at once; costs [R, A,
    B].

    reach, after [need_a + 1 or more]: scratch.
    """
    rows, na, nb = costs.shape
    for y in range(need_a + 1):
        reach[y] = -1
    reach[0] = 0
    for i in range(rows):
        for y in range(need_a + 1):
            after[y] = -1
        for ka in range(na):
            stair = -1
            for kb in range(nb):
                if costs[i, ka, kb] < limit:
                    stair = most if kb == nb - 1 else kb
            if stair < 0:
                break
            gain = most if ka == na - 1 else ka
            for x in range(need_a + 1):
                if reach[x] >= 0:
                    y = min(need_a, x + gain)
                    after[y] = max(after[y], reach[x] + stair)
        for y in range(need_a + 1):
            reach[y] = after[y]
    return bool(reach[need_a] >= need_b)
