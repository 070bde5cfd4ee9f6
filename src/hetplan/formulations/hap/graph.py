"""The programs of a theory as the paths of one directed graph, independent of the ratios.

Read a program backwards. A node is the set of properties still needed: the first one is {goal}, the
last one is empty. A triple that gives something needed leads from N to (N - post) + pre. Every
minimal program is a path and every path is a program. Parallel branches interleave in every order,
because the order decides which computations share a stage.

This is the graph of needs in all orders. Where costs simply add up, the order is irrelevant, and it
is enough to settle the needed properties of the highest level first (`ReducedTheory.level`). That
is the graph of needs in one order, called canonical, which is small for theories of any width.

Nodes are numbered so that arcs lead to the same or a later component. A component holds the states
whose properties have the same levels, as collectives lead from one form of a tensor to another and
back.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from hetplan.compiled import kernel
from hetplan.formulations.hap.problem import Floats, HapProblem, Ints, ReducedTheory, Step
from hetplan.solvers.run import Run

Need = frozenset[int]
Flags = NDArray[np.bool_]
Key = tuple[int, ...]


class Rows:
    """A dataclass of arrays with equally many rows."""

    @property
    def columns(self) -> list[Any]:
        """The arrays, in the order of the fields."""
        return [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]

    def __getitem__(self, rows: Ints | Flags) -> Self:
        return type(self)(*(column[rows] for column in self.columns))

    @classmethod
    def joined(cls, parts: Iterable[Self]) -> Self:
        """The rows of all parts, one part after the other."""
        return cls(
            *(
                type(column[0]).joined(column)
                if isinstance(column[0], Rows)
                else np.concatenate(column)
                for column in zip(*(part.columns for part in parts), strict=True)
            )
        )


@dataclass(frozen=True)
class Work(Rows):
    """What each of A triples or stages does."""

    comm: Flags  # [A] whether it is a collective
    fixed_seconds: Floats  # [A]: of a collective, or of computing on the fastest type
    shared_seconds: Floats  # [A, g] per ratio of each segment, likewise
    fixed_bytes: Floats  # [A] held by every device; 0 without memory
    shared_bytes: Floats  # [A, g] per ratio

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(self.columns, other.columns, strict=True)))


def work_of(problem: HapProblem, steps: Sequence[Step]) -> Work:
    """The work of single triples."""
    comm = np.array([s.comm for s in steps], dtype=np.bool_)
    rows = [(s.fixed, s.shared, s.fixed_bytes, s.shared_bytes) for s in steps]
    fixed, shared, fixed_bytes, shared_bytes = np.array(rows, dtype=float).reshape(-1, 4).T
    unit = np.where(comm, 1.0, problem.speeds[-1])
    segment = np.array([s.segment for s in steps], dtype=np.int64)
    place = segment[:, None] == np.arange(problem.g)
    by_segment = (shared / unit)[:, None] * place, shared_bytes[:, None] * place
    return Work(comm, fixed / unit, by_segment[0], fixed_bytes, by_segment[1])


@dataclass(frozen=True)
class Graph:
    """n nodes and A arcs; paths from node 0 to node n - 1 are programs read backwards."""

    theory: ReducedTheory
    first: Ints  # [n + 1] the arcs of node u are first[u] ... first[u + 1]
    head: Ints  # [A]
    action: Ints  # [A] what an arc does: a number among `steps_of_action`
    component: Ints  # [n] ascending along arcs
    start: int
    # Of each action the steps (positions in theory.steps), the last one in time first.
    steps_of_action: Sequence[tuple[int, ...]]
    work: Work  # [A]
    # Whether paths are programs in their execution order; not so in a canonical graph.
    in_execution_order: bool
    # Whether each arc is a collective or a whole stage.
    arcs_are_stages: bool = False

    @property
    def n(self) -> int:
        """Number of nodes."""
        return len(self.first) - 1

    @cached_property
    def tail(self) -> Ints:
        """[A] where arcs begin."""
        return np.repeat(np.arange(self.n), np.diff(self.first))

    def arcs_of(self, nodes: Ints) -> tuple[Ints, Ints]:
        """All arcs that leave these nodes, and of each the place of its node among them."""
        counts = self.first[nodes + 1] - self.first[nodes]
        place = np.repeat(np.arange(len(nodes)), counts)
        skipped = np.repeat(self.first[nodes] - np.cumsum(counts) + counts, counts)
        return np.arange(counts.sum()) + skipped, place

    def program(self, arcs: Iterable[int]) -> list[int]:
        """Triple numbers in order of execution of the path along these arcs."""
        steps = [s for a in arcs for s in self.steps_of_action[self.action[a]]]
        return [self.theory.steps[s].index for s in reversed(steps)]

    @cached_property
    def backward(self) -> "tuple[Graph, Ints]":
        """The graph read from its last node to its start, and the number here of each arc."""
        last = self.n - 1
        arcs = np.argsort(last - self.head, kind="stable")
        component = (self.component[-1] - self.component)[::-1].copy()
        turned = Graph(
            self.theory, _firsts(last - self.head, self.n), (last - self.tail)[arcs],
            self.action[arcs], component, 0, self.steps_of_action, self.work[arcs],
            self.in_execution_order, self.arcs_are_stages,
        )  # fmt: skip
        return turned, arcs

    def without_arcs(self, hopeless: Flags) -> "tuple[Graph, Ints]":
        """The graph without the marked arcs, and the numbers of the nodes left: the ends, and those
        with arcs in and out. Where nothing leads to the last node any more, no arc is left."""
        if hopeless[self.head == self.n - 1].all():
            hopeless = np.ones_like(hopeless)
        out, into = np.zeros(self.n, dtype=np.bool_), np.zeros(self.n, dtype=np.bool_)
        out[self.tail[~hopeless]] = into[self.head[~hopeless]] = True
        left = out & into
        left[[self.start, self.n - 1]] = True
        nodes, number = np.flatnonzero(left), np.cumsum(left) - 1
        kept = ~hopeless & left[self.tail] & left[self.head]
        graph = Graph(
            self.theory, _firsts(number[self.tail[kept]], len(nodes)), number[self.head[kept]],
            self.action[kept], self.component[nodes], int(number[self.start]), self.steps_of_action,
            self.work[kept], self.in_execution_order, self.arcs_are_stages,
        )  # fmt: skip
        return graph, nodes


def _firsts(tail: Ints, nodes: int) -> Ints:
    """[nodes + 1] where each node's arcs begin once they are sorted by tail."""
    return np.concatenate([[0], np.cumsum(np.bincount(tail, minlength=nodes))]).astype(np.int64)


