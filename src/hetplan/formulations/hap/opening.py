"""What one cell of ratios leaves open of the graph of needs: states, or whole stages as arcs.

`Opener` makes the part of the graph of needs in all orders that one cell of ratios leaves open, for
theories too wide for all of it.

Where a stage's time is taken as a mean over types, costs add up, and from any state the canonical
order gives the least cost to the last state, h, after few states. With g, the least cost from
{goal} over all orders met so far, g + h bounds every program through a state. A state is left out
when for some mean g + h reaches the threshold at every vertex of the cell. One rule keeps the rest
small: a property p is parked while another needed property q cannot be derived without p, or
without what gives p at no cost. No step that costs anything may settle a parked property now. In a
program where such a step did, q is there before that step in the order of execution, and with q
also p for nothing. Dropping the step takes work from a stage or joins two stages, which costs no
more. So an optimal program with the fewest costly steps never settles a parked property.

`graph_of_stages` makes a graph whose arcs are whole stages: what a cell leaves open of a graph
whose arcs are single steps.

A mean over types that is chosen before the computations of a stage are known leaves a gap even when
the cell is a point, because the stage's slowest type depends on all of them. Once few programs are
open, their stages are few, too: for each node where a stage begins, the computations up to the next
communication, as sums of work. Each stage has a mean of its own, exact at a point, and so sums
become exact there.

Two kinds of stages are left out: those that by sums lie on no program below the threshold in the
cell, and those with no less work than another between the same nodes. Where F + S b is no less for
the smallest and the largest ratios of the cell, it is no less for all in between, on every type;
the same holds for bytes. The graph serves for every part of the cell and every lower threshold.
"""

import heapq
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, product

import networkx as nx
import numpy as np

from hetplan.formulations.hap.graph import (
    Flags,
    Graph,
    Need,
    Rows,
    Work,
    graph_of_arcs,
    graph_of_states,
    potentials,
)
from hetplan.formulations.hap.problem import Floats, Ints, ReducedTheory
from hetplan.solvers.run import Run

# A state's costs are lower than before only where they are below this multiple of them.
SAME = 1 - 1e-15


class Opener:
    """Finds the states of a theory that sums leave open in a cell."""

    def __init__(self, theory: ReducedTheory) -> None:
        self.theory = theory
        self._place = {p: i for i, p in enumerate(theory.level)}

    @cached_property
    def underivable_without(self) -> Flags:
        """[P, P]: entry (q, p) is whether q cannot be derived without p or what gives p at no
        cost."""
        P = len(self._place)
        allowed, known = np.ones((P, P), np.bool_), np.zeros((P, P), np.bool_)
        level, steps = self.theory.level, self.theory.steps
        alone = [s for s in steps if s.costless and len(s.pre) == 1]
        gives: nx.DiGraph[int] = nx.DiGraph((q, p) for s in alone for q in s.pre for p in s.post)
        gives.add_nodes_from(level)
        for p, column in self._place.items():
            allowed[[self._place[w] for w in nx.ancestors(gives, p) | {p}], column] = False
        upwards = sorted(steps, key=lambda s: min(level[p] for p in s.post))
        changed = True
        while changed:
            changed = False
            for step in upwards:
                had = known[[self._place[q] for q in step.pre]].all(axis=0)
                for q in (self._place[q] for q in step.post):
                    more = had & allowed[q] & ~known[q]
                    if more.any():
                        known[q] |= more
                        changed = True
        return ~known

    def open(self, cost: Floats, threshold: float, most: int, run: Run) -> Graph | None:
        """The states and arcs of programs whose bound by sums is below the threshold somewhere in
        the cell; {goal} and the empty state always. None where more than `most` states are met.
        Raises `Stopped` where `run` should stop.

        cost [steps, L, V]: of the steps by L means at the V vertices."""
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
        """The steps that settle something of a state, by the rule above."""
        theory = self.theory
        steps = sorted({n for p in need for n in theory.by_post[p]})
        return [n for n in steps if theory.steps[n].costless or not self._parked(need, n)]

    def _parked(self, need: Need, n: int) -> bool:
        """Whether everything of a state that a step gives is parked by what is needed besides."""
        post = self.theory.steps[n].post
        rest = [self._place[q] for q in need - post]
        return all(self.underivable_without[rest, self._place[p]].any() for p in need & post)


class _States:
    """The states met, numbered; 0 is the empty one."""

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
        """A state's number, a new one where it was not met before."""
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
        steps = self._theory.steps
        heads = [self.number((need - steps[n].post) | steps[n].pre) for n in chosen]
        return np.array(heads, dtype=np.int64), np.array(chosen, dtype=np.int64)

    def settled(self, u: int) -> bool:
        """Find h of a state and of all that follow in canonical order; False where these are too
        many."""
        if u in self._settled:
            return True
        level, by_post = self._theory.level, self._theory.by_post
        pending, arcs = [u], {}
        self._settled.add(u)
        for w in pending:
            need = self.needs[w]
            top = max(level[p] for p in need)
            arcs[w] = self.arcs(
                need, sorted({n for p in need if level[p] == top for n in by_post[p]})
            )
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
        """[...]: whether for every mean the cost [..., L * V] is below the threshold at some
        vertex."""
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


# Computations in a row after which a stage counts as going round in a circle.
LONGEST = 256


@dataclass(frozen=True)
class _OpenStages(Rows):
    """m stages that have begun and have not ended."""

    begin: Ints  # [m] the node where each began
    node: Ints  # [m] where it is now
    work: Work  # [m]
    seconds: Floats  # [m, L, V] by the means
    parent: Ints  # [m] the stage that it extends, a number among all begun; -1: none
    arc: Ints  # [m] by which arc


