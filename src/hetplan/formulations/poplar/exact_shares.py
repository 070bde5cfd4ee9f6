"""ZeRO 0 and 1, exactly: the least time by which the devices can reach the global batch between
them.

Sets   k groups of n_k equal devices; g samples of one device.
Data   w_k(g, b) = floor(g / b) t_k(b) + t_k(g mod b) seconds; h_k(g) = min_b w_k(g, b), the fastest
       micro-batch; H_k(g) = max_b { w_k(g, b) <= T }, the one that leaves the least idle time.
       A_k(T) = { g : h_k(g) <= T }, the shares that T admits.
Find   the least T for which G is a sum of n_1 members of A_1(T), n_2 members of A_2(T), …
A_k(T) only grows with T, so a binary search over the values of h is right for any curve. Where h is
monotone, A_k(T) = 0..m and a comparison of G with sum_k n_k m decides; otherwise A_k(T) has holes,
and the sum itself is searched for (fill.py).
Ties   Among all decisions of the least T, shares and micro-batches alike, the least
       under-utilisation (Poplar, eq. 4), that is sum_i p_i H_i(g_i) at its greatest; then the
       largest micro-batch that attains H.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hetplan.formulations.poplar.data import PoplarDecision
from hetplan.formulations.poplar.decode import loads_of, shares_decision
from hetplan.formulations.poplar.fill import GREEDY, Pool, fill, surely_reached
from hetplan.formulations.poplar.kernels import SAME_TIME, busiest, share_seconds
from hetplan.formulations.poplar.problem import Floats, Group, Ints, PoplarProblem
from hetplan.formulations.poplar.share_times import fastest, largest_shares, sufficient_time
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run

# Additions and entries of the tables h; beyond, shares are so large that rounding them by speed is
# enough.
MAX_WORK = 5e9
MAX_ENTRIES = 5e7


@dataclass(frozen=True)
class Curve:
    """h of one group. seconds, batch [most + 1]; falling: minimum of h over this and all larger
    g."""

    group: Group
    seconds: Floats
    batch: Ints
    falling: Floats

    @classmethod
    def of(cls, group: Group, most: int) -> Curve:
        """Tabulated for shares 0..most."""
        seconds, batch = share_seconds(group.seconds, most)
        falling = np.minimum.accumulate(seconds[::-1])[::-1]
        return cls(group, seconds, batch, falling)

    def most(self, limit: float) -> int:
        """The greatest g with h(g) <= limit."""
        return int(np.searchsorted(self.falling, limit, side="right")) - 1

    def pool(self, limit: float) -> Pool:
        """The admissible shares at `limit`; only whether they are admissible is told."""
        seconds = self.seconds[: self.most(limit) + 1]
        return Pool.of(self.group.count, np.zeros(len(seconds)), seconds <= limit)

    def busiest(self, limit: float) -> tuple[Pool, Ints]:
        """The same shares, worth their longest busy time H at peak speed (eq. 3), and its
        micro-batch."""
        worth, batch = busiest(self.group.seconds, self.most(limit * (1 + SAME_TIME)), limit)
        admissible = np.isfinite(worth)
        most = int(np.flatnonzero(admissible)[-1])
        worth, admissible = self.group.peak * worth[: most + 1], admissible[: most + 1]
        return Pool.of(self.group.count, worth, admissible), batch


def solve_shares(problem: PoplarProblem, run: Run) -> Outcome[PoplarDecision]:
    """The exact method for ZeRO 0 and 1."""
    limit = sufficient_time(problem)
    most = largest_shares(problem, limit)
    work = float(sum(m * g.largest for m, g in zip(most, problem.groups, strict=True)))
    if work > MAX_WORK or sum(most) > MAX_ENTRIES:
        return _by_speed(problem)
    curves = [Curve.of(group, m) for group, m in zip(problem.groups, most, strict=True)]
    times = _candidates(curves, problem.total / problem.speed * (1 - 1e-12), limit)
    low = _first(times, lambda t: sum(c.group.count * c.most(t) for c in curves) >= problem.total)
    run.report(bound=times[low] + problem.comm)
    found, checks = _least_reached(curves, problem.total, times, low)
    run.report(bound=found + problem.comm)
    decision, proven = _least_idle(problem, curves, found)
    return Outcome(
        stop=Stop.OPTIMAL,
        decision=decision,
        bound=found + problem.comm,
        details={
            "groups": len(curves),
            "times": len(times),
            "sums_checked": checks,
            "tie_break": "proven" if proven else GREEDY,
        },
    )


def _least_idle(
    problem: PoplarProblem, curves: list[Curve], limit: float
) -> tuple[PoplarDecision, bool]:
    """Of the decisions within `limit`, the least time, one of least under-utilisation; whether that
    is proven."""
    pools, batches = zip(*(curve.busiest(limit) for curve in curves), strict=True)
    filled = fill(pools, sum(pool.copies * pool.most for pool in pools) - problem.total)
    assert filled is not None, "shares that reach the sum were found at this time"
    loads = [loads_of(pool.most, row) for pool, row in zip(pools, filled.losses, strict=True)]
    return shares_decision(problem, loads, lambda k, g: int(batches[k][g])), filled.proven


def _by_speed(problem: PoplarProblem) -> Outcome[PoplarDecision]:
    """Shares in proportion to peak speed, and the bound that no device beats its peak."""
    ideal = problem.total / problem.speed
    floors = [int(ideal * group.peak) for group in problem.groups]
    rest = problem.total - sum(g.count * f for g, f in zip(problem.groups, floors, strict=True))
    loads = []
    for group, floor in zip(problem.groups, floors, strict=True):
        more = min(rest, group.count)
        rest -= more
        loads.append({floor + 1: more, floor: group.count - more})
    decision = shares_decision(problem, loads, lambda k, g: fastest(problem.groups[k], g)[1])
    message = "global batch too large for tables: shares in proportion to speed, bounded by the peak speeds"
    bound = ideal * (1 - 1e-12) + problem.comm
    return Outcome(stop=Stop.LIMIT, decision=decision, bound=bound, message=message)


def _candidates(curves: list[Curve], low: float, high: float) -> Floats:
    """All values of h within [low, high], ascending; never empty, since `high` is one of them."""
    values = np.concatenate([c.seconds[(c.seconds >= low) & (c.seconds <= high)] for c in curves])
    return np.unique(np.append(values, high))


def _first(times: Floats, holds: Callable[[float], bool]) -> int:
    """The first index where the monotone predicate holds; the last index when it holds nowhere
    else."""
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        if holds(float(times[middle])):
            high = middle
        else:
            low = middle + 1
    return low


def _least_reached(curves: list[Curve], total: int, times: Floats, low: int) -> tuple[float, int]:
    """The least time from times[low:] at which the sum is hit, and how many times were looked at.

    The first time mostly does; otherwise a binary search between it and the last, at which a known
    plan hits it.
    """
    checks = 0

    def reached(limit: float) -> bool:
        nonlocal checks
        checks += 1
        pools = [curve.pool(limit) for curve in curves]
        deficit = sum(p.copies * p.most for p in pools) - total
        if deficit <= 0:
            return deficit == 0
        sure = surely_reached(pools)
        return (sure is not None and deficit >= sure) or fill(pools, deficit) is not None

    if not reached(float(times[low])):
        low += 1 + _first(times[low + 1 :], reached)
    return float(times[low]), checks
