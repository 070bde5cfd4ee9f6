"""Least total work under a limit on the slowest stage, when stages of one type may differ.
Compiled.

With every stage of type i limited to cap_i layers, f = min sum_s (n_s c + h). For given stage
counts m the layers beyond one per stage go to the fastest types first, so some type k splits the
(fastest first) order: the types before k are full, those after it hold one layer per stage, and k
    takes what is left. Hence f = min over k, p, n of  F_k(p, n) + [type k: m_k stages, the
    remaining layers] + g_k(P - p - m_k) F_k(p, n)  least work of p full stages with n layers
    together on types before k (a bounded knapsack) g_k(q)     least work of q stages with one layer
    each on types after k (cheapest first, convex in q).
`greedy` needs no table: where faster types are at least as good in everything, they are used first.
"""

from __future__ import annotations

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.astra.problem import AstraProblem, Floats, Ints, portions
from hetplan.solvers.run import Run

Scratch = tuple[Floats, Floats, Ints]


def greedy(problem: AstraProblem, thetas: Floats) -> tuple[Floats, Ints, Ints]:
    """f for all `thetas` [R] at once, for `problem.ordered`: (f [R], +inf where infeasible; m, n
    [M, R]).

    m: stages, n: layers per type.
    """
    caps = np.stack(
        [
            np.searchsorted(row[1 : most + 1], thetas, side="right")
            for row, most in zip(problem.stage_seconds, problem.most_layers, strict=True)
        ]
    )
    stages = np.zeros_like(caps)
    left = np.full(len(thetas), problem.P)
    for i in range(problem.M):
        stages[i] = np.where(caps[i] > 0, np.minimum(left, problem.most_stages[i]), 0)
        left = left - stages[i]
    layers = stages.copy()
    extra = np.full(len(thetas), problem.N - problem.P)
    for i in range(problem.M):
        taken = np.minimum(extra, stages[i] * np.maximum(caps[i] - 1, 0))
        layers[i] += taken
        extra = extra - taken
    work = (problem.c[:, None] * layers + problem.h[:, None] * stages).sum(axis=0)
    return np.where((left == 0) & (extra == 0), work, np.inf), stages, layers


@kernel
def _full_stages(
    c: Floats, h: Floats, limit: Ints, cap: Ints, P: int, N: int, table: Floats, k: int, p: int
) -> None:
    """Carry the states of p full stages on types before k on to type k: part of table[k + 1, p:],
    after that of every smaller p."""
    if p == 0:
        for q in range(P + 1):
            for n in range(N + 1):
                table[k + 1, q, n] = table[k, q, n]
    if cap[k] == 0 or p == P:
        return
    one = c[k] * cap[k] + h[k]
    for n in range(N):
        base = table[k, p, n]
        if base == np.inf:
            continue
        for m in range(1, min(limit[k], P - p) + 1):
            layers = n + m * cap[k]
            if N - layers < P - p - m:
                break
            cost = base + m * one
            table[k + 1, p + m, layers] = min(table[k + 1, p + m, layers], cost)


@kernel
def _single_layers(c: Floats, h: Floats, limit: Ints, cap: Ints, k: int, P: int, g: Floats) -> None:
    """Fill g [P+1] with g_k: least work of q one-layer stages on types after k (+inf: not that
    many)."""
    M = len(c)
    for q in range(P + 1):
        g[q] = np.inf
    g[0] = 0.0
    q, last = 0, -1  # the types up to `last`, in the order of (c + h, number), are used
    while q < P:
        best = -1
        for i in range(k + 1, M):
            if last >= 0:
                one, other = c[i] + h[i], c[last] + h[last]
                if one < other or (one == other and i <= last):
                    continue
            if cap[i] > 0 and (best < 0 or c[i] + h[i] < c[best] + h[best]):
                best = i
        if best < 0:
            return
        last = best
        for _ in range(min(limit[best], P - q)):
            g[q + 1] = g[q] + c[best] + h[best]
            q += 1


