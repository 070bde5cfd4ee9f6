"""The cheapest derivation of every property, by Knuth's generalisation of Dijkstra's algorithm.

A step is a Hoare triple: it establishes its postconditions where its preconditions hold. The cost
of a property is the least cost of a step that establishes it. The cost of a step is its own seconds
plus the sum, or the maximum, of the costs of its preconditions.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hetplan.formulations.hap.problem import Step

TripleSeconds = Callable[[Step], float]
Combine = Callable[[list[float]], float]


@dataclass(frozen=True)
class Derivations:
    """The cheapest derivation of each property that the steps can establish."""

    cost: dict[int, float]  # property -> seconds of its cheapest derivation
    step_of: dict[int, int]  # property -> position of the step that gives it at that cost
    # Positions of all steps that apply; each stands behind the steps that give its preconditions.
    order: list[int]


def derivable(steps: Iterable[Step]) -> tuple[set[int], list[Step]]:
    """(properties, steps): all properties that can be established, and the steps that apply, each
    behind the steps that give its preconditions."""
    listed = list(steps)
    derivations = cheapest_derivations(listed, lambda step: 0.0, max)
    return set(derivations.cost), [listed[n] for n in derivations.order]


def cheapest_derivations(
    steps: Sequence[Step], seconds_of: TripleSeconds, combine: Combine
) -> Derivations:
    """The cheapest derivations, where a step costs its own seconds and those of its preconditions.

    seconds_of: the seconds of one step alone. combine: sum or max, of the preconditions' seconds.
    """
    users: dict[int, list[int]] = {}  # property -> positions of the steps that need it
    missing = [len(step.pre) for step in steps]  # preconditions without a cost so far
    heap: list[tuple[float, int, int]] = []  # (seconds, position of the step, property it gives)
    cost: dict[int, float] = {}
    step_of: dict[int, int] = {}
    order: list[int] = []

    def apply(n: int) -> None:
        """Offer the postconditions of step n, whose preconditions have their costs."""
        step = steps[n]
        seconds = seconds_of(step)
        if step.pre:
            seconds += combine([cost[q] for q in step.pre])
        order.append(n)
        for p in step.post:
            heapq.heappush(heap, (seconds, n, p))

    for n, step in enumerate(steps):
        for q in step.pre:
            users.setdefault(q, []).append(n)
        if not step.pre:
            apply(n)
    while heap:
        seconds, n, p = heapq.heappop(heap)
        if p in cost:
            continue
        cost[p], step_of[p] = seconds, n
        for user in users.get(p, ()):
            missing[user] -= 1
            if missing[user] == 0:
                apply(user)
    return Derivations(cost, step_of, order)
