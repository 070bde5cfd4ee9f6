"""Strongly connected components of a directed graph in compressed rows.

Interpreted: compiling it took longer than all its calls for a theory, whose states are made one by
one anyhow.
"""

from __future__ import annotations

import numpy as np

from hetplan.formulations.hap.problem import Ints


def components(first: Ints, head: Ints) -> Ints:
    """[n]: component numbers such that every arc leads to an equal or greater one (Tarjan, without
    recursion).

    first [n + 1]: node u has arcs first[u] … first[u + 1]; head: where they lead.
    """
    end, heads = first[1:].tolist(), head.tolist()
    n = len(end)
    at = first[:-1].tolist()
    index, low, component = [-1] * n, [0] * n, [-1] * n
    stack: list[int] = []
    path: list[int] = []
    count, found = 0, 0
    for root in range(n):
        if index[root] >= 0:
            continue
        path.append(root)
        while path:
            u = path[-1]
            if index[u] < 0:
                index[u] = low[u] = count
                count += 1
                stack.append(u)
            a, stop, least = at[u], end[u], low[u]
            while a < stop:
                w = heads[a]
                if index[w] < 0:
                    # looked at again from u once it is done: its number is then known
                    path.append(w)
                    break
                if component[w] < 0 and low[w] < least:
                    least = low[w]
                a += 1
            at[u], low[u] = a, least
            if a < stop:
                continue
            path.pop()
            if least == index[u]:
                while component[u] < 0:
                    component[stack.pop()] = found
                found += 1
    return found - 1 - np.array(component, dtype=np.int64)
