"""Cuts of a chain of layers into stages for a given placement, and first placements with them.

All cuts are boundaries [k + 1] from 0 to L, strictly ascending: stage j is layers cut[j] to
cut[j + 1] - 1. `uniform_cut` and `parameter_cut` are Megatron's; AMP's own dynamic programme is in
paper.py. `cut_chain` is exact where all pipelines are alike, and fast:

for caps θ on stage time and s on synchronisation let f(θ, s) be the least Σ t + Σ e. It is a
non-increasing step function of both, and one value is a shortest path over the layers
(`cheapest_cut`), quick to find because the caps leave few first layers to a stage.
T* = min (gas − 1)·θ + s + f(θ, s) is found by branch and bound over boxes of (θ, s): they are
bounded by their least corner in (gas − 1)·θ + s and their greatest in f, and bisected. Source: the
problem is AMP's §3.5 (eq. 5-8); the algorithm is hetplan's.

First incumbents come from the devices in the order of their cells. Positions are filled from it
with tensor ranks innermost, or data ranks innermost, or pipelines one after the other. Most optimal
placements on clusters of whole nodes are of this kind.
"""

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.amp.problem import (
    MEMORY_TOLERANCE,
    AmpProblem,
    Cells,
    Configuration,
    Floats,
    Ints,
    Placed,
    Strategy,
    place,
)
from hetplan.solvers.branch_and_bound import Expansion, Incumbent, search
from hetplan.solvers.run import Run

Box = tuple[int, int, int, int]  # first and last candidate θ, first and last candidate s


def uniform_cut(layers: int, stages: int) -> Ints:
    """Stages of equally many layers; the first L mod k hold one more. Source: AMP §4.1, Table 5."""
    size, rest = divmod(layers, stages)
    return np.concatenate([[0], np.cumsum(size + (np.arange(stages) < rest))]).astype(np.int64)


def parameter_cut(params: Floats, stages: int) -> Ints:
    """A cut whose largest stage has as few parameters as possible; params [L], k <= L. Source: AMP
    §4.1, Table 5."""
    sizes = np.tile(padded(params), (stages, 1))
    nothing, any_layer = np.zeros_like(sizes), np.zeros(sizes.shape, dtype=np.int64)
    # all cuts have the same sum of sizes, and there is nothing to synchronise
    cut = cut_chain(2, sizes, nothing, nothing[:, 0], nothing[0], any_layer)
    assert cut is not None, "without a limit on memory there always is one"
    return np.insert(cut, 0, 0)


def envelope_cut(placed: Placed) -> Ints | None:
    """A good cut for a placement: least (gas-1) max_j t_j + sum_j (t_j + e_j) + max_j S_j that fits
    in memory.

    t_j and e_j are those of stage j in whichever pipeline they are longest, so the value is an
    upper bound of T, exact where pipelines are alike. None where no cut fits the memory.
    """
    problem, chosen = placed.problem, placed.configuration
    stages = chosen.pipeline
    links = np.zeros((stages, problem.layers + 1))
    links[:-1, 1:] = problem.activation * placed.link.max(axis=0, initial=0.0)[:, None]
    params, saved = padded(problem.params), padded(problem.saved)
    first = np.zeros((stages, problem.layers + 1), dtype=np.int64)
    for j, room in enumerate(placed.capacity * chosen.tensor * (1 + MEMORY_TOLERANCE)):
        held = (
            problem.state_factor * params + min(chosen.gas, stages - j) * chosen.micro_batch * saved
        )
        first[j] = np.searchsorted(held, held - room)
    times = padded(placed.layer_seconds.max(axis=0))
    cut = cut_chain(chosen.gas, times, links, placed.sync, params, first)
    return None if cut is None else np.insert(cut, 0, 0)


def padded(rows: Floats) -> Floats:
    """Prefix sums along the last axis, from 0: [..., L] -> [..., L + 1]."""
    return np.concatenate([np.zeros((*rows.shape[:-1], 1)), np.cumsum(rows, axis=-1)], axis=-1)


def cut_chain(
    gas: int, times: Floats, links: Floats, sync: Floats, params: Floats, first: Ints
) -> Ints | None:
    """The best cut of L layers into k stages, the layer behind each stage's last [k]; None when
    memory allows none.

    gas: micro-batches. times [k, L+1]: prefix sums of the layer times on each stage's devices,
    seconds. links [k, L+1]: seconds of the transfer when stage j ends before layer l (last row
    unused). sync [k]: seconds of gradient synchronisation per parameter byte, params [L+1]: prefix
    sums of bytes. first [k, L+1]: first layer that memory allows for a stage ending at b.
    """
    stages, width = times.shape
    thetas, syncs = _candidates(gas, times, sync, params)
    table = (stages + 1, width)
    scratch = np.empty(table), np.empty(table, np.int64)
    waits = (gas - 1) * thetas
    incumbent = Incumbent[Ints](Run(), gap=0.0)

    def expand(box: Box, threshold: float) -> Expansion[Box]:
        t0, t1, s0, s1 = box
        ends = np.empty(stages, dtype=np.int64)
        f, slowest, synced = cheapest_cut(
            times, links, sync, params, first, thetas[t1], syncs[s1], ends, scratch
        )
        incumbent.offer((gas - 1) * slowest + synced + f, ends)
        # f is constant from this cut up to the corner: what is left has a smaller θ or a smaller s
        below = min(t1, int(np.searchsorted(thetas, slowest * (1 - 1e-12))) - 1)
        left = min(s1, int(np.searchsorted(syncs, synced * (1 - 1e-12))) - 1)
        return Expansion(
            [
                (float(waits[half[0]] + syncs[half[2]] + f), half)
                for a, b, c, d in [(t0, below, s0, s1), (max(t0, below + 1), t1, s0, left)]
                if a <= b and c <= d
                for half in _halves((a, b, c, d), waits, syncs)
            ]
        )

    search([(0.0, (0, len(thetas) - 1, 0, len(syncs) - 1))], expand, incumbent, incumbent.run)
    return incumbent.decision


