"""The children of the search's labels, each with a lower bound: compiled loops over the choices.

The search first extends a label by every end of its next stage (`open_stage`), and then by every
shape of the tensor group in row 0, 1, ... (`place_group`); a row is a pipeline. Times,
synchronisation and memory are exact. The rest of each row is bounded by itself: a row whose group
of the stage is placed, by the completion tables of rows.py (`row_cost`); a row whose group is still
to be placed, by the best class of shapes for it (`open_row`). `least_together` makes one bound of
all rows, since together they have to use up all devices.

Letters: x label, j stage, i and k rows, r tensor rank, n and m shapes, c class of shapes, z zone,
h burden, q interval of the slowest stage, a and b first and end layer of the stage.
"""

from typing import NamedTuple

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.amp.problem import Floats, Ints


class Grid(NamedTuple):
    """The configuration as arrays for the kernels; their meaning is that of `layout.Layout`.

    There are C classes of shapes of one kind and one zone, and Q intervals of the slowest stage's
    time.
    """

    gas: int
    size: Ints  # [K] devices of a cell
    bandwidth: Floats  # [K, K]
    params: Floats  # [L + 1]
    sync: float
    shape_cells: Ints  # [N, tp]
    shape_rank: Ints  # [N, tp] how often the rank's cell occurs among this rank and those before
    shape_first: Ints  # [N] how many ranks lie in the cell of the first
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
    """The data of one stage of the pipelines."""

    seconds: Floats  # [M, L + 1, L + 1] layers a to b - 1; +inf where they cannot be the stage
    link: Floats  # [L + 1] bytes sent to it where it begins at layer l
    ahead: Floats  # [Q, H, S, L + 1, A] completions from the next stage on, see `rows.complete`


class Parts(NamedTuple):
    """The labels to extend, field by field; all have the same number of stages and groups."""

    first: Ints  # [X] first layer of the last stage
    end: Ints  # [X] layers done
    used: Ints  # [X, K] devices taken of each cell
    last: Ints  # [X, dp] shape of each row's last group
    sums: Floats  # [X, dp] Σ t + Σ e so far
    tops: Floats  # [X, dp] slowest stage so far
    synced: Floats  # [X] slowest synchronisation so far
    bound: Floats  # [X] seconds; every decision of the label costs at least this


class Box(NamedTuple):
    """The limits of the children that are kept."""

    low: float  # seconds, the least synchronisation
    high: float  # seconds, the longest synchronisation
    limit: float  # seconds; the bound of a child is below it


class Scratch(NamedTuple):
    """Arrays that the kernels use while they run."""

    costs: Floats  # [dp, H, A] least cost of each row, by what it is still to absorb
    link: Floats  # [dp, C] of `look_around`
    free: Ints  # [dp, C] of `look_around`
    one: Floats  # [H, A] of `open_row`
    left: Ints  # [H] weight of the devices that a label leaves


class Children(NamedTuple):
    """The children of the labels, as arrays that a kernel writes."""

    parent: Ints  # the label that the child extends
    choice: Ints  # the end of the stage, or the shape of the group
    total: Floats  # seconds, the new entry of the row in `Parts.sums`
    top: Floats  # seconds, the new entry of the row in `Parts.tops`
    synced: Floats  # seconds, the slowest synchronisation so far
    bound: Floats  # seconds; every decision of the child costs at least this


@kernel
def speed_between(bandwidth: Floats, shape_cells: Ints, n: int, m: int) -> float:
    """The slowest bandwidth, in bytes/s, between equal ranks of two groups of shapes n and m."""
    speed = np.inf
    for r in range(shape_cells.shape[1]):
        speed = min(speed, bandwidth[shape_cells[n, r], shape_cells[m, r]])
    return speed


