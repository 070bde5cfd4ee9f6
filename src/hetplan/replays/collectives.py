"""Seconds of all-gathers and reduce-scatters whose shards may be of unequal size."""

from hetplan.replays.arrays import Floats


def collective_seconds(
    size: float, shares: Floats, bandwidth: float, latency: float, *, messages: int = 1
) -> float:
    """Seconds of an all-gather, or of a reduce-scatter, of `size` bytes over n ranks.

    The faster of two algorithms counts. With b the bandwidth, a the latency, c the messages and
    s_i the shares:

        (n - 1) (size max_i s_i / b + c a)   a ring; each round takes as long as the largest shard
        size / b + n (n - 1) c a             a pipelined broadcast (reduction) of each shard

    For equal shards the ring takes the usual (n - 1) / n size / b, and the latencies (Patarasuk and
    Yuan 2009).

    shares [n]: the part of the bytes that each rank holds. bandwidth: bytes/s of the slowest link.
    latency: seconds per message. messages: number of calls that move the bytes.
    """
    n = len(shares)
    if n == 1:
        return 0.0
    ring = (n - 1) * (size * float(shares.max()) / bandwidth + messages * latency)
    broadcasts = size / bandwidth + n * (n - 1) * messages * latency
    return min(ring, broadcasts)
