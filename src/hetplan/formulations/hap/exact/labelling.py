"""Compiled: label setting on a graph of needs over one cell of ratios.

A cell is a simplex of ratio vectors with vertices x [K, K]; b ascends with speed there, so max b = b[K - 1].
Work is in seconds of the fastest type: `slow` [K] = v_max / v_d turns it into seconds of type d.

Label a is never worse than label b at its node when, for every way to go on and all ratios of the cell,

    C_a - C_b + phi(F_a + f, S_a + s) - phi(F_b + f, S_b + s) <= C_a - C_b + max_d (dF + dS b_d) / v_d <= 0,

C being the closed stages' cost: a maximum of sums exceeds another by at most the largest difference. The right
term is convex in b, so the vertices decide once C_a - C_b is bounded by a convex function. There are two such
bounds. (1) C_a is convex, below its interpolation `upper`; C_b lies above the affine `lower`. (2) A stage of work
(F, S), S > 0, lasts between S phi0 + F and S phi0 + F slow_0, phi0(b) = phi(0, 1) being convex; so the difference is
affine (communication, stages without shared work) + dW phi0 + an interval, W the shared and R the fixed work of
such stages; where dW < 0, phi0 is replaced by an affine minorant. In both, what a and b closed before they parted
cancels exactly, so the error of their last common ancestor is taken off. Dominance in this sense is transitive
(it compares the true costs), so the labels kept at the empty set hold an optimal program for every ratio of the
cell, unless none costs less than the threshold.
"""

from __future__ import annotations

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.hap.cutting import best_in_cell
from hetplan.formulations.hap.exact.kernels import Flags
from hetplan.formulations.hap.problem import Floats, Ints

DONE, TOO_MANY = 0, 1
# Columns of a label's sums: open work; seconds of communication (and of stages of fixed work alone), and those
# per largest ratio; shared and fixed work of closed stages that share any.
F, S, FIXED, TOP, SHARED, REST = 0, 1, 2, 3, 4, 5
# Steps back towards a common ancestor; stages compared one by one.
STEPS, LISTED = 400, 64


@kernel
def _parting(a: int, b: int, parent: Ints) -> int:
    """The last common ancestor of two labels, -1 where it is further back than STEPS. Parents come first."""
    for _ in range(STEPS):
        if a == b:
            return a
        if a > b:
            a = parent[a]
        else:
            b = parent[b]
    return -1


@kernel
def _never_worse(
    a: int, b: int, parent: Ints, upper: Floats, lower: Floats, sums: Floats, x: Floats, slow: Floats,
    top: Floats, low: Floats, slack: float,
) -> bool:  # fmt: skip
    """Whether label a is never worse than label b (see above), by (1) or (2)."""
    V, K = x.shape
    dF, dS = sums[a, F] - sums[b, F], sums[a, S] - sums[b, S]
    dW = sums[a, SHARED] - sums[b, SHARED]
    first, second, hope = -np.inf, -np.inf, -np.inf
    for i in range(V):
        worst = -np.inf
        for d in range(K):
            worst = max(worst, (dF + dS * x[i, d]) * slow[d])
        first = max(first, upper[a, i] - lower[b, i] + worst)
        hope = max(hope, lower[a, i] - lower[b, i] + worst)
        part = sums[a, FIXED] - sums[b, FIXED] + (sums[a, TOP] - sums[b, TOP]) * x[i, K - 1]
        second = max(second, part + dW * (top[i] if dW > 0 else low[i]) + worst)
    Ra, Rb = sums[a, REST], sums[b, REST]
    if first <= slack or second + Ra * slow[0] - Rb <= slack:
        return True
    common = min(Ra, Rb)
    if hope > slack and second + (Ra - common) * slow[0] - (Rb - common) > slack:
        return False
    z = _parting(a, b, parent)
    if z < 0:
        return False
    if second + (Ra - sums[z, REST]) * slow[0] - (Rb - sums[z, REST]) <= slack:
        return True
    for i in range(V):
        worst = -np.inf
        for d in range(K):
            worst = max(worst, (dF + dS * x[i, d]) * slow[d])
        if upper[a, i] - lower[b, i] - (upper[z, i] - lower[z, i]) + worst > slack:
            return False
    return True


@kernel
def _stages_since(
    label: int, z: int, parent: Ints, arc: Ints, comm: Flags, sums: Floats, found: Floats
) -> int:
    """Fill `found` [LISTED, 2] with the work of the stages closed since label z; their number, -1 for too many."""
    count = 0
    while label != z:
        if comm[arc[label]]:
            if count == len(found):
                return -1
            found[count, 0], found[count, 1] = sums[parent[label], F], sums[parent[label], S]
            count += 1
        label = parent[label]
    return count