def graph_of_stages(
    graph: Graph,
    cost: Floats,
    mu: Floats,
    potential: Floats,
    threshold: float,
    cell: Floats,
    most_begun: int,
) -> Graph | None:
    """The graph of stages that sums leave open in a cell; None where more than `most_begun` are
    begun, as where computations lead round in a circle.

    cost [A, L, V]: of the arcs. potential [n, L, V]: made with it for the reference point mu [V].
    """
    before = _least_before(graph, cost, mu)
    begins = np.flatnonzero(np.isfinite(before[:-1]).all(axis=1))
    m = len(begins)
    nothing = Work(*(np.zeros((m, *c.shape[1:]), c.dtype) for c in graph.work.columns))
    none = np.full(m, -1)
    open_ = _OpenStages(begins, begins, nothing, np.zeros((m, *cost.shape[1:])), none, none)
    rounds: list[_OpenStages] = []
    total = 0
    while len(open_.node):
        rounds.append(open_)
        if total > most_begun or len(rounds) > LONGEST:
            return None
        open_ = _extended(graph, cost, open_, total)
        total += len(rounds[-1].node)
        least = (before[open_.begin, None] + open_.seconds + potential[open_.node]).min(axis=2)
        open_ = open_[np.flatnonzero((least < threshold).all(axis=1))]
        open_ = open_[_least_work(open_, cell)]
    return _graph_of(graph, _OpenStages.joined(rounds), cell)


def _least_before(graph: Graph, cost: Floats, mu: Floats) -> Floats:
    """[n, V]: a lower bound, affine over the cell, of what comes before a stage that begins at each
    node; infinite where none begins. The graph read backwards has the same stages."""
    backward, arcs = graph.backward
    to_head = potentials(backward, cost[arcs], mu)[::-1]
    level = np.where(np.isfinite(to_head), to_head, 0.0) @ mu
    closed = to_head[np.arange(len(to_head)), level.argmax(axis=1)]
    comm = np.flatnonzero(graph.work.comm)
    before = np.full(closed.shape, np.inf)
    np.minimum.at(before, graph.head[comm], closed[graph.tail[comm]] + cost[comm, 0])
    before[graph.start] = 0.0
    return before


def _extended(graph: Graph, cost: Floats, open_: _OpenStages, number: int) -> _OpenStages:
    """Every stage with one computation more; those of `open_` are numbered from `number` on."""
    arc, origin = graph.arcs_of(open_.node)
    computes = ~graph.work.comm[arc]
    arc, origin = arc[computes], origin[computes]
    return _OpenStages(
        open_.begin[origin], graph.head[arc], open_.work[origin] + graph.work[arc],
        open_.seconds[origin] + cost[arc], number + origin, arc,
    )  # fmt: skip


def _least_work(open_: _OpenStages, cell: Floats) -> Ints:
    """Numbers of the stages that are kept: those between the same nodes are sorted by work, and one
    with no less work than its neighbour is dropped, until none is."""
    lowest, highest = cell.min(axis=(1, 2)), cell.max(axis=(1, 2))
    corners = np.array(list(product(*zip(lowest, highest, strict=True)))).T
    work = open_.work
    seconds = work.fixed_seconds[:, None] + work.shared_seconds @ corners
    held = work.fixed_bytes[:, None] + work.shared_bytes @ corners
    amounts = np.hstack([seconds, held]) if held.any() else seconds
    kept = np.lexsort((*amounts.T[::-1], open_.node, open_.begin))
    while True:
        one, other = kept[:-1], kept[1:]
        needless = np.zeros(len(kept), dtype=np.bool_)
        needless[1:] = (open_.begin[one] == open_.begin[other]) & (
            open_.node[one] == open_.node[other]
        )
        needless[1:] &= (amounts[other] >= amounts[one]).all(axis=1)
        if not needless.any():
            return kept
        kept = kept[~needless]


def _graph_of(graph: Graph, every: _OpenStages, cell: Floats) -> Graph:
    """Nodes where stages begin, and apart from these, where communication ends them."""
    n, end = graph.n, graph.n - 1
    comm = np.flatnonzero(graph.work.comm)
    closing = np.zeros(n, dtype=np.bool_)
    closing[graph.tail[comm]] = closing[end] = True
    closed = np.flatnonzero(closing[every.node])
    closed = closed[_least_work(every[closed], cell)]
    stage = every[closed]
    # node u where a stage begins, n + u where one has ended
    tail = np.concatenate([stage.begin, n + graph.tail[comm]])
    head = np.concatenate([np.where(stage.node == end, end, n + stage.node), graph.head[comm]])
    nodes, number = np.unique(np.concatenate([[graph.start, end], tail, head]), return_inverse=True)
    keys = [(int(graph.component[u % n]), int(u >= n)) for u in nodes]
    label = np.arange(len(tail))
    steps_of_action = [_chain(graph, every, int(c)) for c in closed]
    steps_of_action += [graph.steps_of_action[s] for s in graph.action[comm]]
    m = len(tail)
    whole = graph_of_arcs(
        graph.theory, keys, (number[2 : 2 + m], number[2 + m :], label), steps_of_action,
        Work.joined([stage.work, graph.work[comm]]), start=int(number[0]), arcs_are_stages=True,
    )  # fmt: skip
    return whole.without_arcs(np.zeros(m, dtype=np.bool_))[0]


def _chain(graph: Graph, every: _OpenStages, stage: int) -> tuple[int, ...]:
    """The steps of a stage, the last one in time first."""
    steps: list[int] = []
    while every.arc[stage] >= 0:
        steps[:0] = graph.steps_of_action[graph.action[every.arc[stage]]]
        stage = int(every.parent[stage])
    return tuple(steps)
