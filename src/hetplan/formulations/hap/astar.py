"""HAP's A* search, Fig. 10, for fixed ratios.

The search extends partial programs by moves (module `astar_moves`). Of each it keeps a state
(module `astar_states`): the properties P(Q) without the redundant ones, the tensors that are
computed, and those that may be communicated no more.

- The cost of a partial program is, as printed (Section 4.3), its time up to the last
  synchronisation. Beside it stands what each device type computes after that.
- The estimate of the rest (ecost) is the printed one: the least computing that is left, with
  infinite bandwidth. Every program computes the required tensors that are left, so that the sum of
  the cheapest move of each is a lower bound.
- Lines 9 to 14 drop a partial program that another one beats. As printed, the other one has a
  superset of its properties, is in the queue, and costs no more. Costs up to the last
  synchronisation do not see what was computed since, so that a cheaper program may be lost. Here a
  partial program beats another one of the same state, also after it was extended, if with all that
  was computed since no device type is later. Then no program is lost. (The authors' program
  compares equal states, too: `property_cache` in `hap.rs`.)

So the program found is the cheapest of all programs that keep to the rules of the moves. Of these
rules only one is not printed: a tensor is computed once. It also shortens what the third pruning
keeps: a property that could only help to compute a tensor again is redundant. Where that is left
out, or where the third pruning is not followed through collectives, the number of states grows
exponentially with the blocks of a network.

The authors' program departs from print in further ways: it adds up the slowest device's seconds of
every triple and so knows no stages, the estimate of its last version is 0, and it has fewer rules.
"""

import heapq
import itertools
from dataclasses import dataclass
from operator import add, le
from typing import NamedTuple

import numpy as np

from hetplan.formulations.hap.astar_moves import Bits, Move, numbers_in
from hetplan.formulations.hap.astar_states import Transitions
from hetplan.formulations.hap.problem import Floats
from hetplan.formulations.hap.theory import ReducedTheory
from hetplan.solvers.run import Run

# Seconds that a state counts towards the budget of a run.
STATE_SECONDS = 2e-4

SecondsByType = tuple[float, ...]  # of the device types that count, see `_types_that_count`
# Seconds of two device types are equal if their relative difference is less, which is rounding.
SAME = 1e-12

REPEATED = "no program communicates each tensor at most once; that pruning was left out"
COMPUTED_AGAIN = "no program computes each tensor once; each property counts as a tensor"


class Partial(NamedTuple):
    """A partial program: the beginning of a program."""

    state: int  # its number
    # By type, cost(Q) and what the type computes after the last synchronisation: the seconds after
    # which the type has nothing left to compute.
    ready: SecondsByType
    # the partial program that it extends, and the move that it appends; None: it is empty
    before: "tuple[Partial, Move] | None" = None

    def triples(self) -> list[int]:
        """The triple numbers, in order."""
        moves, extended = list[Move](), self.before
        while extended is not None:
            shorter, move = extended
            moves.append(move)
            extended = shorter.before
        return [step.index for move in reversed(moves) for step in move.steps]


