"""ZeRO 0 and 1, exactly: the least time by which the devices can reach the global batch between them.

Sets   k groups of n_k equal devices; g samples of one device.
Data   h_k(g) = min_b floor(g / b) t_k(b) + t_k(g mod b) seconds: a device runs its share with its fastest
       micro-batch.
       A_k(T) = { g : h_k(g) <= T }, the shares that T admits.
Find   the least T for which G is a sum of n_1 members of A_1(T), n_2 members of A_2(T), …
A_k(T) only grows with T, so a binary search over the values of h is right for any curve. Where h is monotone,
A_k(T) = 0..m and a comparison of G with sum_k n_k m decides; otherwise A_k(T) has holes, and the sum itself
is searched for (fill.py). Among the shares of time T the least under-utilisation is taken (Poplar, eq. 4).
A slower micro-batch would lower eq. 4 too, without doing any work: it is not considered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hetplan.formulations.poplar.data import PoplarDecision
from hetplan.formulations.poplar.decode import loads_of, shares_decision
from hetplan.formulations.poplar.fill import Filled, Pool, fill, surely_reached
from hetplan.formulations.poplar.kernels import share_seconds
from hetplan.formulations.poplar.problem import Floats, Group, Ints, PoplarProblem
from hetplan.formulations.poplar.share_times import fastest, largest_shares, proportional_time
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run

# Additions and entries of the tables h; beyond, shares are so large that rounding them by speed is enough.
MAX_WORK = 5e9
MAX_ENTRIES = 5e7


@dataclass(frozen=True)
class Curve:
    """h of one group. seconds, batch [most + 1]; falling: minimum of h over this and all larger g."""

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
        """The admissible shares at `limit`, worth their busy time at peak speed (eq. 3)."""
        seconds = self.seconds[: self.most(limit) + 1]
        return Pool.of(self.group.count, self.group.peak * seconds, seconds <= limit)


def solve_shares(problem: PoplarProblem, run: Run) -> Outcome[PoplarDecision]:
    """The exact method for ZeRO 0 and 1."""
    limit = proportional_time(problem)
    most = largest_shares(problem, limit)
    work = float(sum(m * g.largest for m, g in zip(most, problem.groups, strict=True)))
    if work > MAX_WORK or sum(most) > MAX_ENTRIES:
        return _by_speed(problem)
    curves = [Curve.of(group, m) for group, m in zip(problem.groups, most, strict=True)]
    times = _candidates(curves, problem.total / problem.speed * (1 - 1e-12), limit)
    low = _first(times, lambda t: sum(c.group.count * c.most(t) for c in curves) >= problem.total)
    run.report(bound=times[low] + problem.comm)
    found, filled, checks = _least_reached(curves, problem.total, times, low)
    loads = [loads_of(c.most(found), row) for c, row in zip(curves, filled.losses, strict=True)]
    decision = shares_decision(problem, loads, lambda k, g: int(curves[k].batch[g]))
    return Outcome(
        stop=Stop.OPTIMAL,
        decision=decision,
        bound=found + problem.comm,
        details={
            "groups": len(curves),
            "times": len(times),
            "sums_checked": checks,
            "tie_break": "proven" if filled.proven else "most devices fixed by a greedy",
        },
    )


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
    """The first index where the monotone predicate holds; the last index when it holds nowhere else."""
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        if holds(float(times[middle])):
            high = middle
        else:
            low = middle + 1
    return low


def _least_reached(curves: list[Curve], total: int, times: Floats, low: int) -> tuple[float, Filled, int]:
    """The least time from times[low:] at which the sum is hit, and the shares that hit it.

    The first time mostly does; otherwise a binary search between it and the last, at which the proportional
    shares hit it.
    """
    checks = 0

    def attempt(limit: float) -> Filled | None:
        nonlocal checks
        checks += 1
        pools = [curve.pool(limit) for curve in curves]
        return fill(pools, sum(p.copies * p.most for p in pools) - total)

    def reached(limit: float) -> bool:
        nonlocal checks
        checks += 1
        pools = [curve.pool(limit) for curve in curves]
        deficit = sum(p.copies * p.most for p in pools) - total
        sure = surely_reached(pools)
        return (sure is not None and deficit >= sure) or fill(pools, deficit) is not None

    filled = attempt(float(times[low]))
    if filled is None:
        low += 1 + _first(times[low + 1 :], reached)
        filled = attempt(float(times[low]))
    assert filled is not None, "the proportional shares are admissible at the last time"
    return float(times[low]), filled, checks
