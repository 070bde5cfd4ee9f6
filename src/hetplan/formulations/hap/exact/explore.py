"""Compiled: the part of a graph of needs that one cell of ratios and one cost leave open.

All orders of a wide theory's parallel branches are far too many states, but most of them compute
tensors twice or communicate without need. Where a stage's time is taken as a mean over types, costs
add up and the order of a program is irrelevant: from any state the canonical order (the needed
properties of the highest level first) gives the least cost to the empty set, h, after few states.
With g, the least cost from {goal} to a state over all orders found so far, a state is left out when
g + h reaches the cost `enough` at every vertex of the cell for one mean: g + h bounds every program
through it from below, on the whole cell because it is affine there for each pair of paths, hence
concave as a minimum. g is corrected until nothing changes, so a state once left out may return.

States that no optimal program needs are left out besides (`parking`).

Kernels take a theory as six arrays, three pairs of compressed rows: steps that give a property
(by_first, by), properties that a step needs (pre_first, pre) and gives (post_first, post). A state
is a row of `rows` [·, W]: its properties in ascending order, -1 behind them; `table` is a hash
table of states' numbers + 1, 0 where it is free.
"""

from __future__ import annotations

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.hap.exact.kernels import Flags
from hetplan.formulations.hap.exact.parking import given_free, parked
from hetplan.formulations.hap.problem import Floats, Ints

DONE, TOO_MANY, TOO_WIDE, UNDER_WAY = 0, 1, 2, 3
# Places in the counters: states met; the queue's first place and length; states looked at; arcs
# written down.
COUNT, BEGIN, QUEUED, SEEN, ARCS = 0, 1, 2, 3, 4


@kernel
def _after(
    rows: Ints,
    u: int,
    step: int,
    pre_first: Ints,
    pre: Ints,
    post_first: Ints,
    post: Ints,
    after: Ints,
) -> bool:
    """Fill `after` [W] with the state (u - post) + pre; whether it is narrow enough."""
    W, size = len(after), 0
    for i in range(W):
        p = rows[u, i]
        kept = p >= 0
        for q in range(post_first[step], post_first[step + 1]):
            kept = kept and post[q] != p
        if kept:
            after[size] = p
            size += 1
    for q in range(pre_first[step], pre_first[step + 1]):
        p = pre[q]
        at = size
        while at > 0 and after[at - 1] > p:
            at -= 1
        if at > 0 and after[at - 1] == p:
            continue
        if size == W:
            return False
        for i in range(size, at, -1):
            after[i] = after[i - 1]
        after[at] = p
        size += 1
    for i in range(size, W):
        after[i] = -1
    return True


@kernel
def slot(row: Ints, rows: Ints, table: Ints) -> int:
    """Where in the hash table the state `row` stands or belongs."""
    mask, W = len(table) - 1, len(row)
    code = 1469598103934665603
    for i in range(W):
        code = (code ^ (row[i] + 1)) * 1099511628211
        code = code ^ ((code >> 29) & 0x7FFFFFFFF)
    at = code & mask
    while table[at] > 0:
        same = 0
        while same < W and rows[table[at] - 1, same] == row[same]:
            same += 1
        if same == W:
            break
        at = (at + 1) & mask
    return at


@kernel
def ways(
    u: int, canonical: bool, by_first: Ints, by: Ints, pre_first: Ints, pre: Ints, post_first: Ints, post: Ints,
    level: Ints, free: Flags, without: Flags, rows: Ints, table: Ints, counters: Ints, after: Ints,
    g: Floats, h: Floats, arcs: int, head: Ints, step: Ints,
) -> int:  # fmt: skip
    """Write down the arcs of state u at head, step [arcs …]: the next free place; -TOO_WIDE,
    -TOO_MANY otherwise.

    canonical: the steps that give a property of the highest level; else those of all properties
    that neither what comes for nothing nor what is parked forbids.
    """
    W = rows.shape[1]
    highest, only, begun = -1, -1, arcs
    if canonical:
        for i in range(W):
            if rows[u, i] >= 0:
                highest = max(highest, level[rows[u, i]])
    else:
        only = given_free(rows, u, free, by_first, by, pre_first, pre)
    for i in range(W):
        p = rows[u, i]
        if p < 0 or level[p] < highest:
            continue
        for b in range(by_first[p], by_first[p + 1]):
            s = by[b]
            if only >= 0:
                if s != only:
                    continue
            elif not canonical and not free[s] and parked(rows, u, s, post_first, post, without):
                continue
            k = begun  # a step that gives two of the properties comes once
            while k < arcs and step[k] != s:
                k += 1
            if k < arcs:
                continue
            if not _after(rows, u, s, pre_first, pre, post_first, post, after):
                return -TOO_WIDE
            at = slot(after, rows, table)
            if table[at] == 0:
                v = counters[COUNT]
                if v == len(rows):
                    return -TOO_MANY
                counters[COUNT] = v + 1
                table[at] = v + 1
                for j in range(W):
                    rows[v, j] = after[j]
                for j in range(g.shape[1]):
                    g[v, j] = h[v, j] = np.inf
            if arcs == len(head):
                return -TOO_MANY
            head[arcs], step[arcs] = table[at] - 1, s
            arcs += 1
    return arcs