def _candidates(gas: int, times: Floats, sync: Floats, params: Floats) -> tuple[Floats, Floats]:
    """All values that the slowest stage and the synchronisation can take, ascending."""
    upper = np.triu_indices(times.shape[1], 1)
    rows = np.unique(times, axis=0)
    thetas = np.unique((rows[:, None, :] - rows[:, :, None])[:, *upper])
    volumes = (params[None, :] - params[:, None])[upper]
    return thetas if gas > 1 else thetas[-1:], np.unique(np.outer(np.unique(sync), volumes))


def _halves(box: Box, thetas: Floats, syncs: Floats) -> list[Box]:
    """The box bisected where it is widest, in seconds; a box of one value stays whole."""
    t0, t1, s0, s1 = box
    if thetas[t1] - thetas[t0] >= syncs[s1] - syncs[s0]:
        middle = middle_of(thetas, t0, t1)
        return [(t0, middle, s0, s1), (middle + 1, t1, s0, s1)] if middle < t1 else [box]
    middle = middle_of(syncs, s0, s1)
    return [(t0, t1, s0, middle), (t0, t1, middle + 1, s1)] if middle < s1 else [box]


def middle_of(values: Floats, first: int, last: int) -> int:
    """An index in [first, last) that halves the values' range, not their number; `first` where they
    are one."""
    middle = int(np.searchsorted(values, (values[first] + values[last]) / 2, side="right")) - 1
    return max(first, min(middle, last - 1))


@kernel
def cheapest_cut(
    times: Floats,
    links: Floats,
    sync: Floats,
    params: Floats,
    first: Ints,
    stage_cap: float,
    sync_cap: float,
    ends: Ints,
    scratch: tuple[Floats, Ints],
) -> tuple[float, float, float]:
    """f(θ, s): least Σ t + Σ e with stages of at most `stage_cap` and synchronisation of at most
    `sync_cap` seconds.

    times [k, L+1]: prefix times of each stage's devices; links [k, L+1]: seconds of a cut before
    layer l behind stage j; sync [k] seconds per parameter byte; first [k, L+1]: first layer that
    memory allows for a stage ending at b. Writes the cut to ends [k]; +inf if none. Returns f and
    the cut's slowest stage and synchronisation. Scratch: best, origin [k + 1, L+1].
    """
    best, origin = scratch
    stages, width = times.shape
    slack = 1 + 1e-12
    best[:] = np.inf
    best[0, 0] = 0.0
    for j in range(stages):
        for b in range(j + 1, width - (stages - 1 - j)):
            for a in range(b - 1, max(j, first[j, b]) - 1, -1):
                t, s = times[j, b] - times[j, a], (params[b] - params[a]) * sync[j]
                if t > stage_cap * slack or s > sync_cap * slack:
                    break
                value = best[j, a] + t
                if j > 0:
                    value += links[j - 1, a]
                if value < best[j + 1, b]:
                    best[j + 1, b], origin[j + 1, b] = value, a
    slowest, synced, b = 0.0, 0.0, width - 1
    if best[stages, b] < np.inf:
        for j in range(stages - 1, -1, -1):
            a = origin[j + 1, b]
            slowest = max(slowest, times[j, b] - times[j, a])
            synced = max(synced, (params[b] - params[a]) * sync[j])
            ends[j], b = b, a
    return best[stages, width - 1], slowest, synced


def try_placement(
    problem: AmpProblem, config: Configuration, array: Ints
) -> tuple[float, Strategy] | None:
    """The placement with a good cut and its T in seconds; None where no cut fits in memory."""
    placed = place(problem, config, array)
    cut = envelope_cut(placed)
    return (
        None
        if cut is None or not placed.fits(cut)
        else (placed.seconds(cut), Strategy(config, array, cut))
    )


def find_first(problem: AmpProblem, cells: Cells, incumbent: Incumbent[Strategy], run: Run) -> None:
    """First incumbents: the cells one after the other, in three nestings, on every
    configuration."""
    order = np.array([device for members in cells.members for device in members])
    for config in problem.configurations():
        pp, dp, tp = config.pipeline, config.data, config.tensor
        for array in (
            order.reshape(pp, dp, tp),
            order.reshape(dp, pp, tp).transpose(1, 0, 2),
            order.reshape(pp, tp, dp).transpose(0, 2, 1),
        ):
            if run.cancelled or (run.should_stop and incumbent.decision is not None):
                return  # out of time, but never without a first decision
            priced = try_placement(problem, config, array)
            if priced is not None:
                incumbent.offer(*priced)
