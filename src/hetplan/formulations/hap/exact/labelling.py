"""Compiled: label setting on a graph of needs over one cell of ratios.

A cell is a simplex of ratio vectors with vertices x [K, K]; b ascends with speed there, so max b =
b[K - 1].
Work is in seconds of the fastest type: `slow` [K] = v_max / v_d turns it into seconds of type d.

Label a is never worse than label b at its node when, for every way to go on and all ratios of the
cell,

    C_a - C_b + phi(F_a + f, S_a + s) - phi(F_b + f, S_b + s) <= C_a - C_b + max_d (dF + dS b_d) /
    v_d <= 0,

C being the closed stages' cost: a maximum of sums exceeds another by at most the largest
difference. The right term is convex in b, so the vertices decide once C_a - C_b is bounded by a
convex function. There are two such bounds. (1) C_a is convex, below its interpolation `upper`; C_b
lies above the affine `lower`. (2) A stage of work
(F, S), S > 0, lasts between S phi0 + F and S phi0 + F slow_0, phi0(b) = phi(0, 1) being convex; so
the difference is affine (communication, stages without shared work) + dW phi0 + an interval, W the
shared and R the fixed work of such stages; where dW < 0, phi0 is replaced by an affine minorant. In
both, what a and b closed before they parted cancels exactly, so the error of their last common
ancestor is taken off. Dominance in this sense is transitive
(it compares the true costs), so the labels kept at the empty set hold an optimal program for every
ratio of the cell, unless none costs less than the threshold.
"""

from __future__ import annotations

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.hap.exact.kernels import Flags
from hetplan.formulations.hap.problem import Floats, Ints

OPEN, USED, DEAD = 0, 1, 2
# Columns of a label's sums: open work; seconds of communication (and of stages of fixed work
# alone), and those per largest ratio; shared and fixed work of closed stages that share any.
F, S, FIXED, TOP, SHARED, REST = 0, 1, 2, 3, 4, 5
# Steps back towards a common ancestor; stages compared one by one.
STEPS, LISTED = 400, 64


@kernel
def _parting(a: int, b: int, parent: Ints) -> int:
    """The last common ancestor of two labels, -1 where it is further back than STEPS. Parents come
    first."""
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
    """Fill `found` [LISTED, 2] with the work of the stages closed since label z; their number, -1
    for too many."""
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
    """Whether two labels of the same node, not the empty set, have the same stages in another
    order."""
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
        t = s
        while t < count and (
            abs(mine[s, 0] - other[t, 0]) > tiny or abs(mine[s, 1] - other[t, 1]) > tiny
        ):
            t += 1
        if t == count:
            return False
        other[t, 0], other[t, 1] = other[s, 0], other[s, 1]
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
    if fixed + shared > 0:
        r = fixed / (fixed + shared)
        low, high = 0, len(mixtures)
        while low < high:  # the first that is not less
            middle = (low + high) // 2
            if mixtures[middle] < r - 1e-10:
                low = middle + 1
            else:
                high = middle
        if low < len(mixtures) and mixtures[low] <= r + 1e-10:
            for d in range(K):
                blend[d] = blends[low, d]
            return
    top, slowest = -1.0, 0
    for d in range(K):
        blend[d] = 0.0
        busy = (fixed + shared * reference[d]) * slow[d]
        if busy > top:
            top, slowest = busy, d
    blend[slowest] = 1.0


