"""Ties: of all plans of one time the one of least under-utilisation (Poplar, eq. 4).

Every exact method ends here, with the time of a plan (ZeRO 2, 3: with the times of its steps).

The under-utilisation of a device is its idle seconds times its peak speed: the samples that it
could have computed meanwhile. The worth of a load is likewise the device's busy seconds times its
peak speed. At a given time, the plan of the greatest total worth therefore has the least
under-utilisation. `fill` finds it: it begins with the largest loads, and takes samples away at the
least loss of worth.
Source: hetplan, for Poplar eq. 1 to 4 (AAAI 2025).
"""

from collections.abc import Mapping

import numpy as np

from hetplan.formulations.poplar.data import PoplarDecision
from hetplan.formulations.poplar.decisions import loads_of, shares_decision, steps_decision
from hetplan.formulations.poplar.fill import Pool, fill
from hetplan.formulations.poplar.problem import SAME_TIME, Ints, PoplarProblem
from hetplan.formulations.poplar.shares import busiest, largest_shares


def shares_within(problem: PoplarProblem, limit: float) -> PoplarDecision:
    """ZeRO 0, 1: the plan of least under-utilisation within `limit` seconds, which some plan must
    keep to."""
    pools: list[Pool] = []
    micro_batches: list[Ints] = []  # [groups][samples of a share]
    for group, most in zip(problem.groups, largest_shares(problem, limit), strict=True):
        busy_seconds, micro_batch = busiest(group.seconds, most, limit)
        worth = group.peak * busy_seconds
        admissible = np.isfinite(busy_seconds)
        pools.append(Pool.of(group.count, worth, admissible))
        micro_batches.append(micro_batch)
    losses = fill(pools, problem.total)
    assert losses is not None, "some shares reach the sum within this time"
    loads = [loads_of(pool.most, row) for pool, row in zip(pools, losses, strict=True)]
    return shares_decision(problem, loads, lambda k, samples: int(micro_batches[k][samples]))


def steps_within(problem: PoplarProblem, counts: Mapping[float, int]) -> PoplarDecision | None:
    """ZeRO 2, 3: the plan of least under-utilisation with these steps; None where they cannot take
    exactly G samples.

    counts: seconds of a step -> number of steps.
    """
    pools: list[Pool] = []  # a pool of every group for the first time, then for the second, …
    for limit, count in counts.items():
        pools += pools_of(problem, limit, count)
    losses = fill(pools, problem.total)
    if losses is None:
        return None
    loads = [loads_of(pool.most, row) for pool, row in zip(pools, losses, strict=True)]
    groups = len(problem.groups)
    rows = []
    for i, count in enumerate(counts.values()):
        of_groups = loads[i * groups : (i + 1) * groups]
        rows.append((count, of_groups))
    return steps_decision(problem, rows)


def pools_of(problem: PoplarProblem, limit: float, count: int = 1) -> list[Pool]:
    """[groups] a pool for each group, of `count` steps of `limit` seconds.

    A device takes one micro-batch in each step, so that the pool counts it once for each step. The
    worth of a micro-batch is as the module says.
    """
    pools = []
    for group in problem.groups:
        seconds = group.seconds[: problem.total + 1]
        within = seconds <= limit * (1 + SAME_TIME)
        pools.append(Pool.of(group.count * count, group.peak * seconds, within))
    return pools