class Search:
    """The search at given ratios.

    ratios: [g, K], of each segment and device type. byte_price: seconds per byte on one device, for
    theories with memory; the price of a move's bytes is added to its seconds.
    """

    def __init__(self, transitions: Transitions, ratios: Floats, byte_price: float = 0.0) -> None:
        self.transitions = transitions
        moves = transitions.moves.listed
        rows = [self._seconds(move, ratios, byte_price) for move in moves]
        # reshaped, because the prunings may leave no move
        seconds = np.array(rows).reshape(-1, transitions.theory.problem.K)
        seconds = seconds[:, _types_that_count(seconds)]
        # by move; all types wait for a collective
        self.seconds: list[SecondsByType] = list(map(tuple, seconds.tolist()))
        self.no_seconds: SecondsByType = (0.0,) * seconds.shape[1]
        self._least = self._least_seconds(seconds)
        self._rest: dict[Bits, SecondsByType] = {}  # computed tensors -> answer of `rest`
        # state -> `ready` of the partial programs of that state that no other one beats
        self._unbeaten: dict[int, list[SecondsByType]] = {}
        self.extended = 0  # number of partial programs that were extended

    def _seconds(self, move: Move, ratios: Floats, byte_price: float) -> Floats:
        """[K] the seconds of a move on each device type."""
        problem = self.transitions.theory.problem
        triple, row = move.triple, ratios[move.triple.segment]
        if triple.comm:
            seconds = np.full(problem.K, triple.fixed + triple.shared * row.max())
        else:
            seconds = (triple.fixed + triple.shared * row) / problem.speeds
        devices = float(problem.counts.sum())
        held = sum(devices * step.fixed_bytes + step.shared_bytes for step in move.steps)
        return np.asarray(seconds + byte_price * held)

    def _least_seconds(self, seconds: Floats) -> dict[int, SecondsByType]:
        """required tensor -> by type, the least seconds of a move that computes it.

        A move that computes several tensors counts with an equal part for each. A collective that
        gives a new tensor counts with 0 seconds, since bandwidth is infinite.

        seconds: [move, type].
        """
        moves = self.transitions.moves
        least: dict[int, Floats] = {}
        for move, by_type in zip(moves.listed, seconds, strict=True):
            part = by_type / max(1, move.computes.bit_count())
            if move.triple.comm:
                part = np.zeros_like(by_type)
            for tensor in numbers_in(move.computes & moves.required):
                least[tensor] = np.minimum(least.get(tensor, np.inf), part)
        return {tensor: tuple(by_type.tolist()) for tensor, by_type in least.items()}

    def rest(self, computed: Bits) -> SecondsByType:
        """The least seconds of computing on each type that are left once these tensors are
        computed."""
        if computed not in self._rest:
            left = [self.no_seconds]
            left += [least for tensor, least in self._least.items() if not computed >> tensor & 1]
            self._rest[computed] = tuple(map(sum, zip(*left, strict=True)))
        return self._rest[computed]

    def score(self, partial: Partial) -> float:
        """cost(Q) + ecost(Q): a lower bound of the seconds of every program that begins so."""
        computed = self.transitions.states[partial.state].computed
        bound: float = max(map(add, partial.ready, self.rest(computed)))
        return bound

    def extension(self, partial: Partial, move: Move, state: int) -> Partial:
        """The partial program with a move appended that leads to a state (line 8)."""
        ready = partial.ready
        if move.triple.comm:  # a synchronisation: all types wait for the last one
            ready = (max(ready),) * len(ready)
        ready = tuple(map(add, ready, self.seconds[move.number]))
        return Partial(state, ready, before=(partial, move))

    def is_beaten(self, partial: Partial) -> bool:
        """Whether another partial program of the same state is nowhere later (lines 9 to 14).

        If there is none, this one takes the place of those that it beats.
        """
        others = self._unbeaten.setdefault(partial.state, [])
        for other in others:
            if all(map(le, other, partial.ready)):
                return True
        others[:] = [other for other in others if not all(map(le, partial.ready, other))]
        others.append(partial.ready)
        return False

    def run(self, run: Run) -> Partial | None:
        """The cheapest program; None where there is none, or where `run` should stop."""
        empty = Partial(state=0, ready=self.no_seconds)
        self.is_beaten(empty)
        goal: Bits = 1 << self.transitions.moves.goal
        order = itertools.count()
        queue = [(self.score(empty), next(order), empty)]
        while queue and not run.should_stop:
            _, _, partial = heapq.heappop(queue)
            if self.transitions.states[partial.state].known & goal:
                return partial  # its score is its seconds, and no score in the queue is lower
            if partial.ready not in self._unbeaten[partial.state]:
                continue
            self.extended += 1
            run.count(STATE_SECONDS)
            for move, state in self.transitions.extensions(partial.state):
                longer = self.extension(partial, move, state)
                if not self.is_beaten(longer):
                    heapq.heappush(queue, (self.score(longer), next(order), longer))
        return None


def _types_that_count(seconds: Floats) -> list[int]:
    """The device types that may be the slowest one of a stage.

    A type is left out if another one is at least as slow in every move. At ratios in proportion to
    speed, and at even ratios, one type is left.

    seconds: [move, K].
    """
    K = seconds.shape[1]
    count = list(range(K))
    for k in range(K):
        others = [other for other in count if other != k]
        if any((seconds[:, other] >= seconds[:, k] * (1 - SAME)).all() for other in others):
            count.remove(k)
    return count


@dataclass(frozen=True)
class Found:
    """The result of the search at some ratios."""

    program: list[int] | None  # triple numbers; None: the time was up
    states: int  # partial programs that were extended


class AStar:
    """HAP's A* search of one theory, for any ratios.

    It searches with all rules of the moves. Where no program keeps to them, it leaves out the
    second pruning from then on, and after that the names of tensors. Every theory has a program, so
    that the last of these searches finds one.
    """

    def __init__(self, theory: ReducedTheory) -> None:
        self.note = ""  # which rule was left out; empty: none was
        self._theory = theory
        self._transitions = Transitions(theory)

    def at(self, ratios: Floats, run: Run, *, byte_price: float = 0.0) -> Found:
        """The cheapest program at ratios [g, K] with bytes at a price in seconds."""
        states = 0
        while True:
            search = Search(self._transitions, ratios, byte_price)
            found = search.run(run)
            states += search.extended
            if found is not None:
                return Found(self._theory.program(found.triples()), states)
            if run.should_stop:
                return Found(None, states)
            self._leave_out_a_rule()

    def _leave_out_a_rule(self) -> None:
        """Search with one rule less from now on."""
        if not self.note:
            self.note = REPEATED
            self._transitions = Transitions(self._theory, once=False)
        else:
            assert self.note == REPEATED, "the search without names of tensors finds a program"
            self.note = COMPUTED_AGAIN
            self._transitions = Transitions(self._theory, forms=False, once=False)
