"""The inner problem of AMP with the placement fixed: where to cut the chain, exactly.

T* = min over θ, s of (gas − 1)·θ + s + f(θ, s), with f from `chain_kernels.cheapest_cut`
non-increasing in both: boxes of candidate values are bounded by their least corner in (gas − 1)·θ +
s and their greatest in f, and bisected.
Source: the problem is AMP's §3.5 (eq. 5-8); the algorithm is hetplan's.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import count

import numpy as np

from hetplan.formulations.amp.chain_kernels import cheapest_cut, measure
from hetplan.formulations.amp.problem import Floats, Ints

Box = tuple[int, int, int, int]  # first and last candidate θ, first and last candidate s


@dataclass(frozen=True)
class Cut:
    """seconds: (gas − 1)·θ + Σ t + Σ e + s; ends [k]: the layer behind each stage's last;
    evaluations of f."""

    seconds: float
    ends: tuple[int, ...]
    evaluations: int


def cut_chain(
    gas: int,
    times: Floats,
    links: Floats,
    *,
    sync: Floats | None = None,
    params: Floats | None = None,
    first: Ints | None = None,
    limit: float = float("inf"),
) -> Cut | None:
    """The best cut of L layers into k stages, None when there is none below `limit` seconds.

    gas: micro-batches. times [k, L+1]: prefix sums of the layer times on each stage's devices,
    seconds. links [k, L+1]: seconds of the transfer when stage j ends before layer l (last row
    unused). sync [k]: seconds of gradient synchronisation per parameter byte, params [L+1]: prefix
    sums of bytes. first [k, L+1]: first layer that memory allows for a stage ending at b
    (`memory_windows`).
    """
    stages, width = times.shape
    sync = np.zeros(stages) if sync is None else sync
    params = np.zeros(width) if params is None else params
    first = np.zeros((stages, width), dtype=np.int64) if first is None else first
    thetas, syncs = _candidates(gas, times, sync, params)
    table = (stages + 1, width)
    scratch = (
        np.empty(table),
        np.empty(table, np.int64),
        np.empty(width),
        np.empty(width, np.int64),
    )
    best, best_ends, evaluations = limit, None, 0
    heap: list[tuple[float, int, Box]] = []
    order = count()
    todo: list[Box] = [(0, len(thetas) - 1, 0, len(syncs) - 1)]
    while todo:
        for t0, t1, s0, s1 in todo:
            ends = np.empty(stages, dtype=np.int64)
            evaluations += 1
            f = cheapest_cut(
                times, links, sync, params, first, thetas[t1], syncs[s1], ends, *scratch
            )
            if (gas - 1) * thetas[t0] + syncs[s0] + f >= best:
                continue
            slowest, synced = measure(times, sync, params, ends)
            total = (gas - 1) * slowest + synced + f
            if total < best:
                best, best_ends = total, ends
            # f is constant from this cut up to the corner: what is left has a smaller θ or a
            # smaller s
            below = min(t1, int(np.searchsorted(thetas, slowest * (1 - 1e-12))) - 1)
            left = min(s1, int(np.searchsorted(syncs, synced * (1 - 1e-12))) - 1)
            rest: list[Box] = [(t0, below, s0, s1), (max(t0, below + 1), t1, s0, left)]
            for box in rest:
                bound = (gas - 1) * thetas[box[0]] + syncs[s0] + f
                if box[1] >= box[0] and box[3] >= box[2] and bound < best:
                    heapq.heappush(heap, (float(bound), next(order), box))
        todo = []
        if heap and heap[0][0] < best:
            todo = _halves(heapq.heappop(heap)[2], (gas - 1) * thetas, syncs)
    return (
        Cut(float(best), tuple(best_ends.tolist()), evaluations) if best_ends is not None else None
    )


def _candidates(gas: int, times: Floats, sync: Floats, params: Floats) -> tuple[Floats, Floats]:
    """All values that the slowest stage and the synchronisation can take, ascending."""
    upper = np.triu_indices(times.shape[1], 1)
    rows = np.unique(times, axis=0) if len(times) > 1 else times
    thetas = np.unique((rows[:, None, :] - rows[:, :, None])[:, *upper])
    rates = np.unique(sync)
    if not rates.any():
        return (thetas if gas > 1 else thetas[-1:]), np.zeros(1)
    volumes = (params[None, :] - params[:, None])[upper]
    return (thetas if gas > 1 else thetas[-1:]), np.unique(np.outer(rates, volumes))


def _halves(box: Box, thetas: Floats, syncs: Floats) -> list[Box]:
    """The box bisected where it is widest, in seconds; a box of one value stays whole."""
    t0, t1, s0, s1 = box
    if thetas[t1] - thetas[t0] >= syncs[s1] - syncs[s0]:
        middle = _middle(thetas, t0, t1)
        return [(t0, middle, s0, s1), (middle + 1, t1, s0, s1)] if middle < t1 else [box]
    middle = _middle(syncs, s0, s1)
    return [(t0, t1, s0, middle), (t0, t1, middle + 1, s1)] if middle < s1 else [box]


def _middle(values: Floats, first: int, last: int) -> int:
    """An index in [first, last] that halves the range of the values."""
    middle = int(np.searchsorted(values, (values[first] + values[last]) / 2, side="right")) - 1
    return min(max(middle, first), last)
