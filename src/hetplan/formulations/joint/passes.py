"""The passes of one replica, for the bounds of the exact method.

The module has a topological order of all passes (`sequence`), the longest path through them for
many cuts at once (`longest`), and the samples that a stage keeps between forward and backward
passes (`in_flight`).

S stages, C chunks of each stage, M micro-batches; V = S C virtual stages, of which v = c S + s is
chunk c of stage s; L layers. A pass is the forward pass (backward = 0) or the backward pass
(backward = 1) of one micro-batch through one virtual stage.
"""

import itertools
from functools import cache, lru_cache

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.joint.bound.path import Ints
from hetplan.plans.passes import WholeSchedule
from hetplan.replays.arrays import Floats
from hetplan.replays.simulator.pipeline import order


@cache
def all_cuts(layers: int, virtual_stages: int) -> Ints:
    """[N, V + 1] all ways to cut a chain of layers into V nonempty virtual stages: the first layers
    of the virtual stages, then the number of layers."""
    inner = list(itertools.combinations(range(1, layers), virtual_stages - 1))
    cuts = np.zeros((len(inner), virtual_stages + 1), np.int64)
    # the shape is stated for V = 1, where the only choice is empty
    cuts[:, 1:-1] = np.array(inner, np.int64).reshape(len(inner), virtual_stages - 1)
    cuts[:, -1] = layers
    return cuts


@lru_cache(maxsize=1000)
def sequence(schedule: WholeSchedule, S: int, C: int, M: int) -> Ints:
    """[2 S C M, 4] every pass (stage, backward, chunk, micro-batch) in a topological order.

    The stages take turns. Each stage does its passes in the schedule's order, up to the first pass
    that needs the result of a pass that is not done yet.
    """
    queues = [np.array(order(schedule, S, s, M, C)).T.tolist() for s in range(S)]
    done_of_stage = [0] * S  # passes
    done = set[tuple[int, int, int]]()  # (backward, virtual stage, micro-batch)
    passes = list[tuple[int, int, int, int]]()
    while len(passes) < 2 * S * C * M:
        for s, queue in enumerate(queues):
            while done_of_stage[s] < len(queue):
                backward, c, m = queue[done_of_stage[s]]
                v = c * S + s
                need = needed_pass(backward, v, m, last=S * C - 1)
                if need is not None and need not in done:
                    break
                done.add((backward, v, m))
                passes.append((s, backward, c, m))
                done_of_stage[s] += 1
    return np.array(passes)


def needed_pass(backward: int, v: int, m: int, last: int) -> tuple[int, int, int] | None:
    """The pass (backward, virtual stage, micro-batch) whose result a pass needs; None for forward
    passes of the first virtual stage.

    v: virtual stage of the pass. m: its micro-batch. last: the last virtual stage, whose backward
    pass needs the loss of its forward pass.
    """
    if not backward:
        if v == 0:
            return None
        return (0, v - 1, m)
    if v == last:
        return (0, v, m)
    return (1, v + 1, m)


@lru_cache(maxsize=10_000)
def in_flight(
    schedule: WholeSchedule, S: int, s: int, M: int, C: int, samples: int, last_samples: int
) -> Floats:
    """[moments, C] the distinct numbers of samples of each chunk that stage s keeps for backward
    passes, at the moments after its forward passes.

    samples: samples of a micro-batch on one row group. last_samples: samples of the last
    micro-batch.
    """
    backward, chunk, micro_batch = order(schedule, S, s, M, C)
    size = np.where(micro_batch == M - 1, last_samples, samples)
    # a forward pass adds its samples to those kept, a backward pass frees them
    change = np.zeros((len(chunk), C))
    change[np.arange(len(chunk)), chunk] = np.where(backward, -size, size)
    kept = change.cumsum(axis=0)
    return np.unique(kept[backward == 0], axis=0)


@kernel
def longest(
    passes: Ints, seconds: Floats, hops: Floats, sent: Floats, cuts: Ints, shape: Ints
) -> Floats:
    """[N, S] seconds at which each stage has done all its passes, by the longest path through the
    passes.

    This is a lower bound on a replay, since messages do not wait for ports.

    passes: the result of `sequence`.
    seconds: [S, backward, size, a, b] of a pass of layers [a, b); size 0: any micro-batch but the
        last, 1: the last one.
    hops: [V - 1, backward, size, 2] of a message between virtual stages v and v + 1: seconds per
        byte of one sample's activation, and seconds of latency.
    sent: [L + 1] bytes of one sample that pass between layers l - 1 and l.
    cuts: [N, V + 1], as `all_cuts` gives them.
    shape: [2] S and M.
    """
    S, M = shape
    V = cuts.shape[1] - 1
    ends = np.zeros((len(cuts), S))
    # not set back for the next cut: in a topological order every entry is written before it is read
    done = np.zeros((2, V, M))
    for n in range(len(cuts)):
        free = np.zeros(S)
        for i in range(len(passes)):
            s, backward, c, m = passes[i]
            v = c * S + s
            size = int(m == M - 1)
            sender = v + 1 if backward else v - 1
            hop = min(v, sender)  # between virtual stages hop and hop + 1, where there is a sender
            # The backward pass of the last virtual stage has no sender. Its forward pass is on the
            # same stage and came before, so that free[s] is no earlier than its end.
            end = free[s]
            if sender >= 0 and sender < V:
                end = max(end, done[backward, sender, m])
                message = hops[hop, backward, size]
                end += message[0] * sent[cuts[n, hop + 1]] + message[1]
            end += seconds[s, backward, size, cuts[n, v], cuts[n, v + 1]]
            done[backward, v, m] = free[s] = end
        ends[n] = free
    return ends
