"""The cheapest derivation of every property, by Knuth's generalisation of Dijkstra's algorithm.

The cost of a property is that of its cheapest triple plus the sum or the maximum of the costs of
the triple's preconditions.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence

from hetplan.formulations.hap.problem import Step

TripleSeconds = Callable[["Step"], float]
Combine = Callable[[list[float]], float]


def derivable(steps: Iterable[Step]) -> tuple[set[int], list[Step]]:
    """All properties that `steps` can establish, and the steps in an order in which they apply."""
    listed = list(steps)
    cost, _, order = derivations(listed, lambda step: 0.0, max)
    return set(cost), [listed[n] for n in order]


def derivations(
    steps: Sequence[Step], seconds_of: TripleSeconds, combine: Combine
) -> tuple[dict[int, float], dict[int, int], list[int]]:
    """(property -> cost, property -> number of the step that gives it at that cost, the steps that
    apply in order). A step costs its seconds and what `combine` makes of its preconditions'."""
    waiting: dict[int, list[int]] = {}
    missing = [len(step.pre) for step in steps]
    heap: list[tuple[float, int, int]] = []
    cost: dict[int, float] = {}
    by: dict[int, int] = {}
    order: list[int] = []

    def applies(n: int) -> None:
        step = steps[n]
        value = seconds_of(step) + (combine([cost[q] for q in step.pre]) if step.pre else 0.0)
        order.append(n)
        for p in step.post:
            heapq.heappush(heap, (value, n, p))

    for n, step in enumerate(steps):
        for q in step.pre:
            waiting.setdefault(q, []).append(n)
        if not step.pre:
            applies(n)
    while heap:
        value, n, p = heapq.heappop(heap)
        if p not in cost:
            cost[p], by[p] = value, n
            for m in waiting.get(p, ()):
                missing[m] -= 1
                if missing[m] == 0:
                    applies(m)
    return cost, by, order
