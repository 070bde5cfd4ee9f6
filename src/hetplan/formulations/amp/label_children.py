"""The children of the search's labels, each with a lower bound; many labels at once, as arrays.

The search first extends a label by every end of its next stage (`ChildRules.open_stage`), and then
by every shape of the tensor group in row 0, 1, ... (`ChildRules.place_group`); a row is a pipeline.
Times, synchronisation and memory are exact. The rest of each row is bounded by itself: a row whose
group of the stage is placed, by the completion tables of rows.py (`Completions`); a row whose group
is still to be placed, by the best class of shapes for it (`ChildRules.open_row_costs`).
`least_together` makes one bound of all rows, since together they have to use up all devices.

Sizes of arrays: X labels, V children, R rows, N shapes, C classes of shapes with one kind and one
zone, K cells, L layers, H burdens, A levels of a burden, Q intervals of the slowest stage's time,
S states of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.amp.problem import Floats, Ints
from hetplan.formulations.amp.rows import RowModel, SyncBox
from hetplan.solvers.labels import Labels

# Rounding must not exclude synchronisation that a box allows.
SLACK = 1 + 1e-12


@dataclass(frozen=True)
class Completions:
    """What the stages to come cost a row at least, by the time of its slowest stage.

    The intervals of that time ascend and do not overlap. Interval Q stands for none: it costs
    infinitely much.
    """

    waits: int  # how often the slowest stage counts beyond its own pass: micro-batches - 1
    low: Floats  # [Q + 1] seconds, the slowest stage takes at least this
    high: Floats  # [Q] seconds, and less than this: the least time on any zone beyond the interval
    ahead: Floats  # [Q + 1, S, L + 1, H, A] seconds of the stages to come, see `rows.complete`
    later: Floats  # [Q + 2, S, L + 1, H, A] least of wait and `ahead` in an interval from here on

    def row_costs(self, state: Ints, end: Ints, total: Floats, top: Floats) -> Floats:
        """[..., H, A] least cost of rows, by the burden that each is still to absorb.

        state: that of the rows, as in `rows.complete`. end: layers done. total: Σ t + Σ e so far.
        top: the slowest stage so far.
        """
        interval = np.searchsorted(self.high, top)  # the first that may hold the slowest stage
        wait = self.waits * np.maximum(top, self.low[interval])
        in_interval = wait[..., None, None] + self.ahead[interval, state, end]
        in_later_one = self.later[interval + 1, state, end]
        return np.asarray(total[..., None, None] + np.minimum(in_interval, in_later_one))


def least_together(costs: Floats, need: Ints, most: Ints) -> Floats:
    """[V] the least cost at which the rows together can absorb all burdens.

    costs: [V, R, H, A] least cost of each row by the burden that it absorbs. need: [V, H] what all
    rows together have to absorb. most: [H] the burden that the last level of a row stands for.
    """
    children, rows, burdens, levels = costs.shape
    level = np.asarray(costs[:, :, 0, 0].max(axis=1))
    if levels == 1:
        return level
    # From one level to the next a row absorbs one more, with the last one all that there is.
    gain = np.ones((burdens, rows, levels - 1), dtype=np.int64)
    gain[:, :, -1] = (most - (levels - 2))[:, None]
    gain = gain.reshape(1, burdens, rows * (levels - 1))
    steps = costs[..., 1:].transpose(0, 2, 1, 3).reshape(children, *gain.shape[1:])
    cheapest_first = np.argsort(steps, axis=-1, kind="stable")
    gained = np.take_along_axis(gain, cheapest_first, axis=-1).cumsum(axis=-1)
    enough = gained >= need[..., None]
    last_step = np.take_along_axis(cheapest_first, enough.argmax(axis=-1)[..., None], axis=-1)
    price = np.take_along_axis(steps, last_step, axis=-1)[..., 0]
    price = np.where(enough.any(axis=-1), price, np.inf)
    price = np.where(need > 0, price, 0.0)
    return np.asarray(np.maximum(level, price.max(axis=1)))


@dataclass(frozen=True)
class Stage:
    """The data of one stage of the pipelines."""

    # Layers a to b - 1 on groups of each kind and at least in each zone; +inf where they cannot be
    # the stage.
    seconds: Floats  # [M, L + 1, L + 1]
    zone_seconds: Floats  # [Z, L + 1, L + 1]
    link: Floats  # [L + 1] bytes sent to it where it begins at layer l
    completions: Completions  # from the next stage on


def make_stages(model: RowModel, intervals: Sequence[tuple[int, int]], box: SyncBox) -> list[Stage]:
    """The stages; intervals: of the slowest stage's time, first and last of `model.stage_values`,
    ascending."""
    groups, values, waits = model.groups, model.stage_values, model.groups.config.gas - 1
    low = values[[first for first, _ in intervals]]
    high = np.append(values, np.inf)[[last + 1 for _, last in intervals]]
    tables = [model.tables(float(values[last]), box.high)[0] for _, last in intervals]
    stages = []
    for j in range(groups.config.pipeline):
        ahead = np.stack([np.moveaxis(table[:, j + 1], 0, 2) for table in tables])
        none = np.full((1, *ahead.shape[1:]), np.inf)
        with_wait = (waits * low)[:, None, None, None, None] + ahead
        latest_first = np.concatenate([none, none, with_wait[::-1]])
        completions = Completions(
            waits=waits,
            low=np.append(low, low[-1]),
            high=high,
            ahead=np.concatenate([ahead, none]),
            later=np.ascontiguousarray(np.minimum.accumulate(latest_first)[::-1]),
        )
        link = groups.link if j > 0 else np.zeros_like(groups.link)
        stages.append(Stage(*groups.stage_seconds(j), link, completions))
    return stages


@dataclass(frozen=True)
class OpenedStages:
    """V children of some labels with one more stage, whose groups are to be placed."""

    parent: Ints  # [V] the label that the child extends
    end: Ints  # [V] end of the stage
    bound: Floats  # [V] seconds; every decision of the child costs at least this


@dataclass(frozen=True)
class PlacedGroups:
    """V children of some labels with one more group."""

    parent: Ints  # [V] the label that the child extends
    shape: Ints  # [V] the group's shape
    total: Floats  # [V] seconds, Σ t + Σ e of the group's row
    top: Floats  # [V] seconds, slowest stage of the group's row
    synced: Floats  # [V] seconds, slowest synchronisation so far
    bound: Floats  # [V] seconds; every decision of the child costs at least this

    def only(self, chosen: NDArray[Any]) -> "PlacedGroups":
        """Some of the children, by their numbers or by a mask."""
        return PlacedGroups(*(getattr(self, column.name)[chosen] for column in fields(self)))


class ChildRules:
    """How the labels of one configuration are extended, with synchronisation in a box."""

    def __init__(self, model: RowModel, intervals: Sequence[tuple[int, int]], box: SyncBox) -> None:
        """intervals: see `make_stages`."""
        self.groups, self.box = model.groups, box
        self.tensor, self.waits = model.groups.config.tensor, model.groups.config.gas - 1
        self.stages = make_stages(model, intervals, box)
        cells = model.groups.shape_cells
        # [tp, N] how often the rank's cell occurs among this rank and those before it
        self.occurrence = np.stack(
            [(cells[:, : r + 1] == cells[:, [r]]).sum(axis=1) for r in range(self.tensor)]
        )
        self.in_first_cell = (cells == cells[:, :1]).sum(axis=1)  # [N] how many ranks lie there
        self.cell_weight = model.cell_weight  # [H, K] of one device
        self.shape_weight = model.cell_weight[:, cells].sum(axis=2).T  # [N, H] of its devices
        self.most = model.groups.config.pipeline * model.weight.max(axis=1)  # [H] of a whole row
        # [Z, H, A] what a row still has to absorb behind a group of the zone
        absorbed = model.weight.T[..., None]
        self.level_behind = np.maximum(0, np.arange(model.levels) - absorbed)

    def open_stage(self, j: int, labels: Labels, limit: float) -> OpenedStages:
        """Every label with every end of stage j, where the bound is below the limit."""
        x, end = np.nonzero(np.arange(len(self.groups.params)) > labels["end"][:, None])
        floor = self.floor(labels["synced"][x])
        every_row = np.arange(self.groups.config.data)
        costs = self.open_row_costs(j, labels, every_row, labels["end"], x, end, limit - floor)
        keep, bound = self.below(limit, floor, costs, self.weight_left(labels)[x])
        x = x[keep]
        return OpenedStages(x, end[keep], np.maximum(bound, labels["bound"][x]))

    def place_group(self, j: int, i: int, labels: Labels, limit: float) -> PlacedGroups:
        """Every label with every shape of row i's group on stage j, where the bound is below the
        limit."""
        placed = self.priced_groups(j, i, labels)
        row = self.waits * placed.top + placed.total
        within_limit = self.floor(placed.synced) + row < limit
        placed = placed.only(within_limit & (placed.synced <= self.box.high * SLACK))
        x, shape = placed.parent, placed.shape
        cell = self.groups.shape_cells[shape, 0]
        devices = self.devices_left(labels)[x, cell] - self.in_first_cell[shape]
        state = self.state(self.groups.shape_zone[shape], devices)
        costs = self.other_row_costs(j, i, labels, limit)[x]
        costs[:, i] = self.stages[j].completions.row_costs(
            state, labels["end"][x], placed.total, placed.top
        )
        weight_left = self.weight_left(labels)[x] - self.shape_weight[shape]
        keep, bound = self.below(limit, self.floor(placed.synced), costs, weight_left)
        placed = placed.only(keep)
        return replace(placed, bound=np.maximum(bound, placed.bound))

    def priced_groups(self, j: int, i: int, labels: Labels) -> PlacedGroups:
        """Every label with every shape of row i's group on stage j that fits into its cells and
        into memory; bounded as the label is."""
        stage, params = self.stages[j], self.groups.params
        seconds = stage.seconds[:, labels["first"], labels["end"]]  # [M, X]
        fits_memory = np.isfinite(seconds)[self.groups.shape_kind].T
        x, shape = np.nonzero(self.has_room(labels) & fits_memory)
        seconds = seconds[self.groups.shape_kind[shape], x]
        first, end, last = labels["first"][x], labels["end"][x], labels["last"][x]
        link = stage.link[first] / self.speed_between(last[:, i], shape)
        speed = np.full(len(x), np.inf)  # of the stage's data groups so far
        for k in range(i):
            speed = np.minimum(speed, self.speed_between(last[:, k], shape))
        synced = (params[end] - params[first]) * self.groups.sync / speed
        return PlacedGroups(
            parent=x,
            shape=shape,
            total=labels["sums"][x, i] + seconds + link,
            top=np.maximum(labels["tops"][x, i], seconds),
            synced=np.maximum(labels["synced"][x], synced),
            bound=labels["bound"][x],
        )

    def floor(self, synced: Floats) -> Floats:
        """[V] the least synchronisation, seconds, of children in the box."""
        return np.maximum(self.box.low, synced)

    def below(
        self, limit: float, floor: Floats, costs: Floats, weight_left: Ints
    ) -> tuple[Ints, Floats]:
        """The numbers of the children whose bound is below the limit, and these bounds.

        floor: [V] seconds, least synchronisation. costs: [V, R, H, A] of each row. weight_left:
        [V, H] of the devices that the child leaves.
        """
        keep = np.flatnonzero(floor + costs[:, :, 0, 0].max(axis=1) < limit)
        need = -(-weight_left[keep] // self.tensor)
        bound = floor[keep] + least_together(costs[keep], need, self.most)
        below = bound < limit
        return keep[below], bound[below]

    def other_row_costs(self, j: int, i: int, labels: Labels, limit: float) -> Floats:
        """[X, R, H, A] least cost of all rows but row i: those before i have a group on stage j,
        those behind have not. Row i is left open."""
        rows = self.groups.config.data
        everyone, first, end = np.arange(len(labels)), labels["first"], labels["end"]
        costs = np.full((len(labels), rows, *self.level_behind.shape[1:]), np.inf)
        budget = limit - self.floor(labels["synced"])
        behind = np.arange(i + 1, rows)
        costs[:, i + 1 :] = self.open_row_costs(j, labels, behind, first, everyone, end, budget)
        placed = labels["last"][:, :i]
        cell = self.groups.shape_cells[placed, 0]
        devices = np.take_along_axis(self.devices_left(labels), cell, axis=1)
        costs[:, :i] = self.stages[j].completions.row_costs(
            self.state(self.groups.shape_zone[placed], devices),
            np.broadcast_to(end[:, None], placed.shape),
            labels["sums"][:, :i],
            labels["tops"][:, :i],
        )
        return costs

    def open_row_costs(
        self, j: int, labels: Labels, rows: Ints, begin: Ints, x: Ints, end: Ints, budget: Floats
    ) -> Floats:
        """[V, R, H, A] least cost of the given rows where stage j of label x [V] ends before layer
        `end` [V].

        Each row takes a group in the zone that is best for it, in an empty cell and at no cost for
        the link, whatever the others take. begin: [X] first layer of the stage. budget: [V]
        seconds; zones that cost a row as much as that are left out.
        """
        stage = self.stages[j]
        sums, tops = labels["sums"][:, rows], labels["tops"][:, rows]
        least = np.full((len(x), len(rows), *self.level_behind.shape[1:]), np.inf)
        for zone, absorbed in enumerate(self.level_behind):
            seconds = stage.zone_seconds[zone, begin[x], end]
            v = np.flatnonzero(np.isfinite(seconds))
            total = sums[x[v]] + seconds[v, None]
            top = np.maximum(tops[x[v]], seconds[v, None])
            cheap, row = np.nonzero(self.waits * top + total < budget[v, None])
            total, top, v = total[cheap, row], top[cheap, row], v[cheap]
            state = np.full(len(v), self.groups.zones.base[zone + 1] - 1)
            cost = stage.completions.row_costs(state, end[v], total, top)
            behind = np.take_along_axis(cost, absorbed[None], axis=2)
            least[v, row] = np.minimum(least[v, row], behind)
        return least

    def speed_between(self, shape: Ints, other: Ints) -> Floats:
        """[...] the slowest bandwidth, in bytes/s, between equal ranks of two groups."""
        cells, bandwidth = self.groups.shape_cells, self.groups.cells.bandwidth
        ranks = range(self.tensor)
        lanes = [bandwidth[cells[shape, rank], cells[other, rank]] for rank in ranks]
        return np.asarray(np.minimum.reduce(lanes))

    def state(self, zone: Ints, devices: Ints) -> Ints:
        """[...] the state, as in `rows.complete`, of a row whose last group lies in the zone and
        whose cell has `devices` left."""
        zones = self.groups.zones
        most = np.maximum(zones.room[zone] - 1, 0)
        groups_left = np.clip(devices // self.tensor, 0, most)
        return np.asarray(zones.base[zone] + groups_left)

    def devices_left(self, labels: Labels) -> Ints:
        """[X, K] the devices of each cell that a label leaves."""
        return np.asarray(self.groups.cells.size - labels["used"])

    def weight_left(self, labels: Labels) -> Ints:
        """[X, H] the weight of the devices that a label leaves."""
        return np.asarray(self.devices_left(labels) @ self.cell_weight.T)

    def has_room(self, labels: Labels) -> NDArray[np.bool_]:
        """[X, N] whether a label leaves the devices of a group of each shape."""
        free = self.devices_left(labels)
        ranks = zip(self.groups.shape_cells.T, self.occurrence, strict=True)
        return np.asarray(np.logical_and.reduce([free[:, c] >= count for c, count in ranks]))
