"""The programs of a theory as the paths of one directed graph, independent of the ratios.

Module `needs` makes the graph of a theory, `open_states` the part of it that one cell of ratios
leaves open, and `whole_stages` a graph whose arcs are whole stages. `paths` has the shortest paths
in each of them.

Nodes are numbered so that arcs lead to the same or a later component. A component holds the states
whose properties have the same levels, as collectives lead from one form of a tensor to another and
back.
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

    comm: Flags  # [A] whether it is a collective
    fixed_seconds: Floats  # [A] seconds, whatever the ratios
    shared_seconds: Floats  # [A, g] seconds per ratio of each segment (a collective: the largest)
    fixed_bytes: Floats  # [A] bytes on every device; 0 without memory
    shared_bytes: Floats  # [A, g] bytes per ratio of each segment; 0 without memory

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(self.columns, other.columns, strict=True)))


def work_of(problem: HapProblem, steps: Sequence[Step]) -> Work:
    """The work of each of these triples."""
    comm = np.array([s.comm for s in steps], dtype=np.bool_)
    rows = [(s.fixed, s.shared, s.fixed_bytes, s.shared_bytes) for s in steps]
    fixed, shared, fixed_bytes, shared_bytes = np.array(rows, dtype=float).reshape(-1, 4).T
    unit = np.where(comm, 1.0, problem.speeds[-1])
    segment = np.array([s.segment for s in steps], dtype=np.int64)
    in_segment = segment[:, None] == np.arange(problem.g)  # [A, g]
    return Work(
        comm=comm,
        fixed_seconds=fixed / unit,
        shared_seconds=(shared / unit)[:, None] * in_segment,
        fixed_bytes=fixed_bytes,
        shared_bytes=shared_bytes[:, None] * in_segment,
    )


@dataclass(frozen=True)
class Graph:
    """A graph of n nodes and A arcs; paths from the start to node n - 1 are programs, backwards."""

    theory: ReducedTheory
    first: Ints  # [n + 1] the arcs of node u are numbered from first[u] to first[u + 1] - 1
    head: Ints  # [A] the node where an arc ends
    action: Ints  # [A] the action of an arc, a number among `steps_of_action`
    component: Ints  # [n] the component of a node, ascending along arcs
    start: int  # the node of {goal}
    # The steps (positions in theory.steps) of each action, the last one in time first.
    steps_of_action: Sequence[tuple[int, ...]]
    work: Work  # [A] the work of each arc
    # Whether the order of a path is an order of execution of its program; not in a canonical graph.
    in_execution_order: bool
    # Whether each arc is a collective or a whole stage.
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
        """(All arcs that leave these nodes, the position of each one's tail in `nodes`)."""
        counts = self.first[nodes + 1] - self.first[nodes]
        position = np.repeat(np.arange(len(nodes)), counts)
        arcs_before = np.cumsum(counts) - counts  # among those returned
        arcs = np.arange(counts.sum()) + np.repeat(self.first[nodes] - arcs_before, counts)
        return arcs, position

    def program(self, arcs: Iterable[int]) -> list[int]:
        """The program (triple numbers in order of execution) of the path along these arcs."""
        steps = [s for a in arcs for s in self.steps_of_action[self.action[a]]]
        return [self.theory.steps[s].index for s in reversed(steps)]

    @cached_property
    def backward(self) -> "tuple[Graph, Ints]":
        """(The graph read from its last node to its start, for each of its arcs the number here).

        Node u becomes node n - 1 - u.
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

    def without_arcs(self, hopeless: Flags) -> "tuple[Graph, Ints]":
        """(The graph without the marked arcs, the numbers here of its nodes).

        Its nodes are the two ends, and nodes that arcs enter and leave. Where no arc leads to the
        last node any more, the graph has no arcs.
        """
        if hopeless[self.head == self.n - 1].all():
            hopeless = np.ones_like(hopeless)
        is_left = np.zeros(self.n, dtype=np.bool_)
        is_left[self.tail[~hopeless]] = True
        is_entered = np.zeros(self.n, dtype=np.bool_)
        is_entered[self.head[~hopeless]] = True
        stays = is_left & is_entered
        stays[[self.start, self.n - 1]] = True
        nodes = np.flatnonzero(stays)
        new_number = np.cumsum(stays) - 1
        arcs = np.flatnonzero(~hopeless & stays[self.tail] & stays[self.head])
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
    """[nodes + 1] the first arc of each node, of arcs sorted by these tails."""
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
    """The graph of these nodes and arcs; its nodes are the start, then the others by their keys.

    keys: nodes with the same key form a component. arcs: [A] tail, [A] head (positions in keys) and
    [A] action. work: the work of each action.
    """
    tail, head, action = arcs
    # Read backward, paths lead to the last node, and so to the start. Its key is not the least one
    # where needs lead round in a circle.
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
    """[n] the component of each node, of nodes with these keys and arcs from tail to head [A].

    Neighbours of the same key share a component. An arc to an earlier node joins all nodes between
    its head and its tail into one.
    """
    key_differs = np.array([a != b for a, b in pairwise(keys)], dtype=np.bool_)
    goes_back = tail > head
    # the number of such arcs that span the place between a node and the one before it
    change = np.zeros(len(keys) + 1, dtype=np.int64)
    np.add.at(change, head[goes_back] + 1, 1)
    np.add.at(change, tail[goes_back] + 1, -1)
    spanning = np.cumsum(change)[1:-1]
    begins = key_differs & (spanning == 0)
    return np.concatenate([[0], np.cumsum(begins)]).astype(np.int64)
