"""The graph of what a cell leaves open of a theory too wide for all its states (kernels in `explore`)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hetplan.formulations.hap.exact.arrays import Arrays, priced_graph
from hetplan.formulations.hap.exact.explore import DONE, explore
from hetplan.formulations.hap.exact.parking import parking
from hetplan.formulations.hap.graph_kernels import components
from hetplan.formulations.hap.problem import Floats, HapProblem, Ints
from hetplan.formulations.hap.states import Graph, levels
from hetplan.formulations.hap.theory import Theory

# Properties needed at a time at most, and of a theory (a table of pairs is kept).
WIDTH, MOST_PROPERTIES = 16, 16_000


class Explorer:
    """A theory in compressed rows; properties are numbered anew, in the order of `properties` [P]. without [P, P]:
    see `explore.parking`."""

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
        fixed, shared = np.array([s.fixed for s in steps]) / unit, np.array([s.shared for s in steps]) / unit
        self._comm, self._work = comm, (fixed, shared)
        free = ~comm & (fixed == 0) & (shared == 0)
        self._fits = len(self.properties) <= MOST_PROPERTIES
        self.without = (
            parking(*self._by, *self._pre, *self._post, free) if self._fits else np.zeros((0, 0), np.bool_)
        )
        assert theory.goal is not None
        self._goal = number[theory.goal]

    def open(self, cell: Floats, weights: Floats, enough: float, limit: int) -> Arrays | None:
        """The states and arcs on programs of which sums with `weights` [L, K] do not show that they cost `enough`
        all over the cell; only the empty set where there are none; None beyond `limit` states or MOST_PROPERTIES."""
        if not self._fits:
            return None
        slow = self._problem.speeds[-1] / self._problem.speeds
        status, rows, first, head, step = explore(
            self._goal, *self._by, *self._pre, *self._post, self._level, self._comm, *self._work, cell, slow, weights,
            self.without, enough, limit, WIDTH,
        )  # fmt: skip
        return priced_graph(self._problem, self._ordered(rows, first, head, step)) if status == DONE else None

    def _ordered(self, rows: Ints, first: Ints, head: Ints, step: Ints) -> Graph:
        """Nodes by components in topological order; the empty set, which leads nowhere, may well be the last."""
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
        needs = tuple(frozenset(int(p) for p in self.properties[row[row >= 0]]) for row in rows[order])
        return Graph(self._theory, moved, place[head[arcs]], step[arcs], component[order], needs)


def _rows(lists: Iterable[Iterable[int]]) -> tuple[Ints, Ints]:
    """(first [n + 1], all numbers) of lists of numbers."""
    kept = [list(row) for row in lists]
    first = np.zeros(len(kept) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in kept], out=first[1:])
    return first, np.array([x for row in kept for x in row], dtype=np.int64)
