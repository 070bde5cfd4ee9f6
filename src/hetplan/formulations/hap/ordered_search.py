"""A* in the order of the single-device program, for theories on which Figure 10 as printed does not
end.

The printed search appends any instruction whose precondition is met. It meets independent
instructions in every order and at every time, and its estimate of the seconds left counts the
computations of one chain to the goal only. So the number of its states grows exponentially with the
number of operators. This search differs:

- It computes each tensor once, in one topological order of the single-device program.
  Communications and local slices of computed tensors may stand between any two computations. The
  authors' code computes each tensor once, too (`unique_computation`), on forward graphs that are
  nearly chains.
- A property is useful after a number of tensors if a later triple or the goal may need it. Partial
  programs with equally many tensors and the same useful properties share a state. The one of the
  lowest score is kept, also where another one was extended before (the authors' `property_cache`).
- The estimate assumes infinite bandwidth, as the paper's does, but counts all tensors that are
  left: it is the sum of each one's cheapest computation on every device type. The computations of
  the stage under way are added to it.
- It extends states tensor by tensor, for each number of tensors those of the lowest scores first,
  and `width` of them at most. The search is repeated with four times the width until it leaves out
  no state whose score is below the best program's, or until time is up.

Of the prunings of Section 4.5 the order takes the place of the first. The second is left out, since
programs that communicate a tensor twice are mostly the better ones. The third is that only useful
properties are kept.

The tensor of a property is the part of its name before the last `|`, up to a `~`. Behind the `~` a
name tells by which of several ways the tensor is computed. The search finds no program where
tensors depend on each other in a circle, where a tensor that the goal does not need cannot be
computed, or where all triples that compute a tensor also compute an earlier one. Where memory is
limited, it sees the limit only as a price of bytes.
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

from hetplan.formulations.hap.problem import Floats, HapProblem
from hetplan.formulations.hap.theory import ReducedTheory
from hetplan.solvers.run import Run

Properties = frozenset[int]
SecondsByType = tuple[float, ...]  # [K]


class Move(NamedTuple):
    """A triple that the search may append to a partial program."""

    triple: int  # the triple's number
    comm: bool  # True: a collective; False: a computation
    pre: Properties  # properties that it needs
    post: Properties  # properties that it gives
    seconds: SecondsByType  # [K] on each device type; a collective's are the same for all
    byte_seconds: float  # seconds that its bytes cost at their price


class Partial(NamedTuple):
    """A partial program: the beginning of a program."""

    known: Properties  # useful properties that it has established
    cost: float  # seconds up to the last synchronisation, with the price of all its bytes
    busy: SecondsByType  # [K] seconds that each type computes after the last synchronisation
    score: float  # a lower bound on the cost of every program that begins with it
    # the partial program that it extends, and the move that it appends; None: it is empty
    before: "tuple[Partial, Move] | None" = None

    def program(self) -> list[int]:
        """The triple numbers, in order."""
        numbers, extended = list[int](), self.before
        while extended is not None:
            shorter, move = extended
            numbers.append(move.triple)
            extended = shorter.before
        return numbers[::-1]


@dataclass(frozen=True)
class Order:
    """The n tensors of a theory in the order in which the search computes them.

    `computed` below is a number of tensors: those numbered 0 to computed - 1 are computed.
    """

    goal: int
    computing: list[list[Move]]  # [n + 1] the moves that compute each tensor; none at the end
    # property -> the moves that turn it into another property of the same tensor
    changing: dict[int, list[Move]]
    useful: list[Properties]  # [n + 1] the useful properties once `computed` tensors are computed
    # [n + 1] by type, the least seconds of the computations left once `computed` tensors are
    rest: list[SecondsByType]

    def within(self, width: int, least: float, run: Run) -> tuple[Partial | None, bool]:
        """(The best program found below `least` seconds or None, whether a state was left out that
        may lead to a better one).

        width: the states that are extended at most for each number of computed tensors.
        """
        left_out, count, none = False, itertools.count(), frozenset[int]()
        # useful properties -> the best partial program with them, for one number of tensors
        states = {none: Partial(none, 0.0, (0.0,) * len(self.rest[0]), 0.0)}
        for computed, computing in enumerate(self.computing):
            next_states: dict[Properties, Partial] = {}
            queue = [(partial.score, next(count), partial) for partial in states.values()]
            heapq.heapify(queue)
            extended = 0
            while queue:
                score, _, partial = heapq.heappop(queue)
                if states[partial.known].score < score:
                    continue  # a better partial program has taken its state
                if extended == width or run.should_stop:
                    left_out = True
                    break
                extended += 1
                if self.goal in partial.known:
                    # The goal's tensor is the last one where all others lead to it. Then nothing is
                    # left to compute: the score is the cost, and no state in the queue has less.
                    return partial, left_out
                changing = self._moves_that_change(partial.known)
                for better in self._extended(partial, changing, computed, states, least):
                    heapq.heappush(queue, (better.score, next(count), better))
                for _ in self._extended(partial, computing, computed + 1, next_states, least):
                    pass  # each is in `next_states`
            states = next_states
        return None, left_out

    def _moves_that_change(self, known: Properties) -> Iterator[Move]:
        """The moves that turn a known property into another one of the same tensor."""
        for p in sorted(known):
            yield from self.changing.get(p, ())

    def _extended(
        self,
        partial: Partial,
        moves: Iterable[Move],
        computed: int,
        states: dict[Properties, Partial],
        least: float,
    ) -> Iterator[Partial]:
        """The extensions of a partial program by one move that become the best of their states.

        computed: the number of tensors that an extension has computed. states: useful properties ->
        the best partial program with them; each extension is put there before it is returned.
        least: extensions whose score reaches it are left out.
        """
        for move in moves:
            if not move.pre <= partial.known:
                continue
            known = (partial.known | move.post) & self.useful[computed]
            cost = partial.cost + move.byte_seconds
            busy = tuple(map(add, partial.busy, move.seconds))
            if move.comm:
                cost, busy = cost + max(busy), (0.0,) * len(busy)
            score = cost + max(map(add, busy, self.rest[computed]))
            if score < least and (known not in states or score < states[known].score):
                states[known] = Partial(known, cost, busy, score, (partial, move))
                yield states[known]


def search(
    theory: ReducedTheory, ratios: Floats, run: Run, *, most: int, byte_price: float = 0.0
) -> tuple[list[int] | None, int | None]:
    """(The best program found at ratios [g, K], the width of the last search).

    The program is None where none was found. The width is None where that search left out no state
    that could lead to a better program, and where there was no search because tensors depend on
    each other in a circle.

    most: no search follows one of this width or more. byte_price: seconds per byte on one device.
    """
    order = arranged(theory, ratios, byte_price)
    if order is None:
        return None, None
    best: Partial | None = None
    width, left_out = 1, True
    while left_out and width < most and not run.should_stop:
        width *= 4
        least = np.inf if best is None else best.score
        better, left_out = order.within(width, least, run)
        best = better or best
    program = None if best is None else theory.program(best.program())
    return program, width if left_out else None


def arranged(theory: ReducedTheory, ratios: Floats, byte_price: float) -> Order | None:
    """The order of the theory's tensors; None where they depend on each other in a circle."""
    K = theory.problem.K
    moves = _moves(theory, ratios, byte_price)
    needed = [_tensors(theory.problem, move.pre) for move in moves]
    # the tensors that each move computes: it gives a property of them and needs none
    computed = [
        _tensors(theory.problem, move.post) - of_pre
        for move, of_pre in zip(moves, needed, strict=True)
    ]
    tensors = _topological_order(needed, computed)
    if tensors is None:
        return None
    number = {tensor: i for i, tensor in enumerate(tensors)}
    n = len(tensors)
    computing: list[list[Move]] = [[] for _ in range(n + 1)]
    changing: dict[int, list[Move]] = defaultdict(list)
    made_from: nx.DiGraph[int] = nx.DiGraph()  # from a property to those that moves make it of
    for move, of_move in zip(moves, computed, strict=True):
        if of_move:
            # at the first of its tensors; each of the others needs a further move that computes it
            computing[min(number[tensor] for tensor in of_move)].append(move)
        else:
            made_from.add_edges_from(itertools.product(move.post, move.pre))
            changing[min(move.pre)].append(move)
    wanted = {theory.goal}  # properties that the goal or a tensor from number i on may need
    useful: list[Properties] = []  # from the last number of tensors to the first
    least_seconds = np.zeros((n + 1, K))  # of the cheapest computation of each tensor
    for i in range(n, -1, -1):
        for p in frozenset({theory.goal}).union(*(move.pre for move in computing[i])):
            wanted.add(p)
            if p in made_from:
                wanted |= nx.descendants(made_from, p)
        useful.append(frozenset(wanted))
        idle = (0.0,) * K
        # a collective that moves a tensor to another segment gives a new tensor, but computes
        # nothing
        work = [idle if move.comm else move.seconds for move in computing[i]]
        least_seconds[i] = np.min(work, axis=0) if work else 0.0
    rest = least_seconds[::-1].cumsum(axis=0)[::-1]
    return Order(
        goal=theory.goal,
        computing=computing,
        changing=changing,
        useful=useful[::-1],
        rest=[tuple(row) for row in rest.tolist()],
    )


