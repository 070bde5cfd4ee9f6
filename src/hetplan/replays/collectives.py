"""Collectives of shards of unequal size."""

from hetplan.replays.arrays import Floats


def collective_seconds(
    size: float, held: Floats, bandwidth: float, latency: float, *, messages: int = 1
) -> float:
    """An all-gather, or a reduce-scatter, of `size` bytes in shards held_i size, as `messages`
    calls.

    The better of a ring whose rounds each move one shard, the largest setting the pace: (n - 1)
    (size max_i held_i / b + a), which for equal shards is the usual (n - 1) / n size / b (Patarasuk
    and Yuan 2009); and one pipelined broadcast (reduction) per shard, which moves exact bytes: size
    / b + n (n - 1) a.
    """
    n = len(held)
    if n == 1:
        return 0.0
    padded = (n - 1) * (size * float(held.max()) / bandwidth + messages * latency)
    return min(padded, size / bandwidth + n * (n - 1) * messages * latency)
