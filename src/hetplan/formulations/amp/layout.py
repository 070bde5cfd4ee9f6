"""One configuration (degrees, micro-batch) laid out over the cells: what its tensor groups can be.

Shape   the cells of a tensor group's ranks in order; *pure* when they are all one cell.
Kind    (device types of the group, its slowest bandwidth): groups of one kind take the same time
        for any layers.
Zone    what the bound of a single pipeline distinguishes: a class of cells holding pure groups, or,
        for each device type, all groups that straddle cells and whose slowest type it is. A zone is
        as good as its best member, so that bounds hold.
Burden  a weight for each device type, larger for slower types. A group absorbs the weight of its
        slowest type. All devices are used, so the groups together absorb at least a tp-th of the
        weight of all devices, and the pipelines have to share that out.

`Tables` is one configuration as the stated model (model.py) sees it: sets and cost tables.

Sets   c cells (classes of interchangeable devices), p = (j, i, r) positions, n intervals [a, b) of
       layers that stage j can hold, S profiles (the slowest table of a set of types), λ levels
       (distinct bandwidths, ascending).
Tables compute[S][n] + reduce[λ][n] seconds of one micro-batch on a tensor group; link[λ][l] seconds
       to the next stage, by where a stage ends; sync[λ][n] seconds of the gradient all-reduce;
       bytes[n] per device.
Levels that cost nothing are left out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from math import inf

import numpy as np

from hetplan.formulations.amp.problem import (
    MEMORY_TOLERANCE,
    AmpProblem,
    Cells,
    Configuration,
    Floats,
    Ints,
    ring_factor,
)

# All shapes are listed up to this many. Beyond, a first search lists pure groups and those in two
# equal halves; what then stays open is searched again with at most the larger number.
MAX_SHAPES = 600
MOST_SHAPES = 70_000
# A cell with room for more groups than this never forces a crossing in the bound (a relaxation).
MAX_ROOM = 16
# Cell classes up to this many are zones of their own; more are merged by device type.
MAX_ZONES = 6


@dataclass(frozen=True)
class Zones:
    """What a group of each zone costs at least; Z zones, bandwidths in bytes/s."""

    prefix: Floats  # [Z, L + 1] seconds of layers [0, l)
    capacity: Floats  # [Z] bytes of a device
    room: Ints  # [Z] groups that one cell can hold, 0 for no limit
    sync_in: Floats  # [Z] best bandwidth of a data group inside one cell, 0 where it does not fit
    sync_out: Floats  # [Z] best bandwidth of a data group across cells
    stay: Floats  # [Z] best link inside a cell
    leave: Floats  # [Z, Z] best link to another cell, 0 where there is none
    weight: Ints  # [H, Z] what a group absorbs of each burden
    straddles: Ints  # [Z] 1 where groups straddle cells, 0 where they are pure
    base: Ints  # [Z + 1] first row state of a zone; it has one for each number of groups left


@dataclass(frozen=True)
class TensorGroups:
    """Arrays of one configuration; L layers, K cells, N shapes, M kinds, H burdens."""

    config: Configuration
    cells: Cells
    prefix: Floats  # [M, L + 1] seconds of layers [0, l) on a group of the kind
    params: Floats  # [L + 1] bytes of layers [0, l)
    saved: Floats  # [L + 1] bytes per sample that layers [0, l) save
    link: Floats  # [L + 1] bytes sent where a cut lies before layer l
    sync: float  # seconds of synchronisation per parameter byte, times bytes/s
    capacity: Floats  # [M] bytes of the smallest device type in the kind
    state_factor: float
    shape_cells: Ints  # [N, tp]
    shape_kind: Ints  # [N]
    shape_zone: Ints  # [N]
    complete: bool  # whether all shapes are listed
    cell_weight: Ints  # [H, K] weight of one device in each burden
    zones: Zones

    @property
    def burdens(self) -> Ints:
        """[H] what all groups together absorb at least."""
        return -(-(self.cell_weight @ self.cells.size) // self.config.tensor)

    def stage_seconds(self, j: int) -> tuple[Floats, Floats]:
        """([M, L + 1, L + 1], [Z, L + 1, L + 1]) one micro-batch of layers a to b - 1 on stage j,
        for groups of each kind and at least in each zone; +inf where they do not fit in memory
        (1F1B), or leave too few layers for the stages before or behind."""
        config, layers = self.config, self.params.size - 1
        alive = min(config.gas, config.pipeline - j) * config.micro_batch
        held = self.state_factor * self.params + alive * self.saved
        behind = config.pipeline - 1 - j
        a, b = np.indices((layers + 1, layers + 1))
        leaves_enough = (b <= layers - behind) if behind else (b == layers)
        can_be_stage = (a >= j) & (b > a) & leaves_enough

        def seconds_on(prefix: Floats, capacity: Floats) -> Floats:
            room = capacity[:, None, None] * config.tensor * (1 + MEMORY_TOLERANCE)
            fits = can_be_stage & (held[None, :] - held[:, None] <= room)
            return np.where(fits, prefix[:, None, :] - prefix[:, :, None], np.inf)

        return (
            seconds_on(self.prefix, self.capacity),
            seconds_on(self.zones.prefix, self.zones.capacity),
        )


def tensor_groups(
    problem: AmpProblem,
    cells: Cells,
    config: Configuration,
    *,
    ceiling: float = inf,
    most_shapes: int = MAX_SHAPES,
) -> TensorGroups:
    """The configuration's shapes (all of them up to `most_shapes`), kinds, zones and burdens.

    ceiling: layer times are cut off here, seconds. No decision faster than the ceiling has a layer
    that slow, and stage times, taken as differences of prefix sums, keep their digits beside layers
    that are slower by far.
    """
    tp = config.tensor
    seconds = problem.seconds[tp, config.micro_batch]
    ring = problem.tensor * (2 * (tp - 1) / tp * config.micro_batch)

    def prefix_of(layers: Floats, bandwidth: float) -> Floats:
        whole = layers + ring / bandwidth if tp > 1 else layers
        return np.asarray(np.r_[0.0, np.cumsum(np.minimum(whole, ceiling))])

    shapes, complete = _shapes(cells, config, most_shapes)
    types = cells.type[shapes]
    present = (types[..., None] == np.arange(len(seconds))).any(axis=1)
    slowest = np.full(len(shapes), inf)  # bandwidth in the group
    for r, s in combinations(range(tp), 2):
        slowest = np.minimum(slowest, cells.bandwidth[shapes[:, r], shapes[:, s]])
    kinds, shape_kind = np.unique(np.c_[present, slowest], axis=0, return_inverse=True)
    members = kinds[:, :-1] > 0
    weights = _burdens(seconds)
    zone_of_cell, zones = _zones(problem, cells, config, prefix_of, weights)
    order = np.argsort(seconds.sum(axis=1), kind="stable")
    straddling = zones.straddles.argmax() + order[np.argsort(order)[types].max(axis=1)]
    pure = (shapes == shapes[:, :1]).all(axis=1)
    return TensorGroups(
        config=config,
        cells=cells,
        prefix=np.array(
            [
                prefix_of(seconds[kind].max(axis=0), speed)
                for kind, speed in zip(members, kinds[:, -1], strict=True)
            ]
        ).reshape(len(kinds), problem.layers + 1),
        params=np.r_[0.0, np.cumsum(problem.params)],
        saved=np.r_[0.0, np.cumsum(problem.saved)],
        link=np.r_[0.0, problem.activation * config.micro_batch],
        sync=2 * (config.data - 1) / config.data / tp,
        capacity=np.array([problem.capacity[kind].min() for kind in members]),
        state_factor=problem.state_factor,
        shape_cells=shapes,
        shape_kind=shape_kind.reshape(-1).astype(np.int64),
        shape_zone=np.where(pure, zone_of_cell[shapes[:, 0]], straddling).astype(np.int64),
        complete=complete,
        cell_weight=np.ascontiguousarray(weights[:, cells.type]),
        zones=zones,
    )


def _shapes(cells: Cells, config: Configuration, most: int) -> tuple[Ints, bool]:
    """[N, tp] ordered cells of a group's ranks, lexicographically, and whether all are listed.

    A single group holds all devices, and nothing depends on the order of its ranks.
    """
    count, tp, every = cells.count, config.tensor, np.arange(cells.count)
    if config.pipeline * config.data == 1:
        return np.repeat(every, cells.size)[None], True
    shapes = np.zeros((1, 0), dtype=np.int64)
    while shapes.shape[1] < tp and len(shapes) <= most:
        last = np.tile(every, len(shapes))
        shapes = np.c_[np.repeat(shapes, count, axis=0), last]
        shapes = shapes[(shapes == last[:, None]).sum(axis=1) <= cells.size[last]]
    if len(shapes) <= most:
        return shapes, True
    halves = np.repeat(np.indices((count, count)).reshape(2, -1).T, [tp - tp // 2, tp // 2], axis=1)
    equal = halves[:, 0] == halves[:, -1]
    fit = cells.size[halves].min(axis=1) >= np.where(equal, tp, tp // 2)
    allowed = fit & (equal | (tp % 2 == 0) & (count * count <= most))
    return halves[allowed], False


def _burdens(seconds: Floats) -> Ints:
    """[H, types] weights: 1 for the slow types where the speed falls most, in up to two ways.

    With two ways also two sums of both, which tell how they are to be shared out together. A single
    type has the burden 0.
    """
    total = seconds.sum(axis=1)
    order = np.argsort(total, kind="stable")
    falls = [(total[order[i]] / max(total[order[i - 1]], 1e-300), i) for i in range(1, len(order))]
    splits = sorted(i for fall, i in sorted(falls, reverse=True)[:2] if fall > 1)
    if not splits:
        return np.zeros((1, len(order)), dtype=np.int64)
    rank = np.argsort(order)
    slow = np.array([rank >= split for split in splits], dtype=np.int64)
    return slow if len(slow) == 1 else np.array([[1, 0], [0, 1], [1, 1], [2, 1]]) @ slow


def _zones(
    problem: AmpProblem,
    cells: Cells,
    config: Configuration,
    prefix_of: Callable[[Floats, float], Floats],
    weights: Ints,
) -> tuple[Ints, Zones]:
    """The zone of each cell's pure groups (-1 where a group does not fit), and the zones.

    Pure ones come first, a zone for each class of cells (each type where there are many classes),
    then one for each type that may be the slowest of a straddling group.
    """
    seconds = problem.seconds[config.tensor, config.micro_batch]
    tp, count = config.tensor, cells.count
    outer = cells.bandwidth.copy()
    np.fill_diagonal(outer, 0.0)  # no second cell, no link: 0 bytes/s
    inner = np.where(np.isfinite(np.diag(cells.bandwidth)), np.diag(cells.bandwidth), 0.0)
    best_outer = float(outer.max()) if count > 1 else 0.0
    best_inner = float(inner.max()) or best_outer
    anywhere = max(best_outer, best_inner)
    label = cells.kind if cells.kind[-1] < MAX_ZONES else cells.type
    holding = cells.size >= tp
    pure = [np.flatnonzero(holding & (label == one)) for one in np.unique(label[holding])]
    zone_of_cell = np.full(count, -1)
    for z, members in enumerate(pure):
        zone_of_cell[members] = z
    straddling = list(range(len(problem.types)) if tp > 1 and count > 1 else range(0))
    kind = [int(cells.type[members[0]]) for members in pure] + straddling
    most = [int(cells.size[members].max()) for members in pure]
    within = [float(inner[members].max()) for members in pure]
    fits = [n // tp if n // tp <= MAX_ROOM else 0 for n in most]
    local = best_inner if int(cells.size.max()) >= config.data else 0.0
    n, s = len(pure), len(straddling)
    leave = np.full((n + s, n + s), best_outer)
    leave[n:, n:] = anywhere
    for z, y in product(range(n), repeat=2):
        leave[z, y] = outer[np.ix_(pure[z], pure[y])].max()
    room = np.array(fits + [0] * s, dtype=np.int64)
    return zone_of_cell, Zones(
        prefix=np.array(
            [prefix_of(seconds[t], b) for t, b in zip(kind, within + [best_outer] * s, strict=True)]
        ).reshape(n + s, problem.layers + 1),
        capacity=problem.capacity[kind],
        room=room,
        sync_in=np.array(
            [b if m >= config.data * tp else 0.0 for b, m in zip(within, most, strict=True)]
            + [local] * s
        ),
        sync_out=np.array([float(outer[members].max()) for members in pure] + [best_outer] * s),
        stay=np.array(within + [anywhere] * s),
        leave=leave,
        weight=np.ascontiguousarray(weights[:, kind]),
        straddles=np.array([0] * n + [1] * s, dtype=np.int64),
        base=np.r_[0, np.cumsum(np.maximum(room, 1))].astype(np.int64),
    )


# Half of what the evaluator lets pass: the other half is for the solvers' own tolerances.
HALF_TOLERANCE = MEMORY_TOLERANCE / 2


@dataclass(frozen=True)
class Intervals:
    """The ranges of layers that one stage can hold: [N] layers first to last - 1."""

    first: Ints
    last: Ints
    bytes: Floats  # per device, 1F1B

    def sums(self, values: Floats) -> Floats:
        """[N] sums of values[first] to values[last - 1], each summed from its own start (no
        cancellation)."""
        result = np.empty(len(self.first))
        for start in np.unique(self.first):
            here = self.first == start
            result[here] = np.cumsum(values[start:])[self.last[here] - start - 1]
        return result


@dataclass(frozen=True)
class Tables:
    """A problem, one configuration of it and its cells; all tables are in seconds."""

    problem: AmpProblem
    configuration: Configuration
    cells: Cells

    @property
    def shape(self) -> tuple[int, int, int]:
        """(pp, dp, tp)."""
        chosen = self.configuration
        return chosen.pipeline, chosen.data, chosen.tensor

    @cached_property
    def stages(self) -> list[Intervals]:
        """The intervals of each stage: pp nonempty contiguous stages cover the layers."""
        chosen, problem, layers = self.configuration, self.problem, self.problem.layers
        pp, result = chosen.pipeline, []
        for j in range(pp):
            a, b = np.triu_indices(layers + 1, 1)
            kept = (a == 0) if j == 0 else (a >= j)
            kept &= (b == layers) if j == pp - 1 else (b <= layers - (pp - 1 - j))
            alive = min(chosen.gas, pp - j) * chosen.micro_batch
            weights = problem.state_factor * problem.params + alive * problem.saved
            stage = Intervals(a[kept], b[kept], np.zeros(0))
            result.append(Intervals(stage.first, stage.last, stage.sums(weights / chosen.tensor)))
        return result

    @property
    def seconds(self) -> Floats:
        """[types, L] tables of this configuration."""
        return self.problem.seconds[self.configuration.tensor, self.configuration.micro_batch]

    @cached_property
    def profiles(self) -> dict[tuple[int, ...], Floats]:
        """The paces that tensor groups can have: a set of types -> its slowest seconds, layer by
        layer [L], where that is slower than any part of the set."""
        kinds = range(len(self.problem.types))
        profiles: dict[tuple[int, ...], Floats] = {}
        for size in range(1, min(len(kinds), self.configuration.tensor) + 1):
            for types in combinations(kinds, size):
                pace = self.seconds[list(types)].max(axis=0)
                parts = [
                    self.seconds[list(part)].max(axis=0)
                    for part in combinations(types, size - 1)
                    if part
                ]
                if not any((part == pace).all() for part in parts):
                    profiles[types] = pace
        return profiles

    def compute(self, stage: int) -> Floats:
        """[profiles, N]: slowest tables summed over the intervals of a stage."""
        return np.stack([self.stages[stage].sums(pace) for pace in self.profiles.values()])

    @cached_property
    def bandwidths(self) -> Floats:
        """[levels] distinct bandwidths between two devices, ascending; empty for a single
        device."""
        between = self.cells.bandwidth
        return np.unique(between[np.isfinite(between)])

    @cached_property
    def tensor_levels(self) -> Floats:
        """Levels that matter inside tensor groups: none without tensor parallelism or its
        traffic."""
        return self.bandwidths if self.shape[2] > 1 and self.problem.tensor.any() else np.zeros(0)

    @cached_property
    def link_levels(self) -> Floats:
        """Levels that matter between stages."""
        matters = self.shape[0] > 1 and self.problem.activation[:-1].any()
        return self.bandwidths if matters else np.zeros(0)

    @cached_property
    def sync_levels(self) -> Floats:
        """Levels that matter inside data groups."""
        return self.bandwidths if self.shape[1] > 1 and self.problem.params.any() else np.zeros(0)

    def reduce(self, stage: int) -> Floats:
        """[tensor levels, N]: tensor all-reduces of one micro-batch."""
        tp, mbs = self.configuration.tensor, self.configuration.micro_batch
        size = self.stages[stage].sums(self.problem.tensor) * mbs
        return ring_factor(tp) * size / self.tensor_levels[:, None]

    def link(self, stage: int) -> Floats:
        """[link levels, ends]: one micro-batch over the link behind a stage but the last, by the
        layers before which it can end."""
        ends = np.unique(self.stages[stage].last)
        size = self.problem.activation[ends - 1] * self.configuration.micro_batch
        return size / self.link_levels[:, None]

    def sync(self, stage: int) -> Floats:
        """[sync levels, N]: gradient all-reduce of one data group."""
        _, dp, tp = self.shape
        size = self.stages[stage].sums(self.problem.params) / tp
        return ring_factor(dp) * size / self.sync_levels[:, None]

    def crossing(self, levels: Floats) -> Ints:
        """[K, K] index of the level between two devices of cells c and c' (-1: no such pair)."""
        between = self.cells.bandwidth
        index = np.searchsorted(levels, np.where(np.isfinite(between), between, 0.0))
        return np.where(np.isfinite(between), index, -1).astype(np.int64)

    @cached_property
    def capacity(self) -> Floats:
        """[types] bytes of a device, with the tolerance for rounding."""
        return self.problem.capacity * (1 + HALF_TOLERANCE)

    @cached_property
    def slowest_seconds(self) -> float:
        """T of no decision exceeds this: slowest tables and links everywhere."""
        chosen, problem, mbs = self.configuration, self.problem, self.configuration.micro_batch
        slow = self.bandwidths.min(initial=np.inf)
        reduce = ring_factor(chosen.tensor) * problem.tensor.sum() * mbs / slow
        sync = ring_factor(chosen.data) * problem.params.sum() / chosen.tensor / slow
        once = problem.activation.sum() * mbs / slow
        return float(chosen.gas * (self.seconds.max(axis=0).sum() + reduce) + once + sync)
