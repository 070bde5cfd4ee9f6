"""From ratios to whole numbers: how many rows of a dimension each device gets.

Source: HAP, Section 5.1: the nearest whole numbers, then one up or down at the shard where it adds
least to the rounding error until they sum to the length.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetplan.errors import InputError


def shard_lengths(ratios: Sequence[float], length: int) -> list[int]:
    """Whole numbers near length * ratios [m] that sum to `length`. Raises InputError for a length
    below 1."""
    if length < 1:
        raise InputError("length of a dimension", got=length, expected="at least 1")
    wanted = np.array(ratios, dtype=float) * length
    lengths = np.maximum(np.rint(wanted), 0).astype(np.int64)
    while (off := length - int(lengths.sum())) != 0:
        step = 1 if off > 0 else -1
        worse = np.abs(lengths + step - wanted) - np.abs(lengths - wanted)
        if step < 0:
            worse[lengths == 0] = np.inf
        lengths[int(np.argmin(worse))] += step
    return [int(x) for x in lengths]
