"""Cuts of a chain of layers into stages for a given placement, and first placements with them.

A cut of L layers into k stages is a strictly ascending array [k + 1] from 0 to L: stage j has
layers cut[j] to cut[j + 1] - 1. `uniform_cut` and `parameter_cut` are Megatron's cuts. AMP's own
dynamic programme is in paper.py.

`cut_chain` finds the best cut where all pipelines take the same times. Each pipeline has gas
micro-batches. t is the time of a stage and e that of a transfer to the next stage, both for one
micro-batch; S is the time of a stage's gradient synchronisation. All times are in seconds.
- For a cap θ on all t and a cap s on all S let f(θ, s) be the least Σ t + Σ e of any cut. f is a
  step function that does not increase with θ or s. One value of it is a shortest path over the
  layers (`cheapest_cut`). The path is quick to find, because the caps leave few first layers to
  each stage.
- The least T is min over θ and s of (gas − 1)·θ + s + f(θ, s). Branch and bound finds it over boxes
  of (θ, s). The lower bound of a box takes (gas − 1)·θ + s at the box's lower corner and f at its
  upper corner. Boxes are bisected.
Source: the problem is AMP's §3.5 (eq. 5-8); the algorithm is hetplan's.

`find_first` finds first incumbents. It takes the devices cell by cell and fills the positions with
tensor ranks innermost, with data ranks innermost, or one pipeline after the other. Most optimal
placements on clusters of whole nodes are of this form.
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

# Seconds that a placement counts towards the budget of a run.
PLACEMENT_SECONDS = 1e-3

# Relative. Sums of the same layers differ by less than this by rounding.
ROUNDING = 1e-12
# numbers of the first and the last candidate θ, and of the first and the last candidate s
Box = tuple[int, int, int, int]


def uniform_cut(layers: int, stages: int) -> Ints:
    """A cut into stages of equally many layers; the first L mod k stages have one more.

    Source: AMP §4.1, Table 5.
    """
    size, rest = divmod(layers, stages)
    sizes = size + (np.arange(stages) < rest)
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def parameter_cut(params: Floats, stages: int) -> Ints:
    """The cut whose largest stage has the fewest parameter bytes.

    params: [L] bytes. stages: at most L. Source: AMP §4.1, Table 5.
    """
    # The bytes take the place of `cut_chain`'s seconds. Links and synchronisation cost nothing. Σ t
    # is the same for all cuts, so with two micro-batches the largest stage alone decides.
    bytes_before = np.tile(padded(params), (stages, 1))
    nothing = np.zeros_like(bytes_before)
    any_layer = np.zeros(bytes_before.shape, dtype=np.int64)
    cut = cut_chain(2, bytes_before, nothing, nothing[:, 0], nothing[0], any_layer)
    assert cut is not None, "without a limit on memory there always is one"
    return np.insert(cut, 0, 0)


def envelope_cut(placed: Placed) -> Ints | None:
    """The cut that fits in memory and has the least
    (gas-1) max_j t_j + sum_j (t_j + e_j) + max_j S_j.

    t_j is the time of stage j in the pipeline where the stage takes longest, e_j that of the link
    behind it in the pipeline where the link takes longest. The value is therefore an upper bound of
    T, and equals T where all pipelines take the same times. None where no cut fits in memory.
    """
    problem, chosen = placed.problem, placed.configuration
    stages = chosen.pipeline
    links = np.zeros((stages, problem.layers + 1))
    links[:-1, 1:] = problem.activation * placed.link.max(axis=0, initial=0.0)[:, None]
    params, saved = padded(problem.params), padded(problem.saved)
    states = padded(problem.states)
    first = np.zeros((stages, problem.layers + 1), dtype=np.int64)
    capacity = placed.capacity * chosen.tensor * (1 + MEMORY_TOLERANCE)  # of a tensor group
    for j, group_capacity in enumerate(capacity):
        samples_alive = min(chosen.gas, stages - j) * chosen.micro_batch  # under 1F1B
        bytes_before = states + samples_alive * saved
        first[j] = np.searchsorted(bytes_before, bytes_before - group_capacity)
    times = padded(placed.layer_seconds.max(axis=0))
    cut = cut_chain(chosen.gas, times, links, placed.sync, params, first)
    return None if cut is None else np.insert(cut, 0, 0)


def padded(rows: Floats) -> Floats:
    """The prefix sums along the last axis, beginning with 0: [..., L] -> [..., L + 1]."""
    zeros = np.zeros((*rows.shape[:-1], 1))
    return np.concatenate([zeros, np.cumsum(rows, axis=-1)], axis=-1)


def cut_chain(
    gas: int, times: Floats, links: Floats, sync: Floats, params: Floats, first: Ints
) -> Ints | None:
    """The best cut of L layers into k stages by the method of the module's docstring.

    gas: micro-batches.
    times: [k, L + 1] seconds, prefix sums of the layer times on the devices of each stage.
    links: [k, L + 1] seconds of the transfer when stage j ends before layer l (last row unused).
    sync: [k] seconds of gradient synchronisation per byte of parameters.
    params: [L + 1] bytes, prefix sums of the layers' parameters.
    first: [k, L + 1] first layer that memory allows for a stage that ends before layer l.
    Returns ends [k], the layers before which the stages end; None where no cut fits in memory.
    """
    stages, width = times.shape
    thetas, syncs = _candidates(gas, times, sync, params)
    table = (stages + 1, width)
    scratch = np.empty(table), np.empty(table, np.int64)
    waits = (gas - 1) * thetas
    incumbent = Incumbent[Ints](Run(), gap=0.0)  # a run of its own: no time limit, no reports

    def expand(box: Box, threshold: float) -> Expansion[Box]:
        theta_first, theta_last, sync_first, sync_last = box
        theta_cap, sync_cap = thetas[theta_last], syncs[sync_last]
        ends = np.empty(stages, dtype=np.int64)
        f, slowest, synced = cheapest_cut(
            times, links, sync, params, first, theta_cap, sync_cap, ends, scratch
        )
        # without a cut f is +inf, slowest and synced are 0: nothing is offered, and no box remains
        incumbent.offer((gas - 1) * slowest + synced + f, ends)
        # f is constant where θ and s are at least those of this cut, so the cut is optimal there.
        # Two boxes remain: a smaller θ; and an equal or larger θ with a smaller s.
        smaller_theta = int(np.searchsorted(thetas, slowest * (1 - ROUNDING))) - 1
        smaller_sync = int(np.searchsorted(syncs, synced * (1 - ROUNDING))) - 1
        smaller_theta = min(theta_last, smaller_theta)
        smaller_sync = min(sync_last, smaller_sync)
        other_theta = max(theta_first, smaller_theta + 1)
        children = list[tuple[float, Box]]()
        if theta_first <= smaller_theta:
            remaining = (theta_first, smaller_theta, sync_first, sync_last)
            children += bounded_halves(remaining, f)
        if other_theta <= theta_last and sync_first <= smaller_sync:
            remaining = (other_theta, theta_last, sync_first, smaller_sync)
            children += bounded_halves(remaining, f)
        return Expansion(children)

    def bounded_halves(box: Box, f: float) -> list[tuple[float, Box]]:
        """(lower bound, half) of both halves of a box. f: the value at the box's upper corner."""
        bounded = list[tuple[float, Box]]()
        for half in _halves(box, waits, syncs):
            theta_first, _, sync_first, _ = half
            bounded.append((float(waits[theta_first] + syncs[sync_first] + f), half))
        return bounded

    whole = (0, len(thetas) - 1, 0, len(syncs) - 1)
    search([(0.0, whole)], expand, incumbent, incumbent.run)
    return incumbent.decision


