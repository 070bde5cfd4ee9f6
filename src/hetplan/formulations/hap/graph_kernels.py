"""Compiled: strongly connected components of a directed graph in compressed rows, and shortest paths in it."""

from __future__ import annotations

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.hap.problem import Floats, Ints


@kernel
def components(first: Ints, head: Ints) -> Ints:
    """[n]: component numbers such that every arc leads to an equal or greater one (Tarjan, without recursion).

    first [n + 1]: node u has arcs first[u] … first[u + 1]; head: where they lead.
    """
    n = len(first) - 1
    index = np.full(n, -1, np.int64)
    low = np.zeros(n, np.int64)
    component = np.full(n, -1, np.int64)
    stack, path = np.empty(n, np.int64), np.empty(n, np.int64)
    at = first[:-1].copy()
    size, depth, count, found = 0, 0, 0, 0
    for root in range(n):
        if index[root] >= 0:
            continue
        path[0], depth = root, 1
        while depth:
            u = path[depth - 1]
            if index[u] < 0:
                index[u] = low[u] = count
                count += 1
                stack[size] = u
                size += 1
            descended = False
            while at[u] < first[u + 1]:
                w = head[at[u]]
                at[u] += 1
                if index[w] < 0:
                    path[depth] = w
                    depth += 1
                    descended = True
                    break
                if component[w] < 0:
                    low[u] = min(low[u], index[w])
            if descended:
                continue
            depth -= 1
            if depth:
                low[path[depth - 1]] = min(low[path[depth - 1]], low[u])
            if low[u] == index[u]:
                while True:
                    size -= 1
                    component[stack[size]] = found
                    if stack[size] == u:
                        break
                found += 1
    return found - 1 - component


@kernel
def shortest_paths(first: Ints, head: Ints, component: Ints, cost: Floats) -> tuple[Floats, Ints]:
    """(length [n, V], arc [n, V]) of the shortest path from each node to node n - 1, which leads nowhere, for V costs
    [A, V] >= 0 at once, and of its first arc (-1: none). Components ascend along arcs."""
    n, V = len(first) - 1, cost.shape[1]
    length = np.full((n, V), np.inf)
    arc = np.full((n, V), -1, np.int64)
    length[n - 1] = 0.0
    end = n - 1
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
                            changed = changed or (h >= begin and h < end)
        end = begin
    return length, arc