@kernel
def _open(u: int, g: Floats, h: Floats, V: int, enough: float) -> bool:
    """Whether for every mean g + h of state u is below `enough` at some vertex."""
    for first in range(0, g.shape[1], V):
        least = np.inf
        for j in range(first, first + V):
            least = min(least, g[u, j] + h[u, j])
        if least >= enough:
            return False
    return True


@kernel
def explore(
    by_first: Ints, by: Ints, pre_first: Ints, pre: Ints, post_first: Ints, post: Ints,
    level: Ints, free: Flags, without: Flags, cost: Floats, V: int, enough: float, most: int, pause: int,
    rows: Ints, table: Ints, counters: Ints, g: Floats, h: Floats, settled: Flags, waiting: Flags, queue: Ints,
    arc_first: Ints, arc_end: Ints, head: Ints, step: Ints,
    pending: Ints, first: Ints, some_head: Ints, some_step: Ints, after: Ints,
) -> int:  # fmt: skip
    """Look at the states in the queue until it is empty (DONE), or UNDER_WAY after `pause` of them,
    to be called again.

    cost [steps, LV]; g, h [·, LV] as above, for each mean the V vertices; arc_first, arc_end [·]: a
    state's place in head, step, the end 0 as long as it has none. Gives up beyond `most` states
    looked at or what the arrays hold. The rest is scratch.
    """
    LV = cost.shape[1]
    pause += counters[SEEN]
    while counters[QUEUED] > 0:
        if counters[SEEN] >= pause:
            return UNDER_WAY
        u = queue[counters[BEGIN]]
        counters[BEGIN] = (counters[BEGIN] + 1) % len(queue)
        counters[QUEUED] -= 1
        waiting[u] = False
        # least costs from u to the empty set, in canonical order
        size = 0
        if not settled[u]:
            settled[u] = True
            pending[0], size = u, 1
        done = 0
        first[0] = 0
        while done < size:
            end = ways(
                pending[done], True, by_first, by, pre_first, pre, post_first, post, level, free, without, rows,
                table, counters, after, g, h, first[done], some_head, some_step,
            )  # fmt: skip
            if end < 0:
                return -end
            for a in range(first[done], end):
                if not settled[some_head[a]]:
                    settled[some_head[a]] = True
                    pending[size] = some_head[a]
                    size += 1
            done += 1
            first[done] = end
        changed = True
        while changed:
            changed = False
            for k in range(size - 1, -1, -1):
                w = pending[k]
                for a in range(first[k], first[k + 1]):
                    for j in range(LV):
                        value = cost[some_step[a], j] + h[some_head[a], j]
                        if value < h[w, j]:
                            h[w, j] = value
                            changed = True
        if not _open(u, g, h, V, enough):
            continue
        counters[SEEN] += 1
        if counters[SEEN] > most:
            return TOO_MANY
        if arc_end[u] == 0:
            end = ways(
                u, False, by_first, by, pre_first, pre, post_first, post, level, free, without, rows, table, counters,
                after, g, h, counters[ARCS], head, step,
            )  # fmt: skip
            if end < 0:
                return -end
            arc_first[u], arc_end[u] = counters[ARCS], end
            counters[ARCS] = end
        for a in range(arc_first[u], arc_end[u]):
            v = head[a]
            better = False
            for j in range(LV):
                value = g[u, j] + cost[step[a], j]
                if value < g[v, j] * (1 - 1e-15):
                    g[v, j] = value
                    better = True
            if better and v > 0 and not waiting[v]:
                waiting[v] = True
                queue[(counters[BEGIN] + counters[QUEUED]) % len(queue)] = v
                counters[QUEUED] += 1
    return DONE
