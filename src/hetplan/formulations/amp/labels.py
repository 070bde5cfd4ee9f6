"""The label search of one configuration: stage by stage, and in a stage group by group.

A label stands for a choice of layers for the first stages and of cells for their tensor groups, the
last stage perhaps unfinished. It is opened by every end of the next stage (`open_stage`), and then
extended by every shape of the group in row 0, 1, ... (`place_group`); a row is a pipeline. Times,
synchronisation and memory are exact, only the future is bounded (rows.py). The engine of
solvers/labels.py keeps the labels of least bound that no other makes superfluous. What it cuts
leaves its least bound behind, so a search that cuts nothing below the limit has proven its best
decision optimal. docs/method-amp.md has the proofs.

Letters: x label, j stage, i row, r tensor rank, n shape, c class, z zone, h burden, a and b first
and end layer of the stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetplan.compiled import kernel
from hetplan.formulations.amp.problem import Floats, Ints, Strategy
from hetplan.formulations.amp.rows import RowModel, SyncBox
from hetplan.solvers import labels as engine
from hetplan.solvers.labels import Extensions, Labelled, Labels, Numbers, set_labels
from hetplan.solvers.run import Run


@dataclass(frozen=True)
class Limits:
    """What one label search spends."""

    # Intervals of the slowest stage that the search tells apart; more are joined. More raise the
    # bounds and take more time for each.
    most_tables: int = 14
    # Completion tables together, in numbers (8 bytes each).
    most_table_size: int = 2**25
    # Extensions of one call of a kernel at most (some 48 bytes each, well under a second).
    chunk: int = 2**20
    # Labels of equal hash that each label is compared with.
    neighbours: int = 8


class Grid(NamedTuple):
    """The configuration as the kernels see it; arrays as in `layout.Layout`, C classes of shapes of
    one kind and one zone, Q intervals of the slowest stage."""

    gas: int
    size: Ints  # [K] devices of a cell
    bandwidth: Floats  # [K, K]
    params: Floats  # [L + 1]
    sync: float
    shape_cells: Ints  # [N, tp]
    shape_rank: Ints  # [N, tp] how often the rank's cell occurs among this rank and those before
    shape_class: Ints  # [N]
    class_kind: Ints  # [C]
    class_zone: Ints  # [C]
    room: Ints  # [Z]
    base: Ints  # [Z]
    weight: Ints  # [H, Z]
    cell_weight: Ints  # [H, K] of one device
    shape_weight: Ints  # [H, N] of the shape's devices
    most: Ints  # [H] all that a row could ever absorb
    low: Floats  # [Q] the slowest stage takes at least this
    high: Floats  # [Q] and less than this: the least time on any zone beyond the table's cap


class Stage(NamedTuple):
    """What depends on the number of the stage."""

    seconds: Floats  # [M, L + 1, L + 1] layers a to b - 1; +inf where they cannot be the stage
    link: Floats  # [L + 1] bytes sent to it where it begins at layer l
    ahead: Floats  # [Q, H, S, L + 1, A] completions from the next stage on, see `rows.complete`


class Parts(NamedTuple):
    """Fields of the labels, all with the same number of stages and groups."""

    first: Ints  # [X] first layer of the last stage
    end: Ints  # [X] layers done
    used: Ints  # [X, K] devices taken of each cell
    last: Ints  # [X, dp] shape of each row's last group
    sums: Floats  # [X, dp] Σ t + Σ e so far
    tops: Floats  # [X, dp] slowest stage so far
    synced: Floats  # [X] slowest synchronisation so far
    bound: Floats  # [X] seconds; every decision of the label costs at least this


class Children(NamedTuple):
    """What a kernel writes of each child."""

    parent: Ints
    choice: Ints  # the end of the stage, or the shape of the group
    total: Floats  # `sums` and `tops` of the row
    top: Floats
    synced: Floats
    bound: Floats


@kernel
def speed_between(bandwidth: Floats, shape_cells: Ints, n: int, m: int) -> float:
    """Slowest bandwidth between equal ranks of two groups of shapes n and m, bytes/s."""
    speed = np.inf
    for r in range(shape_cells.shape[1]):
        speed = min(speed, bandwidth[shape_cells[n, r], shape_cells[m, r]])
    return speed


@kernel
def row_cost(
    grid: Grid, ahead: Floats, state: int, b: int, total: float, top: float, out: Floats
) -> None:
    """out [H, A]: least cost of a row whose Σ t + Σ e is `total` and whose slowest stage is `top`
    up to layer b, by what it is still to absorb; state: see `rows.complete`."""
    for h in range(out.shape[0]):
        for k in range(out.shape[1]):
            least = np.inf
            for q in range(len(grid.low)):
                if grid.high[q] >= top:
                    fixed = (grid.gas - 1) * max(top, grid.low[q])
                    least = min(least, fixed + ahead[q, h, state, b, k])
            out[h, k] = least + total


@kernel
def least_together(costs: Floats, left: Ints, tp: int, most: Ints) -> float:
    """Least t such that rows of cost t each can absorb all burdens of the devices that remain.

    costs [dp, H, A]; left [H] weight of those devices. The end of a row's table stands for `most`
    [H].
    """
    rows, burdens, levels = costs.shape
    level = 0.0
    for i in range(rows):
        level = max(level, costs[i, 0, 0])
    for h in range(burdens):
        need = -(-left[h] // tp)
        while need > 0 and level < np.inf:
            absorbed, cheapest = 0, np.inf
            for i in range(rows):
                k = 0
                while k + 1 < levels and costs[i, h, k + 1] <= level:
                    k += 1
                if k + 1 < levels:
                    absorbed += k
                    cheapest = min(cheapest, costs[i, h, k + 1])
                else:
                    absorbed += most[h]
            if absorbed >= need:
                break
            level = cheapest
    return level


@kernel
def state_of(grid: Grid, zone: int, groups: int) -> int:
    """A row's state in a zone with room for so many more groups, as in `rows.complete`."""
    state: int = grid.base[zone] + max(0, min(grid.room[zone] - 1, groups))
    return state