@kernel
def row_cost(
    grid: Grid, ahead: Floats, state: int, b: int, total: float, top: float, out: Floats
) -> None:
    """Write the least cost of a row to `out` [H, A], by the burden that it is still to absorb.

    total: Σ t + Σ e of the row up to layer b. top: its slowest stage up to there. state: that of
    `rows.complete`.
    """
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
    """The least cost at which the rows together can absorb all burdens of the devices that remain.

    costs: [dp, H, A] least cost of each row by the burden that it absorbs. left: [H] weight of the
    devices that remain. most: [H] the burden that the last entry of a row's table stands for.
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
def state_of(grid: Grid, zone: int, devices: int) -> int:
    """The state, as in `rows.complete`, of a row in a zone whose cell has `devices` left."""
    groups = devices // grid.shape_cells.shape[1]
    state: int = grid.base[zone] + max(0, min(grid.room[zone] - 1, groups))
    return state


@kernel
def weigh_rest(grid: Grid, parts: Parts, x: int, left: Ints) -> None:
    """Write the weight of the devices that label x leaves to `left` [H]."""
    left[:] = 0
    for cell in range(len(grid.size)):
        for h in range(len(left)):
            left[h] += grid.cell_weight[h, cell] * (grid.size[cell] - parts.used[x, cell])


@kernel
def look_around(
    grid: Grid, stage: Stage, parts: Parts, x: int, i: int, a: int, scratch: Scratch
) -> None:
    """scratch.link, free [i]: per class of shapes, the best seconds of the link from row i's last
    group to a stage that begins at layer a, and the most devices left of a cell; 0 where none
    fits."""
    link, free = scratch.link[i], scratch.free[i]
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
    grid: Grid, stage: Stage, parts: Parts, x: int, i: int, ends: tuple[int, int], limit: float,
    scratch: Scratch,
) -> None:  # fmt: skip
    """scratch.costs [i]: least cost of row i whose group takes the layers `ends` and the class of
    shapes that is best for it, whatever the other rows take; `look_around` comes first. Classes
    that reach the limit are left out."""
    out, one = scratch.costs[i], scratch.one
    out[:] = np.inf
    a, b = ends
    for c in range(len(grid.class_zone)):
        t, z = stage.seconds[grid.class_kind[c], a, b], grid.class_zone[c]
        total, slowest = parts.sums[x, i] + t + scratch.link[i, c], max(parts.tops[x, i], t)
        if (grid.gas - 1) * slowest + total >= limit:
            continue
        state = state_of(grid, z, scratch.free[i, c] - grid.shape_cells.shape[1])
        row_cost(grid, stage.ahead, state, b, total, slowest, one)
        for h in range(out.shape[0]):
            for level in range(out.shape[1]):
                out[h, level] = min(out[h, level], one[h, max(0, level - grid.weight[h, z])])


@kernel
def open_stage(
    grid: Grid, stage: Stage, parts: Parts, box: Box, out: Children, scratch: Scratch
) -> int:
    """Children of all labels by every end of the stage; returns how many."""
    costs, left, count = scratch.costs, scratch.left, 0
    tp = grid.shape_cells.shape[1]
    for x in range(len(parts.end)):
        a, floor = parts.end[x], max(parts.synced[x], box.low)
        weigh_rest(grid, parts, x, left)
        for i in range(len(costs)):
            look_around(grid, stage, parts, x, i, a, scratch)
        for b in range(a + 1, len(grid.params)):
            bound = floor
            for i in range(len(costs)):
                if bound < box.limit:
                    open_row(grid, stage, parts, x, i, (a, b), box.limit - floor, scratch)
                    bound = max(bound, floor + costs[i, 0, 0])
            if bound < box.limit:
                bound = floor + least_together(costs, left, tp, grid.most)
            if bound < box.limit:
                out.parent[count], out.choice[count] = x, b
                out.synced[count], out.bound[count] = parts.synced[x], max(bound, parts.bound[x])
                count += 1
    return count


@kernel
def has_room(grid: Grid, parts: Parts, x: int, n: int) -> bool:
    """Whether label x leaves the devices of a group of shape n."""
    for r in range(grid.shape_cells.shape[1]):
        cell = grid.shape_cells[n, r]
        if parts.used[x, cell] + grid.shape_rank[n, r] > grid.size[cell]:
            return False
    return True


@kernel
def place_group(
    grid: Grid, stage: Stage, parts: Parts, i: int, box: Box, out: Children, scratch: Scratch
) -> int:
    """Children of all labels by every shape of the group in row i; returns how many."""
    costs, left, count = scratch.costs, scratch.left, 0
    tp, last = grid.shape_cells.shape[1], parts.last
    behind = np.empty_like(left)
    for x in range(len(parts.end)):
        a, b = parts.first[x], parts.end[x]
        volume = (grid.params[b] - grid.params[a]) * grid.sync
        weigh_rest(grid, parts, x, left)
        for k in range(len(costs)):
            if k < i:
                zone = grid.class_zone[grid.shape_class[last[x, k]]]
                cell = grid.shape_cells[last[x, k], 0]
                state = state_of(grid, zone, grid.size[cell] - parts.used[x, cell])
                so_far = parts.sums[x, k], parts.tops[x, k]
                row_cost(grid, stage.ahead, state, b, *so_far, costs[k])
            elif k > i:
                look_around(grid, stage, parts, x, k, a, scratch)
                rest = box.limit - max(box.low, parts.synced[x])
                open_row(grid, stage, parts, x, k, (a, b), rest, scratch)
        for n in range(len(grid.shape_class)):
            t = stage.seconds[grid.class_kind[grid.shape_class[n]], a, b]
            total, top = parts.sums[x, i] + t, max(parts.tops[x, i], t)
            if (grid.gas - 1) * top + total >= box.limit or not has_room(grid, parts, x, n):
                continue
            if stage.link[a] > 0:
                speed = speed_between(grid.bandwidth, grid.shape_cells, last[x, i], n)
                total += stage.link[a] / speed
            speed = np.inf  # of the data groups so far
            for k in range(i):
                speed = min(speed, speed_between(grid.bandwidth, grid.shape_cells, last[x, k], n))
            synced = max(parts.synced[x], volume / speed)
            floor = max(box.low, synced)
            if volume > box.high * (1 + 1e-12) * speed or floor >= box.limit:
                continue
            zone, cell = grid.class_zone[grid.shape_class[n]], grid.shape_cells[n, 0]
            devices = grid.size[cell] - parts.used[x, cell] - grid.shape_first[n]
            state = state_of(grid, zone, devices)
            row_cost(grid, stage.ahead, state, b, total, top, costs[i])
            if floor + costs[i, 0, 0] >= box.limit:
                continue
            for h in range(len(left)):
                behind[h] = left[h] - grid.shape_weight[h, n]
            bound = floor + least_together(costs, behind, tp, grid.most)
            if bound < box.limit:
                out.parent[count], out.choice[count] = x, n
                out.total[count], out.top[count] = total, top
                out.synced[count], out.bound[count] = synced, max(bound, parts.bound[x])
                count += 1
    return count