@kernel
def advance(
    c: Floats,
    h: Floats,
    limit: Ints,
    cap: Ints,
    P: int,
    N: int,
    table: Floats,
    g: Floats,
    at: Ints,
    best: float,
    first: int,
    last: int,
) -> float:
    """The steps `first` to `last` of f for one limit, in order; returns the least so far.

    A step takes one p of one type: F's for all types but the last, in `table`, then what every type
    may split.
    `table` and `g` are kept between calls, `at` [4] receives (k, p, n, m_k) of the minimum.
    """
    M = len(c)
    filling = (M - 1) * (P + 1)
    for step in range(first, last):
        if step < filling:
            _full_stages(c, h, limit, cap, P, N, table, step // (P + 1), step % (P + 1))
            continue
        k, p = (step - filling) // (P + 1), (step - filling) % (P + 1)
        if cap[k] == 0:
            continue
        if p == 0:
            _single_layers(c, h, limit, cap, k, P, g)
        for n in range(N + 1):
            base = table[k, p, n]
            if base >= best:
                continue
            extra = (N - n) - (P - p)
            if extra < 0:
                break
            if cap[k] > 1:
                least = (extra + cap[k] - 2) // (cap[k] - 1)
            elif extra > 0:
                continue
            else:
                least = 0
            for m in range(least, min(limit[k], P - p) + 1):
                cost = base + c[k] * (extra + m) + h[k] * m + g[P - p - m]
                if cost < best:
                    best = cost
                    at[0], at[1], at[2], at[3] = k, p, n, m
    return best


def least_work(problem: AstraProblem, cap: Ints, room: Scratch, run: Run) -> float:
    """f for one limit, +inf where infeasible; raises `Stopped` where the run should stop."""
    p, (table, g, at) = problem, room
    table[0] = np.inf
    table[0, 0, 0] = 0.0
    best = np.inf
    for first, last in portions((2 * p.M - 1) * (p.P + 1), p.N * p.P):
        run.check()
        best = float(
            advance(p.c, p.h, p.most_stages, cap, p.P, p.N, table, g, at, best, first, last)
        )
    return best


def scratch(problem: AstraProblem) -> Scratch:
    """Room for `least_work`: table, g, at."""
    shape = (problem.M, problem.P + 1, problem.N + 1)
    return np.empty(shape), np.empty(problem.P + 1), np.zeros(4, np.int64)


def stages_behind(
    problem: AstraProblem, cap: Ints, table: Floats, at: Ints
) -> list[tuple[int, int]]:
    """The stages (type, layers) that attain the last `least_work`, traced back through its
    table."""
    k, p, n, m = (int(v) for v in at)
    c, h, limit = problem.c, problem.h, problem.most_stages
    stages = even_split(k, m, (problem.N - n) - (problem.P - p) + m)
    left = problem.P - p - m
    for i in sorted(
        (i for i in range(k + 1, problem.M) if cap[i] > 0), key=lambda i: float(c[i] + h[i])
    ):
        take = min(left, int(limit[i]))
        stages += [(i, 1)] * take
        left -= take
    for i in range(k - 1, -1, -1):
        width = int(cap[i])
        costs = {0: float(table[i, p, n])}
        if width > 0:
            for count in range(1, min(int(limit[i]), p, n // width) + 1):
                costs[count] = float(table[i, p - count, n - count * width]) + count * float(
                    c[i] * width + h[i]
                )
        count = min(costs, key=lambda m: costs[m])
        stages += [(i, width)] * count
        p, n = p - count, n - count * width
    return stages


def even_split(kind: int, stages: int, layers: int) -> list[tuple[int, int]]:
    """`layers` on `stages` stages of one type, as evenly as possible (never beyond a cap that
    admits them)."""
    if stages == 0:
        return []
    base, more = divmod(layers, stages)
    return [(kind, base + 1)] * more + [(kind, base)] * (stages - more)
