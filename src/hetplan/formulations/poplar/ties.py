"""Ties: of all plans of one time the one of least under-utilisation (Poplar, eq. 4).

Every exact method ends here, with the time of a plan (ZeRO 2, 3: with the times of its steps).
Under-utilisation is busy time at peak speed that a device lacks: the worth of a load is its busy
time, so that `fill` loses the least of it.
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
    """ZeRO 0, 1: the plan of least under-utilisation within `limit` seconds. Some plan must keep to
    the limit."""
    pools: list[Pool] = []
    micro_batches: list[Ints] = []  # [groups][samples of a share]
    for group, most in zip(problem.groups, largest_shares(problem, limit), strict=True):
        busy_seconds, micro_batch = busiest(group.seconds, most, limit)
        worth, admissible = group.peak * busy_seconds, np.isfinite(busy_seconds)
        pools.append(Pool.of(group.count, worth, admissible))
        micro_batches.append(micro_batch)
    losses = fill(pools, problem.total)
    assert losses is not None, "some shares reach the sum within this time"
    loads = [loads_of(pool.most, row) for pool, row in zip(pools, losses, strict=True)]
    return shares_decision(problem, loads, lambda k, samples: int(micro_batches[k][samples]))


def steps_within(problem: PoplarProblem, counts: Mapping[float, int]) -> PoplarDecision | None:
    """ZeRO 2, 3: the plan of least under-utilisation with so many steps of each time; None where
    they cannot take exactly G samples."""
    pools = [pool for limit, count in counts.items() for pool in pools_of(problem, limit, count)]
    losses = fill(pools, problem.total)
    if losses is None:
        return None
    loads = [loads_of(pool.most, row) for pool, row in zip(pools, losses, strict=True)]
    groups = len(problem.groups)
    rows = [
        (count, loads[i * groups : (i + 1) * groups]) for i, count in enumerate(counts.values())
    ]
    return steps_decision(problem, rows)


def pools_of(problem: PoplarProblem, limit: float, count: int = 1) -> list[Pool]:
    """The admissible micro-batches of each group in `count` steps of time `limit`, worth busy time
    at peak speed."""
    pools = []
    for group in problem.groups:
        seconds = group.seconds[: problem.total + 1]
        within = seconds <= limit * (1 + SAME_TIME)
        pools.append(Pool.of(group.count * count, group.peak * seconds, within))
    return pools
