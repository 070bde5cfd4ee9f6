"""Best-first branch and bound, shared by the exact methods of the families.

A node stands for a set of decisions, and its bound is at most what any of them costs. The search
takes the open node of least bound and has the family divide it into children. A node is closed
when its bound reaches the threshold, which is the incumbent's objective less the gap. The least
bound among open and dropped nodes, or the incumbent's objective if that is lower, bounds the whole
problem, whenever the search ends.

Used by a family as

    incumbent = Incumbent[Decision](run)
    incumbent.offer(objective, decision)            # a first decision, if there is one

    def expand(node, threshold):                    # may offer better decisions
        ...
        return Expansion([(bound, child), ...])

    proof = search([(0.0, root)], expand, incumbent, run)
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from hetplan.solvers.run import Run, Stopped

N = TypeVar("N")
D = TypeVar("D")


@dataclass
class Incumbent(Generic[D]):
    """The best decision so far. Families may subclass it, say to price each decision only once."""

    run: Run  # hears of every better objective
    # Relative gap: what is better by less is not sought. None takes the run's own.
    gap: float | None = None
    # Of `decision`. Without a decision, a cut-off: only what costs less is of interest.
    objective: float = math.inf
    decision: D | None = None

    @property
    def threshold(self) -> float:
        """The bound from which on a node need not be divided; infinite without an objective."""
        gap = self.run.options.gap if self.gap is None else self.gap
        if math.isinf(self.objective):
            return self.objective
        return self.objective - gap * abs(self.objective)

    def offer(self, objective: float, decision: D) -> bool:
        """Keep the decision if it costs less than the best so far; whether it does."""
        if not objective < self.objective:
            return False
        self.objective, self.decision = objective, decision
        self.run.report(incumbent=objective)
        return True


@dataclass(frozen=True)
class Expansion(Generic[N]):
    """What became of a node. Its own bound holds for its children as well."""

    # (bound, child). A node that is worth another try may be its own child, with a raised bound.
    children: Iterable[tuple[float, N]] = ()
    # Least bound of the decisions that no child holds; infinite where the children hold all that
    # the node held. A node that is given up undecided is dropped with the bound that it has.
    dropped: float = math.inf
    # Whether the node does not count against the patience of `Limits`.
    progress: bool = False


@dataclass(frozen=True)
class Limits:
    """When a search gives up early, and how its bound is rounded."""

    # Nodes without progress, counted since the proven bound last rose by `rise`, after which the
    # search gives up. None: it never does.
    patience: int | None = None
    # Share of the distance between bound and incumbent that counts as a rise.
    rise: float = 0.01
    # Nodes expanded at most.
    most_nodes: int | None = None
    # Relative rounding in the family's bounds, taken off what is reported and returned.
    rounding: float = 0.0


@dataclass(frozen=True)
class Proof:
    """How a search ended; objective and decision are in the incumbent."""

    # Proven for the whole problem, never above the incumbent's objective. None: nothing is proven,
    # or it is proven that there is no decision.
    bound: float | None
    # No node is left open. False: the search was stopped, or gave up by its limits.
    finished: bool
    # Finished, and no node was dropped below the threshold: nothing costs less than that.
    proven: bool
    # Proven that there is no decision at all.
    empty: bool
    # Nodes expanded.
    expanded: int


def search(
    roots: Iterable[tuple[float, N]],
    expand: Callable[[N, float], Expansion[N]],
    incumbent: Incumbent[D],
    run: Run,
    limits: Limits = Limits(),
) -> Proof:
    """Divide nodes, least bound first, until none is below the incumbent's threshold.

    roots: (bound, node), together all decisions; -inf where no bound is known. Of equal bounds the
    older node goes first. expand(node, threshold): bounds need not be better than the threshold. It
    may raise `Stopped` where the run should stop; the node then stays open as it was.
    """
    number = itertools.count()
    heap = [(bound, next(number), node) for bound, node in roots]
    heapq.heapify(heap)
    dropped, risen = math.inf, 0.0
    expanded = idle = 0

    def proven_bound() -> float:
        least = min(heap[0][0] if heap else math.inf, dropped, incumbent.objective)
        return least * (1 - limits.rounding)

    while heap and heap[0][0] < incumbent.threshold and not run.should_stop:
        bound = heap[0][0]
        if bound > risen + limits.rise * (incumbent.objective - risen):
            idle, risen = 0, bound
        impatient = limits.patience is not None and idle > limits.patience
        if impatient or expanded == limits.most_nodes:
            break
        entry = heapq.heappop(heap)
        try:
            expansion = expand(entry[2], incumbent.threshold)
            children = list(expansion.children)  # may be a generator, which may be stopped as well
        except Stopped:
            heapq.heappush(heap, entry)
            break
        expanded += 1
        idle += not expansion.progress
        dropped = min(dropped, max(bound, expansion.dropped))
        for child_bound, child in children:
            child_bound = max(bound, child_bound)
            if child_bound >= incumbent.threshold:
                dropped = min(dropped, child_bound)
            else:
                heapq.heappush(heap, (child_bound, next(number), child))
        if math.isfinite(proven_bound()):
            run.report(bound=proven_bound())
    finished = not heap or heap[0][0] >= incumbent.threshold
    proven = finished and dropped >= incumbent.threshold
    least = proven_bound()
    return Proof(
        bound=least if math.isfinite(least) else None,
        finished=finished,
        proven=proven,
        empty=proven and math.isinf(incumbent.objective),
        expanded=expanded,
    )
