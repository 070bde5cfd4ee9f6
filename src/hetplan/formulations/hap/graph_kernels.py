"""Compiled: shortest paths in a directed graph in compressed rows."""

from __future__ import annotations

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.hap.problem import Floats, Ints


def shortest_paths(first: Ints, head: Ints, component: Ints, cost: Floats) -> tuple[Floats, Ints]:
    """(length [n, V], arc [n, V]) of the shortest path from each node to node n - 1, which leads
    nowhere, for V costs [A, V] >= 0 at once, and of its first arc (-1: none). Components ascend
    along arcs."""
    n, V = len(first) - 1, cost.shape[1]
    length, arc = np.full((n, V), np.inf), np.full((n, V), -1, np.int64)
    length[n - 1] = 0.0
    _shortest_paths(first, head, component, np.ascontiguousarray(cost), length, arc)
    return length, arc


@kernel
def _shortest_paths(
    first: Ints, head: Ints, component: Ints, cost: Floats, length: Floats, arc: Ints
) -> None:
    """Fill length and arc, which hold what is known of node n - 1 alone."""
    end, V = len(length) - 1, cost.shape[1]
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
                    for i in range(V):
                        after = cost[a, i] + length[h, i]
                        if after < length[u, i]:
                            length[u, i] = after
                            arc[u, i] = a
                            # who looked at u before has to look again
                            changed = changed or end - begin > 1
        end = begin
