"""Whole numbers of rows for sharding ratios. Source: HAP, Section 5.1."""

from collections.abc import Sequence

import numpy as np

from hetplan.errors import require


def shard_lengths(ratios: Sequence[float], length: int) -> list[int]:
    """The whole length of each device's shard, near length * ratio; they sum to `length`.

    Each length is rounded to the nearest whole number. While the sum is wrong, one more length is
    moved by one, where that adds least to the rounding error. ratios: [m]. Raises InputError for a
    length below 1.
    """
    require(length >= 1, "length of a dimension", got=length, expected="at least 1")
    wanted = np.array(ratios, dtype=float) * length
    lengths = np.maximum(np.rint(wanted), 0).astype(np.int64)
    while (missing := length - int(lengths.sum())) != 0:
        step = 1 if missing > 0 else -1
        added_error = np.abs(lengths + step - wanted) - np.abs(lengths - wanted)
        if step < 0:
            added_error[lengths == 0] = np.inf
        lengths[int(np.argmin(added_error))] += step
    return [int(x) for x in lengths]
