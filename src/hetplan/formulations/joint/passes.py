"""The passes of one replica, as the exact method's bounds need them: their order, the longest path
through them for many ways to cut at once, and the samples that a stage keeps meanwhile."""

import itertools
from functools import cache, lru_cache

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.joint.bound import Ints
from hetplan.replays.arrays import Floats
from hetplan.replays.simulator.pipeline import Schedule, order


@cache
def all_cuts(layers: int, runs: int) -> Ints:
    """[N, runs + 1] all ways to cut a chain of layers; each begins with 0 and ends with L."""
    inner = list(itertools.combinations(range(1, layers), runs - 1))
    cuts = np.zeros((len(inner), runs + 1), np.int64)
    cuts[:, 1:-1] = np.array(inner, np.int64).reshape(len(inner), runs - 1)
    cuts[:, -1] = layers
    return cuts


@lru_cache(maxsize=1000)
def sequence(schedule: Schedule, S: int, C: int, M: int) -> Ints:
    """[2 S C M, 4] every pass (stage, backward, chunk, micro-batch), behind all that it needs.

    A topological order: in turn, each stage does its passes up to the first one whose needs are
    not done yet.
    """
    queues = [np.array(order(schedule, S, s, M, C)).T.tolist() for s in range(S)]
    next_of = [0] * S
    done = set[tuple[int, int, int]]()  # (backward, virtual stage, micro-batch)
    passes = list[tuple[int, int, int, int]]()
    while len(passes) < 2 * S * C * M:
        for s, queue in enumerate(queues):
            while next_of[s] < len(queue):
                backward, c, m = queue[next_of[s]]
                v = c * S + s
                need = needed_pass(backward, v, m, last=S * C - 1)
                if need is not None and need not in done:
                    break
                done.add((backward, v, m))
                passes.append((s, backward, c, m))
                next_of[s] += 1
    return np.array(passes)


def needed_pass(backward: int, v: int, m: int, last: int) -> tuple[int, int, int] | None:
    """The pass (backward, virtual stage, micro-batch) whose message, or loss, this one needs; None
    for forward passes of the first virtual stage. last: the last virtual stage."""
    if not backward:
        return (0, v - 1, m) if v > 0 else None
    return (1, v + 1, m) if v < last else (0, v, m)


@lru_cache(maxsize=10_000)
def in_flight(schedule: Schedule, S: int, s: int, M: int, C: int, rows: int, last: int) -> Floats:
    """[moments, C] samples of each chunk that a stage keeps after its forward passes, with so many
    rows of a micro-batch and of the last one."""
    backward, chunk, batch = order(schedule, S, s, M, C)
    size = np.where(batch == M - 1, last, rows)
    change = np.zeros((len(chunk), C))
    change[np.arange(len(chunk)), chunk] = np.where(backward, -size, size)
    kept = change.cumsum(axis=0)
    return np.unique(kept[backward == 0], axis=0)


@kernel
def longest(
    passes: Ints, seconds: Floats, hops: Floats, sent: Floats, cuts: Ints, shape: Ints
) -> Floats:
    """[N, S] when every stage has done its passes, where no port is waited for.

    passes: as of `sequence`. seconds [S, 2, 2, L + 1, L + 1]: of layers [a, b), by direction, of a
    micro-batch and of the last one. hops [V - 1, 2, 2, 2]: of a message, per byte and in all, by
    direction and size. sent [L + 1]: bytes that pass between layers. cuts [N, V + 1]. shape: S, M.
    """
    S, M = shape
    V = cuts.shape[1] - 1
    ends = np.zeros((len(cuts), S))
    done = np.zeros((2, V, M))
    for n in range(len(cuts)):
        free = np.zeros(S)
        for i in range(len(passes)):
            s, backward, c, m = passes[i]
            v, size = c * S + s, int(m == M - 1)
            here, start = v - 1 + backward, free[s]  # here: the hop that its message takes
            if here >= 0 and here < V - 1:
                start = max(start, done[backward, v + 1 if backward else v - 1, m])
                hop = hops[here, backward, size]
                start += hop[0] * sent[cuts[n, here + 1]] + hop[1]
            start += seconds[s, backward, size, cuts[n, v], cuts[n, v + 1]]
            done[backward, v, m] = free[s] = start
        ends[n] = free
    return ends
