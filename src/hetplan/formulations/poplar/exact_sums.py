"""ZeRO 2 and 3: a knapsack over all step sizes that hits the global batch exactly, and settles
ties.

Data   f(B), the least time of a step of B samples: min over loads of B in all of the slowest
       device's time. It need not grow with B when curves fall.
(1) f for all sizes at once, group by group: a min-max convolution, doubled for equal devices
(step_times.py).
(2) V(n) = min_B f(B) + C + V(n - B), the least time of n samples. A plan of time V(G) has no step
    of B samples that lasts longer than f(B), and no size B with f(B) + C + V(G - B) > V(G).
(3) Ties: of the few sizes that remain the least under-utilisation u(B) of a step of B samples and
    f(B) seconds; then the least sum of u over the plans of (2), and of these one with the fewest
    steps.
Large G: see exact_steps; a plan of least time, then least under-utilisation, repeats the step of
the least
(f(B) + C) / B, then least u(B) / B.
Source: hetplan, for Poplar Algorithm 2 and eq. 4.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from hetplan.formulations.poplar.fill import additions, least_losses
from hetplan.formulations.poplar.kernels import SAME_TIME, cover, exact_sum
from hetplan.formulations.poplar.problem import Floats, Ints, PoplarProblem
from hetplan.formulations.poplar.step_levels import (
    MAX_ENTRIES,
    MAX_WORK,
    SAME,
    Level,
    level_of,
    step_sizes,
)
from hetplan.formulations.poplar.step_times import step_times

# Additions, and different step times, up to which ties are settled.
TIE_WORK = 3e7
TIE_LEVELS = 512


@dataclass(frozen=True)
class ExactPlan:
    """counts: {step time: steps} of a plan of least time that can hit G; bound: that time, seconds.

    settled: no plan of that time has less under-utilisation, with whatever step times.
    """

    counts: Counter[float]
    bound: float
    settled: bool


def settled_plan(problem: PoplarProblem) -> ExactPlan | None:
    """With ties settled as far as TIE_WORK allows; None when the table would be too large."""
    sizes, seconds = step_times(problem)
    cost = seconds + problem.comm
    ahead, best, settled = _repeated(problem, sizes, seconds)
    need = problem.total - ahead * int(sizes[best])
    if need > MAX_ENTRIES or need * len(sizes) > MAX_WORK:
        return None
    value, choice = exact_sum(cost, np.zeros(len(cost)), sizes, need, 0.0, 0.0)
    least, steps = float(value[need]), len(chosen_steps(choice, sizes, need))
    on_time = cost + value[np.maximum(need - sizes, 0)] <= least * (1 + SAME_TIME)
    able = np.flatnonzero(on_time & (sizes <= need)).astype(np.int64)
    waste = least_waste(problem, sizes[able], seconds[able])
    settled = settled and waste is not None
    if waste is None:
        waste = np.zeros(len(able))
    slack = SAME_TIME * least / (8 * max(1, steps))
    _, choice = exact_sum(cost[able], waste, sizes[able], need, slack, slack * problem.speed)
    counts = Counter({float(seconds[best]): ahead}) if ahead else Counter()
    counts.update(seconds[able[j]].item() for j in chosen_steps(choice, sizes[able], need))
    return ExactPlan(counts, ahead * float(cost[best]) + least, settled)


def pruned_plan(problem: PoplarProblem) -> ExactPlan | None:
    """A plan of least time from the sizes that can be part of one as good as a known one; ties are
    left alone.

    None when the table would be too large.
    """
    sizes, seconds = step_times(problem)
    cost = seconds + problem.comm
    best = int(np.argmin(cost / sizes))
    ahead = _times_ahead(problem, sizes, best)
    need = problem.total - ahead * int(sizes[best])
    keep = _useful_sizes(problem, need, sizes, cost)
    if need > MAX_ENTRIES or need * len(keep) > MAX_WORK:
        return None
    value, choice = exact_sum(cost[keep], np.zeros(len(keep)), sizes[keep], need, 0.0, 0.0)
    counts = Counter({float(seconds[best]): ahead}) if ahead else Counter()
    counts.update(seconds[keep[j]].item() for j in chosen_steps(choice, sizes[keep], need))
    return ExactPlan(counts, ahead * float(cost[best]) + float(value[need]), False)


def _times_ahead(problem: PoplarProblem, sizes: Ints, best: int) -> int:
    """How often the step `best` of the least ratio surely occurs: fewer than its size of the others
    do."""
    size = int(sizes[best])
    return max(0, -(-(problem.total - size * (int(sizes[-1]) + 1)) // size))


def _repeated(problem: PoplarProblem, sizes: Ints, seconds: Floats) -> tuple[int, int, bool]:
    """(times, step, settled) of the step to repeat: the least time per sample, then the least waste
    per sample."""
    ratio = (seconds + problem.comm) / sizes
    best = int(np.argmin(ratio))
    ahead = _times_ahead(problem, sizes, best)
    tied = np.flatnonzero(ratio <= ratio[best] * (1 + SAME))
    if ahead == 0 or len(tied) == 1:
        return ahead, best, True
    waste = least_waste(problem, sizes[tied], seconds[tied])
    each = np.zeros(len(tied)) if waste is None else waste / sizes[tied]
    best = int(tied[np.flatnonzero(each <= each.min() + SAME_TIME)[-1]])
    return _times_ahead(problem, sizes, best), best, waste is not None


def chosen_steps(choice: Ints, sizes: Ints, need: int) -> list[int]:
    """The steps that a knapsack chose, by their index."""
    found = []
    while need:
        j = int(choice[need])
        found.append(j)
        need -= int(sizes[j])
    return found


def least_waste(
    problem: PoplarProblem, sizes: Ints, seconds: Floats, most_work: float = TIE_WORK
) -> Floats | None:
    """[J] u(B), the least under-utilisation of a step of B samples in that time; None beyond
    `most_work` additions.

    inf where no step of that time takes B samples.
    """
    waste = np.zeros(len(sizes))
    limits = np.unique(seconds)
    if len(limits) > TIE_LEVELS:
        return None
    work = 0.0
    for limit in limits.tolist():
        here = np.flatnonzero(seconds == limit)
        level = level_of(problem, limit)
        deficits = level.most - sizes[here]
        work += additions(level.pools, int(deficits.max()))
        if work > most_work:
            return None
        losses = least_losses(level.pools, int(deficits.max()))
        waste[here] = problem.speed * limit - (_full_worth(problem, level) - losses[deficits])
    return waste


def _full_worth(problem: PoplarProblem, level: Level) -> float:
    """Busy time at peak speed of all devices with their greatest micro-batch."""
    return sum(
        pool.copies * group.peak * float(group.seconds[pool.most])
        for pool, group in zip(level.pools, problem.groups, strict=True)
    )


def _useful_sizes(problem: PoplarProblem, need: int, sizes: Ints, cost: Floats) -> Ints:
    """The sizes B with f(B) + C + (least cover of need - B) no worse than some plan that hits
    `need`."""
    times, most = step_sizes(problem)
    lower, _ = cover(times + problem.comm, most, need, 0.0)
    least = np.where(sizes <= need, cost + lower[np.maximum(need - sizes, 0)], np.inf)
    # the most promising sizes, and the smallest ones to correct the sum with (a size of 1 always
    # exists)
    few = np.unique(np.concatenate((np.argsort(least)[:64], np.arange(min(8, len(sizes))))))
    known, _ = exact_sum(cost[few], np.zeros(len(few)), sizes[few], need, 0.0, 0.0)
    return np.flatnonzero(least <= known[need] * (1 + SAME)).astype(np.int64)
