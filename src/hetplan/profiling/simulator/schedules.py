"""The order in which a stage works: GPipe, 1F1B and interleaved 1F1B.

All three warm up with some forward passes, then alternate one forward with one backward, then
drain; they differ in how long they warm up and in the order of model chunks. GPipe: Huang et al.
2019; 1F1B: PipeDream-Flush, Narayanan et al. 2021 (ICML); interleaved: Narayanan et al. 2021 (SC),
Section 2.2.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b"]
Ints = NDArray[np.int64]


def warm_up(
    schedule: Schedule, stages: int, stage: int, micro_batches: int, chunks: int = 1
) -> int:
    """Forward passes of a stage before its first backward pass."""
    passes = micro_batches * chunks
    if schedule == "gpipe":
        return passes
    if schedule == "1f1b":
        return min(stages - stage - 1, passes)
    return min(2 * (stages - stage - 1) + (chunks - 1) * stages, passes)


def order(
    schedule: Schedule, stages: int, stage: int, micro_batches: int, chunks: int = 1
) -> tuple[Ints, Ints, Ints]:
    """(backward, chunk, micro_batch), each [2 C M]: what a stage does first, second, …

    backward is 0 or 1. Interleaved: micro_batches is a multiple of stages.
    """
    passes = np.arange(micro_batches * chunks)
    if schedule == "interleaved-1f1b":
        rounds, inside = np.divmod(passes, stages * chunks)
        chunk, place = np.divmod(inside, stages)
        batch = rounds * stages + place
    else:
        chunk, batch = np.divmod(passes, micro_batches)
    warm = warm_up(schedule, stages, stage, micro_batches, chunks)
    steady = len(passes) - warm
    forward_at = np.where(passes < warm, passes, warm + 2 * (passes - warm))
    backward_at = np.where(
        passes < steady, warm + 2 * passes + 1, 2 * steady + warm + (passes - steady)
    )
    at = np.concatenate([forward_at, backward_at])
    backward, chunk_of, batch_of = (np.empty(2 * len(passes), np.int64) for _ in range(3))
    backward[at] = np.repeat([0, 1], len(passes))
    chunk_of[at] = np.concatenate([chunk, chunks - 1 - chunk])
    batch_of[at] = np.concatenate([batch, batch])
    return backward, chunk_of, batch_of
