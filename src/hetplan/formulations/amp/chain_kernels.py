"""Compiled: the best cut of a chain into consecutive stages for a fixed placement.

For caps θ on stage time and s on synchronisation let f(θ, s) be the least Σ t + Σ e. It is a
non-increasing step function of both, and one value costs O(k·L): the admissible first layers of a
stage form a window that moves only forward with the stage's end, so a sliding-window minimum
serves. T* = min (gas − 1)·θ + s + f(θ, s) is found by branch and bound over boxes of (θ, s).
"""

from __future__ import annotations

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.amp.problem import MEMORY_TOLERANCE, Floats, Ints


@kernel
def memory_windows(
    stages: int,
    gas: int,
    micro_batch: int,
    tp: int,
    params: Floats,
    saved: Floats,
    factor: float,
    room: Floats,
    first: Ints,
) -> None:
    """Fill in first [k, L+1]: from where stage j may reach its end b within room[j] bytes per
    device (1F1B)."""
    layers = len(params) - 1
    for j in range(stages):
        alive = min(gas, stages - j) * micro_batch
        a = 0
        for b in range(layers + 1):
            while a < b and factor * (params[b] - params[a]) + alive * (saved[b] - saved[a]) > room[
                j
            ] * tp * (1 + MEMORY_TOLERANCE):
                a += 1
            first[j, b] = a


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
    best: Floats,
    origin: Ints,
    value: Floats,
    queue: Ints,
) -> float:
    """f(θ, s): least Σ t + Σ e with stages of at most `stage_cap` and synchronisation of at most
    `sync_cap` seconds.

    times [k, L+1]: prefix times of each stage's devices; links [k, L+1]: seconds of a cut before
    layer l behind stage j; sync [k] seconds per parameter byte; first: `memory_windows`. Writes the
    cut to ends [k]; +inf if none.
    Scratch: best, origin [k + 1, L+1]; value, queue [L+1].
    """
    stages, width = times.shape
    layers = width - 1
    slack = 1 + 1e-12
    for j in range(stages + 1):
        for b in range(width):
            best[j, b] = np.inf
    best[0, 0] = 0.0
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
