"""ZeRO 2 and 3, exactly: an unbounded knapsack over the times that one step may take.

Sets   k groups of n_k equal devices; T ranges over the values of all curves.
Data   A_k(T) = {0} + { b <= G : t_k(b) <= T }; a step of time T takes any sum of n_k members of
       each A_k(T), at most M(T) samples, and costs T + C.
Find   the multiset of step times of least sum (T + C) whose admissible loads can add up to G.
(1) Where the work allows: every step size B has its least time f(B), the knapsack hits every sum
    exactly, and ties of time are settled over all plans of least time (exact_sums.py).
(2) Otherwise relaxed: sum M(T) >= G, a covering knapsack, O(G x times). Its steps are then filled
to exactly G
    (fill.py), with the least under-utilisation of these step times (eq. 4), or of all plans of that
    time
    (cover_ties.py). Monotone curves can always be filled, so the relaxation is exact.
(3) Holes in the sums: the knapsack of (1) over the sizes with f(B) + C + V(G - B) <= a known plan,
V from (2).
Large G: an optimal plan has fewer than M* steps that differ from the step of the best (T + C) / M*
(any M* others hold some whose sum is a multiple of M*), so all but M* x max M samples go to that
step beforehand. What such steps cost beyond that ratio bounds their number further.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from hetplan.formulations.poplar.cover_ties import settled_cover
from hetplan.formulations.poplar.data import PoplarDecision
from hetplan.formulations.poplar.decode import loads_of, steps_decision
from hetplan.formulations.poplar.exact_sums import ExactPlan, pruned_plan, settled_plan
from hetplan.formulations.poplar.fill import GREEDY, Filled, Pool, fill
from hetplan.formulations.poplar.kernels import cover
from hetplan.formulations.poplar.problem import Floats, Ints, PoplarProblem
from hetplan.formulations.poplar.step_levels import (
    MAX_ENTRIES,
    MAX_WORK,
    SAME,
    Level,
    level_of,
    step_sizes,
)
from hetplan.formulations.poplar.step_times import convolution_work, largest_step
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run

# Comparisons and additions up to which every size is looked at (about 5 ms), and ties settled among
# all plans.
SUMS_WORK = 4e6
THESE_TIMES = "proven for these step times"


def solve_steps(problem: PoplarProblem, run: Run) -> Outcome[PoplarDecision]:
    """The exact method for ZeRO 2 and 3."""
    if _sums_work(problem) <= SUMS_WORK:
        plan = settled_plan(problem)
        if plan is not None:
            return _proven(problem, plan, "exact sums", _fill_steps(problem, plan.counts))
    times, most = step_sizes(problem)
    plan = _cover_plan(problem, times, most)
    if plan is None:
        return _beyond_tables(problem, times, most, None)
    run.report(bound=plan.bound)
    filled = _fill_steps(problem, plan.counts)
    if filled is not None:
        return _proven(problem, plan, "cover", filled)
    relaxed, plan = plan.bound, pruned_plan(problem)
    if plan is None:
        return _beyond_tables(problem, times, most, relaxed)
    return _proven(problem, plan, "pruned sums", _fill_steps(problem, plan.counts))


def _proven(
    problem: PoplarProblem, plan: ExactPlan, path: str, filled: Filled | None
) -> Outcome[PoplarDecision]:
    assert filled is not None, "the sums of an exact plan can be hit"
    levels = [level_of(problem, limit) for limit in plan.counts]
    tie = GREEDY if not filled.proven else "proven" if plan.settled else THESE_TIMES
    return Outcome(
        stop=Stop.OPTIMAL,
        decision=_decision(problem, plan.counts, levels, filled),
        bound=plan.bound,
        details={
            "groups": len(problem.groups),
            "different_steps": len(plan.counts),
            "path": path,
            "tie_break": tie,
        },
    )


def _sums_work(problem: PoplarProblem) -> float:
    """Comparisons of all step sizes, and additions of the knapsack over them."""
    top = largest_step(problem)
    need = min(problem.total, top * (top + 1))
    return convolution_work(problem) + 2.0 * need * min(top, need)


def _cover_plan(problem: PoplarProblem, times: Floats, most: Ints) -> ExactPlan | None:
    """Step times of least cost whose sizes add up to at least G; None when the table would be too
    large."""
    cost = times + problem.comm
    best = int(np.argmin(cost / most))
    need, useful = _narrowed(cost, most, best, problem.total)
    ahead = (problem.total - need) // int(most[best])
    times, cost, most = times[useful], cost[useful], most[useful]
    if need > MAX_ENTRIES or need * len(cost) > MAX_WORK:
        return None
    value, choice = cover(cost, most, need, SAME * float(cost.min()))
    first = int(np.argmin(cost / most))
    if not ahead:
        settled = settled_cover(problem, times, most, value)
        if settled is not None:
            return settled
    counts = Counter({float(times[first]): ahead}) if ahead else Counter()
    bound = float(value[need]) + ahead * float(cost[first])
    while need > 0:
        j = int(choice[need])
        counts[float(times[j])] += 1
        need = max(0, need - int(most[j]))
    return ExactPlan(counts, bound, False)


def _narrowed(cost: Floats, sizes: Ints, best: int, total: int) -> tuple[int, Ints]:
    """What is left of `total` for a table, and the steps that can be part of a least cover.

    Every step costs ratio x size + excess. Repeating the best one costs `spare` more than ratio x
    total, so the excesses of a least cover add up to no more: that limits which other steps occur,
    and how many.
    """
    size, ratio = int(sizes[best]), float(cost[best]) / int(sizes[best])
    excess = cost - ratio * sizes
    spare = -(-total // size) * float(cost[best]) - ratio * total + SAME * ratio * total
    useful = np.flatnonzero(excess <= spare).astype(np.int64)
    others = useful[useful != best]
    if not len(others):
        most_others = 0
    else:
        least = float(excess[others].min())
        fewest = size - 1  # any `size` others hold some whose sum is a multiple of it
        most_others = min(fewest, int(spare / least)) if least > 0 else fewest
    kept = most_others * int(sizes[useful].max()) + size
    return total - max(0, -(-(total - kept) // size)) * size, useful


def _beyond_tables(
    problem: PoplarProblem, times: Floats, most: Ints, relaxed: float | None
) -> Outcome[PoplarDecision]:
    """The step of the best ratio as often as it fits, the rest in one step; and the best bound
    known."""
    best = int(np.argmin((times + problem.comm) / most))
    full, rest = divmod(problem.total, int(most[best]))
    bound = (float(times[best]) + problem.comm) / float(most[best]) * problem.total * (1 - SAME)
    for limit in times[np.searchsorted(most, rest) :].tolist() if rest else [float(times[best])]:
        counts = Counter({float(times[best]): full} if full else {})
        counts[limit] += 1 if rest else 0
        filled = _fill_steps(problem, counts)
        if filled is not None:
            break
    levels = [level_of(problem, limit) for limit in counts]
    return Outcome(
        stop=Stop.LIMIT,
        decision=None if filled is None else _decision(problem, counts, levels, filled),
        bound=bound if relaxed is None else max(bound, relaxed),
        message="global batch too large for a table: the step of the best ratio, repeated",
    )


def _fill_steps(problem: PoplarProblem, counts: Counter[float]) -> Filled | None:
    """Micro-batches for steps of these times that hit exactly G; None where holes make that
    impossible."""
    levels = [level_of(problem, limit) for limit in counts]
    pools = [
        Pool(pool.copies * count, pool.loss)
        for level, count in zip(levels, counts.values(), strict=True)
        for pool in level.pools
    ]
    return fill(pools, sum(pool.copies * pool.most for pool in pools) - problem.total)


def _decision(
    problem: PoplarProblem, counts: Counter[float], levels: list[Level], filled: Filled
) -> PoplarDecision:
    rows, losses = [], iter(filled.losses)
    for level, count in zip(levels, counts.values(), strict=True):
        rows.append((count, [loads_of(pool.most, next(losses)) for pool in level.pools]))
    return steps_decision(problem, rows)
