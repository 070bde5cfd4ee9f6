"""The states of the graph of needs in all orders that one cell of ratios leaves open.

`Opener` makes this part of the graph, for theories too wide for all of it.

Where a stage's time is taken as a mean over types, costs add up, and from any state the canonical
order gives the least cost to the last state, h, after few states. With g, the least cost from
{goal} over all orders met so far, g + h bounds every program through a state. A state is left out
when for some mean g + h reaches the threshold at every vertex of the cell. One rule keeps the rest
small: a property p is parked while another needed property q cannot be derived without p, or
without what gives p at no cost. No step that costs anything may settle a parked property now. In a
program where such a step did, q is there before that step in the order of execution, and with q
also p for nothing. Dropping the step takes work from a stage or joins two stages, which costs no
more. So an optimal program with the fewest costly steps never settles a parked property.
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

# A state's costs are lower than before only where they are below this multiple of them.
SAME = 1 - 1e-15


class Opener:
    """The maker of the graph of the states of a theory that sums leave open in a cell."""

    def __init__(self, theory: ReducedTheory) -> None:
        self.theory = theory
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
        """The graph of programs whose bound by sums is below the threshold somewhere in the cell.

        It always has {goal} and the empty state. None where more than `most` states are met. Raises
        `Stopped` where `run` should stop. cost: [steps, L, V], of the steps by L means at the V
        vertices.
        """
        states = _States(self.theory, cost, threshold, most)
        states.g[states.number(frozenset((self.theory.goal,)))] = 0.0
        arcs: dict[int, tuple[Ints, Ints]] = {}
        queue = [(states.keys[1], 1)]
        waiting = {1}
        while queue:
            run.check()
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
            for k in np.flatnonzero((after < states.g[heads] * SAME).any(axis=1)):
                v = int(heads[k])
                states.g[v] = np.minimum(states.g[v], after[k])
                if v and v not in waiting:
                    waiting.add(v)
                    heapq.heappush(queue, (states.keys[v], v))
        return states.graph(arcs)

    def _settling(self, need: Need) -> list[int]:
        """The steps that may settle a property of a state now: no costly step settles a parked
        one."""
        theory = self.theory
        return [
            n
            for n in steps_that_give(theory, need)
            if theory.steps[n].costless or not self._gives_only_parked(need, n)
        ]

    def _gives_only_parked(self, need: Need, n: int) -> bool:
        """Whether all needed properties that step n gives are parked by the other needed ones."""
        post = self.theory.steps[n].post
        others = [self._place[q] for q in need - post]
        return all(self.underivable_without[others, self._place[p]].any() for p in need & post)


class _States:
    """The states met so far, by number; 0 is the empty state. g and h are of the module's text."""

    def __init__(self, theory: ReducedTheory, cost: Floats, threshold: float, most: int) -> None:
        self._theory, self._threshold, self._most = theory, threshold, most
        self._shape = cost.shape[1:]
        self.cost = cost.reshape(len(cost), -1)
        self.needs: list[Need] = [frozenset()]
        self.keys = [theory.key(self.needs[0])]
        self._numbers = {self.needs[0]: 0}
        self.g, self.h = np.full((2, 64, self.cost.shape[1]), np.inf)
        self.h[0] = 0.0
        self._settled = {0}

    @property
    def full(self) -> bool:
        """Whether more states were met than are allowed."""
        return len(self.needs) > self._most

    def number(self, need: Need) -> int:
        """The number of a state, a new one where it was not met before."""
        n = self._numbers.setdefault(need, len(self.needs))
        if n == len(self.needs):
            self.needs.append(need)
            self.keys.append(self._theory.key(need))
            if n == len(self.g):
                more = np.full_like(self.g, np.inf)
                self.g, self.h = np.vstack([self.g, more]), np.vstack([self.h, more])
        return n

    def arcs(self, need: Need, chosen: list[int]) -> tuple[Ints, Ints]:
        """(heads, steps) of the arcs from a state by these steps."""
        heads = [self.number(need_before(self._theory, need, n)) for n in chosen]
        return np.array(heads, dtype=np.int64), np.array(chosen, dtype=np.int64)

    def settled(self, u: int) -> bool:
        """Whether h of a state is known after this call; False where too many states follow it.

        h is found for all states that follow in canonical order.
        """
        if u in self._settled:
            return True
        pending, arcs = [u], {}
        self._settled.add(u)
        for w in pending:  # the list grows
            need = self.needs[w]
            highest = of_highest_level(self._theory, need)
            arcs[w] = self.arcs(need, steps_that_give(self._theory, highest))
            new = [v for v in dict.fromkeys(arcs[w][0].tolist()) if v not in self._settled]
            self._settled.update(new)
            pending += new
            if self.full:
                return False
        pending.sort(key=self.keys.__getitem__, reverse=True)
        for _, group in groupby(pending, self.keys.__getitem__):
            alike = list(group)
            changed = True
            while changed:
                changed = False
                for w in alike:
                    heads, steps = arcs[w]
                    least = (self.cost[steps] + self.h[heads]).min(axis=0)
                    if (least < self.h[w]).any():
                        self.h[w] = least
                        changed = len(alike) > 1
        return True

    def is_open(self, through: Floats) -> Flags:
        """[...] whether each mean's cost [..., L * V] is below the threshold at some vertex."""
        by_mean = through.reshape(*through.shape[:-1], *self._shape)
        return np.asarray((by_mean.min(axis=-1) < self._threshold).all(axis=-1))

    def graph(self, arcs: dict[int, tuple[Ints, Ints]]) -> Graph:
        """The graph of what is open."""
        rows = [np.column_stack([np.full(len(h), u), h, s]) for u, (h, s) in arcs.items()]
        tail, head, step = np.concatenate([np.zeros((0, 3), dtype=np.int64), *rows]).T
        open_ = self.is_open(self.g[tail] + self.cost[step] + self.h[head])
        tail, head, step = tail[open_], head[open_], step[open_]
        # {goal} first, and the empty state always
        order = [1, 0, *(n for n in np.union1d(tail, head) if n > 1)]
        place = np.zeros(len(self.needs), dtype=np.int64)
        place[order] = np.arange(len(order))
        ends = np.column_stack([place[tail], place[head], step])
        return graph_of_states(
            self._theory, [self.needs[n] for n in order], ends, in_execution_order=True
        )
