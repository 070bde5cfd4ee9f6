"""An unbounded knapsack over steps. Ties are broken by waste and then by the number of steps."""

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
    """Fill four arrays [total + 1] with the best plan of each sum.

    value: its least cost. choice: its last step, -1 where there is none. lost: its waste. count:
    its number of steps. steps: (cost, waste, size) [J] each; covering and slack: see `knapsack`.
    """
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
            wasted = lost[before] + waste[j]
            more = count[before] + 1
            if wasted < lost[n] - slack[1] or (wasted <= lost[n] + slack[1] and more < count[n]):
                lost[n] = wasted
                count[n] = more
                choice[n] = j


def knapsack(
    cost: Floats, waste: Floats, size: Ints, total: int, covering: bool, slack: tuple[float, float]
) -> tuple[Floats, list[int]]:
    """([total + 1] the least cost of steps whose sizes add up to each sum, infinite where no steps
    do, the steps of the best plan of sum `total` as indices into `cost`).

    The best plan is the one of least waste, of all plans whose cost is within slack[0] per step of
    the least. Of those whose waste is within slack[1] per step of that, it has the fewest steps.

    cost, waste, size: [J] of one step; a plan may have any number of each of these J steps.
    covering: whether the sizes of a plan may also add up to more than the sum.
    """
    value, choice = np.full(total + 1, np.inf), np.full(total + 1, -1, np.int64)
    lost = np.full(total + 1, np.inf)
    count = np.zeros(total + 1, np.int64)
    value[0] = lost[0] = 0.0
    _knapsack((cost, waste, size), covering, slack, value, choice, lost, count)
    chosen, left = [], total
    while left > 0 and choice[left] >= 0:
        chosen.append(int(choice[left]))
        left -= int(size[chosen[-1]])
    return value, chosen
