"""A graph of needs with the costs of its arcs, as the kernels take them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hetplan.formulations.hap.exact import kernels
from hetplan.formulations.hap.problem import Floats, HapProblem, Ints
from hetplan.formulations.hap.states import Graph


@dataclass(frozen=True)
class Arrays:
    """A graph's arcs with their costs: compute in seconds of the fastest type, comm in seconds;
    shared [A], or [A, g] where several segments have ratios of their own; `ordered`: whether
    its paths are programs in their order (not in a canonical graph). missing: the share of the
    threshold that was missing to it where arcs were last left out. chains: where arcs are whole
    stages (`staging`), the steps behind each number in graph.step, as a program runs them."""

    graph: Graph
    comm: kernels.Flags
    fixed: Floats
    shared: Floats
    slow: Floats
    start: int
    ordered: bool
    missing: float = np.inf
    chains: tuple[tuple[int, ...], ...] | None = None

    @cached_property
    def tails(self) -> Ints:
        """[A]: where arcs begin."""
        return np.repeat(np.arange(self.graph.n), np.diff(self.graph.first))

    @property
    def common(self) -> tuple[Ints, Ints, kernels.Flags, Floats, Floats, Ints]:
        """What every kernel takes: first, head, comm, fixed, shared, component."""
        g = self.graph
        return g.first, g.head, self.comm, self.fixed, self.shared, g.component

    @cached_property
    def reverse(self) -> tuple[Ints, Ints, Ints, Ints]:
        """The graph read backwards, nodes numbered from the end: first, head, component, and each
        arc's number here."""
        g, last = self.graph, self.graph.n - 1
        tails = self.tails
        arcs = np.argsort(last - g.head, kind="stable")
        first = np.zeros(g.n + 1, dtype=np.int64)
        np.cumsum(np.bincount(last - g.head, minlength=g.n), out=first[1:])
        return first, (last - tails)[arcs], (g.component[-1] - g.component)[::-1].copy(), arcs

    def without(self, hopeless: kernels.Flags, missing: float) -> tuple[Arrays, Ints]:
        """The same without the arcs marked, and the numbers of the nodes left: the ends and those
        with arcs in and out. Where none leads to the last node any more, none is left: what remains
        are circles without cost."""
        g = self.graph
        if hopeless[g.head == g.n - 1].all():
            hopeless = np.ones_like(hopeless)
        tails = self.tails
        used = np.zeros((2, g.n), dtype=np.bool_)
        used[0, tails[~hopeless]] = used[1, g.head[~hopeless]] = True
        used[1, self.start] = used[0, g.n - 1] = True
        left = used[0] & used[1]
        left[[self.start, g.n - 1]] = True
        nodes, number = np.flatnonzero(left), np.cumsum(left) - 1
        kept = ~hopeless & left[tails] & left[g.head]
        first = np.zeros(len(nodes) + 1, dtype=np.int64)
        np.cumsum(np.bincount(number[tails[kept]], minlength=len(nodes)), out=first[1:])
        graph = Graph(
            g.theory, first, number[g.head[kept]], g.step[kept], g.component[nodes], tuple(g.needs[u] for u in nodes)
        )  # fmt: skip
        work = self.comm[kept], self.fixed[kept], self.shared[kept]
        return Arrays(
            graph, *work, self.slow, int(number[self.start]), self.ordered, missing, self.chains
        ), nodes

    def path(self, parent: Ints, arc: Ints, label: int) -> list[int]:
        """The triple numbers of a label's program in order."""
        found = []
        while arc[label] >= 0:
            found.append(int(arc[label]))
            label = int(parent[label])
        return self.program(found)

    def program(self, arcs: Iterable[int]) -> list[int]:
        """The triple numbers of a program in order, given by its arcs from the last node to the
        first."""
        g, found = self.graph, []
        for a in arcs:
            step = int(g.step[a])
            steps = (step,) if self.chains is None else self.chains[step]
            found += [g.theory.steps[s].index for s in steps]
        return found


def priced_graph(problem: HapProblem, graph: Graph, *, ordered: bool = True) -> Arrays:
    """Costs per arc."""
    steps = graph.theory.steps
    comm = np.array([s.comm for s in steps], dtype=np.bool_)
    unit = np.where(comm, 1.0, problem.speeds[-1])
    fixed, shared = (
        np.array([s.fixed for s in steps]) / unit,
        np.array([s.shared for s in steps]) / unit,
    )
    slow = problem.speeds[-1] / problem.speeds
    of = graph.step
    return Arrays(graph, comm[of], fixed[of], shared[of], slow, graph.start, ordered)