@kernel
def weigh_rest(grid: Grid, parts: Parts, x: int, left: Ints) -> None:
    """left [H]: weight of the devices that label x leaves."""
    left[:] = 0
    for cell in range(len(grid.size)):
        for h in range(len(left)):
            left[h] += grid.cell_weight[h, cell] * (grid.size[cell] - parts.used[x, cell])


@kernel
def look_around(
    grid: Grid, stage: Stage, parts: Parts, x: int, i: int, a: int, link: Floats, free: Ints
) -> None:
    """link, free [C]: per class of shapes, the best seconds of the link from row i's last group to
    a stage that begins at layer a, and the most devices left of a cell; 0 where none fits."""
    link[:], free[:] = np.inf, 0
    for n in range(len(grid.shape_class)):
        c, left = grid.shape_class[n], grid.size[grid.shape_cells[n, 0]]
        for cell in grid.shape_cells[n]:
            left = min(left, grid.size[cell] - parts.used[x, cell])
        if left > 0:
            seconds = 0.0
            if stage.link[a] > 0:
                speed = speed_between(grid.bandwidth, grid.shape_cells, parts.last[x, i], n)
                seconds = stage.link[a] / speed
            link[c], free[c] = min(link[c], seconds), max(free[c], left)


@kernel
def open_row(
    grid: Grid, stage: Stage, so_far: tuple[float, float], ends: tuple[int, int], limit: float,
    link: Floats, free: Ints, one: Floats, out: Floats,
) -> None:  # fmt: skip
    """out [H, A]: least cost of a row whose group takes the layers `ends` and the class of shapes
    that is best for it, whatever the others take. so_far: the row's Σ t + Σ e and slowest stage;
    link, free: of `look_around`; one [H, A]: scratch."""
    out[:] = np.inf
    (total, top), (a, b) = so_far, ends
    for c in range(len(link)):
        t, z = stage.seconds[grid.class_kind[c], a, b], grid.class_zone[c]
        after, slowest = total + t + link[c], max(top, t)
        if (grid.gas - 1) * slowest + after >= limit:
            continue
        state = state_of(grid, z, free[c] // grid.shape_cells.shape[1] - 1)
        row_cost(grid, stage.ahead, state, b, after, slowest, one)
        for h in range(out.shape[0]):
            for k in range(out.shape[1]):
                out[h, k] = min(out[h, k], one[h, max(0, k - grid.weight[h, z])])


@kernel
def open_stage(
    grid: Grid, stage: Stage, parts: Parts, box: tuple[float, float, float], out: Children,
    scratch: tuple[Floats, Floats, Ints, Floats],
) -> int:  # fmt: skip
    """Children of all labels by every end of the stage; returns how many.

    box: (least synchronisation, greatest, limit of the cost). scratch: costs [dp, H, A]; per row
    and class seconds of the link, and devices left; costs [H, A].
    """
    (costs, link, free, one), (low, _, limit), count = scratch, box, 0
    tp = grid.shape_cells.shape[1]
    left = np.empty(costs.shape[1], dtype=np.int64)
    for x in range(len(parts.end)):
        a, floor = parts.end[x], max(parts.synced[x], low)
        weigh_rest(grid, parts, x, left)
        for i in range(len(costs)):
            look_around(grid, stage, parts, x, i, a, link[i], free[i])
        for b in range(a + 1, len(grid.params)):
            value = floor
            for i in range(len(costs)):
                if value < limit:
                    so_far = parts.sums[x, i], parts.tops[x, i]
                    rest = limit - floor
                    open_row(grid, stage, so_far, (a, b), rest, link[i], free[i], one, costs[i])
                    value = max(value, floor + costs[i, 0, 0])
            if value < limit:
                value = floor + least_together(costs, left, tp, grid.most)
            if value < limit:
                out.parent[count], out.choice[count] = x, b
                out.synced[count], out.bound[count] = parts.synced[x], max(value, parts.bound[x])
                count += 1
    return count


@kernel
def place_group(
    grid: Grid, stage: Stage, parts: Parts, i: int, box: tuple[float, float, float],
    out: Children, scratch: tuple[Floats, Floats, Ints, Floats],
) -> int:  # fmt: skip
    """Children of all labels by every shape of the group in row i; returns how many. box, scratch:
    as in `open_stage`."""
    (costs, link, free, one), (low, high, limit), count = scratch, box, 0
    tp, last = grid.shape_cells.shape[1], parts.last
    left = np.empty(costs.shape[1], dtype=np.int64)
    behind = np.empty_like(left)
    for x in range(len(parts.end)):
        a, b = parts.first[x], parts.end[x]
        volume = (grid.params[b] - grid.params[a]) * grid.sync
        weigh_rest(grid, parts, x, left)
        for k in range(len(costs)):
            so_far = parts.sums[x, k], parts.tops[x, k]
            if k < i:
                m = last[x, k]
                z, cell = grid.class_zone[grid.shape_class[m]], grid.shape_cells[m, 0]
                state = state_of(grid, z, (grid.size[cell] - parts.used[x, cell]) // tp)
                row_cost(grid, stage.ahead, state, b, *so_far, costs[k])
            elif k > i:
                look_around(grid, stage, parts, x, k, a, link[k], free[k])
                rest = limit - max(low, parts.synced[x])
                open_row(grid, stage, so_far, (a, b), rest, link[k], free[k], one, costs[k])
        for n in range(len(grid.shape_class)):
            fits = True
            for r in range(tp):
                cell = grid.shape_cells[n, r]
                fits = fits and parts.used[x, cell] + grid.shape_rank[n, r] <= grid.size[cell]
            c = grid.shape_class[n]
            t = stage.seconds[grid.class_kind[c], a, b]
            total, top = parts.sums[x, i] + t, max(parts.tops[x, i], t)
            if not fits or (grid.gas - 1) * top + total >= limit:
                continue
            if stage.link[a] > 0:
                speed = speed_between(grid.bandwidth, grid.shape_cells, last[x, i], n)
                total += stage.link[a] / speed
            speed = np.inf  # of the data groups so far
            for k in range(i):
                between = speed_between(grid.bandwidth, grid.shape_cells, last[x, k], n)
                speed = min(speed, between)
            synced = max(parts.synced[x], volume / speed)
            floor = max(low, synced)
            if volume > high * (1 + 1e-12) * speed or floor >= limit:
                continue
            cell = grid.shape_cells[n, 0]
            devices = grid.size[cell] - parts.used[x, cell]
            for r in range(tp):
                devices -= grid.shape_cells[n, r] == cell
            state = state_of(grid, grid.class_zone[c], devices // tp)
            row_cost(grid, stage.ahead, state, b, total, top, costs[i])
            if floor + costs[i, 0, 0] >= limit:
                continue
            for h in range(len(left)):
                behind[h] = left[h] - grid.shape_weight[h, n]
            value = floor + least_together(costs, behind, tp, grid.most)
            if value < limit:
                out.parent[count], out.choice[count] = x, n
                out.total[count], out.top[count] = total, top
                out.synced[count], out.bound[count] = synced, max(value, parts.bound[x])
                count += 1
    return count


class Groups:
    """The labels of a configuration's decisions with synchronisation in a box: a family of
    `solvers.labels`.

    Bucket j (1 + dp) holds labels with j whole stages, bucket j (1 + dp) + 1 + i those whose stage
    j has its layers and groups in the rows before i. intervals: of the slowest stage, first and
    last of `model.stage_values`.
    """

    def __init__(
        self,
        model: RowModel,
        intervals: Sequence[tuple[int, int]],
        box: SyncBox,
        limits: Limits,
    ) -> None:
        self.model, self.box, self.limits = model, box, limits
        self.config = model.layout.config
        self.grid, self.stages = make_grid(model, intervals, box.high, limits)

    def search(self, run: Run, *, width: int, limit: float) -> Labelled:
        """The labels below `limit` seconds, at most `width` after each group.

        Every decision of the box costs at least the least of the limit, the bound of what was cut
        and the seconds of the `best`.
        """
        fan = max(len(self.grid.params), len(self.grid.shape_class))
        return set_labels(
            self, self.root(), range(self.config.pipeline * (1 + self.config.data) + 1), run,
            threshold=lambda: limit, trail=["choice"],
            limits=engine.Limits(width, block=max(1, self.limits.chunk // fan)),
        )  # fmt: skip

    def best(self, labelled: Labelled) -> tuple[float, Strategy] | None:
        """The best decision among the labels, with its seconds."""
        if not len(labelled.last):
            return None
        label = labelled.last[:1]
        choices = [int(before["choice"]) for before in labelled.path(label[0])[-2::-1]]
        steps = np.array(choices).reshape(self.config.pipeline, 1 + self.config.data)
        placement = self.model.layout.cells.devices(self.grid.shape_cells[steps[:, 1:]])
        strategy = Strategy(self.config, placement, np.r_[0, steps[:, 0]])
        return float(self.seconds(label)[0]), strategy

    def seconds(self, labels: Labels) -> Floats:
        """[X] of decisions without a stage to come."""
        rows = (self.config.gas - 1) * labels["tops"] + labels["sums"]
        return np.asarray(labels["synced"] + rows.max(axis=1))

    def root(self) -> Labels:
        """The label of nothing."""
        cells, rows = (len(self.grid.size),), (self.config.data,)
        fields = [
            ("bound", "f8"), ("parent", "i8"), ("choice", "i8"), ("first", "i8"), ("end", "i8"),
            ("synced", "f8"), ("sums", "f8", rows), ("tops", "f8", rows), ("last", "i4", rows),
            ("used", "i4", cells),
        ]  # fmt: skip
        root = np.zeros(1, dtype=np.dtype(fields, align=True))
        root["parent"], root["bound"] = -1, self.box.low
        return root

    def extend(self, bucket: int, labels: Labels, limit: float) -> Iterator[Extensions]:
        """Every end of the next stage, or every shape of the group in the next row."""
        grid, (j, i) = self.grid, divmod(bucket, 1 + self.config.data)
        if j == self.config.pipeline:
            return
        opens = i == 0
        space = len(labels) * (len(grid.params) if opens else len(grid.shape_class)) + 1
        whole, real = np.empty((2, space), dtype=np.int64), np.empty((4, space))
        out = Children(*whole, *real)
        costs = (self.config.data, len(grid.weight), self.model.levels)
        table = self.config.data, len(grid.class_zone)
        scratch = np.empty(costs), np.empty(table), np.empty(table, np.int64), np.empty(costs[1:])
        # contiguous, since a kernel is compiled anew for each layout of its arrays
        parts = Parts(*(np.ascontiguousarray(labels[name]) for name in Parts._fields))
        box = self.box.low, self.box.high, limit
        if opens:
            count = open_stage(grid, self.stages[j], parts, box, out, scratch)
        else:
            count = place_group(grid, self.stages[j], parts, i - 1, box, out, scratch)
        out = Children._make(field[:count] for field in out)
        children = labels[out.parent]
        children["choice"], children["bound"] = out.choice, out.bound
        if opens:
            children["first"], children["end"] = children["end"], out.choice
        else:
            children["synced"], children["last"][:, i - 1] = out.synced, out.choice
            children["sums"][:, i - 1], children["tops"][:, i - 1] = out.total, out.top
            everyone = np.arange(count)
            for cells in grid.shape_cells[out.choice].T:
                children["used"][everyone, cells] += 1
        yield Extensions(children, out.parent, np.full(count, bucket + 1))

    def needed(self, bucket: int, labels: Labels) -> Numbers:
        """The labels that no other makes superfluous; of whole decisions the best one."""
        if len(labels) < 2 or bucket < 2:
            return np.arange(len(labels))
        j, i = divmod(bucket, 1 + self.config.data)
        if j == self.config.pipeline:
            return np.array([self.seconds(labels).argmin()])
        return np.flatnonzero(self.undominated(labels, j, i))

    def undominated(self, labels: Labels, j: int, i: int) -> NDArray[np.bool_]:
        """[X] whether no neighbour in the same state costs as little under every completion.

        j, i: whole stages, and groups of the next one. The state: layers done, and use of cells and
        last groups up to a permutation of interchangeable cells and one of rows. Of a full cell
        only its class matters: nothing more can be placed in it, and links out of it depend on the
        class alone. Cells are sorted by (class, use, positions of last groups), rows by (placed in
        this stage, renamed cells, costs).
        """
        count, kind = len(labels), self.model.layout.cells.kind
        rows, tp, cells = self.config.data, self.config.tensor, len(kind)
        placed = np.arange(rows) < i - 1
        begun = np.flatnonzero(placed | (j > 0))  # rows that have a last group
        position = self.grid.shape_cells[labels["last"][:, begun]]  # [X, rows, tp]
        spot = (np.arange(count)[:, None] * cells + position.reshape(count, -1)).ravel()
        weight = np.where(placed[begun], 1, 1 + rows * tp).repeat(tp)
        there = np.bincount(spot, np.tile(weight, count), minlength=count * cells)
        full = labels["used"] == self.grid.size
        there = np.where(full, 0, there.reshape(count, cells).astype(np.int64))
        signature = ((kind * 8192 + labels["used"]) << 32) + there
        by_cell = np.argsort(signature, axis=1, kind="stable")
        rank = np.argsort(by_cell, axis=1, kind="stable")
        renamed = np.where(full, cells + kind, rank)[np.arange(count)[:, None, None], position]
        code = renamed @ (2 * cells) ** np.arange(tp)[::-1]  # an order only: it may wrap around
        sums = labels["sums"][:, begun]
        rest = (self.config.gas - 1) * labels["tops"][:, begun] + sums
        unplaced = np.tile(~placed[begun], (count, 1))
        by_row = np.lexsort((rest, sums, code, unplaced), axis=-1)
        key = np.c_[
            labels["first"],
            labels["end"],
            np.take_along_axis(signature, by_cell, axis=1),
            np.take_along_axis(renamed, by_row[..., None], axis=1).reshape(count, -1),
        ]
        price = np.c_[
            labels["synced"],
            np.take_along_axis(sums, by_row, axis=1),
            np.take_along_axis(rest, by_row, axis=1),
        ]
        mixed = np.random.default_rng(0).integers(1, 2**62, key.shape[1], dtype=np.int64)
        code = (key * mixed).sum(axis=1)  # wraps around: only groups equal keys
        by_code = np.lexsort((labels["bound"], code))
        alive = np.ones(count, dtype=bool)
        for step in range(1, min(self.limits.neighbours + 1, count)):
            x, y = by_code[:-step], by_code[step:]
            alike = np.flatnonzero(code[x] == code[y])
            x, y = x[alike], y[alike]
            alike = (key[x] == key[y]).all(axis=1)
            x, y = x[alike], y[alike]
            first = (price[x] <= price[y]).all(axis=1)
            alive[y[first]] = False
            alive[x[(price[y] <= price[x]).all(axis=1) & ~first]] = False
        return alive


def make_grid(
    model: RowModel, intervals: Sequence[tuple[int, int]], sync_cap: float, limits: Limits
) -> tuple[Grid, list[Stage]]:
    """The kernels' view: completion tables for the intervals, joined so that they are few and small
    enough."""
    pieces, values = list(intervals), model.stage_values
    sample, _ = model.tables(float(values[pieces[-1][1]]), sync_cap)
    most = max(2, min(limits.most_tables, limits.most_table_size // max(1, sample.size)))
    while len(pieces) > most:
        spans = [values[after[1]] - values[here[0]] for here, after in pairwise(pieces)]
        i = int(np.argmin(spans))
        pieces[i : i + 2] = [(pieces[i][0], pieces[i + 1][1])]
    tables = [model.tables(float(values[b]), sync_cap)[0] for _, b in pieces]
    lay, config = model.layout, model.layout.config
    kinds = np.c_[lay.shape_kind, lay.shape_zone]
    classes, shape_class = np.unique(kinds, axis=0, return_inverse=True)
    ranks = range(config.tensor)
    equal = [lay.shape_cells[:, : r + 1] == lay.shape_cells[:, r : r + 1] for r in ranks]
    grid = Grid(
        gas=config.gas,
        size=lay.cells.size,
        bandwidth=lay.cells.bandwidth,
        params=lay.params,
        sync=lay.sync,
        shape_cells=lay.shape_cells,
        shape_rank=np.stack([one.sum(axis=1) for one in equal], axis=1),
        shape_class=shape_class.reshape(-1),
        class_kind=np.ascontiguousarray(classes[:, 0]),
        class_zone=np.ascontiguousarray(classes[:, 1]),
        room=lay.zones.room,
        base=lay.zones.base,
        weight=model.weight,
        cell_weight=model.cell_weight,
        shape_weight=np.ascontiguousarray(model.cell_weight[:, lay.shape_cells].sum(axis=2)),
        most=config.pipeline * model.weight.max(axis=1),
        low=values[[a for a, _ in pieces]],
        high=np.r_[values, np.inf][[b + 1 for _, b in pieces]],
    )
    stages = [
        Stage(
            seconds=lay.stage_seconds(j),
            link=lay.link if j else np.zeros_like(lay.link),
            ahead=np.stack([table[:, j + 1] for table in tables]),
        )
        for j in range(config.pipeline)
    ]
    return grid, stages
