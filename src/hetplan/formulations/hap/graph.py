"""The programs of a theory as the paths of one directed graph, independent of the ratios.

Module `needs` makes the graph of a theory, `open_states` the part of it that one cell of ratios
leaves open, and `whole_stages` a graph whose arcs are whole stages. `paths` has the shortest paths
in each of them.

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