def graph_of_arcs(
    theory: ReducedTheory,
    keys: Sequence[Key],
    arcs: tuple[Ints, Ints, Ints],
    steps_of_action: Sequence[tuple[int, ...]],
    work: Work,
    *,
    start: int = 0,
    in_execution_order: bool = True,
    arcs_are_stages: bool = False,
) -> Graph:
    """The graph of nodes in the order of their keys, but for the start, which is the first.

    keys: nodes with the same key form a component. arcs: tail, head and action. work: of actions.
    """
    tail, head, action = arcs
    # Read backward, paths lead to the last node, and so to the start. Its key is not the least one
    # where needs lead round in a circle.
    others = sorted((u for u in range(len(keys)) if u != start), key=keys.__getitem__)
    order = np.array([start, *others], dtype=np.int64)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    differs = [keys[u] != keys[v] for u, v in zip(order[1:], order[:-1], strict=True)]
    # an arc to an earlier node joins everything between into one component
    back = place[tail] > place[head]
    inside = np.zeros(len(keys) + 1, dtype=np.int64)
    np.add.at(inside, place[head[back]] + 1, 1)
    np.add.at(inside, place[tail[back]] + 1, -1)
    apart = np.array(differs, dtype=np.bool_) & (np.cumsum(inside)[1:-1] == 0)
    component = np.concatenate([[0], np.cumsum(apart)]).astype(np.int64)
    by_tail = np.argsort(place[tail], kind="stable")
    action = action[by_tail]
    return Graph(
        theory, _firsts(place[tail], len(keys)), place[head][by_tail], action, component,
        0, steps_of_action, work[action], in_execution_order, arcs_are_stages,
    )  # fmt: skip


def graph_of_needs(
    theory: ReducedTheory, limit: int, run: Run | None = None, *, canonical: bool = False
) -> Graph | None:
    """The graph of needs in all orders, or the canonical one; None beyond `limit` nodes.

    Raises `Stopped` where `run` should stop.
    """
    states = [frozenset((theory.goal,))]
    numbers = {states[0]: 0}
    arcs: list[tuple[int, int, int]] = []
    for u, need in enumerate(states):
        if run is not None:
            run.check()
        highest = max((theory.level[p] for p in need), default=0) if canonical else -1
        settled = [p for p in need if theory.level[p] >= highest]
        for s in sorted({s for p in settled for s in theory.by_post[p]}):
            after = (need - theory.steps[s].post) | theory.steps[s].pre
            if not after >= need:  # else it only adds needs: the way to the end is no shorter
                if after not in numbers:
                    if len(states) == limit:
                        return None
                    numbers[after] = len(states)
                    states.append(after)
                arcs.append((u, numbers[after], s))
    return graph_of_states(
        theory, states, np.array(arcs, dtype=np.int64), in_execution_order=not canonical
    )


