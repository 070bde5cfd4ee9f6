"""Compiled kernels of the exact method: shortest paths over (devices used, layer, phase), last
layer first.

Legend  u   index of a vector of devices used (mixed radix over kinds, then perhaps stages counted);
        U of them a,b layers: a state (u, a) has covered [a, L) with at most u
        r   option: `kind[r]` its coordinate, `size[r]` its devices, `delta[r]` what one stage adds
        to u c   stages[u], a lower bound on the stages used so far: it picks the row of the windows
        (memory)
Phase 0 lies after the slowest stage k*, phase 1 holds k* already. A stage costs base + rate t, a
        Line each: behind   2 t - credit   after k*                   (its share of T1 + T3 - S θ)
        peak                    k* itself, low <= t <= high
        ahead    t              before k*
and a fee in every base, where a stage has a price.
Tables are ragged: the states of u are the layers first[u] .. last[u], at offset[u].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.ditto.problem import Floats, Ints
from hetplan.solvers.run import Run

# (base, rate) of what a stage costs.
Line = tuple[float, float]
# Arcs of a piece of vectors between two looks at the clock.
MOST_STEPS = 2e8


@kernel
def reach_back(
    coords: Ints,
    strides: Ints,
    kind: Ints,
    size: Ints,
    delta: Ints,
    stages: Ints,
    counted: bool,
    window: Ints,
    reach: Ints,
) -> None:
    """reach[u]: the first layer a such that stages within `window` cover [a, L) with at most u
    devices.

    window [C, R, L + 1]: the first layer of a stage that ends at b.
    """
    vectors, columns = coords.shape
    layers = window.shape[2] - 1
    for u in range(vectors):
        best = layers
        for i in range(columns):
            if coords[u, i] > 0:
                best = min(best, reach[u - strides[i]])
        for r in range(len(kind)):
            if coords[u, kind[r]] < size[r] or (counted and coords[u, columns - 1] < 1):
                continue
            source = u - delta[r]
            c = stages[source]
            best = min(best, window[c, r, reach[source]])
        reach[u] = best


@kernel
def reach_forward(
    coords: Ints,
    strides: Ints,
    kind: Ints,
    size: Ints,
    delta: Ints,
    stages: Ints,
    counted: bool,
    window: Ints,
    reach: Ints,
) -> None:
    """reach[u]: the last layer b such that stages within `window` cover [0, b) with at most u
    devices.

    window [C, R, L + 1]: the last layer of a stage that begins at a. Stages behind these are not
    known yet, so memory is taken at its least (row 0): the result is never too small.
    """
    vectors, columns = coords.shape
    for u in range(vectors):
        best = 0
        for i in range(columns):
            if coords[u, i] > 0:
                best = max(best, reach[u - strides[i]])
        for r in range(len(kind)):
            if coords[u, kind[r]] < size[r] or (counted and coords[u, columns - 1] < 1):
                continue
            best = max(best, window[0, r, reach[u - delta[r]]])
        reach[u] = best


@kernel
def prefix_costs(
    time: Floats,
    price: Floats,
    credit: float,
    after: Ints,
    before: Ints,
    peak_first: Ints,
    charge: Line,
    out: Floats,
) -> None:
    """out [2, L + 1]: least cost of covering [0, b) by unlimited stages that pay price[r] each.

    out[1, b]: all of them before k*; out[0, b]: with k* among them. after, before [R, L + 1]: the
    last layer of a stage that begins at a; peak_first [R, L + 1]: the first layer at which it is
    long enough for k*. charge: (base, rate), peak(t) = base + rate t.
    """
    options, layers = time.shape[0], time.shape[1] - 1
    for b in range(layers + 1):
        out[0, b] = out[1, b] = np.inf
    out[1, 0] = 0.0
    for a in range(layers):
        with_peak, without = out[0, a], out[1, a]
        if with_peak == np.inf and without == np.inf:
            continue
        for r in range(options):
            for b in range(a + 1, after[r, a] + 1):
                t = time[r, a, b]
                out[0, b] = min(out[0, b], with_peak + price[r] + 2 * t - credit)
            for b in range(a + 1, before[r, a] + 1):
                t = time[r, a, b]
                out[1, b] = min(out[1, b], without + price[r] + t)
                if b >= peak_first[r, a]:
                    cost = without + price[r] + charge[0] + charge[1] * t
                    out[0, b] = min(out[0, b], cost)


@kernel
def prefix_devices(
    time: Floats,
    price: Floats,
    credit: float,
    after: Ints,
    before: Ints,
    peak_first: Ints,
    charge: Line,
    out: Floats,
    size: Ints,
    kind: Ints,
    used: Ints,
) -> None:
    """used [K + 1]: devices of each kind and stages on the path behind out[0, L] of `prefix_costs`:
    its slope."""
    options, b = time.shape[0], time.shape[1] - 1
    for i in range(len(used)):
        used[i] = 0
    phase = 0
    while b > 0:
        best, best_a, best_r, best_phase = np.inf, -1, -1, phase
        for a in range(b):
            for r in range(options):
                t = time[r, a, b]
                if phase == 0 and b <= after[r, a]:
                    cost = out[0, a] + price[r] + 2 * t - credit
                    if cost < best:
                        best, best_a, best_r, best_phase = cost, a, r, 0
                if b <= before[r, a]:
                    if phase == 1:
                        cost = out[1, a] + price[r] + t
                    elif b >= peak_first[r, a]:
                        cost = out[1, a] + price[r] + charge[0] + charge[1] * t
                    else:
                        cost = np.inf
                    if cost < best:
                        best, best_a, best_r, best_phase = cost, a, r, 1
        used[kind[best_r]] += size[best_r]
        used[-1] += 1
        b, phase = best_a, best_phase


def pieces(time: Floats, vectors: int) -> Iterator[tuple[int, int]]:
    """Ranges of vectors, each a fraction of a second of work at worst; time [R, L + 1, L + 1]."""
    size = max(1, min(4096, int(MOST_STEPS / time.size)))
    return ((begin, min(begin + size, vectors)) for begin in range(0, vectors, size))


def relax(
    run: Run, time: Floats, behind: Line, peak: Line, ahead: Line, coords: Ints, *rest: Any
) -> None:
    """`relax_all` for all vectors, in pieces; raises `Stopped` where `run` should stop."""
    for begin, end in pieces(time, len(coords)):
        run.check()
        relax_all(begin, end, time, behind, peak, ahead, coords, *rest)


@kernel
def relax_all(
    first_vector: int,
    end_vector: int,
    time: Floats,
    behind: Line,
    peak: Line,
    ahead: Line,
    coords: Ints,
    strides: Ints,
    kind: Ints,
    size: Ints,
    delta: Ints,
    stages: Ints,
    lag: int,
    counted: bool,
    after: Ints,
    before: Ints,
    peak_first: Ints,
    first: Ints,
    last: Ints,
    offset: Ints,
    togo: Floats,
    rent: Floats,
    cutoff: float,
    value: Floats,
) -> None:
    """Fill value [2, states]; a state whose value + togo [2, L + 1] + rent [U] reaches `cutoff`
    becomes +inf.

    togo, rent: a lower bound of what the layers [0, a) still cost. first, last: narrowed to the
    states kept.
    Of the vectors from first_vector to end_vector, those before being done.
    lag: 1 where `stages` counts for the vector behind a stage; 0: for the vector with it (see
    `mirror`).
    """
    columns = coords.shape[1]
    layers = time.shape[1] - 1
    for u in range(first_vector, end_vector):
        begin, end, at = first[u], last[u], offset[u]
        kept_first, kept_last = layers + 1, -1
        for a in range(end, begin - 1, -1):
            v0 = v1 = np.inf
            if a == layers:
                v0 = 0.0
            for i in range(columns):
                if coords[u, i] > 0:
                    s = u - strides[i]
                    if first[s] <= a <= last[s]:
                        v0 = min(v0, value[0, offset[s] + a])
                        v1 = min(v1, value[1, offset[s] + a])
            for r in range(len(kind)):
                if coords[u, kind[r]] < size[r] or (counted and coords[u, columns - 1] < 1):
                    continue
                s = u - delta[r]
                c = stages[u - lag * delta[r]]
                begin_b, base = max(a + 1, first[s]), offset[s]
                row = time[r, a]
                until = min(after[c, r, a], last[s])
                for b in range(begin_b, until + 1):
                    v0 = min(v0, value[0, base + b] + behind[1] * row[b] + behind[0])
                until = min(before[c, r, a], last[s])
                for b in range(begin_b, until + 1):
                    v1 = min(v1, value[1, base + b] + ahead[1] * row[b] + ahead[0])
                for b in range(max(begin_b, peak_first[r, a]), until + 1):
                    v1 = min(v1, value[0, base + b] + peak[1] * row[b] + peak[0])
            if v0 + togo[0, a] + rent[u] >= cutoff:
                v0 = np.inf
            if v1 + togo[1, a] + rent[u] >= cutoff:
                v1 = np.inf
            value[0, at + a] = v0
            value[1, at + a] = v1
            if v0 < np.inf or v1 < np.inf:
                kept_first, kept_last = min(kept_first, a), max(kept_last, a)
        first[u], last[u] = kept_first, kept_last
