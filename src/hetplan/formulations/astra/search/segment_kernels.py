"""Mode 2, compiled: one strategy's segments on several types, for every vector of stage counts that
may matter.

A kind of stage is a type of device, or the first or the last stage on a type (one of each, h with
the embedding's or the head's seconds). For stage counts m and layers n per stage, with c, h
seconds, r(n) exposed seconds of gradient reduction and optimizer, cap the layers that fit:
    T = sum_s (n_s c + h) + (K-1) max_s (n_s c + h) + max_s r(n_s),      money = T sum_i m_i rate_i.
{n: r(n) <= phi} is an interval for every phi (falling, then rising: layers hide a reduction, then
add to it), and g n <= r(n) for all n.
For fixed m the rate is fixed, so the least T is all that matters; a vector m is skipped when a
lower bound on its T is already beaten in both time and money by the front found so far.
"""

from __future__ import annotations

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.astra.problem import Floats, Ints


@kernel
def upto(values: Floats, limit: float) -> int:
    """How many of the ascending values are <= limit."""
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if values[middle] <= limit:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def dominated(seconds: float, money: float, front_seconds: Floats, front_money: Floats) -> bool:
    """Whether a point of the front (seconds ascending, money descending) is as good in both."""
    low = upto(front_seconds, seconds)
    return low > 0 and front_money[low - 1] <= money


@kernel
def least_work_of(c: Floats, h: Floats, m: Ints, low: Ints, cap: Ints, N: int, n: Ints) -> float:
    """Least sum of stage times for counts m and low <= layers <= cap; n [M] receives the layers per
    kind.

    Kinds by ascending c.
    """
    M = len(c)
    work, extra = 0.0, N
    for i in range(M):
        n[i] = m[i] * low[i]
        extra -= n[i]
        work += m[i] * (c[i] * low[i] + h[i])
        if m[i] > 0 and cap[i] < low[i]:
            return np.inf
    if extra < 0:
        return np.inf
    for i in range(M):
        more = min(extra, m[i] * (cap[i] - low[i]))
        n[i] += more
        extra -= more
        work += more * c[i]
    return work if extra == 0 else np.inf


@kernel
def lower_bound(
    c: Floats, h: Floats, g: Floats, m: Ints, low: Ints, cap: Ints, N: int, K: int, n: Ints
) -> tuple[float, float, float, float]:
    """What T is at least: the least work, and divisible layers for the slowest stage and the
    slowest reduction."""
    work = least_work_of(c, h, m, low, cap, N, n)
    if work == np.inf:
        return np.inf, 0.0, 0.0, work
    speed, offset, reduce_speed, theta, phi = 0.0, 0.0, 0.0, 0.0, 0.0
    free = False
    for i in range(len(c)):
        if m[i] > 0:
            theta = max(theta, c[i] + h[i])
            phi = max(phi, g[i])
            if g[i] > 0:
                reduce_speed += m[i] / g[i]
            else:
                free = True
            if c[i] > 0:
                speed += m[i] / c[i]
                offset += m[i] * h[i] / c[i]
            else:
                offset = np.inf
    if offset < np.inf and speed > 0:
        theta = max(theta, (N + offset) / speed)
    if not free and reduce_speed > 0:
        phi = max(phi, N / reduce_speed)
    # rounding: a bound must never exceed what it bounds
    shrink = 1.0 - 1e-12
    return (work + (K - 1) * theta + phi) * shrink, theta * shrink, phi * shrink, work


@kernel
def capped(slope: float, offset: float, limit: float, most: int) -> int:
    """The most layers x <= most with slope x + offset <= limit."""
    if offset > limit:
        return 0
    if slope <= 0.0 or slope * most + offset <= limit:
        return most
    x = int((limit - offset) / slope)
    while slope * (x + 1) + offset <= limit:
        x += 1
    while x > 0 and slope * x + offset > limit:
        x -= 1
    return x


