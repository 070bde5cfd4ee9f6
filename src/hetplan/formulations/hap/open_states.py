"""The open states of the graph of needs in all orders: those through which a program may be better
than the threshold at some ratios of one cell.

`Opener` builds the graph of these states, for theories whose whole graph is too large.

Where the mean over device types replaces a stage's time, the costs of steps add up. From any state
the canonical order then gives h, the least cost to the last state, through few states. With g, the
least cost from {goal} over all orders searched so far, g + h is a lower bound of every program
through a state. There are L means and V vertices of the cell, and a state has a g and an h for each
pair. It is left out when for some mean g + h reaches the threshold at every vertex.

One rule keeps the open states few: a property p is parked while another needed property q cannot be
derived without p, or without the properties that give p at no cost. No step that costs anything may
settle a parked property. In a program where such a step does, q is established before that step in
the order of execution, and with q also p for nothing. Dropping the step takes work from a stage or
joins two stages, which costs no more. So an optimal program with the fewest costly steps never
settles a parked property.
"""

import heapq
from functools import cached_property
from itertools import groupby, product

import networkx as nx
import numpy as np

from hetplan.formulations.hap.graph import Flags, Graph
from hetplan.formulations.hap.needs import (
    Need,
    graph_of_states,
    need_before,
    of_highest_level,
    steps_that_give,
)
from hetplan.formulations.hap.problem import Floats, Ints
from hetplan.formulations.hap.theory import ReducedTheory
from hetplan.solvers.run import Run

# Seconds that a state counts towards the budget of a run.
STATE_SECONDS = 1e-4

# A new g is lower only if it is below this multiple of the old one, so that rounding does not put a
# state into the queue again.
SAME = 1 - 1e-15
EMPTY = 0  # the number of the empty state
FIRST_ROWS = 64  # rows of the arrays of states before they grow


class Opener:
    """Builds the graphs of a theory's open states, one for each cell."""

    def __init__(self, theory: ReducedTheory) -> None:
        self.theory = theory
        # property -> its row and column in `underivable_without`
        self._place = {p: i for i, p in enumerate(theory.level)}

    @cached_property
    def underivable_without(self) -> Flags:
        """[P, P] whether property q (row) cannot be derived without property p (column).

        Deriving it without p also excludes the properties that give p at no cost.
        """
        P = len(self._place)
        level, steps = self.theory.level, self.theory.steps
        gives_at_no_cost: nx.DiGraph[int] = nx.DiGraph()
        gives_at_no_cost.add_nodes_from(level)
        for step in steps:
            if step.costless and len(step.pre) == 1:
                gives_at_no_cost.add_edges_from(product(step.pre, step.post))
        may_be_used = np.ones((P, P), np.bool_)  # entry (q, p): in derivations without p
        for p, column in self._place.items():
            excluded = nx.ancestors(gives_at_no_cost, p) | {p}
            may_be_used[[self._place[q] for q in excluded], column] = False
        derivable = np.zeros((P, P), np.bool_)  # entry (q, p): q without p
        upwards = sorted(steps, key=lambda s: min(level[p] for p in s.post))
        changed = True
        while changed:
            changed = False
            for step in upwards:
                applies = derivable[[self._place[q] for q in step.pre]].all(axis=0)
                for effect in step.post:
                    q = self._place[effect]
                    added = applies & may_be_used[q] & ~derivable[q]
                    if added.any():
                        derivable[q] |= added
                        changed = True
        return ~derivable

    def open(self, cost: Floats, threshold: float, most: int, run: Run) -> Graph | None:
        """The graph of open states of a cell; None where the search meets more than `most` states.

        It always has {goal} and the empty state. Raises `Stopped` where `run` should stop.

        cost: [steps, L, V] seconds of each step by each mean at each vertex of the cell. threshold:
        seconds that a program must stay below.
        """
        states = _States(self.theory, cost, threshold, most)
        goal = states.number(frozenset((self.theory.goal,)))
        states.g[goal] = 0.0
        arcs: dict[int, tuple[Ints, Ints]] = {}
        queue = [(states.keys[goal], goal)]
        waiting = {goal}  # the states in the queue
        while queue:
            run.check(STATE_SECONDS)
            _, u = heapq.heappop(queue)
            waiting.discard(u)
            if states.full or not states.settled(u):
                return None
            if not states.is_open(states.g[u] + states.h[u]):
                continue
            if u not in arcs:
                arcs[u] = states.arcs(states.needs[u], self._settling(states.needs[u]))
            heads, steps = arcs[u]
            after = states.g[u] + states.cost[steps]
            lower = (after < states.g[heads] * SAME).any(axis=1)  # for some mean and vertex
            for k in np.flatnonzero(lower):
                v = int(heads[k])
                states.g[v] = np.minimum(states.g[v], after[k])
                if v != EMPTY and v not in waiting:
                    waiting.add(v)
                    heapq.heappush(queue, (states.keys[v], v))
        return states.graph(arcs)

    def _settling(self, need: Need) -> list[int]:
        """The steps that may settle a property of state `need`: costless ones, and costly ones that
        give a needed property that is not parked."""
        theory = self.theory
        return [
            n
            for n in steps_that_give(theory, need)
            if theory.steps[n].costless or not self._gives_only_parked(need, n)
        ]

    def _gives_only_parked(self, need: Need, n: int) -> bool:
        """Whether the other needed properties park every needed property that step n gives."""
        post = self.theory.steps[n].post
        others = [self._place[q] for q in need - post]
        return all(self.underivable_without[others, self._place[p]].any() for p in need & post)


