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

import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from hetplan.solvers.run import D, Run, Stop, Stopped, stop_reason

N = TypeVar("N")


@dataclass
class Incumbent(Generic[D]):
    """The best decision so far. Families may subclass it, say to price each decision only once."""

    run: Run  # every better objective is reported to it
    # The search does not look for decisions that are better by less than this share of the
    # objective. None: the gap of the run's options.
    gap: float | None = None
    # The cost of `decision`. A family may set it without a decision: the search then looks only
    # for decisions that cost less.
    objective: float = math.inf
    decision: D | None = None

    @property
    def threshold(self) -> float:
        """The bound from which on a node need not be divided; infinite without an objective."""
        gap = self.run.options.gap if self.gap is None else self.gap
        allowed = 0.0 if math.isinf(self.objective) else gap * abs(self.objective)
        return self.objective - allowed

    def offer(self, objective: float, decision: D) -> bool:
        """Keep the decision if it costs less than the best so far; True where it does."""
        if not objective < self.objective:
            return False
        self.objective, self.decision = objective, decision
        self.run.report(incumbent=objective)
        return True


@dataclass(frozen=True)
class Expansion(Generic[N]):
    """The children of a node. The search raises a child's bound to that of its parent."""

    # (bound, child). A node that is worth another try may be its own child, with a raised bound.
    children: Iterable[tuple[float, N]] = ()
    # A lower bound on the cost of the node's decisions that no child holds; infinite where the
    # children hold all of them. For a node that is given up undecided, it is the node's own bound.
    dropped_bound: float = math.inf
    # Nodes without progress are idle: `SearchLimits.patience` counts them.
    progress: bool = False


@dataclass(frozen=True)
class SearchLimits:
    """When a search gives up early, and how its bound is rounded."""

    # The search gives up once more than this number of nodes were idle since the proven bound last
    # rose by the share `rise` of its distance to the incumbent. None: it never gives up.
    patience: int | None = None
    rise: float = 0.01
    most_nodes: int | None = None  # nodes expanded at most; None: no limit
    # The relative rounding in the family's bounds. Reported and returned bounds are lowered by it.
    rounding: float = 0.0
    node_seconds: float = 2e-3  # seconds that a node counts towards the budget of the run


@dataclass(frozen=True)
class Proof:
    """The end of a search; objective and decision are in the incumbent."""

    # Proven for the whole problem, never above the incumbent's objective. None: nothing is proven,
    # or it is proven that there is no decision.
    bound: float | None
    # No node is left open. False: the search was stopped, or gave up by its limits.
    finished: bool
    # Finished, and nothing was dropped below the threshold: no decision costs less than that.
    proven: bool
    # Proven, and the incumbent has no objective: there is no decision at all.
    empty: bool
    expanded: int  # nodes expanded

    def verdict(self, run: Run, none: str, unfinished: str = "") -> tuple[Stop, str]:
        """(stop, message) of the outcome.

        none: the message that there is no decision. unfinished: the message why a search that left
        no node open proves nothing.
        """
        if self.empty:
            return Stop.INFEASIBLE, none
        if self.proven:
            return Stop.OPTIMAL, ""
        if self.finished:
            return stop_reason(run), unfinished
        return stop_reason(run), ""


def search(
    roots: Iterable[tuple[float, N]],
    expand: Callable[[N, float], Expansion[N]],
    incumbent: Incumbent[D],
    run: Run,
    limits: SearchLimits = SearchLimits(),
) -> Proof:
    """The proof of a search that divides nodes, least bound first, until no bound is below the
    incumbent's threshold.

    roots: (bound, node), together all decisions; -inf where no bound is known. Of equal bounds the
    older node goes first. expand(node, threshold): divides a node; a child whose bound has reached
    the threshold need not be bounded any better. `expand` may raise `Stopped` where the run should
    stop; the node then stays open as it was.
    """
    number = itertools.count()
    heap = [(bound, next(number), node) for bound, node in roots]
    heapq.heapify(heap)
    dropped_bound = math.inf
    # The proven bound at the last rise that counted (`SearchLimits.rise`). Without an incumbent the
    # distance to it is infinite, so that no rise counts. The bound begins at 0, since costs are
    # usually times. With costs below 0 a search with `patience` only gives up sooner.
    bound_at_rise = 0.0
    expanded = idle_nodes = 0

    def proven_bound() -> float:
        """A lower bound for the whole problem; -inf where nothing is proven, +inf where no decision
        remains at all."""
        least = min(heap[0][0] if heap else math.inf, dropped_bound, incumbent.objective)
        return least * (1 - limits.rounding)

    while heap and heap[0][0] < incumbent.threshold and not run.should_stop:
        bound = heap[0][0]
        least_rise = limits.rise * (incumbent.objective - bound_at_rise)
        if bound > bound_at_rise + least_rise:
            idle_nodes = 0
            bound_at_rise = bound
        impatient = limits.patience is not None and idle_nodes > limits.patience
        if impatient or expanded == limits.most_nodes:
            break
        entry = heapq.heappop(heap)
        _, _, node = entry
        try:
            expansion = expand(node, incumbent.threshold)
            children = list(expansion.children)  # a generator may raise `Stopped`, too
        except Stopped:
            heapq.heappush(heap, entry)
            break
        expanded += 1
        run.count(limits.node_seconds)
        if not expansion.progress:
            idle_nodes += 1
        dropped_bound = min(dropped_bound, max(bound, expansion.dropped_bound))
        for child_bound, child in children:
            child_bound = max(bound, child_bound)
            if child_bound >= incumbent.threshold:
                dropped_bound = min(dropped_bound, child_bound)
            else:
                heapq.heappush(heap, (child_bound, next(number), child))
        if math.isfinite(proven_bound()):
            run.report(bound=proven_bound())
    finished = not heap or heap[0][0] >= incumbent.threshold
    proven = finished and dropped_bound >= incumbent.threshold
    least = proven_bound()
    return Proof(
        bound=least if math.isfinite(least) else None,
        finished=finished,
        proven=proven,
        empty=proven and math.isinf(incumbent.objective),
        expanded=expanded,
    )
