"""The compiled loops of the exact methods; each fills arrays that the function before it makes."""

from __future__ import annotations

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.poplar.problem import Floats, Ints

# Times that differ by less than this part are equal: sums of the same terms in another order.
SAME_TIME = 1e-9


def share_seconds(seconds: Floats, most: int) -> tuple[Floats, Ints]:
    """h(g) = min_b floor(g / b) t(b) + t(g mod b) for g = 0..most, and the largest b within
    SAME_TIME of it.

    seconds [mbs + 1] with t(0) = 0. The terms are added as the evaluator adds them, so both agree
    to the bit.
    """
    best, batch = np.full(most + 1, np.inf), np.zeros(most + 1, np.int64)
    best[0] = 0.0
    _share_seconds(seconds, best, batch, np.full(most + 1, np.inf))
    return best, batch


@kernel
def _share_seconds(seconds: Floats, best: Floats, batch: Ints, chosen: Floats) -> None:
    """chosen [most + 1]: the time of batch[g]."""
    for b in range(len(seconds) - 1, 0, -1):
        full, last = 1, 0
        for g in range(b, len(best)):
            value = full * seconds[b] + seconds[last]
            best[g] = min(best[g], value)
            if value < chosen[g] * (1.0 - SAME_TIME):
                chosen[g] = value
                batch[g] = b
            last += 1
            if last == b:
                last = 0
                full += 1


def busiest(seconds: Floats, most: int, limit: float) -> tuple[Floats, Ints]:
    """H(g) = max_b floor(g / b) t(b) + t(g mod b) within limit for g = 0..most, and the largest b
    that attains it.

    -inf and 0 where no b keeps within the limit. Both comparisons allow SAME_TIME of the limit.
    """
    best, batch = np.full(most + 1, -np.inf), np.zeros(most + 1, np.int64)
    best[0] = 0.0
    _busiest(seconds, limit, best, batch)
    return best, batch


@kernel
def _busiest(seconds: Floats, limit: float, best: Floats, batch: Ints) -> None:
    slack = SAME_TIME * limit
    for b in range(len(seconds) - 1, 0, -1):
        full, last = 1, 0
        for g in range(b, len(best)):
            value = full * seconds[b] + seconds[last]
            if value <= limit + slack and value > best[g] + slack:
                best[g] = value
                batch[g] = b
            last += 1
            if last == b:
                last = 0
                full += 1


def merge(first: Floats, second: Floats, size: int, slowest: bool) -> Floats:
    """out[s] for s = 0..size: two sets of devices share s samples as is best (inf: no such s).

    min_d first[s - d] + second[d], the min-plus convolution; `slowest`: min_d max(first[s - d],
    second[d]).
    """
    out = np.full(size + 1, np.inf)
    _merge(first, second, slowest, out)
    return out


@kernel
def _merge(first: Floats, second: Floats, slowest: bool, out: Floats) -> None:
    for s in range(min(len(out) - 1, len(first) + len(second) - 2) + 1):
        value = np.inf
        for d in range(max(0, s - len(first) + 1), min(s, len(second) - 1) + 1):
            one, other = first[s - d], second[d]
            value = min(value, max(one, other) if slowest else one + other)
        out[s] = value


def double(table: Floats, width: int, size: int, slowest: bool) -> Floats:
    """`merge` of `table` with itself over halves that differ by at most `width`."""
    out = np.empty(size + 1)
    _double(table, width, slowest, out)
    return out


@kernel
def _double(table: Floats, width: int, slowest: bool, out: Floats) -> None:
    for s in range(len(out)):
        value = np.inf
        for half in range(max(0, (s - width + 1) // 2, s - len(table) + 1), s // 2 + 1):
            one, other = table[half], table[s - half]
            value = min(value, max(one, other) if slowest else one + other)
        out[s] = value


def cover(cost: Floats, amount: Ints, total: int, slack: float) -> tuple[Floats, Ints]:
    """Unbounded knapsack: V[n] = min_j V[max(0, n - amount_j)] + cost_j for n = 0..total, and its
    j.

    cost, amount [J], amounts positive and ascending. Of steps within `slack` of V the largest:
    fewer steps.
    """
    value, choice = np.full(total + 1, np.inf), np.full(total + 1, -1, np.int64)
    value[0] = 0.0
    _cover(cost, amount, slack, value, choice)
    return value, choice


@kernel
def _cover(cost: Floats, amount: Ints, slack: float, value: Floats, choice: Ints) -> None:
    for n in range(1, len(value)):
        for j in range(len(cost)):
            candidate = value[max(0, n - amount[j])] + cost[j]
            value[n] = min(value[n], candidate)
        for j in range(len(cost) - 1, -1, -1):
            if value[max(0, n - amount[j])] + cost[j] <= value[n] + slack:
                choice[n] = j
                break


def exact_sum(
    cost: Floats, waste: Floats, amount: Ints, total: int, slack: float, waste_slack: float
) -> tuple[Floats, Ints]:
    """Unbounded knapsack that hits every n = 0..total exactly: least cost V, and the j of the plan
    to take.

    cost, waste [J]; amount [J] positive. That plan has, among those within `slack` a step of V, the
    least waste and, among those within `waste_slack` a step of that, the fewest steps. V is inf,
    its j -1 where n cannot be made.
    """
    value, choice = np.full(total + 1, np.inf), np.full(total + 1, -1, np.int64)
    lost, steps = value.copy(), np.zeros(total + 1, np.int64)
    value[0] = lost[0] = 0.0
    _exact_sum(cost, waste, amount, slack, waste_slack, value, choice, lost, steps)
    return value, choice


@kernel
def _exact_sum(
    cost: Floats,
    waste: Floats,
    amount: Ints,
    slack: float,
    waste_slack: float,
    value: Floats,
    choice: Ints,
    lost: Floats,
    steps: Ints,
) -> None:
    """lost, steps [total + 1]: waste and steps of the plan to take."""
    for n in range(1, len(value)):
        for j in range(len(cost)):
            if amount[j] <= n:
                value[n] = min(value[n], value[n - amount[j]] + cost[j])
        if value[n] == np.inf:
            continue
        for j in range(len(cost)):
            if amount[j] > n or value[n - amount[j]] + cost[j] > value[n] + slack:
                continue
            wasted = lost[n - amount[j]] + waste[j]
            count = steps[n - amount[j]] + 1
            if wasted < lost[n] - waste_slack or (
                wasted <= lost[n] + waste_slack and count < steps[n]
            ):
                lost[n] = wasted
                steps[n] = count
                choice[n] = j