@kernel
def _twins(
    a: int,
    b: int,
    parent: Ints,
    arc: Ints,
    comm: Flags,
    sums: Floats,
    tiny: float,
    mine: Floats,
    other: Floats,
) -> bool:
    """Whether two labels of the same node, not the empty set, have the same stages in another order."""
    for c in range(sums.shape[1]):
        if abs(sums[a, c] - sums[b, c]) > tiny:
            return False
    z = _parting(a, b, parent)
    if z < 0:
        return False
    count = _stages_since(a, z, parent, arc, comm, sums, mine)
    if count < 0 or count != _stages_since(b, z, parent, arc, comm, sums, other):
        return False
    for s in range(count):
        match = -1
        for t in range(s, count):
            if abs(mine[s, 0] - other[t, 0]) <= tiny and abs(mine[s, 1] - other[t, 1]) <= tiny:
                match = t
                break
        if match < 0:
            return False
        for c in range(2):
            other[match, c], other[s, c] = other[s, c], other[match, c]
    return True


@kernel
def _choose(
    fixed: float,
    shared: float,
    reference: Floats,
    slow: Floats,
    mixtures: Floats,
    blends: Floats,
    blend: Floats,
) -> None:
    """Fill `blend`: which mean over types bounds a stage of work (fixed, shared) from below."""
    K = len(slow)
    if len(mixtures) and fixed + shared > 0:
        r = fixed / (fixed + shared)
        at = np.searchsorted(mixtures, r - 1e-10)
        if at < len(mixtures) and mixtures[at] <= r + 1e-10:
            for d in range(K):
                blend[d] = blends[at, d]
            return
    top, slowest = -1.0, 0
    for d in range(K):
        busy = (fixed + shared * reference[d]) * slow[d]
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
) -> tuple[int, float, int, Ints, Ints, Ints, Floats]:
    """Label setting from {goal} to the empty set over one cell.

    A label holds, per vertex, the closed stages' true cost (convex in b, so its interpolation is an upper bound)
    and an affine lower bound, and the sums named above. The lower bound takes a stage by its slowest type at
    `reference` or, where its mixture F / (F + S) stands in `mixtures` [m] (ascending), by the blend of types
    blends [m, K] (a convex combination, so never above the maximum).
    Labels that cannot stay below `threshold` at any vertex by a potential are dropped.
    The labels kept at the empty set hold an optimal program for each ratio of the cell.
    Returns (status, bound, labels kept, parent, arc, last, sums): the bound holds for every program and ratio of
    the cell, up to threshold; `last` lists labels at the empty set, the one of the least bound first.
    """
    n, V, K, L = len(first) - 1, len(x), x.shape[1], len(weights)
    mean = np.zeros(L)
    share = np.zeros((L, V))
    for l in range(L):
        for d in range(K):
            mean[l] += weights[l, d] * slow[d]
            for i in range(V):
                share[l, i] += weights[l, d] * slow[d] * x[i, d]
    upper, lower, sums = np.empty((room, V)), np.empty((room, V)), np.empty((room, 6))
    parent, arc, after = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64)
    dead, used = np.zeros(room, np.bool_), np.zeros(room, np.bool_)
    newest, alive = np.full(n, -1, np.int64), np.zeros(n, np.int64)
    upper[0], lower[0], sums[0] = 0.0, 0.0, 0.0
    parent[0], arc[0], after[0] = -1, -1, -1
    newest[start], size = 0, 1
    blend, top, low = np.empty(K), np.zeros(V), np.zeros(V)
    mine, others = np.empty((LISTED, 2)), np.empty((LISTED, 2))
    none, nothing = np.empty(0, np.int64), np.empty((0, 6))
    _choose(0.0, 1.0, reference, slow, mixtures, blends, blend)
    for i in range(V):
        for d in range(K):
            top[i] = max(top[i], x[i, d] * slow[d])
            low[i] += blend[d] * x[i, d] * slow[d]
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
                        if size == room:
                            return TOO_MANY, -np.inf, size, none, none, none, nothing
                        new = size
                        parent[new], arc[new] = label, a
                        for c in range(6):
                            sums[new, c] = sums[label, c]
                        for i in range(V):
                            upper[new, i], lower[new, i] = upper[label, i], lower[label, i]
                        if not comm[a]:
                            sums[new, F] += fixed[a]
                            sums[new, S] += shared[a]
                        if comm[a] or h == n - 1:
                            nF, nS = sums[new, F], sums[new, S]
                            _choose(nF, nS, reference, slow, mixtures, blends, blend)
                            for i in range(V):
                                busy = 0.0
                                for d in range(K):
                                    busy = max(busy, (nF + nS * x[i, d]) * slow[d])
                                    lower[new, i] += blend[d] * (nF + nS * x[i, d]) * slow[d]
                                more = fixed[a] + shared[a] * x[i, K - 1] if comm[a] else 0.0
                                upper[new, i] += busy + more
                                lower[new, i] += more
                            if comm[a]:
                                sums[new, FIXED] += fixed[a]
                                sums[new, TOP] += shared[a]
                            if nS > 0:
                                sums[new, SHARED] += nS
                                sums[new, REST] += nF
                            else:
                                sums[new, FIXED] += nF * slow[0]
                            sums[new, F] = sums[new, S] = 0.0
                        nF, nS = sums[new, F], sums[new, S]
                        hopeless = False
                        for l in range(L):
                            least = np.inf
                            for i in range(V):
                                level = lower[new, i] + nF * mean[l] + nS * share[l, i] + potential[h, l, i]
                                least = min(least, level)
                            if least >= threshold:
                                hopeless = True
                                break
                        if hopeless:
                            continue
                        other = newest[h]
                        beaten = False
                        while other >= 0 and not beaten:
                            if not dead[other]:
                                beaten = _never_worse(
                                    other, new, parent, upper, lower, sums, x, slow, top, low, slack
                                ) or (
                                    h < n - 1
                                    and _twins(new, other, parent, arc, comm, sums, slack, mine, others)
                                )
                            other = after[other]
                        if beaten:
                            continue
                        other = newest[h]
                        while other >= 0:
                            if not dead[other] and _never_worse(
                                new, other, parent, upper, lower, sums, x, slow, top, low, 0.0
                            ):
                                dead[other] = True
                                alive[h] -= 1
                            other = after[other]
                        if alive[h] >= per_node:
                            return TOO_MANY, -np.inf, size, none, none, none, nothing
                        after[new] = newest[h]
                        newest[h] = new
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
    return DONE, bound, size, parent[:size].copy(), arc[:size].copy(), last, sums[:size].copy()


