"""A graph of needs with the costs of its arcs, as the kernels take them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetplan.formulations.hap.exact import kernels
from hetplan.formulations.hap.problem import Floats, HapProblem, Ints
from hetplan.formulations.hap.states import Graph


@dataclass(frozen=True)
class Arrays:
    """A graph's arcs with their costs: compute in seconds of the fastest type, comm in seconds; `ordered`: whether
    its paths are programs in their order (not in a canonical graph)."""

    graph: Graph
    comm: kernels.Flags
    fixed: Floats
    shared: Floats
    slow: Floats
    start: int
    ordered: bool

    @property
    def common(self) -> tuple[Ints, Ints, kernels.Flags, Floats, Floats, Ints]:
        """What every kernel takes: first, head, comm, fixed, shared, component."""
        g = self.graph
        return g.first, g.head, self.comm, self.fixed, self.shared, g.component

    def path(self, parent: Ints, arc: Ints, label: int) -> list[int]:
        """The triple numbers of a label's program in order."""
        g, found = self.graph, []
        while arc[label] >= 0:
            found.append(g.theory.steps[g.step[arc[label]]].index)
            label = int(parent[label])
        return found


def priced_graph(problem: HapProblem, graph: Graph, *, ordered: bool = True) -> Arrays:
    """Costs per arc."""
    steps = graph.theory.steps
    comm = np.array([s.comm for s in steps], dtype=np.bool_)
    unit = np.where(comm, 1.0, problem.speeds[-1])
    fixed, shared = np.array([s.fixed for s in steps]) / unit, np.array([s.shared for s in steps]) / unit
    slow = problem.speeds[-1] / problem.speeds
    of = graph.step
    return Arrays(graph, comm[of], fixed[of], shared[of], slow, graph.start, ordered)
