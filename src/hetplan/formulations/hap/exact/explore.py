"""Compiled: the part of a graph of needs that one cell of ratios and one cost leave open.

All orders of a wide theory's parallel branches are far too many states, but most of them compute tensors twice or
communicate without need. Where a stage's time is taken as a mean over types, costs add up and the order of a
program is irrelevant: from any state the canonical order (the needed properties of the highest level first) gives
the least cost to the empty set, h, after few states. With g, the least cost from {goal} to a state over all orders
found so far, a state is left out when g + h reaches the cost `enough` at every vertex of the cell for one mean:
g + h bounds every program through it from below, on the whole cell because it is affine there for each pair of
paths, hence concave as a minimum. g is corrected until nothing changes, so a state once left out may return.

States that no optimal program needs are left out besides (`parking`).
"""

from __future__ import annotations

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.hap.exact.kernels import Flags
from hetplan.formulations.hap.exact.parking import given_free, parked
from hetplan.formulations.hap.problem import Floats, Ints

DONE, TOO_MANY, TOO_WIDE = 0, 1, 2


@kernel
def _after(
    need: Ints, step: int, pre_first: Ints, pre: Ints, post_first: Ints, post: Ints, after: Ints
) -> int:
    """Fill `after` [W] with the sorted set (need - post) + pre, -1 behind it. 1: a state, 0: needs no less than
    before, -1: too wide."""
    W = len(need)
    size, lost = 0, False
    for i in range(W):
        p = need[i]
        if p < 0:
            break
        given = False
        for q in range(post_first[step], post_first[step + 1]):
            given = given or post[q] == p
        if given:
            again = False
            for q in range(pre_first[step], pre_first[step + 1]):
                again = again or pre[q] == p
            lost = lost or not again
        else:
            after[size] = p
            size += 1
    if not lost:
        return 0
    for q in range(pre_first[step], pre_first[step + 1]):
        p = pre[q]
        at = 0
        while at < size and after[at] < p:
            at += 1
        if at < size and after[at] == p:
            continue
        if size == W:
            return -1
        for i in range(size, at, -1):
            after[i] = after[i - 1]
        after[at] = p
        size += 1
    for i in range(size, W):
        after[i] = -1
    return 1


@kernel
def _slot(row: Ints, rows: Ints, table: Ints) -> int:
    """Where in the hash table `row` stands or belongs."""
    mask = len(table) - 1
    code = 1469598103934665603
    for i in range(len(row)):
        if row[i] < 0:
            break
        code = (code ^ (row[i] + 1)) * 1099511628211
        code = code ^ ((code >> 29) & 0x7FFFFFFFF)
    at = int(code & mask)
    while table[at] >= 0:
        same = True
        for i in range(len(row)):
            if rows[table[at], i] != row[i]:
                same = False
                break
        if same:
            return at
        at = (at + 1) & mask
    return at


