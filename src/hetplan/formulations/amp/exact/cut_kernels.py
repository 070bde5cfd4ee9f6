"""Compiled: the best cut of a chain into consecutive stages for a fixed placement.

For caps θ on stage time and s on synchronisation let f(θ, s) be the least Σ t + Σ e. It is a non-increasing step
function of both, and one value costs O(k·L): the admissible first layers of a stage form a window that moves only
forward with the stage's end, so a sliding-window minimum serves. T* = min (gas − 1)·θ + s + f(θ, s) is found by
branch and bound over boxes of (θ, s).
"""

from __future__ import annotations

import numpy as np

from hetplan.formulations.amp.problem import Floats, Ints
from hetplan.solvers.compiled import kernel


@kernel
def memory_windows(
    stages: int, gas: int, micro_batch: int, tp: int, params: Floats, saved: Floats, factor: float, room: Floats
) -> Ints:
    """First layer [k, L+1] from which stage j may reach its end b within room[j] bytes per device (1F1B)."""
    layers = len(params) - 1
    first = np.zeros((stages, layers + 1), dtype=np.int64)
    for j in range(stages):
        alive = min(gas, stages - j) * micro_batch
        a = 0
        for b in range(layers + 1):
            while (
                a < b
                and factor * (params[b] - params[a]) + alive * (saved[b] - saved[a]) > room[j] * tp * (1 + 1e-9)
            ):
                a += 1
            first[j, b] = a
    return first


@kernel
def cheapest_cut(
    times: Floats,
    links: Floats,
    sync: Floats,
    params: Floats,
    first: Ints,
    stage_cap: float,
    sync_cap: float,
    ends: Ints,
) -> float:
    """f(θ, s): least Σ t + Σ e with stages of at most `stage_cap` and synchronisation of at most `sync_cap` seconds.

    times [k, L+1]: prefix times of each stage's devices; links [k, L+1]: seconds of a cut before layer l behind
    stage j; sync [k] seconds per parameter byte; first: `memory_windows`. Writes the cut to ends [k]; +inf if none.
    """
    stages, width = times.shape
    layers = width - 1
    slack = 1 + 1e-12
    best = np.full((stages + 1, width), np.inf)
    origin = np.zeros((stages + 1, width), dtype=np.int64)
    best[0, 0] = 0.0
    queue = np.empty(width, dtype=np.int64)
    value = np.empty(width)
    for j in range(stages):
        a, head, tail, entered = 0, 0, 0, 0
        for b in range(j + 1, layers - (stages - 1 - j) + 1):
            while entered < b:
                v = best[j, entered] - times[j, entered]
                if j > 0:
                    v += links[j - 1, entered]
                value[entered] = v
                if v < np.inf:
                    while tail > head and value[queue[tail - 1]] >= v:
                        tail -= 1
                    queue[tail] = entered
                    tail += 1
                entered += 1
            a = max(a, first[j, b])
            while a < b and (
                times[j, b] - times[j, a] > stage_cap * slack
                or (params[b] - params[a]) * sync[j] > sync_cap * slack
            ):
                a += 1
            while head < tail and queue[head] < a:
                head += 1
            if head < tail:
                best[j + 1, b] = value[queue[head]] + times[j, b]
                origin[j + 1, b] = queue[head]
    if best[stages, layers] < np.inf:
        at = layers
        for j in range(stages - 1, -1, -1):
            ends[j] = at
            at = origin[j + 1, at]
    return float(best[stages, layers])


@kernel
def measure(times: Floats, sync: Floats, params: Floats, ends: Ints) -> tuple[float, float]:
    """Slowest stage and slowest synchronisation of a cut, seconds."""
    slowest, synced, a = 0.0, 0.0, 0
    for j in range(len(ends)):
        b = ends[j]
        slowest = max(slowest, times[j, b] - times[j, a])
        synced = max(synced, (params[b] - params[a]) * sync[j])
        a = b
    return slowest, synced


@kernel
def split_value(values: Floats, first: int, last: int) -> int:
    """An index in [first, last] that halves the values' range."""
    half = (values[first] + values[last]) / 2
    middle = np.searchsorted(values, half, side="right") - 1
    return min(max(middle, first), last)


