"""The costs of one configuration (degrees, micro-batch) over the cells of a problem.

`lay_out` lists the possible tensor groups of the configuration, for the exact method:
Shape   the cells of a tensor group's ranks in order. A shape is *pure* when all ranks are in one
        cell.
Kind    (device types of a group, its slowest bandwidth). Groups of one kind take the same time for
        any layers.
Zones and burdens of the groups are in zones.py.

`Tables` holds the sets and the cost tables of the configuration for general solvers (model.py):
Sets    c cells (classes of interchangeable devices), p = (j, i, r) positions (stage, data rank,
        tensor rank), n intervals [a, b) of layers that stage j can hold, S profiles (the seconds of
        the slowest of some device types, layer by layer), λ levels (distinct bandwidths,
        ascending).
Tables  compute[S][n] + reduce[λ][n] seconds of one micro-batch on a tensor group; link[λ][l]
        seconds of the transfer to the next stage where a stage ends before layer l; sync[λ][n]
        seconds of the gradient all-reduce; bytes[n] per device.
A table has no levels where the configuration has nothing to send or to reduce.
"""

from dataclasses import dataclass, replace
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

# Where there are more shapes than this, the first search lists pure shapes and shapes of two equal
# halves only. Each label of a search has a child for each shape, so that many shapes are slow. Both
# numbers are chosen as the other parameters of exact.py.
MAX_SHAPES = 600
# A second search, for decisions with other shapes, lists all shapes up to this number.
MOST_SHAPES = 70_000


