"""One configuration (degrees, micro-batch) laid out over the cells: what its groups can look like
and cost.

Shape     the cells of a tensor group's ranks in order; *pure* when they are all one cell.
Kind      (device types of the group, its slowest bandwidth): groups of one kind take the same time
for any layers.
Zone      what the bound of a single pipeline distinguishes: a class of cells holding pure groups,
          or, for each device type, all groups that straddle cells. Every zone is as good as its
          best member, so that bounds hold.
Threshold a set of slow types: the groups holding one of them are at least ceil(devices of the set /
          tp), and the pipelines must absorb them somewhere, since every device is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, product
from math import inf

import numpy as np

from hetplan.formulations.amp.cells import Cells
from hetplan.formulations.amp.problem import AmpProblem, Configuration, Floats, Ints

# All ordered tuples of cells are listed up to this many; beyond, groups straddling cells are
# restricted, at first. What then stays open is searched again with the larger number.
MAX_SHAPES = 600
MOST_SHAPES = 70_000
# A cell with room for more groups than this never forces a crossing in the bound (a relaxation).
MAX_ROOM = 16
# Cell classes up to this many are zones of their own; more are merged by device type.
MAX_ZONES = 6


@dataclass(frozen=True)
class Zones:
    """prefix [Z, L+1] s; capacity [Z] bytes; room [Z]: groups that one cell can hold, 0 for no
    limit.

    sync_in, sync_out [Z] bytes/s: best bandwidth of a data group inside one cell (0: it does not
    fit), and across. stay [Z], leave [Z, Z] bytes/s: best link inside a cell and to another one (0:
    there is none). level [Z, H] 0/1. base [Z + 1]: first row state of each zone (one for each
    number of groups left in the cell). straddles [Z] 0/1.
    """

    prefix: Floats
    capacity: Floats
    room: Ints
    sync_in: Floats
    sync_out: Floats
    stay: Floats
    leave: Floats
    level: Ints
    base: Ints
    straddles: Ints


@dataclass(frozen=True)
class Layout:
    """Arrays of one configuration; L layers, K cells, N shapes, M kinds, Z zones.

    prefix [M, L+1] s: time of layers [0, l) on a group of the kind; params, saved [L+1] bytes:
    prefix sums; link [L+1] bytes sent where a cut lies before layer l. sync: seconds per parameter
    byte × bytes/s. capacity [M] bytes of the smallest device type in the kind.
    shape_cells [N, tp], shape_kind, shape_zone [N].
    complete: all shapes are listed. thresholds [H, types] bool, at most two; threshold_devices [H].
    """

    config: Configuration
    cells: Cells
    prefix: Floats
    params: Floats
    saved: Floats
    link: Floats
    sync: float
    capacity: Floats
    state_factor: float
    shape_cells: Ints
    shape_kind: Ints
    shape_zone: Ints
    complete: bool
    thresholds: Ints
    threshold_devices: Ints
    zones: Zones

    @property
    def threshold_groups(self) -> Ints:
        """[H] least number of groups that hold a device of each threshold's set."""
        return -(-self.threshold_devices // self.config.tensor)


def lay_out(
    problem: AmpProblem,
    cells: Cells,
    config: Configuration,
    *,
    ceiling: float = inf,
    most_shapes: int = MAX_SHAPES,
) -> Layout:
    """The configuration's shapes (all of them up to `most_shapes`), kinds and zones.

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
    kinds: dict[tuple[frozenset[int], float], int] = {}
    shape_kind = [kinds.setdefault(_kind(cells, shape), len(kinds)) for shape in shapes]
    prefix, capacity = [], []
    for members, slowest in kinds:
        rows = sorted(members)
        prefix.append(prefix_of(seconds[rows].max(axis=0), slowest))
        capacity.append(problem.capacity[rows].min())
    thresholds = _thresholds(problem, seconds)
    keys, zones = _zones(problem, cells, config, prefix_of, thresholds)
    number = {key: n for n, key in enumerate(keys)}
    rank = np.argsort(np.argsort(seconds.sum(axis=1), kind="stable"), kind="stable")
    shape_zone = [
        number.get(("pure", _zone_of(cells, shape[0])), -1)
        if len(set(shape)) == 1
        else number[("straddling", int(max((cells.type[c] for c in shape), key=lambda t: rank[t])))]
        for shape in shapes
    ]
    shape_array = np.array(shapes, dtype=np.int64).reshape(len(shapes), tp)
    return Layout(
        config=config,
        cells=cells,
        prefix=np.array(prefix).reshape(len(kinds), problem.layers + 1),
        params=np.r_[0.0, np.cumsum(problem.params)],
        saved=np.r_[0.0, np.cumsum(problem.saved)],
        link=np.r_[0.0, problem.activation * config.micro_batch],
        sync=2 * (config.data - 1) / config.data / tp,
        capacity=np.array(capacity),
        state_factor=problem.state_factor,
        shape_cells=shape_array,
        shape_kind=np.array(shape_kind, dtype=np.int64),
        shape_zone=np.array(shape_zone, dtype=np.int64),
        complete=complete,
        thresholds=thresholds,
        threshold_devices=(thresholds[:, problem.device_type] > 0).sum(axis=1).astype(np.int64),
        zones=zones,
    )


def _shapes(cells: Cells, config: Configuration, most: int) -> tuple[list[tuple[int, ...]], bool]:
    """Ordered cells of a group's ranks, lexicographically, and whether the list is complete.

    With a single group nothing depends on the order of its ranks, and sorted tuples are all there
    is.
    """
    count, tp = cells.count, config.tensor
    single = config.pipeline * config.data == 1
    every = list(islice(_tuples(cells.size.tolist(), tp, single), most + 1))
    if len(every) <= most:
        return every, True
    chosen = [(c,) * tp for c in range(count) if cells.size[c] >= tp]
    if tp % 2 == 0 and count * count <= most:  # two halves: the common way to straddle nodes
        half = tp // 2
        chosen += [
            (u,) * half + (v,) * half
            for u, v in product(range(count), repeat=2)
            if u != v and cells.size[u] >= half and cells.size[v] >= half
        ]
    return sorted(chosen), False


def _tuples(
    left: list[int], length: int, ascending: bool, least: int = 0
) -> Iterator[tuple[int, ...]]:
    """Tuples of cells that use cell c at most left[c] times, in lexicographic order."""
    if length == 0:
        yield ()
        return
    for cell in range(least, len(left)):
        if left[cell] > 0:
            left[cell] -= 1
            for rest in _tuples(left, length - 1, ascending, cell if ascending else 0):
                yield (cell, *rest)
            left[cell] += 1


def _kind(cells: Cells, shape: tuple[int, ...]) -> tuple[frozenset[int], float]:
    """Types and slowest bandwidth of a group (+inf for a single device)."""
    pairs = [cells.bandwidth[u, v] for i, u in enumerate(shape) for v in shape[:i]]
    return frozenset(int(cells.type[c]) for c in shape), float(min(pairs, default=inf))


def _thresholds(problem: AmpProblem, seconds: Floats) -> Ints:
    """[H, types] up to two sets of slow types, split where the speed falls most."""
    total = seconds.sum(axis=1)
    order = np.argsort(total, kind="stable")
    ratios = [(total[order[i]] / max(total[order[i - 1]], 1e-300), i) for i in range(1, len(order))]
    chosen = sorted(i for ratio, i in sorted(ratios, reverse=True)[:2] if ratio > 1)
    result = np.zeros((len(chosen), len(order)), dtype=np.int64)
    for row, start in enumerate(chosen):
        result[row, order[start:]] = 1
    return result


def _zone_of(cells: Cells, cell: int) -> int:
    """The zone number of a cell's pure groups: its class, or its type where there are many
    classes."""
    return int(cells.kind[cell] if cells.kind[-1] < MAX_ZONES else cells.type[cell])


def _zones(
    problem: AmpProblem,
    cells: Cells,
    config: Configuration,
    prefix_of: Callable[[Floats, float], Floats],
    thresholds: Ints,
) -> tuple[list[tuple[str, int]], Zones]:
    """The zones and what each stands for: ("pure", cell class) or ("straddling", slowest type)."""
    seconds = problem.seconds[config.tensor, config.micro_batch]
    tp, count = config.tensor, cells.count
    outer = cells.bandwidth.copy()
    np.fill_diagonal(outer, 0.0)  # no second cell, no link: 0 bytes/s
    inner = np.diag(cells.bandwidth)
    best_outer = float(outer.max()) if count > 1 else 0.0
    finite = inner[np.isfinite(inner)]
    best_inner = float(finite.max()) if finite.size else best_outer
    anywhere = max(best_outer, best_inner)
    groups: dict[int, list[int]] = {}
    for cell in range(count):
        if cells.size[cell] >= tp:
            groups.setdefault(_zone_of(cells, cell), []).append(cell)
    straddling = range(len(problem.types)) if tp > 1 and count > 1 else range(0)
    keys = [("pure", z) for z in groups] + [("straddling", t) for t in straddling]
    pure = list(groups.values())
    total = len(keys)
    prefix = np.empty((total, problem.layers + 1))
    capacity, sync_in, sync_out, stay = (np.empty(total) for _ in range(4))
    room = np.zeros(total, dtype=np.int64)
    leave = np.full((total, total), best_outer)
    level = np.zeros((total, len(thresholds)), dtype=np.int64)
    for z, members in enumerate(pure):
        kind = int(cells.type[members[0]])
        within = float(np.where(np.isfinite(inner[members]), inner[members], 0.0).max())
        prefix[z] = prefix_of(seconds[kind], within)
        capacity[z], level[z] = problem.capacity[kind], thresholds[:, kind]
        fits = int(cells.size[members].max()) // tp
        room[z] = fits if fits <= MAX_ROOM else 0
        local = int(cells.size[members].max()) >= config.data * tp
        stay[z], sync_in[z], sync_out[z] = within, within if local else 0.0, outer[members].max()
        for y, others in enumerate(pure):
            leave[z, y] = outer[np.ix_(members, others)].max()
    for z in range(len(pure), total):
        kind = keys[z][1]
        prefix[z] = prefix_of(seconds[kind], best_outer)
        capacity[z], level[z] = problem.capacity[kind], thresholds[:, kind]
        local = int(cells.size.max()) >= config.data
        stay[z], sync_in[z], sync_out[z] = anywhere, best_inner if local else 0.0, best_outer
    leave[len(pure) :, len(pure) :] = anywhere
    return keys, Zones(
        prefix=prefix,
        capacity=capacity,
        room=room,
        sync_in=sync_in,
        sync_out=sync_out,
        stay=stay,
        leave=leave,
        level=level,
        base=np.r_[0, np.cumsum(np.maximum(room, 1))].astype(np.int64),
        straddles=np.array([name == "straddling" for name, _ in keys], dtype=np.int64),
    )
