"""The compiled loops of the exact methods."""

from __future__ import annotations

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.poplar.problem import Floats, Ints


@kernel
def share_seconds(seconds: Floats, most: int) -> tuple[Floats, Ints]:
    """h(g) = min_b floor(g / b) t(b) + t(g mod b) for g = 0..most, and the b that attains it (the largest).

    seconds [mbs + 1] with t(0) = 0. The terms are added as the evaluator adds them, so both agree to the bit.
    """
    best = np.full(most + 1, np.inf)
    batch = np.zeros(most + 1, np.int64)
    best[0] = 0.0
    for b in range(len(seconds) - 1, 0, -1):
        full, last = 1, 0
        for g in range(b, most + 1):
            value = full * seconds[b] + seconds[last]
            if value < best[g]:
                best[g] = value
                batch[g] = b
            last += 1
            if last == b:
                last = 0
                full += 1
    return best, batch


@kernel
def merge(first: Floats, second: Floats, size: int) -> Floats:
    """Min-plus convolution: out[s] = min_d first[s - d] + second[d] for s = 0..size (inf: no such s)."""
    out = np.full(size + 1, np.inf)
    for s in range(min(size, len(first) + len(second) - 2) + 1):
        value = np.inf
        for d in range(max(0, s - len(first) + 1), min(s, len(second) - 1) + 1):
            candidate = first[s - d] + second[d]
            value = min(value, candidate)
        out[s] = value
    return out


@kernel
def double(table: Floats, width: int, size: int) -> Floats:
    """Min-plus convolution of `table` with itself over halves that differ by at most `width`."""
    out = np.full(size + 1, np.inf)
    for s in range(size + 1):
        value = np.inf
        for half in range(max(0, (s - width + 1) // 2, s - len(table) + 1), s // 2 + 1):
            candidate = table[half] + table[s - half]
            value = min(value, candidate)
        out[s] = value
    return out


@kernel
def cover(cost: Floats, amount: Ints, total: int) -> tuple[Floats, Ints]:
    """Unbounded knapsack: V[n] = min_j V[max(0, n - amount_j)] + cost_j for n = 0..total, and its j.

    cost, amount [J], amounts positive and ascending. The larger step wins a tie: fewer steps.
    """
    value = np.full(total + 1, np.inf)
    choice = np.full(total + 1, -1, np.int64)
    value[0] = 0.0
    for n in range(1, total + 1):
        for j in range(len(cost) - 1, -1, -1):
            candidate = value[max(0, n - amount[j])] + cost[j]
            if candidate < value[n]:
                value[n] = candidate
                choice[n] = j
    return value, choice


@kernel
def exact_sum(cost: Floats, waste: Floats, amount: Ints, total: int, slack: float) -> tuple[Floats, Ints]:
    """Unbounded knapsack that hits every n = 0..total exactly; least cost first, then least waste.

    cost, waste [J]; amount [J] positive. Costs within `slack` of each other count as equal. V is inf and its
    j -1 where n cannot be made.
    """
    value = np.full(total + 1, np.inf)
    lost = np.full(total + 1, np.inf)
    choice = np.full(total + 1, -1, np.int64)
    value[0] = 0.0
    lost[0] = 0.0
    for n in range(1, total + 1):
        for j in range(len(cost)):
            if amount[j] > n:
                continue
            candidate = value[n - amount[j]] + cost[j]
            wasted = lost[n - amount[j]] + waste[j]
            if candidate < value[n] - slack or (candidate <= value[n] + slack and wasted < lost[n]):
                value[n] = candidate
                lost[n] = wasted
                choice[n] = j
    return value, choice


def ready() -> None:
    """Load every kernel, or compile it where the cache has none, so that no solve is charged with that."""
    curve, sizes = np.array([0.0, 1.0]), np.ones(1, np.int64)
    share_seconds(curve, 1)
    merge(curve, curve, 1)
    double(curve, 1, 1)
    cover(curve[1:], sizes, 1)
    exact_sum(curve[1:], curve[:1], sizes, 1, 0.0)
