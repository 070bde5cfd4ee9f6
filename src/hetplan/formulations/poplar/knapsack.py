"""An unbounded knapsack over steps, with ties broken by waste and then by the number of steps."""

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.poplar.problem import Floats, Ints


@kernel
def _knapsack(
    steps: tuple[Floats, Floats, Ints],
    covering: bool,
    slack: tuple[float, float],
    value: Floats,
    choice: Ints,
    lost: Floats,
    count: Ints,
) -> None:
    """Fill value, choice, lost, count [total + 1]; see `knapsack`."""
    cost, waste, size = steps
    for n in range(1, len(value)):
        for j in range(len(cost)):
            before = max(0, n - size[j]) if covering else n - size[j]
            if before >= 0:
                value[n] = min(value[n], value[before] + cost[j])
        if value[n] == np.inf:
            continue
        for j in range(len(cost)):
            before = max(0, n - size[j]) if covering else n - size[j]
            if before < 0 or value[before] + cost[j] > value[n] + slack[0]:
                continue
            wasted, more = lost[before] + waste[j], count[before] + 1
            if wasted < lost[n] - slack[1] or (wasted <= lost[n] + slack[1] and more < count[n]):
                lost[n] = wasted
                count[n] = more
                choice[n] = j


def knapsack(
    cost: Floats, waste: Floats, size: Ints, total: int, covering: bool, slack: tuple[float, float]
) -> tuple[Floats, list[int]]:
    """An unbounded knapsack: the least cost of steps whose sizes add up to a sum, and the steps.

    cost, waste, size [J]: of one step of each kind; a plan has any number of each. covering:
    whether sizes may add up to more than the sum. Returns the least cost [total + 1] of each sum,
    infinite where no steps have it, and the kinds of the steps of a plan with sum `total`. Of the
    plans within slack[0] per step of the least cost it is the one of least waste; of those within
    slack[1] per step of that, the one with the fewest steps.
    """
    value, choice = np.full(total + 1, np.inf), np.full(total + 1, -1, np.int64)
    lost, count = np.full(total + 1, np.inf), np.zeros(total + 1, np.int64)
    value[0] = lost[0] = 0.0
    _knapsack((cost, waste, size), covering, slack, value, choice, lost, count)
    chosen, left = [], total
    while left > 0 and choice[left] >= 0:
        chosen.append(int(choice[left]))
        left -= int(size[chosen[-1]])
    return value, chosen
