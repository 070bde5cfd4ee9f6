"""Lower bounds of a configuration from its single pipelines ("rows").

For a cap s on the synchronisation and θ on the stage time let R(θ, s) be the cheapest Σ t + Σ e of
one pipeline that absorbs its part of the slow groups. Every decision with slowest stage in (θa, θb]
and synchronisation in [sa, sb] costs at least sa + (gas − 1)·θa + R(θb, sb): intervals of θ and of
s are bisected where the bound is least.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np

from hetplan.formulations.amp.exact.layout import Layout
from hetplan.formulations.amp.exact.row_kernels import absorbs, completions, windows
from hetplan.formulations.amp.problem import Floats, Ints

# How many groups beyond an even share the tables count; more are treated as this many (a
# relaxation).
SPARE = 1
MAX_INTERVALS = 40
MAX_BOXES = 40


@dataclass(frozen=True)
class SyncBox:
    """Decisions with synchronisation in [low, high] seconds cost at least `bound`."""

    low: float
    high: float
    bound: float


@dataclass(frozen=True)
class RowModel:
    """The row bound of one layout.

    absorb [2]: group counts that the tables distinguish. need [2]: groups to absorb in all
    pipelines together. stage_values: candidate slowest-stage times, ascending; sync_values:
    candidate synchronisation times.
    """

    layout: Layout
    level: Ints
    absorb: Ints
    need: Ints
    stage_values: Floats
    sync_values: Floats

    def tables(self, stage_cap: float, sync_cap: float) -> tuple[Floats, Floats]:
        """(ahead, start) of `row_kernels.completions` under the caps, seconds."""
        lay, config = self.layout, self.layout.config
        zones, width = lay.zones.prefix.shape
        window = np.empty((config.pipeline, zones, width), dtype=np.int64)
        local = np.full((zones, width), width, dtype=np.int64)
        windows(
            config.pipeline,
            config.gas,
            config.micro_batch,
            config.tensor,
            config.data,
            stage_cap,
            sync_cap,
            lay.sync,
            lay.zones.prefix,
            lay.params,
            lay.saved,
            lay.state_factor,
            lay.zones.capacity,
            lay.zones.sync_in,
            lay.zones.sync_out,
            window,
            local,
        )
        counts = (int(self.absorb[0]) + 1, int(self.absorb[1]) + 1)
        ahead = np.full((config.pipeline, int(lay.zones.base[zones]), width, *counts), np.inf)
        start = np.full(counts, np.inf)
        enter = np.empty((zones, 1 + int(lay.zones.room.max(initial=1)), *counts))
        completions(
            config.pipeline,
            config.data,
            window,
            local,
            lay.zones.prefix,
            lay.link,
            lay.zones.room,
            lay.zones.stay,
            lay.zones.leave,
            self.level,
            lay.zones.base,
            ahead,
            start,
            enter,
        )
        return ahead, start

    def share(self, cost: Floats) -> float:
        """Least t such that all pipelines, each costing at most t, absorb what is needed; +inf if
        they cannot.

        cost [A, B]: see `absorbs`.
        """
        if cost.size == 1:
            return float(cost[0, 0])
        config = self.layout.config
        values = np.unique(cost)
        values = values[np.isfinite(values)]
        wanted = int(self.need[0]) + 1
        scratch = [np.empty(size, dtype=np.int64) for size in (len(cost), wanted, wanted)]
        low, high = 0, len(values)  # absorbs is monotone in the limit
        while low < high:
            middle = (low + high) // 2
            if absorbs(cost, config.data, self.need, config.pipeline, values[middle], *scratch):
                high = middle
            else:
                low = middle + 1
        return float(values[low]) if low < len(values) else np.inf


def row_model(layout: Layout, *, straddle: bool = False) -> RowModel:
    """The row bound's data; `straddle` asks for decisions in which at least one group straddles
    cells."""
    config = layout.config
    columns = [layout.zones.level[:, h] for h in range(layout.zones.level.shape[1])]
    needs = layout.threshold_groups.tolist()
    if straddle:  # takes the place of the last threshold where there are two
        columns, needs = [*columns[:1], layout.zones.straddles], [*needs[:1], 1]
    while len(columns) < 2:
        columns.append(np.zeros(len(layout.zones.prefix), dtype=np.int64))
        needs.append(0)
    absorb = [min(config.pipeline, -(-n // config.data) + SPARE) if n else 0 for n in needs]
    prefix = layout.zones.prefix
    sums = (prefix[:, None, :] - prefix[:, :, None])[:, *np.triu_indices(prefix.shape[1], 1)]
    volumes = (layout.params[None, :] - layout.params[:, None])[np.triu_indices(prefix.shape[1], 1)]
    speeds = np.unique(layout.cells.bandwidth)
    speeds = speeds[np.isfinite(speeds) & (speeds > 0)]
    if config.data == 1 or not speeds.size:
        sync_values = np.zeros(1)
    else:
        sync_values = distinct(np.outer(volumes * layout.sync, 1.0 / speeds).ravel())
    return RowModel(
        layout,
        np.ascontiguousarray(np.stack(columns, axis=1)),
        np.array(absorb, dtype=np.int64),
        np.array(needs, dtype=np.int64),
        distinct(sums.ravel()) if config.gas > 1 else np.array([sums.max()]),
        sync_values,
    )


def distinct(values: Floats, relative: float = 1e-12) -> Floats:
    """The values ascending, those within rounding of a smaller one dropped in favour of the largest
    of them."""
    ordered = np.unique(values)
    keep = np.r_[ordered[1:] > ordered[:-1] * (1 + relative) + 1e-300, True]
    return ordered[keep]


@dataclass(frozen=True)
class StageIntervals:
    """Bound over all slowest-stage times: `bound` seconds without synchronisation, and the
    intervals behind it.

    intervals: (first, last) indices into the candidate stage times, ascending, those that can beat
    the limit.
    """

    bound: float
    intervals: tuple[tuple[int, int], ...]


def bound_stages(
    model: RowModel,
    sync_cap: float,
    limit: float,
    stop: Callable[[], bool],
    tolerance: float = 1e-5,
) -> StageIntervals:
    """Least cost of the pipelines (without synchronisation) when synchronisation is at most
    `sync_cap`.

    limit: costs of at least this are not of interest. tolerance: relative, where bisection may end.
    """
    weight = model.layout.config.gas - 1
    values = model.stage_values
    last = len(values) - 1
    _, start = model.tables(float(values[last]), sync_cap)
    pieces = {0: (0, last, start)}
    worth = {0: model.share(start + weight * values[0])}
    names = count(1)
    for _ in range(MAX_INTERVALS):
        best = min(worth, key=worth.__getitem__, default=None)
        if best is None or worth[best] >= limit or stop():
            break
        first, final, table = pieces[best]
        if first == final or weight * (values[final] - values[first]) <= tolerance * worth[best]:
            break
        middle = _middle(values, first, final)
        _, lower = model.tables(float(values[middle]), sync_cap)
        del pieces[best], worth[best]
        for piece in ((first, middle, lower), (middle + 1, final, table)):
            # A pipeline that absorbs less than its share may end here although not all of them can.
            if piece[2][0, 0] + weight * values[piece[0]] < limit:
                name = next(names)
                pieces[name] = piece
                worth[name] = model.share(piece[2] + weight * values[piece[0]])
    if not pieces:
        return StageIntervals(limit, ())
    total = np.minimum.reduce([piece[2] + weight * values[piece[0]] for piece in pieces.values()])
    intervals = tuple(sorted((piece[0], piece[1]) for piece in pieces.values()))
    return StageIntervals(min(limit, model.share(total)), intervals)


def _middle(values: Floats, first: int, last: int) -> int:
    """An index in [first, last) that halves the values' range, not their number."""
    middle = int(np.searchsorted(values, (values[first] + values[last]) / 2, side="right")) - 1
    return min(max(middle, first), last - 1)


