"""Compiled: potentials on a graph of needs over one cell of ratios.

A cell is a simplex of ratio vectors with vertices x [K, K]; b ascends with speed there, so max b =
b[K - 1].
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


def means(x: Floats, slow: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """What means over types, weights [L, K], make of a unit of fixed [L] and of shared [L, V]
    work."""
    rows = weights * slow
    return rows.sum(axis=1), np.ascontiguousarray(rows @ x.T)


def prices(
    comm: Flags, fixed: Floats, shared: Floats, x: Floats, slow: Floats, weights: Floats
) -> Floats:
    """[A, L, V]: seconds of each arc at the vertices when its stage counts as a mean over types."""
    (L, V), kinds = (len(weights), len(x)), np.empty((4, len(comm)))
    kinds[:2], kinds[2:] = (fixed, shared), (fixed, shared)
    kinds[:2, comm] = kinds[2:, ~comm] = 0.0
    mean, share = means(x, slow, weights)
    rows = np.ones((4, L * V))
    rows[0], rows[1], rows[3] = np.repeat(mean, V), share.ravel(), np.tile(x[:, -1], L)
    return np.asarray(kinds.T @ rows).reshape(-1, L, V)


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
    """[n, L, V]: a lower bound, affine over the cell and told by its values at the vertices, of the
    cost from each node to the empty set when the stage under way counts as the mean over types with
    weights[l].

    A mean never exceeds the maximum, and adds up. Where the graph's paths are programs in their
    order (`ordered`; not in a canonical graph, whose paths stand for other orders with other
    stages), any mean may price any stage, so that each stage takes the one that tells most at the
    point mu [V] (barycentric) from the node where it begins, read from the program's end; of those
    that tell the same, where types tie, the first.
    """
    step = prices(comm, fixed, shared, x, slow, weights)
    return potentials_of(first, head, comm, component, step, mu, ordered)


def potentials_of(
    first: Ints, head: Ints, comm: Flags, component: Ints, step: Floats, mu: Floats, ordered: bool
) -> Floats:
    """The same for arcs' prices step [A, L, V]."""
    n, (L, V) = len(first) - 1, step.shape[1:]
    value, begun = np.full((n, L * V), np.inf), np.full((n if ordered else 1, L * V), np.inf)
    value[-1] = begun[-1] = 0.0
    rows = np.ascontiguousarray(step.reshape(len(head), L * V))
    _potentials(first, head, comm, component, rows, mu, ordered, value, begun, np.empty(V))
    return value.reshape(n, L, V)


def through(
    reverse: tuple[Ints, Ints, Ints, Ints], head: Ints, step: Floats, value: Floats
) -> Floats:
    """[A, L]: a lower bound over the cell of every path with an arc: what leads to its tail, itself
    (step [A, L, V]) and the potential value [n, L, V] of its head, all with one mean before the
    head.

    reverse: the graph read backwards, whose first node is where paths end and whose last one where
    they begin.
    """
    first, back, component, arcs = reverse
    A, L, V = step.shape
    before = np.full((len(value), L * V), np.inf)
    before[-1] = 0.0
    turned = np.ascontiguousarray(step.reshape(A, -1)[arcs])
    plain, scratch = np.zeros(A, dtype=np.bool_), (np.full((1, L * V), np.inf), np.empty(V))
    _potentials(first, back, plain, component, turned, np.ones(V), False, before, *scratch)
    whole = before[back] + turned + value.reshape(len(value), -1)[head[arcs]]
    found = np.empty((A, L))
    found[arcs] = whole.reshape(A, L, V).min(axis=2)
    return found


def lengths(first: Ints, head: Ints, component: Ints, step: Floats) -> Floats:
    """[n, L, V]: the least sums of step [A, L, V] from each node to the last."""
    n, (A, L, V) = len(first) - 1, step.shape
    value = np.full((n, L * V), np.inf)
    value[-1] = 0.0
    plain, scratch = np.zeros(A, dtype=np.bool_), (np.full((1, L * V), np.inf), np.empty(V))
    _potentials(
        first, head, plain, component, step.reshape(A, -1), np.ones(V), False, value, *scratch
    )
    return value.reshape(n, L, V)


@kernel
def _potentials(
    first: Ints, head: Ints, comm: Flags, component: Ints, step: Floats, mu: Floats, ordered: bool,
    value: Floats, begun: Floats, finer: Floats,
) -> None:  # fmt: skip
    """Fill value [n, LV], for each mean the V vertices; begun [n, LV]: from nodes where a stage
    begins, with the mean that it takes, the same for all."""
    LV, V = value.shape[1], len(mu)
    end = len(value) - 1
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
                    if h >= end:
                        after = begun if ordered and comm[a] else value
                        for j in range(LV):
                            cost = step[a, j] + after[h, j]
                            if cost < value[u, j]:
                                value[u, j] = cost
                                changed = (
                                    changed or end - begin > 1
                                )  # who looked at u before has to look again
                        continue
                    for j in range(LV):
                        cost = step[a, j] + value[h, j]
                        if cost < value[u, j]:
                            value[u, j] = cost
                            changed = True
        # the means that stages take; within a component twice, with the means that its stages took
        # before
        for _ in range(0 if not ordered else 1 if end - begin == 1 else 2):
            for u in range(begin, end):
                best, chosen = -np.inf, 0
                for j in range(0, LV, V):
                    level = 0.0
                    for i in range(V):
                        level += mu[i] * value[u, j + i] if mu[i] > 0 else 0.0
                    if best == -np.inf or level > best + CLOSE * abs(best):
                        best, chosen = level, j
                for j in range(LV):
                    begun[u, j] = value[u, chosen + j % V]
            for u in range(begin, end if end - begin > 1 else begin):
                for j in range(0, LV, V):
                    for i in range(V):
                        finer[i] = np.inf
                    for a in range(first[u], first[u + 1]):
                        h = head[a]
                        for i in range(V):
                            rest = begun[h, j + i] if comm[a] else value[h, j + i]
                            finer[i] = min(finer[i], step[a, j + i] + rest)
                    more = 0.0
                    for i in range(V):
                        more += mu[i] * (finer[i] - value[u, j + i]) if mu[i] > 0 else 0.0
                    if more > 0:
                        for i in range(V):
                            value[u, j + i] = finer[i]
        end = begin
