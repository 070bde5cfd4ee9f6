"""ZeRO 2 and 3 where a cover is not enough: a knapsack over all step sizes that hits the global batch exactly.

f(B), the least time of a step of B samples, need not grow with B when curves fall: sizes that the admissible
loads cannot add up to are missing at one time and appear at a later one. See exact_steps, (2).
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from hetplan.formulations.poplar.fill import least_losses, surely_reached
from hetplan.formulations.poplar.kernels import cover, exact_sum
from hetplan.formulations.poplar.problem import Floats, Ints, PoplarProblem
from hetplan.formulations.poplar.step_levels import MAX_ENTRIES, MAX_WORK, SAME, Level, level_of, step_sizes


def exact_plan(problem: PoplarProblem, *, prune: bool) -> tuple[Counter[float], float] | None:
    """Step times of a plan of least time that hits G exactly, least under-utilisation among equal times.

    prune: keep only the step sizes that can be part of a plan as good as a known one, and leave ties alone.
    None when the table would be too large.
    """
    sizes, seconds, waste = _all_sizes(problem, with_waste=not prune)
    cost = seconds + problem.comm
    best = int(np.argmin(cost / sizes))
    ahead = max(0, -(-(problem.total - int(sizes[best]) * (int(sizes[-1]) + 1)) // int(sizes[best])))
    need = problem.total - ahead * int(sizes[best])
    counts = Counter({float(seconds[best]): ahead}) if ahead else Counter()
    bound = ahead * float(cost[best])
    if prune:
        keep = _useful_sizes(problem, need, sizes, cost)
        sizes, cost, seconds, waste = sizes[keep], cost[keep], seconds[keep], waste[keep]
    if need > MAX_ENTRIES or need * len(sizes) > MAX_WORK:
        return None
    value, choice = exact_sum(cost, waste, sizes, need, SAME * problem.total / problem.speed)
    bound += float(value[need])
    while need:
        j = int(choice[need])
        counts[float(seconds[j])] += 1
        need -= int(sizes[j])
    return counts, bound


def _all_sizes(problem: PoplarProblem, *, with_waste: bool) -> tuple[Ints, Floats, Floats]:
    """Every step size B with its least time f(B) and its least under-utilisation (0 where not asked for)."""
    largest = min(problem.total, sum(g.count * min(g.largest, problem.total) for g in problem.groups))
    seconds = np.full(largest + 1, np.inf)
    waste = np.zeros(largest + 1)
    curves = [group.seconds[1 : problem.total + 1] for group in problem.groups]
    for limit in np.unique(np.concatenate(curves)).tolist():
        level = level_of(problem, limit)
        most = level.most
        sure = None if with_waste else surely_reached(level.pools)
        width = most if sure is None else min(sure, most)
        if sure is not None and most - width >= 1:
            top = min(most - width, largest) + 1
            seconds[:top] = np.minimum(seconds[:top], limit)
        losses = least_losses(level.pools, width)
        deficits = np.flatnonzero(np.isfinite(losses))
        found = most - deficits
        new = (found <= largest) & (found >= 1)
        found, deficits = found[new], deficits[new]
        fresh = np.isinf(seconds[found])
        seconds[found[fresh]] = limit
        if with_waste:
            busiest = sum(
                pool.copies * (group.peak * limit)
                for pool, group in zip(level.pools, problem.groups, strict=True)
            )
            full = _full_worth(problem, level)
            waste[found[fresh]] = busiest - (full - losses[deficits[fresh]])
    sizes = np.flatnonzero(np.isfinite(seconds[1:])) + 1
    return sizes.astype(np.int64), seconds[sizes], waste[sizes]


def _full_worth(problem: PoplarProblem, level: Level) -> float:
    """Busy time at peak speed of all devices with their greatest micro-batch."""
    return sum(
        pool.copies * group.peak * float(group.seconds[pool.most])
        for pool, group in zip(level.pools, problem.groups, strict=True)
    )


def _useful_sizes(problem: PoplarProblem, need: int, sizes: Ints, cost: Floats) -> Ints:
    """The sizes B with f(B) + C + (least cover of need - B) no worse than some plan that hits `need`."""
    times, most = step_sizes(problem)
    lower, _ = cover(times + problem.comm, most, need)
    least = np.where(sizes <= need, cost + lower[np.maximum(need - sizes, 0)], np.inf)
    # the most promising sizes, and the smallest ones to correct the sum with (a size of 1 always exists)
    few = np.unique(np.concatenate((np.argsort(least)[:64], np.arange(min(8, len(sizes))))))
    known, _ = exact_sum(cost[few], np.zeros(len(few)), sizes[few], need, 0.0)
    return np.flatnonzero(least <= known[need] * (1 + SAME)).astype(np.int64)
