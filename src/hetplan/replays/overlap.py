"""Communication beside computation: the seconds that it adds.

What is hidden behind computation is not free. Communication kernels take processors and memory
bandwidth from the computation beside them, so that a share `CONTENTION` of the hidden seconds is
spent after all.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from hetplan.profiling.models.operators import CONTENTION
from hetplan.replays.arrays import Floats, Numbers


def uncovered(seconds: Numbers, window: Numbers) -> Floats:
    """Seconds that communication adds beside a window of computation.

    The part that does not fit into the window, and CONTENTION of the part that does:
    seconds - (1 - CONTENTION) min(seconds, window).

    seconds: of the communication alone. window: seconds of the computation beside it.
    """
    return np.asarray(seconds - (1 - CONTENTION) * np.minimum(seconds, window))


def bucket_params(ranks: Numbers, least: float, per_rank: float) -> Floats:
    """Parameters of one bucket, whose gradients are reduced together: max(least, per_rank ranks).

    ranks: that share the gradients. Source: Megatron Core,
    `DistributedDataParallelConfig.bucket_size`.
    """
    return np.asarray(np.maximum(least, per_rank * ranks))


def bucket_count(params: Numbers, bucket: Numbers) -> Floats:
    """Buckets, not rounded, at least 1. params: parameters of all; bucket: of each."""
    return np.asarray(np.maximum(params / bucket, 1.0))


def uncovered_buckets(once: Numbers, count: Numbers, window: Numbers) -> Floats:
    """Seconds that `count` buckets add, of which one cannot hide behind the window.

    Of gradients that is the bucket which is ready last, of weights the one that is needed first:
    once + uncovered((count - 1) once, window).

    once: seconds of one bucket alone.
    """
    behind = uncovered(once * (count - 1), window)
    return np.asarray(once + behind)


def prefetched_pass(
    compute: Sequence[float], gather: Sequence[float], scatter: Sequence[float], ahead: int
) -> tuple[float, float]:
    """(seconds until the last layer has computed, seconds that the link goes on after it) of a pass
    whose weights are gathered ahead (FSDP: Zhao et al. 2023, Section 3.3).

    The link works beside the computation, in the order of asking:

        the weights of layer l are asked for when the computation of layer l - 1 - ahead is done
        layer l computes when layer l - 1 has and its weights are there
        its gradients are scattered when it has computed, before what is asked at the same moment

    compute, gather, scatter [L]: seconds of each layer in the order of the pass. ahead: layers that
    are gathered early.
    """
    arrived = list(accumulate(gather[: ahead + 1]))
    link_free = arrived[-1]
    computed = 0.0
    for layer, seconds in enumerate(compute):
        computed = max(computed, arrived[layer]) + seconds
        link_free = max(link_free, computed) + scatter[layer]
        if layer + ahead + 1 < len(compute):
            link_free += gather[layer + ahead + 1]
            arrived.append(link_free)
    return computed, link_free - computed