def _candidates(gas: int, times: Floats, sync: Floats, params: Floats) -> tuple[Floats, Floats]:
    """(candidate θ, candidate s): all values, ascending, that the time of the slowest stage and of
    the synchronisation can have. With one micro-batch θ costs nothing, and the largest value is the
    only candidate."""
    first, end = np.triu_indices(times.shape[1], 1)
    rows = np.unique(times, axis=0)  # stages on devices of one type have equal rows
    thetas = np.unique(rows[:, end] - rows[:, first])
    if gas == 1:
        thetas = thetas[-1:]
    volumes = params[end] - params[first]
    syncs = np.unique(np.outer(np.unique(sync), volumes))
    return thetas, syncs


def _halves(box: Box, waits: Floats, syncs: Floats) -> list[Box]:
    """The box bisected along the axis on which it is wider; the box itself where it has one value.

    waits: (gas − 1)·θ of the candidates, seconds. syncs: the candidates s, seconds.
    """
    theta_first, theta_last, sync_first, sync_last = box
    if waits[theta_last] - waits[theta_first] >= syncs[sync_last] - syncs[sync_first]:
        middle = middle_of(waits, theta_first, theta_last)
        if middle == theta_last:
            return [box]
        return [
            (theta_first, middle, sync_first, sync_last),
            (middle + 1, theta_last, sync_first, sync_last),
        ]
    middle = middle_of(syncs, sync_first, sync_last)
    if middle == sync_last:
        return [box]
    return [
        (theta_first, theta_last, sync_first, middle),
        (theta_first, theta_last, middle + 1, sync_last),
    ]


