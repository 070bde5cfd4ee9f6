"""The states of HAP's A* search, and the third pruning: redundant properties leave a program.

As printed, a property is redundant once no triple that needs it has a new effect. A collective of a
tensor that is needed no more still has one, so that this rule alone keeps such tensors. Here the
rule is followed through collectives: a property is redundant once it can help to compute no tensor
that is not computed yet. The authors' program gets the same by merging a collective into each
consumer of its effect (`fuse_communication` in `hap.rs`). Source: HAP, Section 4.5.

No program is lost. Take a chain of moves that leads from a redundant property to the computation of
a tensor. It leads through another known property. The last such property of the chain is not
redundant, and the rest of the chain begins with it and costs no more.

Nothing here depends on the ratios.
"""

from collections.abc import Hashable, Iterator
from typing import NamedTuple

import networkx as nx

from hetplan.formulations.hap.astar_moves import Bits, Move, Moves, bits_of, moves_of, numbers_in
from hetplan.formulations.hap.theory import NOTHING, ReducedTheory
from hetplan.text import grouped


class State(NamedTuple):
    """All of a partial program that decides by which moves it can be extended."""

    known: Bits  # properties that it has established and that are not redundant
    computed: Bits  # tensors that it has computed
    # tensors that it has communicated and may not communicate again, of those with a known property
    communicated: Bits


class _Surroundings:
    """Properties that moves turn into each other, mostly the forms of one tensor, and the moves
    that need them."""

    def __init__(self, moves: Moves, properties: list[int]) -> None:
        self.properties = bits_of(properties)
        self.communicated_tensors = bits_of(moves.communicated_tensor_of[p] for p in properties)
        self.consumers: Bits = 0  # the tensors that the properties help to compute
        self._goal = moves.goal
        # property -> the moves that compute a tensor of it, and those that make other forms of it
        self._computing: dict[int, list[Move]] = {p: [] for p in properties}
        self._changing: dict[int, list[Move]] = {p: [] for p in properties}
        # (known properties, computed consumers, communicated tensors) -> those that are of use
        self._useful: dict[tuple[Bits, Bits, Bits], Bits] = {}

    def add(self, move: Move, p: int) -> None:
        """Add a move that needs property p."""
        if move.computes:
            self.consumers |= move.computes
            self._computing[p].append(move)
        else:
            self._changing[p].append(move)

    def useful(self, known: Bits, computed: Bits, communicated: Bits) -> Bits:
        """The known properties of these surroundings that are not redundant.

        The arguments describe a state, and may have properties and tensors of other surroundings.
        """
        known &= self.properties
        computed &= self.consumers
        communicated &= self.communicated_tensors
        case = known, computed, communicated
        if case not in self._useful:
            self._useful[case] = bits_of(p for p in numbers_in(known) if self._helps(p, *case))
        return self._useful[case]

    def _helps(self, p: int, known: Bits, computed: Bits, communicated: Bits) -> bool:
        """Whether property p gives the goal or helps to compute a new tensor, directly or through
        properties that are not known."""
        pending = [p]
        reached = known
        for q in pending:  # the loop appends to the list
            if q == self._goal:
                return True
            for move in self._computing[q]:
                if move.computes & ~computed and not move.communicates & communicated:
                    return True
            for move in self._changing[q]:
                if not move.communicates & communicated:
                    pending += numbers_in(move.post & ~reached)
                    reached |= move.post
        return False


class Transitions:
    """The moves that each state has, and the states that they lead to.

    States are numbered in the order in which they are met, and kept, so that searches at further
    ratios meet them again.
    """

    def __init__(self, theory: ReducedTheory, *, forms: bool = True, once: bool = True) -> None:
        """forms, once: see `moves_of`."""
        self.theory = theory
        self.moves = moves_of(theory, forms=forms, once=once)
        # property -> the moves of which it is the first precondition; NOTHING: they have none
        self._by_first_need = grouped(
            (next(numbers_in(move.pre), NOTHING), move) for move in self.moves.listed
        )
        of_property = _surroundings(self.moves)
        # tensor -> the surroundings that help to compute it
        consuming: dict[int, set[_Surroundings]] = {}
        for surroundings in set(of_property):
            for tensor in numbers_in(surroundings.consumers):
                consuming.setdefault(tensor, set()).add(surroundings)
        # by move, the surroundings whose properties it may make redundant
        self._affected: list[list[_Surroundings]] = []
        for move in self.moves.listed:
            affected = {of_property[p] for p in numbers_in(move.pre | move.post)}
            for tensor in numbers_in(move.computes):
                affected |= consuming.get(tensor, set())
            self._affected.append(list(affected))
        empty = State(known=0, computed=0, communicated=0)
        self.states = [empty]  # the state of each number; the empty program has number 0
        self._numbers = {empty: 0}
        # number of a state -> answer of `extensions`
        self._extensions: dict[int, list[tuple[Move, int]]] = {}

    def extensions(self, n: int) -> list[tuple[Move, int]]:
        """The moves that state n has, and the number of the state that each leads to."""
        if n not in self._extensions:
            state = self.states[n]
            self._extensions[n] = [
                (move, self._number(self._after(state, move))) for move in self._applicable(state)
            ]
        return self._extensions[n]

    def _number(self, state: State) -> int:
        """The number of a state; one that was not met before gets the next number."""
        n = self._numbers.setdefault(state, len(self.states))
        if n == len(self.states):
            self.states.append(state)
        return n

    def _applicable(self, state: State) -> Iterator[Move]:
        """The moves whose precondition is met and that have a new effect (line 7 of Fig. 10)."""
        known, computed, communicated = state
        for p in (NOTHING, *numbers_in(known)):
            for move in self._by_first_need.get(p, ()):
                if move.pre & ~known or move.communicates & communicated:
                    continue
                new_effects = move.computes & ~computed if move.computes else move.post & ~known
                if new_effects:
                    yield move

    def _after(self, state: State, move: Move) -> State:
        """The state that a move leads to (line 8), without redundant properties."""
        known = state.known | move.post
        computed = state.computed | move.computes
        communicated = state.communicated | move.communicates
        for surroundings in self._affected[move.number]:
            useful = surroundings.useful(known, computed, communicated)
            known = (known & ~surroundings.properties) | useful
            if not useful:
                communicated &= ~surroundings.communicated_tensors
        return State(known, computed, communicated)


def _surroundings(moves: Moves) -> list[_Surroundings]:
    """The surroundings of each property.

    Properties share surroundings if they have a tensor in common, or if a move that computes no
    tensor has them together.
    """
    linked: nx.Graph[Hashable] = nx.Graph()
    properties = range(len(moves.tensor_of))
    linked.add_nodes_from(properties)
    for p in properties:
        linked.add_edge(p, ("tensor", moves.tensor_of[p]))
        linked.add_edge(p, ("communicated tensor", moves.communicated_tensor_of[p]))
    for move in moves.listed:
        if not move.computes:
            nx.add_path(linked, numbers_in(move.pre | move.post))
    of_property: dict[int, _Surroundings] = {}
    for component in nx.connected_components(linked):
        members = sorted(p for p in component if isinstance(p, int))
        of_property.update(dict.fromkeys(members, _Surroundings(moves, members)))
    for move in moves.listed:
        for p in numbers_in(move.pre):
            of_property[p].add(move, p)
    return [of_property[p] for p in properties]