@kernel
def set_labels(
    first: Ints, head: Ints, comm: Flags, fixed: Floats, shared: Floats, component: Ints,
    x: Floats, slow: Floats, top: Floats, low: Floats, reference: Floats, mixtures: Floats, blends: Floats,
    potential: Floats, mean: Floats, share: Floats, threshold: float, slack: float, per_node: int,
    upper: Floats, lower: Floats, sums: Floats, parent: Ints, arc: Ints, after: Ints, state: Ints,
    newest: Ints, alive: Ints, blend: Floats, mine: Floats, others: Floats,
) -> int:  # fmt: skip
    """The labels' number, -1 - that where there is no room for more.

    Label 0 is set. upper, lower [room, V] as above; sums [room, 6]; parent, arc [room]; state
    [room]: OPEN, USED, DEAD; a node's labels are a list, newest [n] first, -1 last, by after
    [room]; alive [n] counts them. What bounds the open stage: means over types, mean [L], share [L,
    V]; potential [n, L, V]. The rest is scratch.
    """
    n, V, K, L = len(newest), len(x), len(slow), len(mean)
    size, begin = 1, 0
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
                    if state[label] != OPEN:
                        continue
                    state[label] = USED
                    for a in range(first[u], first[u + 1]):
                        h, new = head[a], size
                        if new == len(parent):
                            return -1 - size
                        parent[new], arc[new] = label, a
                        for c in range(6):
                            sums[new, c] = sums[label, c]
                        for i in range(V):
                            upper[new, i], lower[new, i] = upper[label, i], lower[label, i]
                        if not comm[a]:
                            sums[new, F] += fixed[a]
                            sums[new, S] += shared[a]
                        nF, nS = sums[new, F], sums[new, S]
                        if comm[a] or h == n - 1:
                            _choose(nF, nS, reference, slow, mixtures, blends, blend)
                            for i in range(V):
                                more = fixed[a] + shared[a] * x[i, K - 1] if comm[a] else 0.0
                                busy = 0.0
                                for d in range(K):
                                    busy = max(busy, (nF + nS * x[i, d]) * slow[d])
                                    lower[new, i] += blend[d] * (nF + nS * x[i, d]) * slow[d]
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
                            nF = nS = 0.0
                            sums[new, F] = sums[new, S] = 0.0
                        promising = True
                        for l in range(L):
                            least = np.inf
                            for i in range(V):
                                level = (
                                    lower[new, i]
                                    + nF * mean[l]
                                    + nS * share[l, i]
                                    + potential[h, l, i]
                                )
                                least = min(least, level)
                            if least >= threshold:
                                promising = False
                                break
                        other = newest[h] if promising else -1
                        while other >= 0 and promising:
                            if state[other] != DEAD:
                                promising = not _never_worse(
                                    other, new, parent, upper, lower, sums, x, slow, top, low, slack
                                ) and (
                                    h == n - 1
                                    or not _twins(
                                        new, other, parent, arc, comm, sums, slack, mine, others
                                    )
                                )
                            other = after[other]
                        if not promising:
                            continue
                        other = newest[h]
                        while other >= 0:
                            if state[other] != DEAD and _never_worse(
                                new, other, parent, upper, lower, sums, x, slow, top, low, 0.0
                            ):
                                state[other] = DEAD
                                alive[h] -= 1
                            other = after[other]
                        if alive[h] >= per_node:
                            return -1 - size
                        state[new] = OPEN
                        after[new] = newest[h]
                        newest[h] = new
                        alive[h] += 1
                        size += 1
                        changed = changed or (h >= begin and h < end)
        begin = end
    return size


@kernel
def stages_of(
    label: int,
    parent: Ints,
    arc: Ints,
    sums: Floats,
    comm: Flags,
    fixed: Floats,
    shared: Floats,
    found: Floats,
) -> int:
    """Fill `found` [·, 2] with the program of a label at the empty set: seconds of its
    communication, fixed and per largest ratio, in row 0, then the work of its stages, the last
    first; the number of rows."""
    count = 1
    found[0, 0] = found[0, 1] = 0.0
    a = arc[label]
    if not comm[a]:  # the last stage is closed by the empty set
        found[1, 0] = sums[parent[label], F] + fixed[a]
        found[1, 1] = sums[parent[label], S] + shared[a]
        count = 2
        label = parent[label]
    while parent[label] >= 0:
        a = arc[label]
        label = parent[label]
        if comm[a]:
            found[0, 0] += fixed[a]
            found[0, 1] += shared[a]
            found[count, 0], found[count, 1] = sums[label, F], sums[label, S]
            count += 1
    return count
