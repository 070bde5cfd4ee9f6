"""The programs of a theory as the paths of one directed graph, independent of the ratios.

Module `needs` makes the graph of a theory, `open_states` the part of it that one cell of ratios
leaves open, and `whole_stages` a graph whose arcs are whole stages. `paths` finds shortest paths in
all three.

Nodes are numbered so that every arc leads to its own or a later component. Within a component arcs
may form circles, because collectives lead from one form of a tensor to another and back.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.hap.problem import Floats, HapProblem, Ints, Step
from hetplan.formulations.hap.theory import ReducedTheory

Flags = NDArray[np.bool_]
Key = tuple[int, ...]


class Rows:
    """Base of dataclasses whose fields are arrays with the same number of rows."""

    @property
    def columns(self) -> list[Any]:
        """The arrays, in the order of the fields."""
        return [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]

    def __getitem__(self, rows: Ints | Flags) -> Self:
        return type(self)(*(column[rows] for column in self.columns))

    @classmethod
    def joined(cls, parts: Iterable[Self]) -> Self:
        """The rows of all parts, one part after the other."""
        joined: list[Any] = []
        for columns in zip(*(part.columns for part in parts), strict=True):
            if isinstance(columns[0], Rows):
                joined.append(type(columns[0]).joined(columns))
            else:
                joined.append(np.concatenate(columns))
        return cls(*joined)


@dataclass(frozen=True)
class Work(Rows):
    """The work of A triples or stages, in seconds of the fastest device type."""

    comm: Flags  # [A] whether the triple is a collective
    fixed_seconds: Floats  # [A] seconds that do not depend on the ratios
    # [A, g] seconds per ratio in each of g segments; for a collective, per largest ratio.
    shared_seconds: Floats
    fixed_bytes: Floats  # [A] bytes on every device; 0 in a problem without memory limits
    shared_bytes: Floats  # [A, g] bytes per ratio in each segment; 0 without memory limits

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(self.columns, other.columns, strict=True)))


def work_of(problem: HapProblem, steps: Sequence[Step]) -> Work:
    """The work of triples, one row for each of `steps`."""
    comm = np.array([step.comm for step in steps], dtype=np.bool_)
    rows = [(step.fixed, step.shared, step.fixed_bytes, step.shared_bytes) for step in steps]
    # reshaped, because an array of no rows does not have four columns
    fixed, shared, fixed_bytes, shared_bytes = np.array(rows, dtype=float).reshape(-1, 4).T
    # the work of a collective is in seconds, that of a computation in FLOP
    per_second = np.where(comm, 1.0, problem.speeds[-1])
    segment = np.array([step.segment for step in steps], dtype=np.int64)
    in_segment = segment[:, None] == np.arange(problem.g)  # [A, g]
    return Work(
        comm=comm,
        fixed_seconds=fixed / per_second,
        shared_seconds=(shared / per_second)[:, None] * in_segment,
        fixed_bytes=fixed_bytes,
        shared_bytes=shared_bytes[:, None] * in_segment,
    )


@dataclass(frozen=True)
class Graph:
    """A graph of n nodes and A arcs.

    A path from the start to node n - 1 is a program; its arcs are in reverse order of execution.
    """

    theory: ReducedTheory
    first: Ints  # [n + 1] the arcs of node u are numbered from first[u] to first[u + 1] - 1
    head: Ints  # [A] the node where an arc ends
    action: Ints  # [A] the action of an arc, an index into `steps_of_action`
    component: Ints  # [n] the number of each node's component; no arc leads to a smaller one
    start: int  # the node whose only open need is the goal
    # [action] its steps, as positions in theory.steps, in reverse order of execution.
    steps_of_action: Sequence[tuple[int, ...]]
    work: Work  # [A] the work of each arc
    # Whether the program of a path can be executed in the (reversed) order of its arcs; not in a
    # canonical graph, whose arcs settle needs by levels (`needs`).
    in_execution_order: bool
    # Whether every arc is either one collective or one whole stage.
    arcs_are_stages: bool = False

    @property
    def n(self) -> int:
        """Number of nodes."""
        return len(self.first) - 1

    @cached_property
    def tail(self) -> Ints:
        """[A] the node where an arc begins."""
        return np.repeat(np.arange(self.n), np.diff(self.first))

    def arcs_of(self, nodes: Ints) -> tuple[Ints, Ints]:
        """(all arcs that leave the nodes, for each arc the position of its tail in `nodes`)."""
        counts = self.first[nodes + 1] - self.first[nodes]
        position = np.repeat(np.arange(len(nodes)), counts)
        # The k-th returned arc is number k - begin of its node, where the node's arcs begin at
        # position `begin` of the returned array.
        begin = np.cumsum(counts) - counts
        arcs = np.arange(counts.sum()) + np.repeat(self.first[nodes] - begin, counts)
        return arcs, position

    def program(self, arcs: Iterable[int]) -> list[int]:
        """The program (triple numbers, in order of execution) of the path with these arcs."""
        steps: list[int] = []
        for arc in arcs:
            steps += self.steps_of_action[self.action[arc]]
        return [self.theory.steps[step].index for step in reversed(steps)]

    @cached_property
    def backward(self) -> "tuple[Graph, Ints]":
        """(the graph with all arcs reversed, for each of its arcs the number of the arc in this
        graph).

        Node u becomes node n - 1 - u, so that arcs lead to the same or a later component again.
        """
        last = self.n - 1
        arcs = np.argsort(last - self.head, kind="stable")
        reversed_graph = replace(
            self,
            first=_firsts(last - self.head, self.n),
            head=(last - self.tail)[arcs],
            action=self.action[arcs],
            component=(self.component[-1] - self.component)[::-1].copy(),
            start=0,
            work=self.work[arcs],
        )
        return reversed_graph, arcs

    def without_arcs(self, removed: Flags) -> "tuple[Graph, Ints]":
        """(the graph without some arcs, for each of its nodes the number of the node in this
        graph).

        removed: [A] whether an arc is removed. The first and the last node remain, and every node
        that a remaining arc enters and another one leaves. Where no arc to the last node remains,
        all arcs are removed.
        """
        if removed[self.head == self.n - 1].all():
            removed = np.ones_like(removed)
        has_outgoing = np.zeros(self.n, dtype=np.bool_)
        has_outgoing[self.tail[~removed]] = True
        has_incoming = np.zeros(self.n, dtype=np.bool_)
        has_incoming[self.head[~removed]] = True
        remains = has_outgoing & has_incoming
        remains[[self.start, self.n - 1]] = True
        nodes = np.flatnonzero(remains)
        new_number = np.cumsum(remains) - 1
        arcs = np.flatnonzero(~removed & remains[self.tail] & remains[self.head])
        graph = replace(
            self,
            first=_firsts(new_number[self.tail[arcs]], len(nodes)),
            head=new_number[self.head[arcs]],
            action=self.action[arcs],
            component=self.component[nodes],
            start=int(new_number[self.start]),
            work=self.work[arcs],
        )
        return graph, nodes


def _firsts(tail: Ints, nodes: int) -> Ints:
    """[nodes + 1] the number of the first arc of each node, where arcs are sorted by their tails.
    The last entry is the number of arcs."""
    out_degrees = np.bincount(tail, minlength=nodes)
    return np.concatenate([[0], np.cumsum(out_degrees)]).astype(np.int64)


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
    """The graph of given nodes and arcs. The start is numbered 0, and the other nodes in the order
    of their keys.

    keys: [n] the key of each node; neighbours with equal keys share a component. arcs: ([A] tail,
    [A] head, both as positions in `keys`, [A] action). steps_of_action, in_execution_order,
    arcs_are_stages: see `Graph`. work: [action] the work of each action. start: the position of
    the start in `keys`.
    """
    tail, head, action = arcs
    # The start is the first node even where circles of needs give another node a smaller key:
    # `Graph.backward` makes it the last node, to which paths lead.
    others = sorted((u for u in range(len(keys)) if u != start), key=keys.__getitem__)
    order = [start, *others]
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.arange(len(order))
    tail, head = number[tail], number[head]
    by_tail = np.argsort(tail, kind="stable")
    action = action[by_tail]
    return Graph(
        theory=theory,
        first=_firsts(tail, len(keys)),
        head=head[by_tail],
        action=action,
        component=_components([keys[u] for u in order], tail, head),
        start=0,
        steps_of_action=steps_of_action,
        work=work[action],
        in_execution_order=in_execution_order,
        arcs_are_stages=arcs_are_stages,
    )


def _components(keys: Sequence[Key], tail: Ints, head: Ints) -> Ints:
    """[n] the component of each node. keys: [n]. tail, head: [A] the ends of each arc.

    Neighbours with the same key share a component. An arc to an earlier node joins all nodes from
    its head to its tail into one component.
    """
    key_differs = np.array([a != b for a, b in pairwise(keys)], dtype=np.bool_)
    goes_back = tail > head
    # spanning[u - 1]: the number of arcs that go back across the boundary between nodes u - 1 and
    # u. It is the prefix sum of `change`, +1 where such an arc begins to span and -1 where it ends.
    change = np.zeros(len(keys) + 1, dtype=np.int64)
    np.add.at(change, head[goes_back] + 1, 1)
    np.add.at(change, tail[goes_back] + 1, -1)
    spanning = np.cumsum(change)[1:-1]
    begins = key_differs & (spanning == 0)
    return np.concatenate([[0], np.cumsum(begins)]).astype(np.int64)