@dataclass(frozen=True)
class TensorGroups:
    """Arrays of one configuration with L layers, K cells, N shapes, M kinds, H burdens; `lay_out`
    makes it."""

    config: Configuration
    cells: Cells
    prefix: Floats  # [M, L + 1] seconds of layers [0, l) on a group of the kind
    params: Floats  # [L + 1] bytes of the parameters of layers [0, l)
    saved: Floats  # [L + 1] bytes per sample that layers [0, l) keep until their backward pass
    link: Floats  # [L + 1] bytes of a micro-batch that are sent where a stage begins at layer l
    sync: float  # a stage of b parameter bytes synchronises in b sync / bandwidth seconds
    capacity: Floats  # [M] bytes of the smallest device type in the kind
    states: Floats  # [L + 1] bytes of weights, gradients and optimizer states before layer l
    shape_cells: Ints  # [N, tp] cell of each rank
    shape_kind: Ints  # [N] kind of each shape
    shape_zone: Ints  # [N] zone of each shape
    complete: bool  # whether all shapes are listed
    cell_weight: Ints  # [H, K] weight of one device of the cell in each burden
    zones: Zones

    @property
    def burdens(self) -> Ints:
        """[H] weight that all groups together absorb at least of each burden."""
        return -(-(self.cell_weight @ self.cells.size) // self.config.tensor)

    def stage_seconds(self, j: int) -> tuple[Floats, Floats]:
        """(seconds on groups of each kind [M, L + 1, L + 1], lower bounds on them in each zone
        [Z, L + 1, L + 1]) of one micro-batch where stage j has the layers [a, b).

        +inf where the layers do not fit in memory (1F1B), or leave too few layers for the other
        stages.
        """
        config, layers = self.config, self.params.size - 1
        samples_alive = min(config.gas, config.pipeline - j) * config.micro_batch
        bytes_before = self.states + samples_alive * self.saved
        stages_behind = config.pipeline - 1 - j
        a, b = np.indices((layers + 1, layers + 1))
        is_last = stages_behind == 0
        leaves_enough = (b == layers) if is_last else (b <= layers - stages_behind)
        can_be_stage = (a >= j) & (b > a) & leaves_enough
        stage_bytes = bytes_before[None, :] - bytes_before[:, None]  # [L + 1, L + 1] of [a, b)

        def seconds_on(prefix: Floats, capacity: Floats) -> Floats:
            room = capacity[:, None, None] * config.tensor * (1 + MEMORY_TOLERANCE)
            fits = can_be_stage & (stage_bytes <= room)
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
    """The configuration's shapes, kinds, zones and burdens.

    ceiling: seconds; longer layer times are replaced by it. No decision faster than the ceiling has
    such a layer. Stage times are differences of prefix sums, and lose digits where some layers take
    far longer than all others.
    most_shapes: all shapes are listed where there are no more than this number.
    """
    tp = config.tensor
    seconds = problem.seconds[tp, config.micro_batch]
    # [L] bytes that each link carries in the tensor all-reduces of a layer
    reduce_bytes = problem.tensor * (ring_factor(tp) * config.micro_batch)

    def prefix_of(computing: Floats, bandwidth: float) -> Floats:
        layer_seconds = computing
        if tp > 1:  # a group of one device has no bandwidth inside
            layer_seconds = computing + reduce_bytes / bandwidth
        return np.asarray(np.r_[0.0, np.cumsum(np.minimum(layer_seconds, ceiling))])

    shapes, complete = _shapes(cells, config, most_shapes)
    types = cells.type[shapes]  # [N, tp]
    present = (types[..., None] == np.arange(len(seconds))).any(axis=1)  # [N, types]
    inside = np.full(len(shapes), inf)  # [N] slowest bandwidth in the group
    for r, s in combinations(range(tp), 2):
        inside = np.minimum(inside, cells.bandwidth[shapes[:, r], shapes[:, s]])
    kinds, shape_kind = np.unique(np.c_[present, inside], axis=0, return_inverse=True)
    types_of_kind, inside_of_kind = kinds[:, :-1] > 0, kinds[:, -1]
    prefix = [
        prefix_of(seconds[types_present].max(axis=0), bandwidth)
        for types_present, bandwidth in zip(types_of_kind, inside_of_kind, strict=True)
    ]
    # a group has the memory of its smallest device
    capacity = [problem.capacity[types_present].min() for types_present in types_of_kind]

    burdens = find_burdens(seconds)
    zones = find_zones(problem, cells, config, prefix_of, burdens)
    fastest_first = np.argsort(seconds.sum(axis=1), kind="stable")  # types
    speed_rank = np.argsort(fastest_first)  # [types] 0 for the fastest type
    slowest_type = fastest_first[speed_rank[types].max(axis=1)]  # [N]
    pure = (shapes == shapes[:, :1]).all(axis=1)
    shape_zone = np.where(pure, zones.of_cell[shapes[:, 0]], zones.of_type[slowest_type])
    return TensorGroups(
        config=config,
        cells=cells,
        prefix=np.array(prefix).reshape(len(kinds), problem.layers + 1),
        params=np.r_[0.0, np.cumsum(problem.params)],
        saved=np.r_[0.0, np.cumsum(problem.saved)],
        link=np.r_[0.0, problem.activation * config.micro_batch],
        sync=ring_factor(config.data) / tp,
        capacity=np.array(capacity),
        states=np.r_[0.0, np.cumsum(problem.states)],
        shape_cells=shapes,
        shape_kind=shape_kind.reshape(-1).astype(np.int64),
        shape_zone=shape_zone.astype(np.int64),
        complete=complete,
        cell_weight=np.ascontiguousarray(burdens[:, cells.type]),
        zones=zones,
    )


def _shapes(cells: Cells, config: Configuration, most: int) -> tuple[Ints, bool]:
    """(shapes [N, tp] in lexicographic order, whether all are listed). `most`: the number of shapes
    above which only pure shapes and shapes of two equal halves are listed.

    The only group of a configuration without pipelines and data parallelism has all devices. The
    order of its ranks does not matter, and one shape is listed.
    """
    count = cells.count
    tp = config.tensor
    every_cell = np.arange(cells.count)
    if config.pipeline * config.data == 1:
        return np.repeat(every_cell, cells.size)[None], True
    shapes = np.zeros((1, 0), dtype=np.int64)  # cells of the ranks so far
    while shapes.shape[1] < tp and len(shapes) <= most:
        next_cell = np.tile(every_cell, len(shapes))
        shapes = np.c_[np.repeat(shapes, count, axis=0), next_cell]
        devices_used = (shapes == next_cell[:, None]).sum(axis=1)  # devices of the next cell
        shapes = shapes[devices_used <= cells.size[next_cell]]
    if len(shapes) <= most:
        return shapes, True
    first, second = np.indices((count, count)).reshape(2, -1)  # cells of the two halves
    halves = np.repeat(np.c_[first, second], [tp - tp // 2, tp // 2], axis=1)
    pure = first == second
    devices_needed = np.where(pure, tp, tp // 2)
    fits = np.minimum(cells.size[first], cells.size[second]) >= devices_needed
    halves_are_equal_and_few = tp % 2 == 0 and count * count <= most
    return halves[fits & (pure | halves_are_equal_and_few)], False


# Half of the evaluator's tolerance; general solvers may violate a row by the other half.
HALF_TOLERANCE = MEMORY_TOLERANCE / 2


@dataclass(frozen=True)
class Intervals:
    """The N ranges of layers that one stage can have."""

    first: Ints  # [N] first layer
    last: Ints  # [N] the layer behind the last one
    bytes: Floats  # [N] bytes on each device of the stage, under 1F1B

    def sums(self, values: Floats) -> Floats:
        """[N] sums of values[first] to values[last - 1]. Each sum is computed from its own first
        layer on, not as a difference of prefix sums, which would lose digits."""
        sums = np.empty(len(self.first))
        for start in np.unique(self.first):
            here = self.first == start
            sums[here] = np.cumsum(values[start:])[self.last[here] - start - 1]
        return sums


@dataclass(frozen=True)
class Tables:
    """The cost tables of one configuration of a problem, in seconds, for model.py."""

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
        """The intervals of each stage: those with which pp nonempty contiguous stages can cover all
        layers."""
        chosen, problem, layers = self.configuration, self.problem, self.problem.layers
        pp, stages = chosen.pipeline, list[Intervals]()
        for j in range(pp):
            a, b = np.triu_indices(layers + 1, 1)
            leaves_enough_before = (a == 0) if j == 0 else (a >= j)
            leaves_enough_behind = (b == layers) if j == pp - 1 else (b <= layers - (pp - 1 - j))
            kept = leaves_enough_before & leaves_enough_behind
            samples_alive = min(chosen.gas, pp - j) * chosen.micro_batch
            layer_bytes = problem.states + samples_alive * problem.saved
            stage = Intervals(a[kept], b[kept], np.zeros(0))
            stages.append(replace(stage, bytes=stage.sums(layer_bytes / chosen.tensor)))
        return stages

    @property
    def seconds(self) -> Floats:
        """[types, L] seconds of a micro-batch of this configuration on one tensor group, without
        all-reduces."""
        return self.problem.seconds[self.configuration.tensor, self.configuration.micro_batch]

    @cached_property
    def profiles(self) -> dict[tuple[int, ...], Floats]:
        """The profiles of the tensor groups: set of types -> [L] seconds of its slowest type, layer
        by layer. A set with the same seconds as one of its subsets is left out."""
        numbers = range(len(self.problem.types))
        most_types = min(len(numbers), self.configuration.tensor)
        profiles: dict[tuple[int, ...], Floats] = {}
        for size in range(1, most_types + 1):
            for types in combinations(numbers, size):
                slowest = self.slowest_of(types)
                # With every further type no layer gets faster. So if any subset has the same
                # seconds, one with a single type less has them.
                subsets = combinations(types, size - 1) if size > 1 else ()
                if not any((self.slowest_of(subset) == slowest).all() for subset in subsets):
                    profiles[types] = slowest
        return profiles

    def slowest_of(self, types: tuple[int, ...]) -> Floats:
        """[L] seconds of the slowest of some device types, layer by layer."""
        return np.asarray(self.seconds[list(types)].max(axis=0))

    def compute(self, stage: int) -> Floats:
        """[profiles, N] seconds of a micro-batch on each interval of a stage, without
        all-reduces."""
        return np.stack([self.stages[stage].sums(slowest) for slowest in self.profiles.values()])

    @cached_property
    def bandwidths(self) -> Floats:
        """[levels] distinct bandwidths between two devices, ascending; empty for a single
        device."""
        between = self.cells.bandwidth
        return np.unique(between[np.isfinite(between)])

    @cached_property
    def tensor_levels(self) -> Floats:
        """The levels inside tensor groups; empty where tensor groups have nothing to reduce."""
        _, _, tp = self.shape
        return self.levels_if(tp > 1 and self.problem.tensor.any())

    @cached_property
    def link_levels(self) -> Floats:
        """The levels between stages; empty where stages have nothing to send."""
        pp, _, _ = self.shape
        return self.levels_if(pp > 1 and self.problem.activation[:-1].any())

    @cached_property
    def sync_levels(self) -> Floats:
        """The levels inside data groups; empty where data groups have nothing to synchronise."""
        _, dp, _ = self.shape
        return self.levels_if(dp > 1 and self.problem.params.any())

    def levels_if(self, needed: bool | np.bool_) -> Floats:
        """All levels where they are needed, otherwise none."""
        return self.bandwidths if needed else np.zeros(0)

    def reduce(self, stage: int) -> Floats:
        """[tensor levels, N] seconds of one micro-batch's tensor all-reduces."""
        tp, mbs = self.configuration.tensor, self.configuration.micro_batch
        message_bytes = self.stages[stage].sums(self.problem.tensor) * mbs
        return ring_factor(tp) * message_bytes / self.tensor_levels[:, None]

    def link(self, stage: int) -> Floats:
        """[link levels, ends] seconds of one micro-batch over the link behind a stage. The ends are
        the layers before which the stage can end. The last stage has no link."""
        ends = np.unique(self.stages[stage].last)
        message_bytes = self.problem.activation[ends - 1] * self.configuration.micro_batch
        return message_bytes / self.link_levels[:, None]

    def sync(self, stage: int) -> Floats:
        """[sync levels, N] seconds of one data group's gradient all-reduce."""
        _, dp, tp = self.shape
        message_bytes = self.stages[stage].sums(self.problem.params) / tp
        return ring_factor(dp) * message_bytes / self.sync_levels[:, None]

    def crossing(self, levels: Floats) -> Ints:
        """[K, K] number of the level between a device of one cell and a device of another; on the
        diagonal of the level inside a cell, -1 where the cell has one device."""
        bandwidth = self.cells.bandwidth
        index = np.searchsorted(levels, np.where(np.isfinite(bandwidth), bandwidth, 0.0))
        return np.where(np.isfinite(bandwidth), index, -1).astype(np.int64)

    @cached_property
    def capacity(self) -> Floats:
        """[types] bytes of a device, with the tolerance for rounding."""
        return self.problem.capacity * (1 + HALF_TOLERANCE)

    @cached_property
    def slowest_seconds(self) -> float:
        """An upper bound on T of every decision: the slowest type runs every layer, and the slowest
        link carries every message."""
        chosen, problem, mbs = self.configuration, self.problem, self.configuration.micro_batch
        slowest_link = self.bandwidths.min(initial=np.inf)  # infinite for a single device
        computing = self.seconds.max(axis=0).sum()
        reduce = ring_factor(chosen.tensor) * problem.tensor.sum() * mbs / slowest_link
        sync = ring_factor(chosen.data) * problem.params.sum() / chosen.tensor / slowest_link
        links = problem.activation.sum() * mbs / slowest_link
        # gas - 1 times the slowest stage, and all stages, are no more than gas times all layers
        return float(chosen.gas * (computing + reduce) + links + sync)
