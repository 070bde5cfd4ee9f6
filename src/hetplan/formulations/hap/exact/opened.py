"""The graph of what a cell leaves open of a theory too wide for all its states (kernels in
`explore`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from hetplan.formulations.hap.exact import kernels
from hetplan.formulations.hap.exact.arrays import Arrays, priced_graph
from hetplan.formulations.hap.exact.explore import COUNT, DONE, UNDER_WAY, explore, slot
from hetplan.formulations.hap.exact.kernels import Flags
from hetplan.formulations.hap.exact.parking import parking
from hetplan.formulations.hap.graph_parts import components
from hetplan.formulations.hap.problem import Floats, HapProblem, Ints
from hetplan.formulations.hap.states import Graph, levels
from hetplan.formulations.hap.theory import Theory
from hetplan.solvers.run import Run, Stopped

# Properties needed at a time at most, and of a theory (a table of pairs is kept).
WIDTH, MOST_PROPERTIES = 16, 16_000
# States looked at between two looks at the clock.
PAUSE = 2_000


class Explorer:
    """A theory in compressed rows; properties are numbered anew, in the order of `properties`
    [P]."""

    def __init__(self, problem: HapProblem, theory: Theory) -> None:
        self._problem, self._theory = problem, theory
        level = levels(theory)
        self.properties = np.array(sorted(level), dtype=np.int64)
        number = {int(p): i for i, p in enumerate(self.properties)}
        steps = theory.steps
        self._by = _rows(theory.by_post.get(int(p), ()) for p in self.properties)
        self._pre = _rows(sorted(number[p] for p in s.pre) for s in steps)
        self._post = _rows(sorted(number[p] for p in s.post) for s in steps)
        self._level = np.array([level[int(p)] for p in self.properties], dtype=np.int64)
        comm = np.array([s.comm for s in steps], dtype=np.bool_)
        unit = np.where(comm, 1.0, problem.speeds[-1])
        fixed, shared = (
            np.array([s.fixed for s in steps]) / unit,
            np.array([s.shared for s in steps]) / unit,
        )
        self._comm, self._work = comm, (fixed, shared)
        self._free = ~comm & (fixed == 0) & (shared == 0)
        assert theory.goal is not None
        self._goal = number[theory.goal]
        self._without: Flags | None = None

    def without(self, run: Run) -> Flags:
        """[P, P], see `parking`; found once. Raises `Stopped` where `run` should stop."""
        if self._without is None:
            self._without = parking(*self._by, *self._pre, *self._post, self._free, run)
        return self._without

    def open(
        self, cell: Floats, weights: Floats, enough: float, limit: int, run: Run
    ) -> Arrays | None:
        """The states and arcs on programs of which sums with `weights` [L, K] do not show that they
        cost `enough` all over the cell; only the empty set where there are none; None beyond
        `limit` states left open, 4 `limit` met, 16 `limit` looked at or MOST_PROPERTIES, and where
        the run should stop."""
        slow = self._problem.speeds[-1] / self._problem.speeds
        cost = kernels.prices(self._comm, *self._work, cell, slow, weights)
        graph = self.left_open(cost, enough, limit, run)
        return None if graph is None else priced_graph(self._problem, graph)

    def left_open(self, cost: Floats, enough: float, limit: int, run: Run) -> Graph | None:
        """The same by prices of the steps cost [steps, L, V]: the graph."""
        if len(self.properties) > MOST_PROPERTIES:
            return None
        try:
            without = self.without(run)
        except Stopped:
            return None
        states = _States(self._goal, 4 * limit, cost)
        status = UNDER_WAY
        while status == UNDER_WAY:
            if run.should_stop:
                return None
            status = explore(
                *self._by, *self._pre, *self._post, self._level, self._free, without, states.cost, cost.shape[2],
                enough, 16 * limit, PAUSE, *states.kept, *states.scratch,
            )  # fmt: skip
        left = states.left(enough, limit) if status == DONE else None
        return None if left is None else self._ordered(*left)

    def _ordered(self, rows: Ints, first: Ints, head: Ints, step: Ints) -> Graph:
        """Nodes by components in topological order; the empty set, which leads nowhere, may well be
        the last."""
        n = len(rows)
        component = components(first, head)
        component[n - 1] = component.max() + 1
        order = np.argsort(component, kind="stable")
        place = np.empty(n, dtype=np.int64)
        place[order] = np.arange(n)
        tail = place[np.repeat(np.arange(n), np.diff(first))]
        arcs = np.argsort(tail, kind="stable")
        moved = np.zeros(n + 1, dtype=np.int64)
        np.cumsum(np.bincount(tail, minlength=n), out=moved[1:])
        needs = tuple(
            frozenset(int(p) for p in self.properties[row[row >= 0]]) for row in rows[order]
        )
        return Graph(self._theory, moved, place[head[arcs]], step[arcs], component[order], needs)


class _States:
    """The kernel's arrays for at most `most` states besides the empty one: node 0 needs nothing,
    node 1 is the goal."""

    def __init__(self, goal: int, most: int, cost: Floats) -> None:
        room, width, self._vertices = most + 1, WIDTH, cost.shape[2]
        self.cost = cost.reshape(len(cost), -1)
        shape = self.cost.shape[1:]
        self.rows = np.empty((room, width), np.int64)
        table = np.zeros(1 << (3 * most).bit_length(), np.int64)
        self.counters = np.array([2, 0, 1, 0, 0])
        self.g, self.h = np.empty((room, *shape)), np.empty((room, *shape))
        settled, waiting, queue = (
            np.zeros(room, np.bool_),
            np.zeros(room, np.bool_),
            np.empty(most, np.int64),
        )
        self.first, self.end = np.zeros(room, np.int64), np.zeros(room, np.int64)
        self.head, self.step = np.empty(16 * most, np.int64), np.empty(16 * most, np.int64)
        self.rows[:2] = -1
        self.rows[1, 0] = goal
        for node in (0, 1):
            table[slot(self.rows[node], self.rows, table)] = node + 1
        self.g[0], self.h[0], self.g[1], self.h[1] = np.inf, 0.0, 0.0, np.inf
        settled[0] = waiting[1] = True
        queue[0] = 1
        self.kept: tuple[Any, ...] = (
            self.rows, table, self.counters, self.g, self.h, settled, waiting, queue, self.first, self.end, self.head,
            self.step,
        )  # fmt: skip
        self.scratch: tuple[Any, ...] = (
            np.empty(room, np.int64), np.empty(room + 1, np.int64), np.empty(16 * most, np.int64),
            np.empty(16 * most, np.int64), np.empty(width, np.int64),
        )  # fmt: skip

    def left(self, enough: float, limit: int) -> tuple[Ints, Ints, Ints, Ints] | None:
        """(rows [n, W] of properties, arcs: first [n + 1], head, step) of the states left open and
        the arcs among them that are open themselves, {goal} first, the empty set last; None where
        there are more than `limit`."""
        count = int(self.counters[COUNT])
        nodes = 1 + np.flatnonzero(self._open(self.g[1:count] + self.h[1:count], enough))
        if len(nodes) > limit:
            return None
        kept = np.append(nodes, 0)
        number = np.full(count, -1, np.int64)
        number[kept] = np.arange(len(kept))
        lengths = self.end[nodes] - self.first[nodes]
        arc = np.repeat(self.first[nodes] - np.cumsum(lengths) + lengths, lengths) + np.arange(
            lengths.sum()
        )
        tail, head, step = np.repeat(nodes, lengths), self.head[arc], self.step[arc]
        open_ = number[head] >= 0
        tail, head, step = tail[open_], head[open_], step[open_]
        open_ = self._open(self.g[tail] + self.cost[step] + self.h[head], enough)
        tail, head, step = tail[open_], head[open_], step[open_]
        first = np.zeros(len(kept) + 1, np.int64)
        np.cumsum(np.bincount(number[tail], minlength=len(kept)), out=first[1:])
        return self.rows[kept], first, number[head], step

    def _open(self, through: Floats, enough: float) -> Flags:
        """[·] whether for every mean the cost [·, LV] is below `enough` at some vertex."""
        by_mean = through.reshape(len(through), through.shape[1] // self._vertices, self._vertices)
        return np.asarray((by_mean.min(axis=2) < enough).all(axis=1))


def _rows(lists: Iterable[Iterable[int]]) -> tuple[Ints, Ints]:
    """(first [n + 1], all numbers) of lists of numbers."""
    kept = [list(row) for row in lists]
    first = np.zeros(len(kept) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in kept], out=first[1:])
    return first, np.array([x for row in kept for x in row], dtype=np.int64)