@kernel
def price(
    last: Ints,
    parent: Ints,
    arc: Ints,
    sums: Floats,
    comm: Flags,
    fixed: Floats,
    shared: Floats,
    x: Floats,
    slow: Floats,
    enough: float,
) -> tuple[Floats, Floats, Floats]:
    """Each program's least cost over the cell: (lower bounds [c], costs [c] at points [c, K]), for the labels `last`
    [c] at the empty set. A bound of `enough` suffices."""
    count, K = len(last), len(slow)
    bounds, costs, points = np.empty(count), np.empty(count), np.empty((count, K))
    for c in range(count):
        label = last[c]
        size = 1
        while parent[label] >= 0:
            size += comm[arc[label]]
            label = parent[label]
        stages = np.zeros((size, 2))
        constant, top, at = 0.0, 0.0, 0
        label = last[c]
        a = arc[label]
        if not comm[a]:
            stages[0, 0], stages[0, 1] = fixed[a], shared[a]
            stages[0, 0] += sums[parent[label], F]
            stages[0, 1] += sums[parent[label], S]
            label = parent[label]
            at = 1
        pure = 0.0
        while parent[label] >= 0:
            a = arc[label]
            if comm[a]:
                constant += fixed[a]
                top += shared[a]
                stages[at, 0], stages[at, 1] = sums[parent[label], F], sums[parent[label], S]
                at += 1
            label = parent[label]
        kept = 1
        mixed = np.zeros((at + 1, 2))
        for s in range(at):
            if stages[s, 1] == 0.0:
                constant += stages[s, 0] * slow[0]
            elif stages[s, 0] == 0.0:
                pure += stages[s, 1]
            else:
                mixed[kept] = stages[s]
                kept += 1
        mixed[0, 1] = pure
        point, _, bound = best_in_cell(
            mixed[:kept, 0].copy(), mixed[:kept, 1].copy(), top, x, slow, enough - constant
        )
        cost = constant + top * point[K - 1]
        for s in range(kept):
            busy = 0.0
            for d in range(K):
                busy = max(busy, (mixed[s, 0] + mixed[s, 1] * point[d]) * slow[d])
            cost += busy
        bounds[c], costs[c] = bound + constant, cost
        points[c] = point
    return bounds, costs, points