@kernel
def explore(
    goal: int,
    by_first: Ints,
    by: Ints,
    pre_first: Ints,
    pre: Ints,
    post_first: Ints,
    post: Ints,
    level: Ints,
    comm: Flags,
    fixed: Floats,
    shared: Floats,
    x: Floats,
    slow: Floats,
    weights: Floats,
    without: Flags,
    enough: float,
    limit: int,
    width: int,
) -> tuple[int, Ints, Ints, Ints, Ints]:
    """(status, rows [n, W] of properties, arcs: first [n + 1], head, step) of the states left open, {goal} first.

    by: steps that give a property; pre, post: properties of a step (all in compressed rows); level [P]; comm,
    fixed, shared [steps]; x [V, K] vertices; weights [L, K] means over types; without [P, P]: see `parking`.
    Gives up beyond `limit` states left open, 4 `limit` met or 16 `limit` looked at, or `width` properties at once.
    """
    V, K, L = len(x), x.shape[1], len(weights)
    free = np.zeros(len(comm), np.bool_)
    for s in range(len(comm)):
        free[s] = not comm[s] and fixed[s] == 0 and shared[s] == 0
    cap = 4 * limit
    cost = np.zeros((len(comm), L, V))
    for s in range(len(comm)):
        for l in range(L):
            for i in range(V):
                if comm[s]:
                    cost[s, l, i] = fixed[s] + shared[s] * x[i, K - 1]
                else:
                    for d in range(K):
                        cost[s, l, i] += weights[l, d] * slow[d] * (fixed[s] + shared[s] * x[i, d])
    rows = np.full((cap + 1, width), -1, np.int64)
    bits = 1
    while bits < 3 * cap:
        bits *= 2
    table = np.full(bits, -1, np.int64)
    g, h = np.full((cap + 1, L, V), np.inf), np.full((cap + 1, L, V), np.inf)
    settled, waiting = np.zeros(cap + 1, np.bool_), np.zeros(cap + 1, np.bool_)
    pending, queue = np.empty(cap + 1, np.int64), np.empty(cap + 1, np.int64)
    none, nothing = np.empty(0, np.int64), np.empty((0, width), np.int64)
    arc_first = np.empty(cap + 2, np.int64)
    arc_head, arc_step = np.empty(16 * cap, np.int64), np.empty(16 * cap, np.int64)
    after = np.empty(width, np.int64)
    # node 0: nothing needed; node 1: the goal
    table[_slot(rows[0], rows, table)] = 0
    h[0] = 0.0
    settled[0] = True
    rows[1, 0] = goal
    table[_slot(rows[1], rows, table)] = 1
    count, seen = 2, 0
    g[1] = 0.0
    queue[0], begin, queued = 1, 0, 1
    waiting[1] = True
    while queued > 0:
        u = queue[begin]
        begin = (begin + 1) % cap
        queued -= 1
        waiting[u] = False
        # least costs from u to the empty set, in canonical order
        if not settled[u]:
            pending[0], size, done, arcs = u, 1, 0, 0
            settled[u] = True
            while done < size:
                w = pending[done]
                arc_first[done] = arcs
                done += 1
                highest = -1
                for i in range(width):
                    if rows[w, i] < 0:
                        break
                    highest = max(highest, level[rows[w, i]])
                for i in range(width):
                    p = rows[w, i]
                    if p < 0:
                        break
                    if level[p] < highest:
                        continue
                    for b in range(by_first[p], by_first[p + 1]):
                        s = by[b]
                        kind = _after(rows[w], s, pre_first, pre, post_first, post, after)
                        if kind < 0:
                            return TOO_WIDE, nothing, none, none, none
                        if kind == 0:
                            continue
                        at = _slot(after, rows, table)
                        v = table[at]
                        if v < 0:
                            if count == cap or arcs >= len(arc_head) - 1:
                                return TOO_MANY, nothing, none, none, none
                            v = count
                            count += 1
                            table[at] = v
                            rows[v] = after
                        if not settled[v]:
                            settled[v] = True
                            pending[size] = v
                            size += 1
                        arc_head[arcs], arc_step[arcs] = v, s
                        arcs += 1
            arc_first[done] = arcs
            changed = True
            while changed:
                changed = False
                for k in range(size - 1, -1, -1):
                    w = pending[k]
                    for a in range(arc_first[k], arc_first[k + 1]):
                        v, s = arc_head[a], arc_step[a]
                        for l in range(L):
                            for i in range(V):
                                value = cost[s, l, i] + h[v, l, i]
                                if value < h[w, l, i]:
                                    h[w, l, i] = value
                                    changed = True
        if not _open(g[u], h[u], enough):
            continue
        seen += 1
        if seen > 16 * limit:
            return TOO_MANY, nothing, none, none, none
        only = given_free(rows[u], free, by_first, by, pre_first, pre)
        for i in range(width):
            p = rows[u, i]
            if p < 0:
                break
            for b in range(by_first[p], by_first[p + 1]):
                s = by[b]
                if only >= 0 and s != only:
                    continue
                if not free[s] and parked(rows[u], s, post_first, post, without):
                    continue
                kind = _after(rows[u], s, pre_first, pre, post_first, post, after)
                if kind < 0:
                    return TOO_WIDE, nothing, none, none, none
                if kind == 0:
                    continue
                at = _slot(after, rows, table)
                v = table[at]
                if v < 0:
                    if count == cap:
                        return TOO_MANY, nothing, none, none, none
                    v = count
                    count += 1
                    table[at] = v
                    rows[v] = after
                better = False
                for l in range(L):
                    for j in range(V):
                        value = g[u, l, j] + cost[s, l, j]
                        if value < g[v, l, j] * (1 - 1e-15):
                            g[v, l, j] = value
                            better = True
                if better and v > 0 and not waiting[v]:
                    waiting[v] = True
                    queue[(begin + queued) % cap] = v
                    queued += 1
    # the states left open, and the arcs among them that are open themselves
    number = np.full(count, -1, np.int64)
    kept = np.empty(count, np.int64)
    size = 0
    for u in range(1, count):
        if g[u, 0, 0] < np.inf and _open(g[u], h[u], enough):
            number[u] = size
            kept[size] = u
            size += 1
    if size > limit:
        return TOO_MANY, nothing, none, none, none
    kept[size] = 0
    number[0] = size
    size += 1
    first = np.zeros(size + 1, np.int64)
    total = 0
    through = np.empty((L, V))
    for k in range(size):
        u = kept[k]
        first[k] = total
        only = given_free(rows[u], free, by_first, by, pre_first, pre)
        for i in range(width):
            p = rows[u, i]
            if p < 0:
                break
            for b in range(by_first[p], by_first[p + 1]):
                s = by[b]
                again = False  # a step that gives two of the properties comes once
                for j in range(i):
                    for q in range(post_first[s], post_first[s + 1]):
                        again = again or post[q] == rows[u, j]
                if only >= 0 and s != only:
                    continue
                if not free[s] and parked(rows[u], s, post_first, post, without):
                    continue
                if again or _after(rows[u], s, pre_first, pre, post_first, post, after) != 1:
                    continue
                v = table[_slot(after, rows, table)]
                if v < 0 or number[v] < 0:
                    continue
                for l in range(L):
                    for j in range(V):
                        through[l, j] = g[u, l, j] + cost[s, l, j]
                if not _open(through, h[v], enough):
                    continue
                if total == len(arc_head):
                    return TOO_MANY, nothing, none, none, none
                arc_head[total], arc_step[total] = number[v], s
                total += 1
    first[size] = total
    return DONE, rows[kept[:size]], first, arc_head[:total].copy(), arc_step[:total].copy()


@kernel
def _open(g: Floats, h: Floats, enough: float) -> bool:
    """Whether for every mean g + h is below `enough` at some vertex."""
    for l in range(len(g)):
        least = np.inf
        for i in range(g.shape[1]):
            least = min(least, g[l, i] + h[l, i])
        if least >= enough:
            return False
    return True
