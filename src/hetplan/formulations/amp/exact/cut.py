"""The inner problem of AMP with the placement fixed: where to cut the chain, exactly.

Source: the problem is AMP's §3.5 (eq. 5-8); the algorithm is hetplan's, see `cut_kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetplan.formulations.amp.exact.cut_kernels import best_cut
from hetplan.formulations.amp.problem import Floats, Ints


@dataclass(frozen=True)
class Cut:
    """seconds: (gas − 1)·θ + Σ t + Σ e + s; ends [k]: the layer behind each stage's last; evaluations of f."""

    seconds: float
    ends: tuple[int, ...]
    evaluations: int


def cut_chain(
    gas: int,
    times: Floats,
    links: Floats,
    *,
    sync: Floats | None = None,
    params: Floats | None = None,
    first: Ints | None = None,
    limit: float = float("inf"),
) -> Cut | None:
    """The best cut of L layers into k stages, None when there is none below `limit` seconds.

    gas: micro-batches. times [k, L+1]: prefix sums of the layer times on each stage's devices, seconds.
    links [k, L+1]: seconds of the transfer when stage j ends before layer l (last row unused).
    sync [k]: seconds of gradient synchronisation per parameter byte, params [L+1]: prefix sums of bytes.
    first [k, L+1]: first layer that memory allows for a stage ending at b (`memory_windows`).
    """
    stages, width = times.shape
    sync = np.zeros(stages) if sync is None else sync
    params = np.zeros(width) if params is None else params
    first = np.zeros((stages, width), dtype=np.int64) if first is None else first
    upper = np.triu_indices(width, 1)
    rows = np.unique(times, axis=0) if stages > 1 else times
    stage_values = np.unique((rows[:, None, :] - rows[:, :, None])[:, *upper])
    rates = np.unique(sync)
    sync_values = np.unique(np.outer(rates, (params[None, :] - params[:, None])[upper])) if rates.any() else np.zeros(1)
    if gas == 1:
        stage_values = stage_values[-1:]
    seconds, ends, evaluations = best_cut(
        gas, np.ascontiguousarray(times), links, sync, params, first, stage_values, sync_values, limit
    )
    return Cut(seconds, tuple(ends.tolist()), evaluations) if np.isfinite(seconds) else None
