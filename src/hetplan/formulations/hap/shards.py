"""Whole numbers of rows for sharding ratios. Source: HAP, Section 5.1."""

from collections.abc import Sequence

import numpy as np

from hetplan.errors import require


def shard_lengths(ratios: Sequence[float], length: int) -> list[int]:
    """Whole numbers near length * ratios [m] that sum to `length`: the nearest ones, then one up or
    down where it adds least to the rounding error until the sum is right. Raises InputError for a
    length below 1. Source: HAP, Section 5.1."""
    require(length >= 1, "length of a dimension", got=length, expected="at least 1")
    wanted = np.array(ratios, dtype=float) * length
    lengths = np.maximum(np.rint(wanted), 0).astype(np.int64)
    while (off := length - int(lengths.sum())) != 0:
        step = 1 if off > 0 else -1
        worse = np.abs(lengths + step - wanted) - np.abs(lengths - wanted)
        if step < 0:
            worse[lengths == 0] = np.inf
        lengths[int(np.argmin(worse))] += step
    return [int(x) for x in lengths]
