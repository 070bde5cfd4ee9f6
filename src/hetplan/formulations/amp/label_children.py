"""The children of the search's labels, each with a lower bound; many labels at once, as arrays.

The search first extends a label by every end of its next stage (`ChildRules.open_stage`), and then
by every shape of the tensor group in row 0, 1, ... (`ChildRules.place_group`). A *row* is a
pipeline. Times, synchronisation and memory of the placed groups are exact. The stages to come are
bounded row by row:
- a row whose group of the present stage is placed, by the completion tables of rows.py
  (`Completions`);
- a row whose group of the present stage is still to be placed, by the best zone for that group
  (`ChildRules.open_row_costs`).
`least_together` makes one bound of the bounds of all rows, since the rows together have to use all
devices. This is counted by burdens. A burden gives each device type a weight, and a group absorbs
the weight of its slowest type. The rows together have to absorb at least 1/tp of the weight of all
devices, where tp is the tensor degree (zones.py).

Sizes of arrays: X labels, V children, R rows, N shapes, M kinds of shapes, Z zones, K cells,
L layers, H burdens, A levels of a burden (level k: the row still has to absorb a weight of at least
k), Q intervals of the slowest stage's time, S states of a row (rows.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.amp.problem import Floats, Ints
from hetplan.formulations.amp.rows import SLACK, RowModel, SyncBox
from hetplan.solvers.labels import Labels


@dataclass(frozen=True)
class Completions:
    """Lower bounds on the cost of a row's stages to come, by the interval that holds the time of
    the row's slowest stage.

    The Q intervals ascend and do not overlap. Number Q stands for no interval, at infinite cost.
    """

    waits: int  # gas - 1: how often the slowest stage counts beside the sum of all stages
    # [Q + 1] seconds; the slowest stage takes at least this. Entry Q may be any number, since its
    # cost `ahead` is infinite.
    low: Floats
    # [Q] seconds; the slowest stage takes less than this, the candidate time that follows the
    # interval's last one
    high: Floats
    ahead: Floats  # [Q + 1, S, L + 1, H, A] seconds of the stages to come, see `rows.complete`
    # [Q + 2, S, L + 1, H, A] least of waits low + ahead in this interval and all later ones
    later: Floats

    def row_costs(self, state: Ints, end: Ints, total: Floats, top: Floats) -> Floats:
        """[..., H, A] seconds that rows cost at least, by the level of a burden that each still has
        to absorb.

        state: state of the rows, see `rows.complete`. end: the layer behind the last stage. total:
        seconds, Σ t + Σ e so far. top: seconds, the slowest stage so far. Their shape is `...`.
        """
        # The first interval that may hold the slowest stage. One that ends at `top` is included,
        # which can only lower the bound.
        interval = np.searchsorted(self.high, top)
        wait = self.waits * np.maximum(top, self.low[interval])
        in_interval = wait[..., None, None] + self.ahead[interval, state, end]
        in_later_one = self.later[interval + 1, state, end]
        return np.asarray(total[..., None, None] + np.minimum(in_interval, in_later_one))


def least_together(costs: Floats, need: Ints, most: Ints) -> Floats:
    """[V] the least cost, in seconds, that the most expensive row must have for the rows together
    to absorb all burdens.

    costs: [V, R, H, A] least cost of each row by the level that it absorbs. need: [V, H] weight
    that all rows together have to absorb. most: [H] weight that a row on its last level absorbs.
    """
    children, rows, burdens, levels = costs.shape
    # on level 0 there is nothing to absorb, so that all burdens have the same costs there
    without_burden = np.asarray(costs[:, :, 0, 0].max(axis=1))
    if levels == 1:
        return without_burden
    # A step takes a row from one level to the next, on which it absorbs a weight of one more. The
    # last step takes it to the last level, on which it absorbs `most`. A row costs no less on a
    # higher level, so a stable sort by cost has the steps of each row in order. The cheapest steps
    # are taken until the rows absorb enough. The cost of the last step taken is the price.
    gain = np.ones((burdens, rows, levels - 1), dtype=np.int64)
    gain[:, :, -1] = (most - (levels - 2))[:, None]
    gain = gain.reshape(1, burdens, rows * (levels - 1))
    step_costs = costs[..., 1:].transpose(0, 2, 1, 3).reshape(children, *gain.shape[1:])
    cheapest_first = np.argsort(step_costs, axis=-1, kind="stable")
    absorbed = np.take_along_axis(gain, cheapest_first, axis=-1).cumsum(axis=-1)
    enough = absorbed >= need[..., None]
    first_enough = enough.argmax(axis=-1)[..., None]
    last_step = np.take_along_axis(cheapest_first, first_enough, axis=-1)
    price = np.take_along_axis(step_costs, last_step, axis=-1)[..., 0]  # [V, H]
    price = np.where(enough.any(axis=-1), price, np.inf)
    price = np.where(need > 0, price, 0.0)
    return np.asarray(np.maximum(without_burden, price.max(axis=1)))


@dataclass(frozen=True)
class Stage:
    """The costs of stage j in all pipelines."""

    # Seconds of layers a to b - 1 on a group of each kind, and at least on a group of each zone;
    # +inf where these layers cannot be the stage.
    seconds: Floats  # [M, L + 1, L + 1]
    zone_seconds: Floats  # [Z, L + 1, L + 1]
    link: Floats  # [L + 1] bytes that are sent to the stage where it begins at layer l
    completions: Completions  # lower bounds on the cost of stages j + 1, j + 2, …


def make_stages(model: RowModel, intervals: Sequence[tuple[int, int]], box: SyncBox) -> list[Stage]:
    """The costs of each stage.

    intervals: intervals of the time of the slowest stage, ascending; numbers of the first and the
    last candidate time in `model.stage_values`.
    """
    groups = model.groups
    values = model.stage_values
    waits = model.groups.config.gas - 1
    low = values[[first for first, _ in intervals]]
    high = np.append(values, np.inf)[[last + 1 for _, last in intervals]]
    tables = []  # [H, pp + 1, S, L + 1, A] of each interval
    for _, last in intervals:
        ahead_of_stages, _ = model.tables(float(values[last]), box.high)
        tables.append(ahead_of_stages)
    stages = []
    for j in range(groups.config.pipeline):
        # [Q, S, L + 1, H, A] of stages j + 1, j + 2, …
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
    """V children, each of which extends a label by the layers of its next stage."""

    parent: Ints  # [V] the label that the child extends
    end: Ints  # [V] end of the stage
    bound: Floats  # [V] seconds; every decision of the child costs at least this


@dataclass(frozen=True)
class PlacedGroups:
    """V children, each of which extends a label by the group of one row on its last stage."""

    parent: Ints  # [V] the label that the child extends
    shape: Ints  # [V] the group's shape
    total: Floats  # [V] seconds, Σ t + Σ e so far of the group's row
    top: Floats  # [V] seconds, slowest stage so far of the group's row
    synced: Floats  # [V] seconds, slowest synchronisation so far
    bound: Floats  # [V] seconds; every decision of the child costs at least this

    def select(self, chosen: NDArray[Any]) -> "PlacedGroups":
        """The chosen children. chosen: their numbers, or a mask [V]."""
        return PlacedGroups(*(getattr(self, column.name)[chosen] for column in fields(self)))


class ChildRules:
    """Extends the labels of one configuration whose synchronisation time lies in a box."""

    def __init__(self, model: RowModel, intervals: Sequence[tuple[int, int]], box: SyncBox) -> None:
        """intervals: see `make_stages`."""
        self.groups, self.box = model.groups, box
        self.tensor = model.groups.config.tensor
        self.waits = model.groups.config.gas - 1
        self.stages = make_stages(model, intervals, box)
        cells = model.groups.shape_cells
        # [tp, N] number of ranks, up to this one, that are in this rank's cell
        self.occurrence = np.stack(
            [(cells[:, : r + 1] == cells[:, [r]]).sum(axis=1) for r in range(self.tensor)]
        )
        # [N] number of ranks in the first rank's cell
        self.in_first_cell = (cells == cells[:, :1]).sum(axis=1)
        self.cell_weight = model.cell_weight  # [H, K] weight of one device
        self.shape_weight = model.cell_weight[:, cells].sum(axis=2).T  # [N, H] of all its devices
        # [H] most weight that a row absorbs
        self.most = model.groups.config.pipeline * model.weight.max(axis=1)
        # [Z, H, A] the level that a row of each level has behind a group of the zone
        absorbed = model.weight.T[..., None]
        self.level_behind = np.maximum(0, np.arange(model.levels) - absorbed)

    def open_stage(self, j: int, labels: Labels, limit: float) -> OpenedStages:
        """Every label extended by every end of stage j, where the child's bound is below the
        limit."""
        # x, end [V]: label and end of each child
        x, end = np.nonzero(np.arange(len(self.groups.params)) > labels["end"][:, None])
        floor = self.floor(labels["synced"][x])
        every_row = np.arange(self.groups.config.data)
        costs = self.open_row_costs(j, labels, every_row, labels["end"], x, end, limit - floor)
        keep, bound = self.below(limit, floor, costs, self.weight_left(labels)[x])
        x = x[keep]
        return OpenedStages(x, end[keep], np.maximum(bound, labels["bound"][x]))

    def place_group(self, j: int, i: int, labels: Labels, limit: float) -> PlacedGroups:
        """Every label extended by every shape of row i's group on stage j, where the child's bound
        is below the limit."""
        placed = self.priced_groups(j, i, labels)
        row = self.waits * placed.top + placed.total
        within_limit = self.floor(placed.synced) + row < limit
        # rounding must not exclude a synchronisation time that the box allows
        placed = placed.select(within_limit & (placed.synced <= self.box.high * SLACK))
        x, shape = placed.parent, placed.shape
        # A row's state counts the devices that are left in the cell of its last group. A pure group
        # lies in a single cell, that of its first rank. A zone of straddling groups has only one
        # state, so that any cell will do.
        cell = self.groups.shape_cells[shape, 0]
        devices = self.devices_left(labels)[x, cell] - self.in_first_cell[shape]
        state = self.state(self.groups.shape_zone[shape], devices)
        costs = self.other_row_costs(j, i, labels, limit)[x]
        costs[:, i] = self.stages[j].completions.row_costs(
            state, labels["end"][x], placed.total, placed.top
        )
        weight_left = self.weight_left(labels)[x] - self.shape_weight[shape]
        keep, bound = self.below(limit, self.floor(placed.synced), costs, weight_left)
        placed = placed.select(keep)
        return replace(placed, bound=np.maximum(bound, placed.bound))

    def priced_groups(self, j: int, i: int, labels: Labels) -> PlacedGroups:
        """Every label extended by every shape of row i's group on stage j for which there are
        devices and memory. A child has the bound of its label."""
        stage, params = self.stages[j], self.groups.params
        seconds = stage.seconds[:, labels["first"], labels["end"]]  # [M, X]
        fits_memory = np.isfinite(seconds)[self.groups.shape_kind].T
        x, shape = np.nonzero(self.has_room(labels) & fits_memory)
        seconds = seconds[self.groups.shape_kind[shape], x]
        first, end, last = labels["first"][x], labels["end"][x], labels["last"][x]
        # on stage 0 rows have no last group; its number stands for any group, as nothing is sent
        link = stage.link[first] / self.speed_between(last[:, i], shape)
        speed = np.full(len(x), np.inf)  # bytes/s between this group and those in rows before i
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
        """[V] seconds that synchronisation takes at least. synced: [V] slowest so far."""
        return np.maximum(self.box.low, synced)

    def below(
        self, limit: float, floor: Floats, costs: Floats, weight_left: Ints
    ) -> tuple[Ints, Floats]:
        """(numbers of the children whose bounds are below the limit, these bounds).

        floor: [V] seconds that synchronisation takes at least. costs: [V, R, H, A] seconds that
        each row costs at least. weight_left: [V, H] weight of the devices not yet in use.
        """
        keep = np.flatnonzero(floor + costs[:, :, 0, 0].max(axis=1) < limit)
        # a group of `tensor` devices absorbs the weight of one of them, the largest
        need = -(-weight_left[keep] // self.tensor)
        bound = floor[keep] + least_together(costs[keep], need, self.most)
        below = bound < limit
        return keep[below], bound[below]

    def other_row_costs(self, j: int, i: int, labels: Labels, limit: float) -> Floats:
        """[X, R, H, A] seconds that all rows but row i cost at least; +inf for row i.

        Rows 0 to i - 1 have a group on stage j, rows i + 1, … have none yet.
        """
        rows = self.groups.config.data
        every_label = np.arange(len(labels))
        first = labels["first"]
        end = labels["end"]
        costs = np.full((len(labels), rows, *self.level_behind.shape[1:]), np.inf)
        budget = limit - self.floor(labels["synced"])
        behind = np.arange(i + 1, rows)
        costs[:, i + 1 :] = self.open_row_costs(j, labels, behind, first, every_label, end, budget)
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
        """[V, R, H, A] seconds that rows without a group on stage j cost at least.

        A relaxation: each row gets a group in the zone that is best for it, in an empty cell and
        with a link that costs nothing, regardless of the other rows.

        rows: [R] numbers of the rows. begin: [X] first layer of stage j. x: [V] label. end: [V] the
        layer behind stage j. budget: [V] seconds; a zone that costs a row as much as that is left
        out.
        """
        stage = self.stages[j]
        sums, tops = labels["sums"][:, rows], labels["tops"][:, rows]
        least = np.full((len(x), len(rows), *self.level_behind.shape[1:]), np.inf)
        for zone, level_behind in enumerate(self.level_behind):
            seconds = stage.zone_seconds[zone, begin[x], end]
            v = np.flatnonzero(np.isfinite(seconds))
            total = sums[x[v]] + seconds[v, None]
            top = np.maximum(tops[x[v]], seconds[v, None])
            cheap, row = np.nonzero(self.waits * top + total < budget[v, None])
            total, top, v = total[cheap, row], top[cheap, row], v[cheap]
            # the last state of the zone: the zone's largest cell holds this group alone
            state = np.full(len(v), self.groups.zones.base[zone + 1] - 1)
            cost = stage.completions.row_costs(state, end[v], total, top)
            behind = np.take_along_axis(cost, level_behind[None], axis=2)
            least[v, row] = np.minimum(least[v, row], behind)
        return least

    def speed_between(self, shape: Ints, other: Ints) -> Floats:
        """[...] the slowest bandwidth, in bytes/s, between equal ranks of two groups. shape, other:
        [...] their shapes."""
        cells, bandwidth = self.groups.shape_cells, self.groups.cells.bandwidth
        of_ranks = [
            bandwidth[cells[shape, rank], cells[other, rank]] for rank in range(self.tensor)
        ]
        return np.asarray(np.minimum.reduce(of_ranks))

    def state(self, zone: Ints, devices: Ints) -> Ints:
        """[...] the state, as in `rows.complete`, of a row whose last group lies in the zone and
        whose cell has `devices` left."""
        zones = self.groups.zones
        most = np.maximum(zones.room[zone] - 1, 0)
        groups_left = np.clip(devices // self.tensor, 0, most)
        return np.asarray(zones.base[zone] + groups_left)

    def devices_left(self, labels: Labels) -> Ints:
        """[X, K] number of devices of each cell that are not in use."""
        return np.asarray(self.groups.cells.size - labels["used"])

    def weight_left(self, labels: Labels) -> Ints:
        """[X, H] weight of the devices that are not in use."""
        return np.asarray(self.devices_left(labels) @ self.cell_weight.T)

    def has_room(self, labels: Labels) -> NDArray[np.bool_]:
        """[X, N] whether a group of each shape finds enough devices in its cells."""
        free = self.devices_left(labels)
        fits = []  # [X, N] of each rank: whether its cell has a device for it and the ranks before
        for cell, count in zip(self.groups.shape_cells.T, self.occurrence, strict=True):
            fits.append(free[:, cell] >= count)
        return np.asarray(np.logical_and.reduce(fits))
