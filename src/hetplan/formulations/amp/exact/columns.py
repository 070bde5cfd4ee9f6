"""The label search of one configuration, and the decision behind its answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetplan.formulations.amp.data import AmpDecision
from hetplan.formulations.amp.exact.column_kernels import search_columns
from hetplan.formulations.amp.exact.layout import Layout
from hetplan.formulations.amp.exact.rows import RowModel, StageIntervals, SyncBox
from hetplan.formulations.amp.problem import Floats, Ints

# Intervals of the slowest stage that the search tells apart; more are joined.
MAX_TABLES = 14
# Completion tables together, in numbers (8 bytes each).
MAX_TABLE_SIZE = 2**25


@dataclass(frozen=True)
class Found:
    """Answer of one search. cost: inf when nothing better was found; dropped: least bound cut away, inf for none.

    ends [pp], shapes [pp, dp] describe the best decision. finished: False when it was stopped.
    """

    cost: float
    dropped: float
    ends: Ints
    shapes: Ints
    labels: int
    leaves: int
    finished: bool


@dataclass(frozen=True)
class Guide:
    """Completion tables for the intervals of slowest-stage times that can still win; see `row_ahead`."""

    ahead: Floats
    low: Floats
    high: Floats


def make_guide(model: RowModel, stages: StageIntervals, sync_cap: float) -> Guide:
    """Tables for `stages.intervals`, joined so that they are few and small enough."""
    pieces = list(stages.intervals)
    values = model.stage_values
    _, last = pieces[-1]
    sample, _ = model.tables(float(values[last]), sync_cap)
    most = max(2, min(MAX_TABLES, MAX_TABLE_SIZE // max(1, sample.size)))
    while len(pieces) > most:
        spans = [values[pieces[i + 1][1]] - values[pieces[i][0]] for i in range(len(pieces) - 1)]
        i = int(np.argmin(spans))
        pieces[i : i + 2] = [(pieces[i][0], pieces[i + 1][1])]
    ahead = [model.tables(float(values[b]), sync_cap)[0] for _, b in pieces]
    return Guide(
        np.stack(ahead),
        values[[a for a, _ in pieces]],
        values[[b for _, b in pieces]] * (1 + 1e-12),
    )


def search(
    model: RowModel,
    guide: Guide,
    box: SyncBox,
    *,
    width: int,
    most_leaves: int,
    tolerance: float,
    incumbent: Floats,
    stop: Ints,
    forced: Ints | None = None,
) -> Found:
    """Run `search_columns`; `incumbent` [1] and `stop` [1] are shared with other threads."""
    lay = model.layout
    config, cells = lay.config, lay.cells
    degrees = [config.pipeline, config.data, config.tensor, config.micro_batch, config.gas]
    if forced is None:
        forced = np.full((config.pipeline, config.data), -1, dtype=np.int64)
    cost, dropped, ends, shapes, counts = search_columns(
        np.array(degrees, dtype=np.int64),
        cells.size,
        cells.kind,
        cells.before,
        cells.bandwidth,
        np.ascontiguousarray(lay.thresholds[:, cells.type]),
        lay.prefix,
        lay.params,
        lay.saved,
        lay.link,
        lay.sync,
        lay.capacity,
        lay.state_factor,
        lay.shape_cells,
        lay.shape_kind,
        lay.shape_zone,
        lay.zone_room,
        lay.zone_base,
        guide.ahead,
        guide.low,
        guide.high,
        np.array([box.low, box.high]),
        forced,
        width,
        most_leaves,
        tolerance,
        incumbent,
        stop,
    )
    return Found(cost, dropped, ends, shapes, int(counts[0]), int(counts[1]), bool(counts[2]))


def decision_of(layout: Layout, ends: Ints, shapes: Ints) -> AmpDecision:
    """The decision with these stage ends and group shapes; devices of a cell are taken in order."""
    config = layout.config
    free = [list(reversed(members)) for members in layout.cells.members]
    placement = [
        [[free[cell].pop() for cell in layout.shape_cells[shape].tolist()] for shape in row]
        for row in shapes.tolist()
    ]
    bounds = [0, *ends.tolist()]
    return AmpDecision(
        pipeline=config.pipeline,
        data=config.data,
        tensor=config.tensor,
        micro_batch=config.micro_batch,
        placement=placement,
        stages=list(zip(bounds[:-1], bounds[1:], strict=True)),
    )