class _States:
    """The states met so far, numbered in the order in which they were met; 0 is the empty state.

    The module's text defines g and h. Their arrays have more rows than there are states.
    """

    def __init__(self, theory: ReducedTheory, cost: Floats, threshold: float, most: int) -> None:
        self._theory, self._threshold, self._most = theory, threshold, most
        self._means_and_vertices = cost.shape[1:]
        self.cost = cost.reshape(len(cost), -1)  # [steps, L * V]
        columns = self.cost.shape[1]
        self.needs: list[Need] = [frozenset()]  # number of a state -> the properties that it needs
        self.keys = [theory.key(self.needs[EMPTY])]  # by number
        self._numbers = {self.needs[EMPTY]: EMPTY}
        self.g = np.full((FIRST_ROWS, columns), np.inf)  # [rows, L * V]
        self.h = np.full((FIRST_ROWS, columns), np.inf)  # [rows, L * V]
        self.h[EMPTY] = 0.0
        self._settled = {EMPTY}  # states whose h is computed

    @property
    def full(self) -> bool:
        """Whether more states were met than are allowed."""
        return len(self.needs) > self._most

    def number(self, need: Need) -> int:
        """The number of a state; one that was not met before gets the next number."""
        n = self._numbers.setdefault(need, len(self.needs))
        if n == len(self.needs):
            self.needs.append(need)
            self.keys.append(self._theory.key(need))
            if n == len(self.g):  # double the rows
                more = np.full_like(self.g, np.inf)
                self.g = np.vstack([self.g, more])
                self.h = np.vstack([self.h, more])
        return n

    def arcs(self, need: Need, chosen: list[int]) -> tuple[Ints, Ints]:
        """(heads, steps) of the arcs that leave a state by the steps `chosen`."""
        heads = [self.number(need_before(self._theory, need, n)) for n in chosen]
        return np.array(heads, dtype=np.int64), np.array(chosen, dtype=np.int64)

    def settled(self, u: int) -> bool:
        """Compute h of a state where it is not computed yet; returns whether that succeeded.

        It fails where more states follow than are allowed. All states that follow in canonical
        order get their h, too.
        """
        if u in self._settled:
            return True
        pending: list[int] = [u]
        arcs: dict[int, tuple[Ints, Ints]] = {}
        self._settled.add(u)
        for w in pending:  # the list grows
            need = self.needs[w]
            highest = of_highest_level(self._theory, need)
            arcs[w] = self.arcs(need, steps_that_give(self._theory, highest))
            heads, _ = arcs[w]
            new = [v for v in dict.fromkeys(heads.tolist()) if v not in self._settled]
            self._settled.update(new)
            pending += new
            if self.full:
                return False
        # Arcs lead to the same or a later key, so that h is computed from the last key to the
        # first. States of the same key may lead to each other, which takes several rounds.
        pending.sort(key=self.keys.__getitem__, reverse=True)
        for _, group in groupby(pending, self.keys.__getitem__):
            same_key = list(group)
            changed = True
            while changed:
                changed = False
                for w in same_key:
                    heads, steps = arcs[w]
                    least = (self.cost[steps] + self.h[heads]).min(axis=0)
                    if (least < self.h[w]).any():
                        self.h[w] = least  # no entry rises, because h only falls
                        changed = len(same_key) > 1
        return True

    def is_open(self, bound: Floats) -> Flags:
        """[...] whether by every mean a lower bound of programs, `bound` [..., L * V], is below the
        threshold at some vertex."""
        by_mean = bound.reshape(*bound.shape[:-1], *self._means_and_vertices)
        return np.asarray((by_mean.min(axis=-1) < self._threshold).all(axis=-1))

    def graph(self, arcs: dict[int, tuple[Ints, Ints]]) -> Graph:
        """The graph of the open ones among these arcs.

        arcs: state -> (heads, steps) of the arcs that leave it.
        """
        tables = [np.zeros((0, 3), dtype=np.int64)]  # tail, head, step; there may be no arc at all
        for u, (heads, steps) in arcs.items():
            tables.append(np.column_stack([np.full(len(heads), u), heads, steps]))
        tail, head, step = np.concatenate(tables).T
        is_open = self.is_open(self.g[tail] + self.cost[step] + self.h[head])
        tail, head, step = tail[is_open], head[is_open], step[is_open]
        # {goal} is the first node, and the empty state is always one.
        goal = self._numbers[frozenset((self._theory.goal,))]
        others = [n for n in np.union1d(tail, head) if n not in {goal, EMPTY}]
        order = [goal, EMPTY, *others]
        node = np.zeros(len(self.needs), dtype=np.int64)  # of each state
        node[order] = np.arange(len(order))
        ends = np.column_stack([node[tail], node[head], step])
        needs = [self.needs[n] for n in order]
        return graph_of_states(self._theory, needs, ends, in_execution_order=True)
