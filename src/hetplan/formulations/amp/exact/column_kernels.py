"""Compiled: one stage of the label search, all pipelines ("rows") of the configuration side by
side.

A label is a choice of layers and cells for stages 0..j. It carries, for each row, Σ t + Σ e and the
slowest stage so far, and the slowest synchronisation. `expand` extends every label by one more
stage ("column").
Letters: x label, j stage, i row, r tensor rank, n shape, c cell, z zone, a and b first and end
layer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetplan.compiled import kernel
from hetplan.formulations.amp.exact.absorption_kernels import (
    fits_together,
    least_ahead,
    least_for,
    most_taken,
)
from hetplan.formulations.amp.exact.label_kernels import Labels
from hetplan.formulations.amp.problem import MEMORY_TOLERANCE, Floats, Ints


class Grid(NamedTuple):
    """The configuration; arrays as in `layout.Layout`.

    marked [H, K] 0/1: cells whose devices count for a threshold; level [Z, 2] 0/1: zones that do.
    ahead [Q, pp, S, L+1, A, B]: completions of a row whose slowest stage takes at least low[q] and
    less than high[q], the least time of a stage on any zone beyond the table's cap (a group's real
    time may lie between the times of zones). forced [pp, dp]: the shape of a group, -1 where free.
    """

    pp: int
    dp: int
    tp: int
    micro_batch: int
    gas: int
    size: Ints
    kind: Ints
    bandwidth: Floats
    marked: Ints
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
    level: Ints
    room: Ints
    base: Ints
    ahead: Floats
    low: Floats
    high: Floats
    forced: Ints


class Scratch(NamedTuple):
    """Memory of one expansion; allowed, sums, tops, least [dp, N] price shape n in row i; takes
    [dp, N, 2]: groups of each threshold that the row can absorb from here on if it takes shape n;
    spare [dp + 1, 2]: what the rows up to i - 1 take and the others could take at most, beyond the
    need.

    narrow [dp + 1]: slowest bandwidth inside the column's data groups up to row i. same [dp]: an
    earlier row with the same past, -1 if none. used, present, earlier [K]: devices taken, whether
    the last stage lies there, and an earlier cell that the future cannot tell apart. absorbed [dp],
    reach, after [devices + 1]: see `least_for` and `fits_together`. counter [3]: leaves seen,
    children written, labels expanded. answer: best cost, least bound dropped. winner [1 + dp]:
    label and shapes of the best cost.
    """

    allowed: NDArray[np.bool_]
    sums: Floats
    tops: Floats
    least: Floats
    takes: Ints
    choice: Ints
    spare: Ints
    best_take: Ints
    narrow: Floats
    same: Ints
    used: Ints
    present: Ints
    earlier: Ints
    costs: Floats
    absorbed: Ints
    reach: Ints
    after: Ints
    counter: Ints
    answer: Floats
    winner: Ints


@kernel
def expand(
    grid: Grid,
    j: int,
    labels: Labels,
    begin: int,
    end: int,
    box: Floats,
    most_leaves: int,
    tolerance: float,
    incumbent: Floats,
    stop: Ints,
    scratch: Scratch,
    children: Labels,
) -> int:
    """Extend labels begin..end-1 by stage j; returns the first label not extended (children are
    full, or stopped).

    box: least and greatest synchronisation, seconds. incumbent [1]: best cost known, re-read all
    the time (other threads may lower it); labels within `tolerance` (relative) of it are pruned.
    stop [1]: not 0 ends the search.

    One long function on purpose: numba compiles it in a third of the time that its parts take one
    by one.
    """
    pp, dp, tp, gas, sync = grid.pp, grid.dp, grid.tp, grid.gas, grid.sync
    size, bandwidth, marked = grid.size, grid.bandwidth, grid.marked
    prefix, params, saved, link, capacity = (
        grid.prefix,
        grid.params,
        grid.saved,
        grid.link,
        grid.capacity,
    )
    shape_cells, shape_kind, shape_zone = grid.shape_cells, grid.shape_kind, grid.shape_zone
    room, base, low, high, forced = grid.room, grid.base, grid.low, grid.high, grid.forced
    ahead = grid.ahead[:, min(j + 1, pp - 1)]
    done, used, last, sums, tops = labels.done, labels.used, labels.last, labels.sums, labels.tops
    synced, bound = labels.synced, labels.bound
    allowed, row_sums, row_tops, choice = (
        scratch.allowed,
        scratch.sums,
        scratch.tops,
        scratch.choice,
    )
    row_least, takes, spare = scratch.least, scratch.takes, scratch.spare
    narrow, same, taken, costs = scratch.narrow, scratch.same, scratch.used, scratch.costs
    present, earlier, best_take, slow = (
        scratch.present,
        scratch.earlier,
        scratch.best_take,
        grid.level,
    )
    counter, answer, winner = scratch.counter, scratch.answer, scratch.winner
    layers, cells, shapes = prefix.shape[1] - 1, len(size), len(shape_cells)
    alive = min(gas, pp - j) * grid.micro_batch
    one = costs[0]
    both = costs.shape[2] > 1
    for x in range(begin, end):
        if stop[0] != 0 or counter[1] + most_leaves > len(children.done):
            return x
        if bound[x] >= incumbent[0] * (1 - tolerance):
            continue
        counter[2] += 1
        leaves, tries = most_leaves, 20 * most_leaves
        for c in range(
            cells
        ):  # cells that the future cannot tell apart: alike, used alike, no link into them
            present[c] = 0
        if j > 0:
            for i in range(dp):
                for r in range(tp):
                    present[shape_cells[last[x, i], r]] = 1
        for c in range(cells):
            earlier[c] = -1
            for k in range(c - 1, -1, -1):
                if (
                    grid.kind[k] == grid.kind[c]
                    and used[x, k] == used[x, c]
                    and present[k] + present[c] == 0
                ):
                    earlier[c] = k
                    break
        # the nearest earlier row with the same past: their futures may be exchanged
        for i in range(dp):
            same[i] = -1
            for k in range(i - 1, -1, -1):
                alike = j == 0 or (sums[x, k] == sums[x, i] and tops[x, k] == tops[x, i])
                if alike and j > 0:
                    for r in range(tp):
                        c, d = shape_cells[last[x, k], r], shape_cells[last[x, i], r]
                        full = (
                            used[x, c] == size[c]
                            and used[x, d] == size[d]
                            and grid.kind[c] == grid.kind[d]
                        )
                        alike = alike and (c == d or full)
                if alike:
                    same[i] = k
                    break
        a = done[x]
        for b in range(layers if j == pp - 1 else a + 1, layers - (pp - 1 - j) + 1):
            limit = incumbent[0] * (1 - tolerance)
            floor = max(synced[x], box[0])
            held = grid.state_factor * (params[b] - params[a]) + alive * (saved[b] - saved[a])
            volume = (params[b] - params[a]) * sync
            # what every shape would cost every row
            possible = True
            for i in range(dp):
                twin = same[i] if forced[j, i] < 0 else -1
                some = False
                for n in range(shapes):
                    if twin >= 0:
                        allowed[i, n] = allowed[twin, n]
                        row_sums[i, n], row_tops[i, n] = row_sums[twin, n], row_tops[twin, n]
                        row_least[i, n] = row_least[twin, n]
                        takes[i, n, 0], takes[i, n, 1] = takes[twin, n, 0], takes[twin, n, 1]
                        some = some or allowed[i, n]
                        continue
                    kind = shape_kind[n]
                    allowed[i, n] = False
                    if 0 <= forced[j, i] != n or held > capacity[kind] * tp * (
                        1 + MEMORY_TOLERANCE
                    ):
                        continue
                    t = prefix[kind, b] - prefix[kind, a]
                    total = sums[x, i] + t
                    if j > 0 and link[a] > 0:
                        speed = np.inf
                        for r in range(tp):
                            speed = min(
                                speed, bandwidth[shape_cells[last[x, i], r], shape_cells[n, r]]
                            )
                        total += link[a] / speed
                    top = max(tops[x, i], t)
                    row_sums[i, n], row_tops[i, n] = total, top
                    value = (gas - 1) * top + total
                    if j < pp - 1:
                        z, c = shape_zone[n], shape_cells[n, 0]
                        state = base[z] + max(0, min(room[z], (size[c] - used[x, c]) // tp) - 1)
                        least_ahead(gas, low, high, ahead, state, b, total, top, one)
                        value = one[0, 0]
                    row_least[i, n] = value
                    takes[i, n, 0], takes[i, n, 1] = pp, pp
                    if j < pp - 1:
                        z = shape_zone[n]
                        takes[i, n, 0] = most_taken(one, 0, limit - floor, pp) + slow[z, 0]
                        takes[i, n, 1] = most_taken(one, 1, limit - floor, pp) + slow[z, 1]
                    allowed[i, n] = floor + value < limit
                    some = some or allowed[i, n]
                if not some:
                    possible = False
                    break
            if not possible:
                continue
            # what is left when every row absorbs as much as it can
            for h in range(2):
                devices = 0
                if h < len(marked):
                    for c in range(cells):
                        if marked[h, c] > 0:
                            devices += size[c] - used[x, c]
                spare[0, h] = -((devices + tp - 1) // tp)
                for i in range(dp):
                    most = 0
                    for n in range(shapes):
                        if allowed[i, n]:
                            most = max(most, takes[i, n, h])
                    best_take[i, h] = most
                    spare[0, h] += most
            if spare[0, 0] < 0 or spare[0, 1] < 0:
                continue
            # depth first over the rows: choice[i] is the shape tried in row i
            for c in range(cells):
                taken[c] = used[x, c]
            narrow[0] = np.inf
            choice[0] = -1
            i = 0
            while i >= 0 and leaves > 0:
                tries -= 1
                if tries <= 0 or (tries % 4096 == 0 and stop[0] != 0):
                    leaves = 0
                    break
                n = choice[i]
                if n >= 0:
                    for r in range(tp):
                        taken[shape_cells[n, r]] -= 1
                elif same[i] >= 0 and forced[j, i] < 0:
                    n = choice[same[i]] - 1  # exchangeable rows in ascending order
                placed = False
                while not placed and n < shapes - 1:
                    n += 1
                    if not allowed[i, n]:
                        continue
                    spare[i + 1, 0] = spare[i, 0] - best_take[i, 0] + takes[i, n, 0]
                    spare[i + 1, 1] = spare[i, 1] - best_take[i, 1] + takes[i, n, 1]
                    if spare[i + 1, 0] < 0 or spare[i + 1, 1] < 0:
                        continue  # the rows could not absorb the slow devices that are left
                    put = 0
                    while put < tp:
                        c = shape_cells[n, put]
                        # cells that are alike are taken in order
                        early = (
                            earlier[c] >= 0
                            and taken[earlier[c]] == used[x, earlier[c]]
                            and taken[c] == used[x, c]
                            and forced[j, i] < 0
                        )
                        if early or taken[c] >= size[c]:
                            break
                        taken[c] += 1
                        put += 1
                    placed = put == tp
                    if placed and dp > 1:
                        narrowest = narrow[i]
                        for k in range(i):
                            for r in range(tp):
                                narrowest = min(
                                    narrowest,
                                    bandwidth[shape_cells[choice[k], r], shape_cells[n, r]],
                                )
                        narrow[i + 1] = narrowest
                        placed = volume == 0 or volume <= box[1] * (1 + 1e-12) * narrowest
                    if not placed:
                        for r in range(put):
                            taken[shape_cells[n, r]] -= 1
                if not placed:
                    i -= 1
                    continue
                choice[i] = n
                if i < dp - 1:
                    i += 1
                    choice[i] = -1
                    continue
                # a whole column
                leaves -= 1
                reached = synced[x]
                if dp > 1 and volume > 0:
                    reached = max(reached, volume / narrow[dp])
                if j == pp - 1:
                    value = 0.0
                    for k in range(dp):
                        value = max(
                            value, (gas - 1) * row_tops[k, choice[k]] + row_sums[k, choice[k]]
                        )
                    if reached + value < min(answer[0], incumbent[0]):
                        answer[0] = incumbent[0] = reached + value
                        winner[0] = x
                        for k in range(dp):
                            winner[1 + k] = choice[k]
                    continue
                limit = incumbent[0] * (1 - tolerance)
                floor = max(reached, box[0])
                value = 0.0
                for k in range(dp):
                    value = max(value, row_least[k, choice[k]])
                if floor + value >= limit:
                    continue
                need_a, need_b = 0, 0
                for c in range(cells):
                    for h in range(len(marked)):
                        if marked[h, c] > 0 and h == 0:
                            need_a += size[c] - taken[c]
                        elif marked[h, c] > 0:
                            need_b += size[c] - taken[c]
                need_a, need_b = (need_a + tp - 1) // tp, (need_b + tp - 1) // tp
                for k in range(dp):
                    z, c = shape_zone[choice[k]], shape_cells[choice[k], 0]
                    state = base[z] + max(0, min(room[z] - 1, (size[c] - taken[c]) // tp))
                    total, top = row_sums[k, choice[k]], row_tops[k, choice[k]]
                    least_ahead(gas, low, high, ahead, state, b, total, top, costs[k])
                value = floor + least_for(costs, 0, need_a, pp, scratch.absorbed)
                if both and value < limit:
                    value = max(value, floor + least_for(costs, 1, need_b, pp, scratch.absorbed))
                    if value < limit and not fits_together(
                        costs, need_a, need_b, pp, limit - floor, scratch.reach, scratch.after
                    ):
                        value = limit
                if value < limit:
                    y = counter[1]
                    counter[1] += 1
                    for c in range(cells):
                        children.used[y, c] = taken[c]
                    for k in range(dp):
                        children.last[y, k] = choice[k]
                        children.sums[y, k] = row_sums[k, choice[k]]
                        children.tops[y, k] = row_tops[k, choice[k]]
                    children.synced[y], children.done[y] = reached, b
                    children.bound[y], children.parent[y] = max(value, bound[x]), x
            if leaves <= 0:
                answer[1] = min(answer[1], bound[x])
                break
        counter[0] += most_leaves - leaves
    return end
