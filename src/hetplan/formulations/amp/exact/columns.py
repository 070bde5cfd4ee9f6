"""The label search of one configuration: stage by stage, cut to a width, with the bound of what was
cut.

Labels are extended (`column_kernels.expand`), compared with labels in the same state, and cut to
the best `width`.
What the cut drops leaves its least bound behind, so a search that drops nothing has proven its
incumbent optimal.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hetplan.formulations.amp.data import AmpDecision
from hetplan.formulations.amp.exact.column_kernels import Grid, Scratch, expand
from hetplan.formulations.amp.exact.label_kernels import Labels, canonical, dominated
from hetplan.formulations.amp.exact.layout import Layout
from hetplan.formulations.amp.exact.rows import RowModel, StageIntervals, SyncBox
from hetplan.formulations.amp.problem import Floats, Ints

# Intervals of the slowest stage that the search tells apart; more are joined.
MAX_TABLES = 14
# Completion tables together, in numbers (8 bytes each).
MAX_TABLE_SIZE = 2**25


@dataclass(frozen=True)
class Found:
    """Answer of one search. cost: inf when nothing better was found; dropped: least bound cut away,
    inf for none.

    ends [pp], shapes [pp, dp] describe the best decision. finished: False when it was stopped.
    """

    cost: float
    dropped: float
    ends: Ints
    shapes: Ints
    labels: int
    leaves: int
    finished: bool


NOTHING = np.zeros(0, dtype=np.int64)


def make_grid(
    model: RowModel, stages: StageIntervals, sync_cap: float, forced: Ints | None = None
) -> Grid:
    """The kernel's view: completion tables for `stages.intervals`, joined so that they are few and
    small enough."""
    pieces = list(stages.intervals)
    values = model.stage_values
    sample, _ = model.tables(float(values[pieces[-1][1]]), sync_cap)
    most = max(2, min(MAX_TABLES, MAX_TABLE_SIZE // max(1, sample.size)))
    while len(pieces) > most:
        spans = [values[pieces[i + 1][1]] - values[pieces[i][0]] for i in range(len(pieces) - 1)]
        i = int(np.argmin(spans))
        pieces[i : i + 2] = [(pieces[i][0], pieces[i + 1][1])]
    lay = model.layout
    config, cells = lay.config, lay.cells
    return Grid(
        pp=config.pipeline,
        dp=config.data,
        tp=config.tensor,
        micro_batch=config.micro_batch,
        gas=config.gas,
        size=cells.size,
        kind=cells.kind,
        bandwidth=cells.bandwidth,
        marked=np.ascontiguousarray(lay.thresholds[:, cells.type]),
        prefix=lay.prefix,
        params=lay.params,
        saved=lay.saved,
        link=lay.link,
        sync=lay.sync,
        capacity=lay.capacity,
        state_factor=lay.state_factor,
        shape_cells=lay.shape_cells,
        shape_kind=lay.shape_kind,
        shape_zone=lay.shape_zone,
        level=model.level,
        room=lay.zones.room,
        base=lay.zones.base,
        ahead=np.stack([model.tables(float(values[b]), sync_cap)[0] for _, b in pieces]),
        low=values[[a for a, _ in pieces]],
        high=np.r_[values, np.inf][[b + 1 for _, b in pieces]],
        forced=np.full((config.pipeline, config.data), -1, dtype=np.int64)
        if forced is None
        else forced,
    )


def search(
    grid: Grid,
    box: SyncBox,
    *,
    width: int,
    most_leaves: int,
    tolerance: float,
    incumbent: Floats,
    stop: Ints,
) -> Found:
    """Search for decisions with synchronisation in the box that beat `incumbent` [1] by more than
    `tolerance`.

    most_leaves: columns tried per label before the rest is dropped. incumbent and stop [1] may be
    shared with other threads; stop not 0 ends the search.
    """
    scratch = _scratch(grid)
    children = _labels(grid, max(4 * width, 2 * most_leaves))
    labels = _labels(grid, 1)
    labels.used[:], labels.synced[:], labels.done[:], labels.bound[:] = 0, 0.0, 0, box.low
    labels.last[:], labels.sums[:], labels.tops[:] = 0, 0.0, 0.0
    limits = np.array([box.low, box.high])
    past: list[Labels] = []
    finished = True
    for j in range(grid.pp):
        scratch.counter[1] = begin = 0
        end = len(labels.done)
        while begin < end:
            begin = expand(
                grid,
                j,
                labels,
                begin,
                end,
                limits,
                most_leaves,
                tolerance,
                incumbent,
                stop,
                scratch,
                children,
            )
            if stop[0]:
                finished = False
                break
            if begin < end:  # the children are full
                kept = _keep(grid, children, scratch, width, float(incumbent[0]) * (1 - tolerance))
                for target, source in zip(children, kept, strict=True):
                    target[: len(source)] = source
                scratch.counter[1] = len(kept.done)
        if not finished or j == grid.pp - 1:
            break
        past.append(labels)
        labels = _keep(grid, children, scratch, width, float(incumbent[0]) * (1 - tolerance))
        if not len(labels.done):
            break
    cost, dropped = (float(v) for v in scratch.answer)
    ends, shapes = (
        _path(grid, [*past, labels], scratch.winner) if np.isfinite(cost) else (NOTHING, NOTHING)
    )
    return Found(
        cost, dropped, ends, shapes, int(scratch.counter[2]), int(scratch.counter[0]), finished
    )


def _labels(grid: Grid, count: int) -> Labels:
    """Room for `count` labels."""
    cells, rows = len(grid.size), grid.dp
    return Labels(
        done=np.empty(count, dtype=np.int64),
        used=np.empty((count, cells), dtype=np.int64),
        last=np.empty((count, rows), dtype=np.int64),
        sums=np.empty((count, rows)),
        tops=np.empty((count, rows)),
        synced=np.empty(count),
        bound=np.empty(count),
        parent=np.empty(count, dtype=np.int64),
        key=np.empty((count, 1 + cells + rows * grid.tp), dtype=np.int64),
        order=np.empty((count, rows), dtype=np.int64),
    )


def _scratch(grid: Grid) -> Scratch:
    """Working memory of one search."""
    rows, shapes = grid.dp, len(grid.shape_cells)
    return Scratch(
        allowed=np.zeros((rows, shapes), dtype=np.bool_),
        sums=np.zeros((rows, shapes)),
        tops=np.zeros((rows, shapes)),
        least=np.zeros((rows, shapes)),
        takes=np.zeros((rows, shapes, 2), dtype=np.int64),
        choice=np.full(rows, -1, dtype=np.int64),
        spare=np.zeros((rows + 1, 2), dtype=np.int64),
        best_take=np.zeros((rows, 2), dtype=np.int64),
        narrow=np.full(rows + 1, np.inf),
        same=np.full(rows, -1, dtype=np.int64),
        used=np.zeros(len(grid.size), dtype=np.int64),
        present=np.zeros(len(grid.size), dtype=np.int64),
        earlier=np.zeros(len(grid.size), dtype=np.int64),
        costs=np.empty((rows, *grid.ahead.shape[4:])),
        absorbed=np.zeros(rows, dtype=np.int64),
        reach=np.zeros(1 + int(grid.size.sum()), dtype=np.int64),
        after=np.zeros(1 + int(grid.size.sum()), dtype=np.int64),
        counter=np.zeros(3, dtype=np.int64),
        answer=np.full(2, np.inf),
        winner=np.zeros(1 + rows, dtype=np.int64),
    )


def _keep(grid: Grid, children: Labels, scratch: Scratch, width: int, limit: float) -> Labels:
    """The best `width` children that nothing makes superfluous, best bound first; the rest leaves
    its bound."""
    count = int(scratch.counter[1])
    by_cell, by_row = (
        np.empty((2, len(grid.size)), dtype=np.int64),
        np.empty(grid.dp, dtype=np.int64),
    )
    canonical(
        count, grid.shape_cells, grid.size, grid.kind, children, by_cell[0], by_cell[1], by_row
    )
    written = _rows(children, np.arange(count))
    mixed = np.random.default_rng(0).integers(1, 2**62, written.key.shape[1], dtype=np.int64)
    code = (written.key * mixed).sum(axis=1)  # wraps around: only groups equal keys
    alive = written.bound < limit
    dominated(grid.gas, written, np.argsort(code, kind="stable"), code, alive)
    chosen = np.flatnonzero(alive)
    chosen = chosen[np.argsort(written.bound[chosen], kind="stable")]
    if len(chosen) > width:
        scratch.answer[1] = min(scratch.answer[1], written.bound[chosen[width]])
        chosen = chosen[:width]
    return _rows(written, chosen)


def _rows(labels: Labels, chosen: Ints) -> Labels:
    """A copy of the chosen labels."""
    return Labels(
        done=labels.done[chosen],
        used=labels.used[chosen],
        last=labels.last[chosen],
        sums=labels.sums[chosen],
        tops=labels.tops[chosen],
        synced=labels.synced[chosen],
        bound=labels.bound[chosen],
        parent=labels.parent[chosen],
        key=labels.key[chosen],
        order=labels.order[chosen],
    )


def _path(grid: Grid, levels: list[Labels], winner: Ints) -> tuple[Ints, Ints]:
    """Stage ends and shapes from the last label back to the first."""
    ends = np.full(grid.pp, grid.prefix.shape[1] - 1, dtype=np.int64)
    shapes = np.empty((grid.pp, grid.dp), dtype=np.int64)
    shapes[-1] = winner[1:]
    x = int(winner[0])
    for j in range(grid.pp - 1, 0, -1):
        ends[j - 1], shapes[j - 1] = levels[j].done[x], levels[j].last[x]
        x = int(levels[j].parent[x])
    return ends, shapes


def decision(layout: Layout, cells: Ints, ends: Ints) -> AmpDecision:
    """The decision with cells [pp, dp, tp] and stage ends [pp]; devices of a cell are taken in
    order."""
    config = layout.config
    free = [list(reversed(members)) for members in layout.cells.members]
    bounds = [0, *ends.tolist()]
    return AmpDecision(
        pipeline=config.pipeline,
        data=config.data,
        tensor=config.tensor,
        micro_batch=config.micro_batch,
        placement=[[[free[c].pop() for c in group] for group in row] for row in cells.tolist()],
        stages=list(pairwise(bounds)),
    )
