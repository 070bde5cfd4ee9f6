"""Compiled: potentials and label setting on a graph of needs over one cell of ratios.

A cell is a simplex of ratio vectors with vertices x [K, K]; b ascends with speed there, so max b = b[K - 1].
Work is in seconds of the fastest type: `slow` [K] = v_max / v_d turns it into seconds of type d.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetplan.compiled import kernel
from hetplan.formulations.hap.problem import Floats, Ints

Flags = NDArray[np.bool_]
DONE, TOO_MANY = 0, 1


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


@kernel
def _dominates(
    upper: Floats,
    F: float,
    S: float,
    lower: Floats,
    F2: float,
    S2: float,
    x: Floats,
    slow: Floats,
    slack: float,
) -> bool:
    """Whether a label (at most `upper` at the vertices) is never worse than another (at least `lower`).

    C1 + phi(F1 + f, S1 + s) <= C2 + phi(F2 + f, S2 + s) for all f, s follows from
    C1 - C2 + max_d ((F1 - F2) + (S1 - S2) b_d) / v_d <= 0, a convex function of b: the vertices decide.
    """
    V, K = x.shape
    for i in range(V):
        worst = -np.inf
        for d in range(K):
            worst = max(worst, (F - F2 + (S - S2) * x[i, d]) * slow[d])
        if upper[i] - lower[i] + worst > slack:
            return False
    return True


@kernel
def _choose(
    F: float, S: float, reference: Floats, slow: Floats, mixtures: Floats, blends: Floats, blend: Floats
) -> None:
    """Fill `blend`: which mean over types bounds a stage of work (F, S) from below."""
    K = len(slow)
    if len(mixtures) and F + S > 0:
        r = F / (F + S)
        at = np.searchsorted(mixtures, r - 1e-10)
        if at < len(mixtures) and mixtures[at] <= r + 1e-10:
            for d in range(K):
                blend[d] = blends[at, d]
            return
    top, slowest = -1.0, 0
    for d in range(K):
        busy = (F + S * reference[d]) * slow[d]
        if busy > top:
            top, slowest = busy, d
    for d in range(K):
        blend[d] = 0.0
    blend[slowest] = 1.0


@kernel
def labels(
    first: Ints,
    head: Ints,
    comm: Flags,
    fixed: Floats,
    shared: Floats,
    component: Ints,
    start: int,
    x: Floats,
    slow: Floats,
    reference: Floats,
    mixtures: Floats,
    blends: Floats,
    potential: Floats,
    weights: Floats,
    threshold: float,
    slack: float,
    room: int,
    per_node: int,
) -> tuple[int, float, int, Ints, Ints, Ints]:
    """Label setting from {goal} to the empty set over one cell.

    A label holds, per vertex, the closed stages' true cost (convex in b, so its interpolation is an upper bound)
    and an affine lower bound, and the open stage's work. The lower bound takes a stage by its slowest type at
    `reference` or, where its mixture F / (F + S) stands in `mixtures` [m] (ascending), by the blend of types
    blends [m, K] (a convex combination, so never above the maximum).
    Labels that cannot stay below `threshold` at any vertex by a potential are dropped.
    Returns (status, bound, labels kept, parent, arc, last): the bound holds for every program and ratio of the
    cell, up to threshold; `last` lists labels at the empty set, the one of the least bound first.
    """
    n, V, K, L = len(first) - 1, len(x), x.shape[1], len(weights)
    mean = np.zeros(L)
    share = np.zeros((L, V))
    for l in range(L):
        for d in range(K):
            mean[l] += weights[l, d] * slow[d]
            for i in range(V):
                share[l, i] += weights[l, d] * slow[d] * x[i, d]
    upper, lower = np.empty((room, V)), np.empty((room, V))
    F, S = np.empty(room), np.empty(room)
    parent, arc, after = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64)
    dead, used = np.zeros(room, np.bool_), np.zeros(room, np.bool_)
    newest, alive = np.full(n, -1, np.int64), np.zeros(n, np.int64)
    for i in range(V):
        upper[0, i] = lower[0, i] = 0.0
    F[0], S[0], parent[0], arc[0], after[0] = 0.0, 0.0, -1, -1, -1
    newest[start], size = 0, 1
    nu, nl, blend = np.empty(V), np.empty(V), np.empty(K)
    none = np.empty(0, np.int64)
    begin = 0
    while begin < n:
        end = begin + 1
        while end < n and component[end] == component[begin]:
            end += 1
        changed = True
        while changed:
            changed = False
            for u in range(begin, end):
                here = newest[u]
                while here >= 0:
                    label, here = here, after[here]
                    if dead[label] or used[label]:
                        continue
                    used[label] = True
                    for a in range(first[u], first[u + 1]):
                        h = head[a]
                        nF, nS = F[label], S[label]
                        for i in range(V):
                            nu[i], nl[i] = upper[label, i], lower[label, i]
                        if not comm[a]:
                            nF += fixed[a]
                            nS += shared[a]
                        if comm[a] or h == n - 1:
                            _choose(nF, nS, reference, slow, mixtures, blends, blend)
                            for i in range(V):
                                top = 0.0
                                for d in range(K):
                                    top = max(top, (nF + nS * x[i, d]) * slow[d])
                                more = fixed[a] + shared[a] * x[i, K - 1] if comm[a] else 0.0
                                nu[i] += top + more
                                for d in range(K):
                                    nl[i] += blend[d] * (nF + nS * x[i, d]) * slow[d]
                                nl[i] += more
                            nF = nS = 0.0
                        hopeless = False
                        for l in range(L):
                            least = np.inf
                            for i in range(V):
                                least = min(
                                    least, nl[i] + nF * mean[l] + nS * share[l, i] + potential[h, l, i]
                                )
                            if least >= threshold:
                                hopeless = True
                                break
                        if hopeless:
                            continue
                        other = newest[h]
                        beaten = False
                        while other >= 0:
                            if not dead[other]:
                                same = F[other] == nF and S[other] == nS
                                if same:
                                    for i in range(V):
                                        if lower[other, i] > nl[i] + slack:
                                            same = False
                                            break
                                if same or _dominates(
                                    upper[other], F[other], S[other], nl, nF, nS, x, slow, slack
                                ):
                                    beaten = True
                                    break
                            other = after[other]
                        if beaten:
                            continue
                        other = newest[h]
                        while other >= 0:
                            if not dead[other] and _dominates(
                                nu, nF, nS, lower[other], F[other], S[other], x, slow, 0.0
                            ):
                                dead[other] = True
                                alive[h] -= 1
                            other = after[other]
                        if size == room or alive[h] >= per_node:
                            return TOO_MANY, -np.inf, size, none, none, none
                        for i in range(V):
                            upper[size, i], lower[size, i] = nu[i], nl[i]
                        F[size], S[size] = nF, nS
                        parent[size], arc[size], after[size] = label, a, newest[h]
                        newest[h] = size
                        alive[h] += 1
                        size += 1
                        changed = changed or (h >= begin and h < end)
        begin = end
    bound, count, best = threshold, 0, -1
    last = np.empty(max(alive[n - 1], 0), np.int64)
    here = newest[n - 1]
    while here >= 0:
        if not dead[here]:
            last[count] = here
            least = np.inf
            for i in range(V):
                least = min(least, lower[here, i])
            if best < 0 or least < bound:
                bound, best = min(bound, least), count
            count += 1
        here = after[here]
    last = last[:count]
    if best > 0:
        last[0], last[best] = last[best], last[0]
    return DONE, bound, size, parent[:size].copy(), arc[:size].copy(), last