@kernel
def least_time(
    c: Floats,
    h: Floats,
    g: Floats,
    m: Ints,
    cap: Ints,
    N: int,
    K: int,
    thetas: Floats,
    phis: Floats,
    least: Ints,
    most: Ints,
    n: Ints,
    chosen: Ints,
    lows: Ints,
    caps: Ints,
) -> float:
    """Least T for counts m (+inf: none); `chosen` [M] receives the layers per kind.

    thetas, phis: ascending values of the slowest stage and reduction; least, most [phis, M]: the
    layers whose reduction keeps to it (none: least > most). Only those between the bounds and what
    the incumbent leaves room for are tried. lows, caps [M]: scratch.
    """
    for i in range(len(c)):
        lows[i] = 1
    _, theta_low, phi_low, work_low = lower_bound(c, h, g, m, lows, cap, N, K, n)
    best = np.inf
    M = len(c)
    for a in range(max(0, upto(thetas, theta_low) - 1), len(thetas)):
        theta = thetas[a]
        if work_low + (K - 1) * theta + phi_low >= best:
            break
        # slack: theta sets no cap, so that a larger one changes nothing
        settled, slack = False, True
        for i in range(M):
            if m[i] > 0 and capped(c[i], h[i], theta, cap[i]) < cap[i]:
                slack = False
        for b in range(max(0, upto(phis, phi_low) - 1), len(phis)):
            phi = phis[b]
            if work_low + (K - 1) * theta + phi >= best or settled:
                break
            settled = True  # until some limit is set by phi rather than theta
            for i in range(M):
                by_theta = capped(c[i], h[i], theta, cap[i])
                caps[i], lows[i] = min(by_theta, most[b, i]), least[b, i]
                if m[i] > 0 and (most[b, i] < by_theta or least[b, i] > 1):
                    settled = False
            total = least_work_of(c, h, m, lows, caps, N, n) + (K - 1) * theta + phi
            if total < best:
                best = total
                for i in range(M):
                    chosen[i] = n[i]
        if slack:
            break
    return best


@kernel
def explore(
    c: Floats,
    h: Floats,
    g: Floats,
    cap: Ints,
    need: Ints,
    room: Ints,
    rate: Floats,
    P: int,
    N: int,
    K: int,
    thetas: Floats,
    phis: Floats,
    least: Ints,
    most: Ints,
    front_seconds: Floats,
    front_money: Floats,
    m: Ints,
    out_seconds: Floats,
    out_m: Ints,
    out_n: Ints,
    counts: Ints,
    patience: int,
    scratch: Ints,
) -> int:
    """Solve stage counts from `m` on until they are exhausted, the output is full, or after
    `patience` steps; returns the points found.

    c, h, g, cap, need, room [M] by ascending c: need <= m <= room; rate [M]: money per second of
    one stage. m [M]: the first vector to look at (start with `need`; the last entry is
    overwritten), afterwards the next one, or -1 in m[0] when none is left.
    front_*: the front so far, seconds ascending; out_seconds [B], out_m, out_n [B, M]. counts [2]:
    vectors seen, solved. scratch [5, M].
    """
    M = len(c)
    n, chosen, ones, lows, caps = scratch[0], scratch[1], scratch[2], scratch[3], scratch[4]
    for i in range(M):
        ones[i] = 1
    points, left = 0, P
    for i in range(M - 1):
        left -= m[i]
    while points < len(out_seconds) and patience > 0:
        patience -= 1
        if need[M - 1] <= left <= room[M - 1]:
            m[M - 1] = left
            counts[0] += 1
            paid = 0.0
            for i in range(M):
                paid += m[i] * rate[i]
            bound, _, _, _ = lower_bound(c, h, g, m, ones, cap, N, K, n)
            if bound < np.inf and not dominated(bound, bound * paid, front_seconds, front_money):
                counts[1] += 1
                found = least_time(
                    c, h, g, m, cap, N, K, thetas, phis, least, most, n, chosen, lows, caps
                )
                if found < np.inf and not dominated(
                    found, found * paid, front_seconds, front_money
                ):
                    out_seconds[points] = found
                    for i in range(M):
                        out_m[points, i] = m[i]
                        out_n[points, i] = chosen[i]
                    points += 1
        # odometer over m[0..M-2]; the last type takes the rest
        place = M - 2
        while place >= 0:
            if left > 0 and m[place] < room[place]:
                m[place] += 1
                left -= 1
                break
            left += m[place] - need[place]
            m[place] = need[place]
            place -= 1
        if place < 0:
            m[0] = -1
            break
    return points
