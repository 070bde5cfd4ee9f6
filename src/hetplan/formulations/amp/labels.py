"""The label search of one configuration: stage by stage, and in a stage group by group.

A label stands for a choice of layers for the first stages and of cells for their tensor groups, the
last stage perhaps unfinished. It is opened by every end of the next stage (`open_stage`), and then
extended by every shape of the group in row 0, 1, ... (`place_group`); a row is a pipeline. Times,
synchronisation and memory are exact, only the future is bounded (rows.py). Labels are compared with
labels in the same state and cut to the best `width`. What the cut drops leaves its least bound
behind, so a search that drops nothing below the limit has proven its best decision optimal.
docs/method-amp.md has the proofs.

Letters: x label, j stage, i row, r tensor rank, n shape, c cell, z zone, h burden, a and b first
and end layer of the stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetplan.compiled import kernel
from hetplan.formulations.amp.layout import Layout
from hetplan.formulations.amp.problem import Floats, Ints
from hetplan.formulations.amp.rows import RowModel, SyncBox
from hetplan.formulations.amp.strategy import Strategy

# Intervals of the slowest stage that the search tells apart; more are joined.
MAX_TABLES = 14
# Completion tables together, in numbers (8 bytes each).
MAX_TABLE_SIZE = 2**25
# Numbers that one call of a kernel fills at most (8 bytes each, well under a second).
CHUNK = 2**20
# Labels of equal hash that each label is compared with.
NEIGHBOURS = 8


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
    shape_weight: Ints  # [N + 1, H] weight of the shape's devices; last: of none
    most: Ints  # [H] all that a row could ever absorb
    low: Floats  # [Q] the slowest stage takes at least this
    high: Floats  # [Q] and less than this: the least time on any zone beyond the table's cap


class Stage(NamedTuple):
    """What depends on the number of the stage."""

    seconds: Floats  # [M, L + 1, L + 1] layers a to b - 1; +inf where they cannot be the stage
    link: Floats  # [L + 1] bytes sent to it where it begins at layer l
    ahead: Floats  # [Q, H, S, L + 1, A] completions from the next stage on, see `rows.complete`


class Labels(NamedTuple):
    """Labels side by side, all with the same number of stages and groups."""

    first: Ints  # [X] first layer of the last stage
    end: Ints  # [X] layers done
    used: Ints  # [X, K] devices taken of each cell
    last: Ints  # [X, dp] shape of each row's last group
    sums: Floats  # [X, dp] Σ t + Σ e so far
    tops: Floats  # [X, dp] slowest stage so far
    synced: Floats  # [X] slowest synchronisation so far
    bound: Floats  # [X] seconds; every decision of the label costs at least this
    left: Ints  # [X, H] weight of the devices not used yet
    costs: Floats  # [X, dp, H, A] least cost of a row that is still to absorb k of a burden

    def take(self, chosen: Ints) -> Labels:
        """A copy of the chosen labels."""
        return Labels._make(field[chosen] for field in self)


class Children(NamedTuple):
    """What a kernel writes of each child."""

    parent: Ints
    choice: Ints  # the end of the stage, or the shape of the group
    total: Floats  # `sums` and `tops` of the row
    top: Floats
    synced: Floats
    bound: Floats
    costs: Floats  # [Y, dp, H, A] of a stage just opened, [Y, 1, H, A] of a group just placed


@kernel
def speed_between(bandwidth: Floats, shape_cells: Ints, n: int, m: int) -> float:
    """Slowest bandwidth between equal ranks of two groups of shapes n and m, bytes/s."""
    speed = np.inf
    for r in range(shape_cells.shape[1]):
        speed = min(speed, bandwidth[shape_cells[n, r], shape_cells[m, r]])
    return speed


@kernel
def row_cost(
    grid: Grid, ahead: Floats, state: int, b: int, total: float, top: float, out: Floats, i: int
) -> None:
    """out[i] [H, A]: least cost of a row whose Σ t + Σ e is `total` and whose slowest stage is
    `top` up to layer b, by what it is still to absorb; state: see `rows.complete`."""
    for h in range(out.shape[1]):
        for k in range(out.shape[2]):
            least = np.inf
            for q in range(len(grid.low)):
                if grid.high[q] >= top:
                    fixed = (grid.gas - 1) * max(top, grid.low[q])
                    least = min(least, fixed + ahead[q, h, state, b, k])
            out[i, h, k] = least + total


@kernel
def least_together(costs: Floats, left: Ints, taken: Ints, tp: int, most: Ints) -> float:
    """Least t such that rows of cost t each can absorb all burdens of the devices that remain.

    costs [dp, H, A]; left [H] before, taken [H] by the group just placed. The end of a row's table
    stands for `most` [H].
    """
    rows, burdens, levels = costs.shape
    level = 0.0
    for i in range(rows):
        level = max(level, costs[i, 0, 0])
    for h in range(burdens):
        need = -((taken[h] - left[h]) // tp)
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
def open_stage(
    grid: Grid,
    stage: Stage,
    labels: Labels,
    span: tuple[int, int],
    box: tuple[float, float, float],
    out: Children,
    scratch: tuple[Floats, Floats, Ints],
) -> int:
    """Children of labels span[0] to span[1] - 1 by every end of the stage; returns how many.

    box: (least synchronisation, greatest, limit of the cost). Each row takes the class of shapes
    that is best for it, whatever the others take; a class has the best link and the most room of
    its members. scratch: costs [1, H, A]; per row and class seconds of the link, and devices left.
    """
    (one, link, room), (low, _, limit), count = scratch, box, 0
    dp, tp = labels.last.shape[1], grid.shape_cells.shape[1]
    for x in range(span[0], span[1]):
        a, floor = labels.end[x], max(labels.synced[x], low)
        for i in range(dp):
            for c in range(link.shape[1]):
                link[i, c], room[i, c] = np.inf, 0
            for n in range(len(grid.shape_class)):
                free, c = grid.size[grid.shape_cells[n, 0]], grid.shape_class[n]
                for r in range(tp):
                    cell = grid.shape_cells[n, r]
                    free = min(free, grid.size[cell] - labels.used[x, cell])
                if free > 0:
                    seconds = 0.0
                    if stage.link[a] > 0:
                        m = labels.last[x, i]
                        speed = speed_between(grid.bandwidth, grid.shape_cells, m, n)
                        seconds = stage.link[a] / speed
                    link[i, c], room[i, c] = min(link[i, c], seconds), max(room[i, c], free)
        for b in range(a + 1, len(grid.params)):
            value = floor
            for i in range(dp):
                for h in range(one.shape[1]):
                    for k in range(one.shape[2]):
                        out.costs[count, i, h, k] = np.inf
                for c in range(link.shape[1] if value < limit else 0):
                    t, z = stage.seconds[grid.class_kind[c], a, b], grid.class_zone[c]
                    total, top = labels.sums[x, i] + t + link[i, c], max(labels.tops[x, i], t)
                    if floor + (grid.gas - 1) * top + total >= limit:
                        continue
                    state = grid.base[z] + max(0, min(grid.room[z], room[i, c] // tp) - 1)
                    row_cost(grid, stage.ahead, state, b, total, top, one, 0)
                    for h in range(one.shape[1]):
                        for k in range(one.shape[2]):
                            rest = one[0, h, max(0, k - grid.weight[h, z])]
                            out.costs[count, i, h, k] = min(out.costs[count, i, h, k], rest)
                value = max(value, floor + out.costs[count, i, 0, 0])
            if value < limit:
                taken = grid.shape_weight[len(grid.shape_class)]
                costs, left = out.costs[count], labels.left[x]
                value = floor + least_together(costs, left, taken, tp, grid.most)
            if value < limit:
                out.parent[count], out.choice[count] = x, b
                out.synced[count], out.bound[count] = labels.synced[x], max(value, labels.bound[x])
                count += 1
    return count


@kernel
def place_group(
    grid: Grid,
    stage: Stage,
    labels: Labels,
    span: tuple[int, int],
    i: int,
    box: tuple[float, float, float],
    out: Children,
    costs: Floats,
) -> int:
    """Children of labels span[0] to span[1] - 1 by every shape of the group in row i; returns how
    many. box: as in `open_stage`; costs [dp, H, A]: scratch."""
    (low, high, limit), last, count = box, labels.last, 0
    dp, tp = last.shape[1], grid.shape_cells.shape[1]
    for x in range(span[0], span[1]):
        a, b = labels.first[x], labels.end[x]
        volume = (grid.params[b] - grid.params[a]) * grid.sync
        for n in range(len(grid.shape_class)):
            fits = True
            for r in range(tp):
                cell = grid.shape_cells[n, r]
                fits = fits and labels.used[x, cell] + grid.shape_rank[n, r] <= grid.size[cell]
            c = grid.shape_class[n]
            t = stage.seconds[grid.class_kind[c], a, b]
            total, top = labels.sums[x, i] + t, max(labels.tops[x, i], t)
            if not fits or (grid.gas - 1) * top + total >= limit:
                continue
            if stage.link[a] > 0:
                speed = speed_between(grid.bandwidth, grid.shape_cells, last[x, i], n)
                total += stage.link[a] / speed
            speed = np.inf  # of the data groups so far
            for k in range(i):
                between = speed_between(grid.bandwidth, grid.shape_cells, last[x, k], n)
                speed = min(speed, between)
            synced = max(labels.synced[x], volume / speed)
            floor = max(low, synced)
            if volume > high * (1 + 1e-12) * speed or floor >= limit:
                continue
            for k in range(dp):
                if k != i and not (k < i and i == dp - 1):
                    for h in range(costs.shape[1]):
                        for level in range(costs.shape[2]):
                            costs[k, h, level] = labels.costs[x, k, h, level]
                    continue
                # this row; after the last one, also those before: what room they leave is known now
                m = n if k == i else last[x, k]
                z, cell = grid.class_zone[grid.shape_class[m]], grid.shape_cells[m, 0]
                free = grid.size[cell] - labels.used[x, cell]
                for r in range(tp):
                    free -= grid.shape_cells[n, r] == cell
                state = grid.base[z] + max(0, min(grid.room[z] - 1, free // tp))
                sums, tops = (total, top) if k == i else (labels.sums[x, k], labels.tops[x, k])
                row_cost(grid, stage.ahead, state, b, sums, tops, costs, k)
            if floor + costs[i, 0, 0] >= limit:
                continue
            taken = grid.shape_weight[n]
            value = floor + least_together(costs, labels.left[x], taken, tp, grid.most)
            if value < limit:
                out.parent[count], out.choice[count] = x, n
                out.total[count], out.top[count] = total, top
                out.synced[count], out.bound[count] = synced, max(value, labels.bound[x])
                for h in range(costs.shape[1]):
                    for level in range(costs.shape[2]):
                        out.costs[count, 0, h, level] = costs[i, h, level]
                count += 1
    return count


@dataclass(frozen=True)
class Found:
    """Answer of one search. Every decision of the box costs at least the least of the best one's
    seconds, `dropped` and the limit."""

    best: tuple[float, Strategy] | None  # seconds; None: nothing found below the limit
    dropped: float  # least bound cut away, +inf for none
    labels: int  # how many were extended


def search(
    model: RowModel,
    intervals: Sequence[tuple[int, int]],
    box: SyncBox,
    *,
    width: int,
    limit: float,
    check: Callable[[], None],
) -> Found:
    """The best decision with synchronisation in the box that costs less than `limit` seconds.

    intervals: of the slowest stage, first and last of `model.stage_values`. width: labels kept
    after each group. check: raises where it is time to stop.
    """
    config = model.layout.config
    grid, stages = make_grid(model, intervals, box.high)
    labels, dropped, extended = _root(model, grid, box), np.inf, 0
    past: list[tuple[Ints, Ints]] = []  # (parent, choice) of the labels kept at each step
    for j, stage in enumerate(stages):
        for i in range(-1, config.data):  # -1: the stage is opened
            extended += len(labels.end)
            parts = []
            for some in _children(grid, stage, labels, i, (box.low, box.high, limit)):
                check()
                parts.append(some)
            children = Children._make(map(np.concatenate, zip(*parts, strict=True)))
            costs = labels.costs  # large, so only for the labels that are kept
            labels = _extended(grid, labels._replace(costs=costs[:, :0]), children, i)
            if (j, i) != (config.pipeline - 1, config.data - 1):
                chosen, cut_away = _best(model.layout, labels, (j, i), width)
                children = Children._make(field[chosen] for field in children)
                labels, dropped = labels.take(chosen), min(dropped, cut_away)
            if i >= 0:
                costs = costs[children.parent]
                costs[:, i] = children.costs[:, 0]
            labels = labels._replace(costs=costs if i >= 0 else children.costs)
            past.append((children.parent, children.choice))
            if not len(children.parent):
                return Found(None, dropped, extended)
    costs = labels.synced + ((config.gas - 1) * labels.tops + labels.sums).max(axis=1)
    if costs.min() >= limit:
        return Found(None, dropped, extended)
    x, choices = int(costs.argmin()), []
    seconds = float(costs[x])
    for parent, choice in reversed(past):
        choices.append(int(choice[x]))
        x = int(parent[x])
    steps = np.array(choices[::-1]).reshape(config.pipeline, 1 + config.data)
    placement = model.layout.cells.devices(grid.shape_cells[steps[:, 1:]])
    strategy = Strategy(config, placement, np.r_[0, steps[:, 0]])
    return Found((seconds, strategy), dropped, extended)


def make_grid(
    model: RowModel, intervals: Sequence[tuple[int, int]], sync_cap: float
) -> tuple[Grid, list[Stage]]:
    """The kernels' view: completion tables for the intervals, joined so that they are few and small
    enough."""
    pieces, values = list(intervals), model.stage_values
    sample, _ = model.tables(float(values[pieces[-1][1]]), sync_cap)
    most = max(2, min(MAX_TABLES, MAX_TABLE_SIZE // max(1, sample.size)))
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
    weights = model.cell_weight[:, lay.shape_cells].sum(axis=2)
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
        shape_weight=np.vstack([weights.T, np.zeros(len(weights), dtype=np.int64)]),
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


def _root(model: RowModel, grid: Grid, box: SyncBox) -> Labels:
    """The label of nothing."""
    rows, nothing = model.layout.config.data, np.zeros(1, dtype=np.int64)
    return Labels(
        first=nothing,
        end=nothing,
        used=np.zeros((1, len(grid.size)), dtype=np.int64),
        last=np.zeros((1, rows), dtype=np.int64),
        sums=np.zeros((1, rows)),
        tops=np.zeros((1, rows)),
        synced=np.zeros(1),
        bound=np.full(1, box.low),
        left=(model.cell_weight @ grid.size)[None],
        costs=np.zeros((1, rows, len(grid.weight), model.levels)),
    )


def _children(
    grid: Grid, stage: Stage, labels: Labels, i: int, box: tuple[float, float, float]
) -> Iterator[Children]:
    """The children of all labels, some labels at a time; i: the row to be placed, -1 where the
    stage is opened."""
    _, rows, burdens, levels = labels.costs.shape
    fan, kept = (len(grid.params), rows) if i < 0 else (len(grid.shape_class), 1)
    at_once = max(1, CHUNK // (fan * kept * burdens * levels))
    space = min(at_once, len(labels.end)) * fan + 1
    out = Children(
        parent=np.empty(space, dtype=np.int64),
        choice=np.empty(space, dtype=np.int64),
        total=np.empty(space),
        top=np.empty(space),
        synced=np.empty(space),
        bound=np.empty(space),
        costs=np.empty((space, kept, burdens, levels)),
    )
    by_class = rows, len(grid.class_zone)
    one, link = np.empty((1, burdens, levels)), np.empty(by_class)
    scratch = one, link, np.empty(by_class, dtype=np.int64)
    costs = np.empty((rows, burdens, levels))
    for begin in range(0, len(labels.end), at_once):
        span = begin, min(begin + at_once, len(labels.end))
        if i < 0:
            count = open_stage(grid, stage, labels, span, box, out, scratch)
        else:
            count = place_group(grid, stage, labels, span, i, box, out, costs)
        yield Children._make(field[:count].copy() for field in out)


def _extended(grid: Grid, labels: Labels, children: Children, i: int) -> Labels:
    """The children as labels, but for their costs; i: the row of the group placed, -1 where a stage
    was opened."""
    after = labels.take(children.parent)._replace(synced=children.synced, bound=children.bound)
    if i < 0:
        return after._replace(first=after.end, end=children.choice)
    everyone = np.arange(len(children.parent))
    for cells in grid.shape_cells[children.choice].T:
        after.used[everyone, cells] += 1
    after.last[:, i] = children.choice
    after.sums[:, i] = children.total
    after.tops[:, i] = children.top
    return after._replace(left=after.left - grid.shape_weight[children.choice])


def _best(layout: Layout, labels: Labels, at: tuple[int, int], width: int) -> tuple[Ints, float]:
    """The best `width` labels that no other makes superfluous, best bound first; and the least
    bound of the rest."""
    order = np.argsort(labels.bound, kind="stable")
    near, far = order[: 16 * width + 1000], order[16 * width + 1000 :]
    alive = near[undominated(layout, labels.take(near), at)]
    cut = [*labels.bound[alive[width:]][:1], *labels.bound[far][:1]]
    return alive[:width], float(min(cut, default=np.inf))


def undominated(layout: Layout, labels: Labels, at: tuple[int, int]) -> NDArray[np.bool_]:
    """[X] whether no neighbour in the same state costs as little under every completion.

    The state: layers done, and use of cells and last groups up to a permutation of interchangeable
    cells and one of rows. Of a full cell only its class matters: nothing more can be placed in it,
    and links out of it depend on the class alone. Cells are sorted by (class, use, positions of
    last groups), rows by (placed in this stage, renamed cells, costs).
    """
    (j, i), count, kind = at, len(labels.end), layout.cells.kind
    if count < 2 or at == (0, -1):
        return np.ones(count, dtype=bool)
    rows, tp, cells = layout.config.data, layout.config.tensor, len(kind)
    placed = np.arange(rows) <= i
    begun = np.flatnonzero(placed | (j > 0))  # rows that have a last group
    position = layout.shape_cells[labels.last[:, begun]]  # [X, rows, tp]
    spot = (np.arange(count)[:, None] * cells + position.reshape(count, -1)).ravel()
    weight = np.where(placed[begun], 1, 1 + rows * tp).repeat(tp)
    there = np.bincount(spot, np.tile(weight, count), minlength=count * cells)
    full = labels.used == layout.cells.size
    there = np.where(full, 0, there.reshape(count, cells).astype(np.int64))
    signature = ((kind * 8192 + labels.used) << 32) + there
    by_cell = np.argsort(signature, axis=1, kind="stable")
    rank = np.argsort(by_cell, axis=1, kind="stable")
    renamed = np.where(full, cells + kind, rank)[np.arange(count)[:, None, None], position]
    code = renamed @ (2 * cells) ** np.arange(tp)[::-1]  # an order only: it may wrap around
    tops = (layout.config.gas - 1) * labels.tops + labels.sums
    by_row = np.lexsort(
        (tops[:, begun], labels.sums[:, begun], code, np.tile(~placed[begun], (count, 1))), axis=-1
    )
    key = np.concatenate(
        [
            labels.first[:, None],
            labels.end[:, None],
            np.take_along_axis(signature, by_cell, axis=1),
            np.take_along_axis(renamed, by_row[..., None], axis=1).reshape(count, -1),
        ],
        axis=1,
    )
    price = np.concatenate(
        [
            labels.synced[:, None],
            np.take_along_axis(labels.sums[:, begun], by_row, axis=1),
            np.take_along_axis(tops[:, begun], by_row, axis=1),
        ],
        axis=1,
    )
    mixed = np.random.default_rng(0).integers(1, 2**62, key.shape[1], dtype=np.int64)
    code = (key * mixed).sum(axis=1)  # wraps around: only groups equal keys
    by_code = np.lexsort((labels.bound, code))
    alive = np.ones(count, dtype=bool)
    for step in range(1, min(NEIGHBOURS + 1, count)):
        x, y = by_code[:-step], by_code[step:]
        alike = (code[x] == code[y]).nonzero()[0]
        x, y = x[alike], y[alike]
        alike = (key[x] == key[y]).all(axis=1)
        x, y = x[alike], y[alike]
        first = (price[x] <= price[y]).all(axis=1)
        alive[y[first]] = False
        alive[x[(price[y] <= price[x]).all(axis=1) & ~first]] = False
    return alive