def bound_configuration(
    model: RowModel, limit: Callable[[], float], stop: Callable[[], bool], tolerance: float = 1e-4
) -> list[SyncBox]:
    """Boxes of synchronisation time covering every decision cheaper than `limit()`, each with its
    bound.

    An empty list proves that the configuration has none. Boxes are bisected while the least one can
    be told apart.
    """
    values = model.sync_values
    names = count()

    def box(first: int, last: int, rows: float) -> tuple[float, int, int, int, float]:
        return float(values[first]) + rows, next(names), first, last, rows

    def rows_of(first: int, last: int) -> float:
        return bound_stages(model, float(values[last]), limit() - float(values[first]), stop).bound

    last = len(values) - 1
    heap = [box(0, last, rows_of(0, last))]
    done: list[SyncBox] = []
    for _ in range(MAX_BOXES):
        heap = [entry for entry in heap if entry[0] < limit()]
        heapq.heapify(heap)
        if not heap or stop():
            break
        bound, _, first, last, rows = heap[0]
        last = min(last, int(np.searchsorted(values, limit() - rows, side="right")) - 1)
        if last <= first or values[last] - values[first] <= tolerance * bound:
            heapq.heappop(heap)
            done.append(SyncBox(float(values[first]), float(values[max(first, last)]), bound))
            continue
        heapq.heappop(heap)
        middle = _middle(values, first, last)
        heapq.heappush(heap, box(first, middle, rows_of(first, middle)))
        heapq.heappush(heap, box(middle + 1, last, rows))
    rest = [SyncBox(float(values[f]), float(values[l]), bound) for bound, _, f, l, _ in heap]
    boxes = sorted([*done, *rest], key=lambda b: b.low)
    return _merge([b for b in boxes if b.bound < limit()])


def _merge(boxes: list[SyncBox], most: int = 6) -> list[SyncBox]:
    """At most `most` boxes: neighbours with the nearest bounds are joined (the joint bound is the
    smaller)."""
    while len(boxes) > most:
        i = min(range(len(boxes) - 1), key=lambda n: abs(boxes[n].bound - boxes[n + 1].bound))
        a, b = boxes[i], boxes[i + 1]
        boxes[i : i + 2] = [SyncBox(a.low, max(a.high, b.high), min(a.bound, b.bound))]
    return boxes
