"""A* in the order of the single-device program, for theories on which Figure 10 as printed does not
end.

As printed the search appends any instruction whose precondition is met. It meets independent
instructions in every order and at every time, and its estimate is that of one chain to the goal,
so that its states grow exponentially with the operators. Here

- tensors are computed once each, in one topological order of the single-device program;
  communications and local slices of what there is may stand between any two. The authors' code
  computes each tensor once, too (`unique_computation`), on forward graphs that are nearly chains;
- partial programs of as many tensors with the same properties still of use share a state, extended
  ones included (their `property_cache`); the one of the lowest score is kept;
- the estimate is the paper's, the least time of what is left at infinite bandwidth: with a fixed
  list of tensors, each one's cheapest form on every type, beside the stage under way;
- states are extended tensor by tensor, the best of each tensor first and only so many. The search
  is repeated with four times as many until it has left none out whose score is below the best
  program's, or until time is up.

Of the prunings of §4.5 the order takes the place of the first; the second is left out, since
programs that communicate a tensor twice are mostly the better ones; the third is the properties of
use. A property's tensor is what precedes its last `|`, without what follows a `~`, which names a
way to it. Nothing is found where tensors depend on each other in a circle, or one that cannot be
computed is not needed for the goal. Memory is known as a price of bytes.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

import networkx as nx
import numpy as np

from hetplan.formulations.hap.problem import Floats
from hetplan.formulations.hap.theory import ReducedTheory
from hetplan.solvers.run import Run

Known = frozenset[int]
ByType = tuple[float, ...]


class Move(NamedTuple):
    """A step: its triple's number, what it needs and gives, its seconds by type (a communication's
    are the same for all), what its bytes cost."""

    triple: int
    comm: bool
    pre: Known
    post: Known
    seconds: ByType
    paid: float


class Partial(NamedTuple):
    """A partial program: properties of use; seconds up to the last synchronisation, by type since
    then; the least that a whole program of it takes; the one before and the move added."""

    known: Known
    cost: float
    busy: ByType
    score: float
    before: "tuple[Partial, Move] | None" = None

    def program(self) -> list[int]:
        """Triple numbers in order."""
        numbers, at = list[int](), self.before
        while at is not None:
            numbers.append(at[1].triple)
            at = at[0].before
        return numbers[::-1]


@dataclass(frozen=True)
class Order:
    """making [n + 1]: the moves that compute the tensor of that number, none last; changing:
    property -> moves that turn it into others of the same tensor. useful [n + 1]: properties still
    of use once so many tensors are computed; rest [n + 1]: seconds of computing left at least, by
    type."""

    goal: int
    making: list[list[Move]]
    changing: dict[int, list[Move]]
    useful: list[Known]
    rest: list[ByType]

    def within(self, width: int, least: float, run: Run) -> tuple[Partial | None, bool]:
        """(The best program below `least`, extending so many states of each tensor; whether others
        that might be better were left out)."""
        left_out, count, none = False, itertools.count(), frozenset[int]()
        level = {none: Partial(none, 0.0, (0.0,) * len(self.rest[0]), 0.0)}
        for made, making in enumerate(self.making):
            after: dict[Known, Partial] = {}
            queue = [(old.score, next(count), old) for old in level.values()]
            heapq.heapify(queue)
            extended = 0
            while queue:
                score, _, old = heapq.heappop(queue)
                if level[old.known].score < score:
                    continue
                if extended == width or run.should_stop:
                    left_out = True
                    break
                extended += 1
                if self.goal in old.known:
                    return old, left_out
                changes = (move for p in sorted(old.known) for move in self.changing.get(p, ()))
                for new in self.extended(old, changes, made, level, least):
                    heapq.heappush(queue, (new.score, next(count), new))
                for _ in self.extended(old, making, made + 1, after, least):
                    pass
            level = after
        return None, left_out

    def extended(
        self, old: Partial, moves: Iterable[Move], made: int, states: dict[Known, Partial],
        least: float,
    ) -> Iterator[Partial]:  # fmt: skip
        """The partial programs with one move more, of so many tensors, that are the best of their
        states, in which they are put."""
        for move in moves:
            if not move.pre <= old.known:
                continue
            known = (old.known | move.post) & self.useful[made]
            cost, busy = old.cost + move.paid, tuple(map(add, old.busy, move.seconds))
            if move.comm:
                cost, busy = cost + max(busy), (0.0,) * len(busy)
            score = cost + max(map(add, busy, self.rest[made]))
            if score < least and (known not in states or score < states[known].score):
                states[known] = Partial(known, cost, busy, score, (old, move))
                yield states[known]


def search(
    theory: ReducedTheory, ratios: Floats, run: Run, *, most: int, byte_price: float = 0.0
) -> tuple[list[int] | None, int | None]:
    """The best program met at ratios [g, K], None where there is none; and how many states of each
    tensor were extended for it (`most` at most), None for all that could be better.

    byte_price: seconds per byte on one device.
    """
    order, best, width = arranged(theory, ratios, byte_price), None, 1
    left_out = order is not None
    while order is not None and left_out and width < most and not run.should_stop:
        width *= 4
        program, left_out = order.within(width, best.score if best else np.inf, run)
        best = program or best
    return theory.program(best.program()) if best else None, width if left_out else None


def arranged(theory: ReducedTheory, ratios: Floats, byte_price: float) -> Order | None:
    """The order of the theory's tensors; None where they depend on each other in a circle."""
    problem, names = theory.problem, theory.problem.properties
    moves = []
    for step in theory.steps:
        row = ratios[step.segment]
        paid = byte_price * (step.fixed_bytes * float(problem.counts.sum()) + step.shared_bytes)
        shares, speeds = (row.max(), np.ones(problem.K)) if step.comm else (row, problem.speeds)
        seconds = tuple(((step.fixed + step.shared * shares) / speeds).tolist())
        moves.append(Move(step.index, step.comm, step.pre, step.post, seconds, paid))

    def tensors(properties: Known) -> set[str]:
        return {(names[p].rpartition("|")[0] or names[p]).partition("~")[0] for p in properties}

    graph: nx.DiGraph[str] = nx.DiGraph()
    place: dict[str, int] = {}
    made_by = [tensors(move.post) - tensors(move.pre) for move in moves]
    for n, (move, made) in enumerate(zip(moves, made_by, strict=True)):
        graph.add_nodes_from(made)
        graph.add_edges_from(itertools.product(tensors(move.pre), made))
        place = dict.fromkeys(made, n) | place
    try:
        order = list(nx.lexicographical_topological_sort(graph, key=lambda t: place.get(t, -1)))
    except nx.NetworkXUnfeasible:
        return None
    number = {tensor: i for i, tensor in enumerate(order)}
    making: list[list[Move]] = [[] for _ in range(len(order) + 1)]
    changing: dict[int, list[Move]] = defaultdict(list)
    sources: nx.DiGraph[int] = nx.DiGraph()
    for move, made in zip(moves, made_by, strict=True):
        if made:
            making[min(number[tensor] for tensor in made)].append(move)
        else:
            sources.add_edges_from(itertools.product(move.post, move.pre))
            changing[min(move.pre)].append(move)
    wanted, useful = {theory.goal}, list[Known]()
    rest = np.zeros((len(order) + 1, problem.K))
    for i in range(len(order), -1, -1):
        for p in frozenset({theory.goal}).union(*(move.pre for move in making[i])):
            wanted |= {p} | (nx.descendants(sources, p) if p in sources else set())
        useful.append(frozenset(wanted))
        work = [(0.0,) * problem.K if move.comm else move.seconds for move in making[i]]
        rest[i] = np.min(work, axis=0) if work else 0.0
    left = rest[::-1].cumsum(axis=0)[::-1]
    return Order(theory.goal, making, changing, useful[::-1], [tuple(row) for row in left.tolist()])