def _moves(theory: ReducedTheory, ratios: Floats, byte_price: float) -> list[Move]:
    """One move for each triple of the theory, with its seconds at the ratios [g, K]."""
    problem = theory.problem
    devices = float(problem.counts.sum())
    moves = []
    for step in theory.steps:
        row = ratios[step.segment]
        if step.comm:
            seconds = np.full(problem.K, step.fixed + step.shared * row.max())
        else:
            seconds = (step.fixed + step.shared * row) / problem.speeds
        moves.append(
            Move(
                triple=step.index,
                comm=step.comm,
                pre=step.pre,
                post=step.post,
                seconds=tuple(seconds.tolist()),
                byte_seconds=byte_price * (step.fixed_bytes * devices + step.shared_bytes),
            )
        )
    return moves


def _tensors(problem: HapProblem, properties: Properties) -> set[str]:
    """The tensors of these properties, by the names of the properties."""
    names = [problem.properties[p] for p in properties]
    return {(name.rpartition("|")[0] or name).partition("~")[0] for name in names}


def _topological_order(needed: list[set[str]], computed: list[set[str]]) -> list[str] | None:
    """All tensors, each behind the tensors that its moves need; None where that is impossible.

    needed, computed: the tensors that each move needs and computes. Of tensors that may come next,
    the one goes first whose first move comes first.
    """
    depends: nx.DiGraph[str] = nx.DiGraph()
    first_move: dict[str, int] = {}
    for n, (of_pre, of_move) in enumerate(zip(needed, computed, strict=True)):
        depends.add_nodes_from(of_move)
        depends.add_edges_from(itertools.product(of_pre, of_move))
        for tensor in of_move:
            first_move.setdefault(tensor, n)
    try:
        return list(
            nx.lexicographical_topological_sort(depends, key=lambda t: first_move.get(t, -1))
        )
    except nx.NetworkXUnfeasible:
        return None
