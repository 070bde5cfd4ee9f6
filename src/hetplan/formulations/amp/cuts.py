"""Cuts of a chain of layers into stages: by count, by parameters, and by the slowest pipeline.

All return boundaries [k + 1] from 0 to L, strictly ascending: stage j is layers cut[j] to cut[j +
1] - 1.
AMP's own dynamic programme is in paper_cut.py.
"""

from __future__ import annotations

import numpy as np

from hetplan.formulations.amp.problem import Floats, Ints
from hetplan.formulations.amp.strategy import Placed


def uniform_cut(layers: int, stages: int) -> Ints:
    """Stages of equally many layers; the first L mod k hold one more. Source: AMP §4.1, Table 5."""
    size, rest = divmod(layers, stages)
    return np.concatenate([[0], np.cumsum(size + (np.arange(stages) < rest))]).astype(np.int64)


def parameter_cut(params: Floats, stages: int) -> Ints:
    """The cut whose largest stage has the fewest parameters; params [L], k <= L. Source: AMP §4.1,
    Table 5.

    Stages are filled from the front up to the least limit for which k stages suffice, found by
    bisection over the sums of consecutive layers.
    """
    layers = params.size
    prefix = np.concatenate([[0.0], np.cumsum(params)])
    limits = np.unique((prefix[None, :] - prefix[:, None])[np.triu_indices(layers + 1, 1)])
    low, high = 0, limits.size - 1
    while low < high:
        middle = (low + high) // 2
        if filled(prefix, stages, limits[middle]) is None:
            low = middle + 1
        else:
            high = middle
    cut = filled(prefix, stages, limits[high])
    assert cut is not None, "a stage may hold all layers under the largest limit"
    return cut


def filled(prefix: Floats, stages: int, limit: float) -> Ints | None:
    """Stages filled from the front up to `limit`, a layer left for each later one; None if k are
    too few."""
    layers = prefix.size - 1
    cut = [0]
    for j in range(stages):
        first = cut[-1]
        # the widest stage whose own sum, as listed among the limits, keeps to the limit
        last = first + int(
            np.searchsorted(prefix[first + 1 :] - prefix[first], limit, side="right")
        )
        last = min(last, layers - (stages - 1 - j))
        if last <= first:
            return None
        cut.append(last)
    return np.array(cut, dtype=np.int64) if cut[-1] == layers else None


def envelope_cut(placed: Placed) -> Ints | None:
    """A good cut for a placement: least (gas-1) max_j t_j + sum_j (t_j + e_j) + max_j S_j that fits
    in memory.

    t_j and e_j are those of stage j in whichever pipeline they are longest, so the value is an
    upper bound of T, exact where pipelines are alike. None where no cut fits the memory.
    """
    from hetplan.formulations.amp.chain import cut_chain
    from hetplan.formulations.amp.chain_kernels import memory_windows

    problem, chosen = placed.problem, placed.configuration
    params = padded(problem.params)
    links = np.zeros((chosen.pipeline, problem.layers + 1))
    links[:-1, 1:] = problem.activation * placed.link.max(axis=0, initial=0.0)[:, None]
    first = np.empty((chosen.pipeline, problem.layers + 1), dtype=np.int64)
    memory_windows(
        chosen.pipeline,
        chosen.gas,
        chosen.micro_batch,
        chosen.tensor,
        params,
        padded(problem.saved),
        problem.state_factor,
        placed.capacity,
        first,
    )
    times = padded(placed.layer_seconds.max(axis=0))
    cut = cut_chain(chosen.gas, times, links, sync=placed.sync, params=params, first=first)
    return None if cut is None else np.array([0, *cut.ends], dtype=np.int64)


def padded(rows: Floats) -> Floats:
    """Prefix sums along the last axis, from 0: [..., L] -> [..., L + 1]."""
    return np.concatenate([np.zeros((*rows.shape[:-1], 1)), np.cumsum(rows, axis=-1)], axis=-1)
