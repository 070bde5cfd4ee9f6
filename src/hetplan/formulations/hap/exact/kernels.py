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
) -> Floats:
    """[n, L, V]: least cost from each node to the empty set when a stage's time is taken as the mean over types
    with weights[l] (a lower bound of the maximum, and additive), at each vertex of the cell."""
    n, L, V, K = len(first) - 1, len(weights), len(x), x.shape[1]
    mean = np.zeros(L)
    share = np.zeros((L, V))
    for l in range(L):
        for d in range(K):
            mean[l] += weights[l, d] * slow[d]
            for i in range(V):
                share[l, i] += weights[l, d] * slow[d] * x[i, d]
    value = np.full((n, L, V), np.inf)
    value[n - 1] = 0.0
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
                    for l in range(L):
                        for i in range(V):
                            if comm[a]:
                                cost = fixed[a] + shared[a] * x[i, K - 1]
                            else:
                                cost = fixed[a] * mean[l] + shared[a] * share[l, i]
                            cost += value[h, l, i]
                            if cost < value[u, l, i]:
                                value[u, l, i] = cost
                                changed = changed or (h >= begin and h < end)
        end = begin
    return value
