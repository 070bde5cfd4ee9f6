"""One configuration (degrees, micro-batch) laid out over the cells: what its tensor groups can be.

Shape   the cells of a tensor group's ranks in order; *pure* when they are all one cell.
Kind    (device types of the group, its slowest bandwidth): groups of one kind take the same time
        for any layers.

Zones and burdens of the groups are in zones.py.

`Tables` is one configuration as the stated model (model.py) sees it: sets and cost tables.

Sets   c cells (classes of interchangeable devices), p = (j, i, r) positions, n intervals [a, b) of
       layers that stage j can hold, S profiles (the slowest table of a set of types), λ levels
       (distinct bandwidths, ascending).
Tables compute[S][n] + reduce[λ][n] seconds of one micro-batch on a tensor group; link[λ][l] seconds
       to the next stage, by where a stage ends; sync[λ][n] seconds of the gradient all-reduce;
       bytes[n] per device.
Levels that cost nothing are left out.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
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
from hetplan.formulations.amp.zones import Zones, find_burdens, find_zones

# All shapes are listed up to this many. Beyond, a first search lists pure groups and those in two
# equal halves; what then stays open is searched again with at most the larger number.
MAX_SHAPES = 600
MOST_SHAPES = 70_000


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


def lay_out(
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
    inside = np.full(len(shapes), inf)  # slowest bandwidth in the group
    for r, s in combinations(range(tp), 2):
        inside = np.minimum(inside, cells.bandwidth[shapes[:, r], shapes[:, s]])
    kinds, shape_kind = np.unique(np.c_[present, inside], axis=0, return_inverse=True)
    types_of_kind, inside_of_kind = kinds[:, :-1] > 0, kinds[:, -1]
    prefix = [
        prefix_of(seconds[present].max(axis=0), bandwidth)
        for present, bandwidth in zip(types_of_kind, inside_of_kind, strict=True)
    ]

    burdens = find_burdens(seconds)
    zones = find_zones(problem, cells, config, prefix_of, burdens)
    fastest_first = np.argsort(seconds.sum(axis=1), kind="stable")
    slowest_type = fastest_first[np.argsort(fastest_first)[types].max(axis=1)]
    pure = (shapes == shapes[:, :1]).all(axis=1)
    shape_zone = np.where(pure, zones.of_cell[shapes[:, 0]], zones.of_type[slowest_type])
    return TensorGroups(
        config=config,
        cells=cells,
        prefix=np.array(prefix).reshape(len(kinds), problem.layers + 1),
        params=np.r_[0.0, np.cumsum(problem.params)],
        saved=np.r_[0.0, np.cumsum(problem.saved)],
        link=np.r_[0.0, problem.activation * config.micro_batch],
        sync=2 * (config.data - 1) / config.data / tp,
        capacity=np.array([problem.capacity[present].min() for present in types_of_kind]),
        state_factor=problem.state_factor,
        shape_cells=shapes,
        shape_kind=shape_kind.reshape(-1).astype(np.int64),
        shape_zone=shape_zone.astype(np.int64),
        complete=complete,
        cell_weight=np.ascontiguousarray(burdens[:, cells.type]),
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
    first, last = np.indices((count, count)).reshape(2, -1)
    halves = np.repeat(np.c_[first, last], [tp - tp // 2, tp // 2], axis=1)
    pure = first == last
    fits = np.minimum(cells.size[first], cells.size[last]) >= np.where(pure, tp, tp // 2)
    listed = pure | (tp % 2 == 0 and count * count <= most)
    return halves[fits & listed], False


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
