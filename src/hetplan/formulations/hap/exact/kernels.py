"""Compiled: potentials on a graph of needs over one cell of ratios.

A cell is a simplex of ratio vectors with vertices x [K, K]; b ascends with speed there, so max b = b[K - 1].
Work is in seconds of the fastest type: `slow` [K] = v_max / v_d turns it into seconds of type d.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetplan.compiled import kernel
from hetplan.formulations.hap.problem import Floats, Ints

Flags = NDArray[np.bool_]
# Bounds that differ by less, relatively, are the same.
CLOSE = 1e-9


@kernel
def potentials(
    first: Ints,
    head: Ints,
    comm: Flags,
    fixed: Floats,
    shared: Floats,
    component: Ints,
    x: Floats,
    slow: Floats,
    weights: Floats,
    mu: Floats,
    ordered: bool,
) -> Floats:
    """[n, L, V]: a lower bound, affine over the cell and told by its values at the vertices, of the cost from each
    node to the empty set when the stage under way counts as the mean over types with weights[l].

    A mean never exceeds the maximum, and adds up. Where the graph's paths are programs in their order (`ordered`;
    not in a canonical graph, whose paths stand for other orders with other stages), any mean may price any stage,
    so that each stage takes the one that tells most at the point mu [V] (barycentric) from the node where it
    begins, read from the program's end; of those that tell the same, where types tie, the first.
    """
    n, L, V, K = len(first) - 1, len(weights), len(x), x.shape[1]
    mean = np.zeros(L)
    share = np.zeros((L, V))
    for l in range(L):
        for d in range(K):
            mean[l] += weights[l, d] * slow[d]
            for i in range(V):
                share[l, i] += weights[l, d] * slow[d] * x[i, d]
    step = np.zeros((len(head), L, V))
    for a in range(len(head)):
        for l in range(L):
            for i in range(V):
                if comm[a]:
                    step[a, l, i] = fixed[a] + shared[a] * x[i, K - 1]
                else:
                    step[a, l, i] = fixed[a] * mean[l] + shared[a] * share[l, i]
    value = np.full((n, L, V), np.inf)
    begun = np.full((n, V), np.inf)
    value[n - 1] = 0.0
    begun[n - 1] = 0.0
    finer = np.empty(V)
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
                    switch = ordered and comm[a] and h >= end
                    for l in range(L):
                        for i in range(V):
                            cost = step[a, l, i] + (begun[h, i] if switch else value[h, l, i])
                            if cost < value[u, l, i]:
                                value[u, l, i] = cost
                                changed = changed or (h >= begin and h < end)
        for _ in range(0 if not ordered else 1 if end - begin == 1 else 2):
            for u in range(begin, end):
                best = -np.inf
                for l in range(L):
                    level = 0.0
                    for i in range(V):
                        level += mu[i] * value[u, l, i] if mu[i] > 0 else 0.0
                    if best == -np.inf or level > best + CLOSE * abs(best):
                        best = level
                        for i in range(V):
                            begun[u, i] = value[u, l, i]
            if end - begin == 1:
                continue
            # within a component once more, with the means that its stages now choose
            for u in range(begin, end):
                for l in range(L):
                    finer[:] = np.inf
                    for a in range(first[u], first[u + 1]):
                        h = head[a]
                        for i in range(V):
                            cost = step[a, l, i] + (begun[h, i] if comm[a] else value[h, l, i])
                            finer[i] = min(finer[i], cost)
                    old, new = 0.0, 0.0
                    for i in range(V):
                        if mu[i] > 0:
                            old += mu[i] * value[u, l, i]
                            new += mu[i] * finer[i]
                    if new > old:
                        for i in range(V):
                            value[u, l, i] = finer[i]
        end = begin
    return value
