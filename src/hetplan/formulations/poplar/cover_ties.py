"""ZeRO 2 and 3: ties among all plans of the time that a covering knapsack found (exact_steps, (2)).

V(n) is the least cost of steps whose greatest sizes M(T) add up to n or more. A plan of time V(G)
takes B samples in a step of T seconds only if T + C + V(G - B) <= V(G); with the least
under-utilisation of each such (T, B), the knapsack of exact_sums finds the plan of least time and,
of these, least under-utilisation. (Steps of other times, at which M does not grow, would make a
cheaper cover.)
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from hetplan.formulations.poplar.exact_sums import ExactPlan, chosen_steps, least_waste
from hetplan.formulations.poplar.kernels import SAME_TIME, exact_sum
from hetplan.formulations.poplar.problem import Floats, Ints, PoplarProblem

# Additions of the knapsack, and of the fills (about 4 ms each).
PAIR_WORK = 4e6
FILL_WORK = 4e6


def settled_cover(
    problem: PoplarProblem, times: Floats, most: Ints, value: Floats
) -> ExactPlan | None:
    """The plan, its ties settled; None where that is too much work or holes in the sums forbid that
    time.

    times, most [J] step times and M; value [G + 1] V.
    """
    total, least = problem.total, float(value[-1])
    left = least * (1 + SAME_TIME) - (times + problem.comm)
    rest = np.searchsorted(value, left, side="right") - 1  # V ascends
    smallest = np.maximum(1, total - rest)
    counts = np.where(rest >= 0, np.minimum(most, total) - smallest + 1, 0).clip(min=0)
    if float(counts.sum()) * total > PAIR_WORK:
        return None
    kept = np.flatnonzero(counts)
    sizes = np.concatenate([np.arange(smallest[j], smallest[j] + counts[j]) for j in kept])
    seconds = np.repeat(times[kept], counts[kept])
    waste = least_waste(problem, sizes, seconds, FILL_WORK)
    if waste is None:
        return None
    able = np.isfinite(waste)
    sizes, seconds, waste = sizes[able].astype(np.int64), seconds[able], waste[able]
    slack = SAME_TIME * float(seconds.min(initial=np.inf) + problem.comm) / 8
    cost = seconds + problem.comm
    found, choice = exact_sum(cost, waste, sizes, total, slack, slack * problem.speed)
    if not found[-1] <= least * (1 + SAME_TIME):
        return None
    steps = Counter(seconds[j].item() for j in chosen_steps(choice, sizes, total))
    return ExactPlan(steps, least, True)