def graph_of_states(
    theory: ReducedTheory, states: Sequence[Need], arcs: Ints, *, in_execution_order: bool
) -> Graph:
    """The graph of states, {goal} first, with arcs [A, 3]: tail, head, step."""
    tail, head, step = arcs.reshape(-1, 3).T
    return graph_of_arcs(
        theory, [theory.key(need) for need in states], (tail, head, step),
        [(s,) for s in range(len(theory.steps))], work_of(theory.problem, theory.steps),
        in_execution_order=in_execution_order,
    )  # fmt: skip


# Sums that differ by less, relatively, are the same: of such means the first is taken.
CLOSE = 1e-9


def shortest(graph: Graph, cost: Floats) -> tuple[Floats, Ints]:
    """([n, J] least sums of the costs [A, J] >= 0 from each node to the last one, [n, J] the first
    arc of such a path, -1 where there is none)."""
    length, arc = np.full((graph.n, cost.shape[1]), np.inf), np.full((graph.n, cost.shape[1]), -1)
    length[-1] = 0.0
    none = np.zeros(len(graph.head), dtype=np.bool_)
    _fill_shortest(
        graph.first, graph.head, none, graph.component, np.ascontiguousarray(cost), np.ones(1),
        length, arc, length[:0],
    )  # fmt: skip
    return length, arc


def path(graph: Graph, arc: Ints) -> list[int]:
    """The arcs from the start on, given each node's first arc [n]."""
    node, taken = graph.start, []
    while node < graph.n - 1:
        taken.append(int(arc[node]))
        node = int(graph.head[taken[-1]])
    return taken


def potentials(graph: Graph, cost: Floats, mu: Floats) -> Floats:
    """[n, L, V] a lower bound, affine over a cell, of the cost from each node to the last one when
    the stage under way costs what mean l says.

    cost [A, L, V]: of arcs by L means at the V vertices. Where paths are programs in execution
    order, every stage may have another mean. It takes the one whose value at the point mu [V]
    (barycentric) is the largest at the node where the stage begins, read from the program's end.
    The first mean wins ties.
    """
    if not graph.in_execution_order:
        return shortest(graph, cost.reshape(len(cost), -1))[0].reshape(graph.n, *cost.shape[1:])
    rows = np.ascontiguousarray(cost.reshape(len(cost), -1))
    value, at_stage_begin = np.full((2, graph.n, rows.shape[1]), np.inf)
    value[-1] = at_stage_begin[-1] = 0.0
    _fill_shortest(
        graph.first, graph.head, graph.work.comm, graph.component, rows, mu, value,
        np.full(value.shape, -1), at_stage_begin,
    )  # fmt: skip
    return value.reshape(graph.n, *cost.shape[1:])


@kernel
def _fill_shortest(
    first: Ints, head: Ints, closes: Flags, component: Ints, cost: Floats, mu: Floats,
    value: Floats, arc: Ints, at_stage_begin: Floats,
) -> None:  # fmt: skip
    """Fill value [n, J], least sums of cost [A, J] to the last node, and arc [n, J].

    Every len(mu) columns belong to one mean. Behind an arc that `closes` a stage, at_stage_begin
    [n, J] of its head counts in place of the value: there all means have the columns of the one
    with the largest value at mu. Within a component that choice is made once, with the values
    before it.
    """
    J, V = cost.shape[1], len(mu)
    end = len(value) - 1
    while end > 0:
        begin = end - 1
        while begin > 0 and component[begin - 1] == component[end - 1]:
            begin -= 1
        changed = True
        while changed:
            changed = False
            for u in range(end - 1, begin - 1, -1):
                for a in range(first[u], first[u + 1]):
                    h = head[a]
                    after = at_stage_begin if closes[a] and h >= end else value
                    for j in range(J):
                        total = cost[a, j] + after[h, j]
                        if total < value[u, j]:
                            value[u, j] = total
                            arc[u, j] = a
                            # who looked at u before has to look again
                            changed = changed or end - begin > 1
        for u in range(begin, min(end, len(at_stage_begin))):
            best, chosen = -np.inf, 0
            for j in range(0, J, V):
                level = 0.0
                for i in range(V):
                    level += mu[i] * value[u, j + i] if mu[i] > 0 else 0.0
                if best == -np.inf or level > best + CLOSE * abs(best):
                    best, chosen = level, j
            for j in range(J):
                at_stage_begin[u, j] = value[u, chosen + j % V]
        end = begin
