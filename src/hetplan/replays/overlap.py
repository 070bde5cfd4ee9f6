"""Overlap of communication with computation: the seconds that communication adds to a pass.

Hidden communication is not free. Its kernels take processors and memory bandwidth from the
computation beside them, so that a share `CONTENTION` of the hidden seconds is spent after all.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from hetplan.profiling.models.operators import CONTENTION
from hetplan.replays.arrays import Floats, Numbers


def uncovered(seconds: Numbers, window: Numbers) -> Floats:
    """Seconds that communication adds beside a window of computation:
    seconds - (1 - CONTENTION) min(seconds, window).

    These are the part of the communication that does not fit into the window, and the share
    CONTENTION of the part that does.

    seconds: the communication alone. window: seconds of the computation beside it.
    """
    return np.asarray(seconds - (1 - CONTENTION) * np.minimum(seconds, window))


def bucket_params(ranks: Numbers, least: float, per_rank: float) -> Floats:
    """Parameters of one bucket, whose gradients are reduced together: max(least, per_rank ranks).

    least: parameters of a bucket, at least. per_rank: parameters for each rank, at least. ranks:
    ranks that reduce the gradients. Source: Megatron Core,
    `DistributedDataParallelConfig.bucket_size`.
    """
    return np.asarray(np.maximum(least, per_rank * ranks))


def bucket_count(params: Numbers, bucket: Numbers) -> Floats:
    """The number of buckets, at least 1 and not rounded. params: parameters of all buckets.
    bucket: parameters of one."""
    return np.asarray(np.maximum(params / bucket, 1.0))


def uncovered_buckets(once: Numbers, count: Numbers, window: Numbers) -> Floats:
    """Seconds that `count` buckets add, of which one cannot hide behind the window:
    once + uncovered((count - 1) once, window).

    The bucket that cannot hide is the last one of gradients, which is ready when the computation
    ends, or the first one of weights, for which the computation waits.

    once: seconds of one bucket alone. window: seconds of the computation beside the buckets.
    """
    of_others = uncovered(once * (count - 1), window)
    return np.asarray(once + of_others)


def prefetched_pass(
    compute: Sequence[float], gather: Sequence[float], scatter: Sequence[float], ahead: int
) -> tuple[float, float]:
    """(seconds until the last layer is computed, seconds that the link is still busy after it) of a
    pass whose weights are gathered ahead (FSDP: Zhao et al. 2023, Section 3.3).

    One link works beside the computation and serves requests in their order:

        the weights of layer l are requested when the computation of layer l - 1 - ahead ends
        layer l is computed when layer l - 1 is computed and the weights of layer l have arrived
        the gradients of layer l are scattered when it is computed, before weights requested then

    compute, gather, scatter [L]: seconds of each layer in the order of the pass. ahead: number of
    layers whose weights are gathered early.
    """
    arrived = list(accumulate(gather[: ahead + 1]))  # when the weights of each layer arrive
    link_free = arrived[-1]  # when the link has served all requests so far
    computed = 0.0  # when the layers so far are computed
    for layer, seconds in enumerate(compute):
        computed = max(computed, arrived[layer]) + seconds
        link_free = max(link_free, computed) + scatter[layer]
        if layer + ahead + 1 < len(compute):
            link_free += gather[layer + ahead + 1]
            arrived.append(link_free)
    return computed, link_free - computed