def middle_of(values: Floats, first: int, last: int) -> int:
    """An index in [first, last) at which the range of ascending `values` from first to last is
    halved; `first` where first = last."""
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
    """(f(θ, s), slowest stage, slowest synchronisation) of the cheapest cut, in seconds; f is +inf
    where there is no cut.

    times, links, sync, params, first: see `cut_chain`. stage_cap: θ, seconds. sync_cap: s,
    seconds. ends: [k] receives the layers before which the cut's stages end. scratch: two arrays
    [k + 1, L + 1] whose contents are overwritten.
    """
    # best[j, b]: least Σ t + Σ e of j stages that end before layer b; origin[j, b]: first layer of
    # the last of them
    best, origin = scratch
    stages, width = times.shape
    slack = 1 + ROUNDING
    best[:] = np.inf
    best[0, 0] = 0.0
    for j in range(stages):
        for b in range(j + 1, width - (stages - 1 - j)):
            for a in range(b - 1, max(j, first[j, b]) - 1, -1):
                t, s = times[j, b] - times[j, a], (params[b] - params[a]) * sync[j]
                if t > stage_cap * slack or s > sync_cap * slack:
                    break  # with an earlier first layer t and s are no smaller
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
    """(T in seconds, strategy) of a placement with its `envelope_cut`; None where no cut fits in
    memory.

    array: [pp, dp, tp] devices.
    """
    placed = place(problem, config, array)
    cut = envelope_cut(placed)
    if cut is None or not placed.fits(cut):
        return None
    return placed.seconds(cut), Strategy(config, array, cut)


def find_first(problem: AmpProblem, cells: Cells, incumbent: Incumbent[Strategy], run: Run) -> None:
    """Offer the first incumbents: three placements of every configuration, see the module's
    docstring. When time runs out, it goes on until there is a decision."""
    order = np.array([device for members in cells.members for device in members])
    for config in problem.configurations():
        pp, dp, tp = config.pipeline, config.data, config.tensor
        tensor_innermost = order.reshape(pp, dp, tp)
        pipeline_after_pipeline = order.reshape(dp, pp, tp).transpose(1, 0, 2)
        data_innermost = order.reshape(pp, tp, dp).transpose(0, 2, 1)
        for array in (tensor_innermost, pipeline_after_pipeline, data_innermost):
            out_of_time = run.should_stop and incumbent.decision is not None
            if run.cancelled or out_of_time:
                return
            priced = try_placement(problem, config, array)
            run.count(PLACEMENT_SECONDS)
            if priced is not None:
                seconds, strategy = priced
                incumbent.offer(seconds, strategy)