@kernel
def best_cut(
    gas: int,
    times: Floats,
    links: Floats,
    sync: Floats,
    params: Floats,
    first: Ints,
    stage_values: Floats,
    sync_values: Floats,
    limit: float,
) -> tuple[float, Ints, int]:
    """Least (gas − 1)·θ + s + f(θ, s) below `limit`, its cut, and how often f was evaluated; +inf if there is none.

    stage_values, sync_values: candidate values of θ and s, ascending, containing those of every cut.
    """
    weight = gas - 1.0
    stages = len(times)
    best = limit
    best_ends = np.zeros(stages, dtype=np.int64)
    ends = np.zeros(stages, dtype=np.int64)
    found = False
    evaluations = 0
    capacity = 256
    boxes = np.empty((capacity, 4), dtype=np.int64)
    bounds = np.empty(capacity)
    # the two corners at which f is to be evaluated next: (first θ, last θ, first s, last s)
    todo = np.empty((4, 4), dtype=np.int64)
    todo[0, 0], todo[0, 1] = 0, len(stage_values) - 1
    todo[0, 2], todo[0, 3] = 0, len(sync_values) - 1
    pending, count = 1, 0
    while True:
        for m in range(pending):
            t0, t1, s0, s1 = todo[m, 0], todo[m, 1], todo[m, 2], todo[m, 3]
            evaluations += 1
            f = cheapest_cut(times, links, sync, params, first, stage_values[t1], sync_values[s1], ends)
            if f == np.inf or weight * stage_values[t0] + sync_values[s0] + f >= best:
                continue
            slowest, synced = measure(times, sync, params, ends)
            total = weight * slowest + synced + f
            if total < best:
                best, found = total, True
                best_ends[:] = ends
            # f is constant from here up to the corner: what is left has a smaller θ or a smaller s
            t1 = min(t1, np.searchsorted(stage_values, slowest * (1 - 1e-12), side="left") - 1)
            s_top = min(s1, np.searchsorted(sync_values, synced * (1 - 1e-12), side="left") - 1)
            if count + 2 > capacity:
                capacity *= 2
                grown, grown_bounds = np.empty((capacity, 4), dtype=np.int64), np.empty(capacity)
                grown[:count], grown_bounds[:count] = boxes[:count], bounds[:count]
                boxes, bounds = grown, grown_bounds
            if t1 >= t0:
                boxes[count, 0], boxes[count, 1], boxes[count, 2], boxes[count, 3] = t0, t1, s0, s1
                bounds[count] = weight * stage_values[t0] + sync_values[s0] + f
                count += 1
            if s_top >= s0:
                above = max(t0, t1 + 1)
                boxes[count, 0], boxes[count, 1], boxes[count, 2], boxes[count, 3] = above, todo[m, 1], s0, s_top
                bounds[count] = weight * stage_values[above] + sync_values[s0] + f
                count += 1
        if count == 0:
            break
        x = int(np.argmin(bounds[:count]))
        if bounds[x] >= best:
            break
        t0, t1, s0, s1 = boxes[x, 0], boxes[x, 1], boxes[x, 2], boxes[x, 3]
        count -= 1
        boxes[x], bounds[x] = boxes[count], bounds[count]
        pending = 0
        if weight * (stage_values[t1] - stage_values[t0]) >= sync_values[s1] - sync_values[s0]:
            middle = split_value(stage_values, t0, t1)
            todo[0, 0], todo[0, 1], todo[0, 2], todo[0, 3] = t0, middle, s0, s1
            pending = 1
            if middle < t1:
                todo[1, 0], todo[1, 1], todo[1, 2], todo[1, 3] = middle + 1, t1, s0, s1
                pending = 2
        else:
            middle = split_value(sync_values, s0, s1)
            todo[0, 0], todo[0, 1], todo[0, 2], todo[0, 3] = t0, t1, s0, middle
            pending = 1
            if middle < s1:
                todo[1, 0], todo[1, 1], todo[1, 2], todo[1, 3] = t0, t1, middle + 1, s1
                pending = 2
    return (best if found else np.inf), best_ends, evaluations
