"""Compiled: label search over stages ("columns"), every pipeline of the configuration side by side.

A label is a choice of layers and cells for stages 0..j. It carries, for each pipeline ("row"), Σ t + Σ e and the
slowest stage so far, and the slowest synchronisation. Labels are extended stage by stage, bounded by the rows'
cheapest completions, compared with labels in the same state, and cut to a width; what the cut drops leaves its
least bound behind, so that a search which drops nothing has proven its incumbent optimal.
"""

from __future__ import annotations

import numpy as np

from hetplan.formulations.amp.problem import Floats, Ints
from hetplan.solvers.compiled import kernel


@kernel
def row_ahead(
    gas: int,
    total: float,
    slowest: float,
    low: Floats,
    high: Floats,
    ahead: Floats,
    state: int,
    b: int,
    out: Floats,
) -> None:
    """out [A, B]: least cost of a whole row, for each number of groups still absorbed; +inf when impossible.

    ahead [Q, S, L+1, A, B]: completions for slowest stages in (low[q], high[q]].
    """
    out[:] = np.inf
    for q in range(len(low)):
        if high[q] < slowest:
            continue
        fixed = (gas - 1) * max(slowest, low[q]) + total
        for ka in range(out.shape[0]):
            for kb in range(out.shape[1]):
                out[ka, kb] = min(out[ka, kb], fixed + ahead[q, state, b, ka, kb])


@kernel
def least_for(costs: Floats, axis: int, need: int, most: int) -> float:
    """Least t such that the rows, each costing at most t, absorb `need` groups of one threshold; costs [R, A, B]."""
    rows, na, nb = costs.shape
    top = (na if axis == 0 else nb) - 1
    level = 0.0
    for i in range(rows):
        level = max(level, costs[i, 0, 0])
    if need <= 0:
        return level
    taken = np.zeros(rows, dtype=np.int64)
    while True:
        sum_taken = 0
        cheapest = np.inf
        for i in range(rows):
            while taken[i] < top:
                k = taken[i] + 1
                value = costs[i, k, 0] if axis == 0 else costs[i, 0, k]
                if value > level:
                    cheapest = min(cheapest, value)
                    break
                taken[i] = k
            sum_taken += most if taken[i] == top else taken[i]
        if sum_taken >= need or cheapest == np.inf:
            return level if sum_taken >= need else np.inf
        level = cheapest


@kernel
def fits_together(costs: Floats, need_a: int, need_b: int, most: int, limit: float) -> bool:
    """Whether rows of cost below `limit` can absorb both thresholds' groups at once; costs [R, A, B]."""
    rows, na, nb = costs.shape
    reach = np.full(need_a + 1, -1, dtype=np.int64)
    reach[0] = 0
    after = np.empty(need_a + 1, dtype=np.int64)
    for i in range(rows):
        after[:] = -1
        for ka in range(na):
            stair = -1
            for kb in range(nb):
                if costs[i, ka, kb] < limit:
                    stair = most if kb == nb - 1 else kb
            if stair < 0:
                break
            gain = most if ka == na - 1 else ka
            for x in range(need_a + 1):
                if reach[x] >= 0:
                    y = min(need_a, x + gain)
                    after[y] = max(after[y], reach[x] + stair)
        reach[:] = after
    return reach[need_a] >= need_b


@kernel
def dominates(gas: int, sync: Floats, sums: Floats, tops: Floats, order: Ints, x: int, y: int) -> bool:
    """Whether label x is no worse than y for every completion (same state, rows in canonical order)."""
    if sync[x] > sync[y]:
        return False
    for i in range(sums.shape[1]):
        rx, ry = order[x, i], order[y, i]
        if sums[x, rx] > sums[y, ry]:
            return False
        if (gas - 1) * tops[x, rx] + sums[x, rx] > (gas - 1) * tops[y, ry] + sums[y, ry]:
            return False
    return True


@kernel
def canonical(
    layers_done: int,
    used: Ints,
    last: Ints,
    sums: Floats,
    tops: Floats,
    shape_cells: Ints,
    kind: Ints,
    key: Ints,
    order: Ints,
) -> None:
    """Write the state's key [1 + K + dp tp] and the order of its rows: equal keys mean equal futures.

    Interchangeable cells are sorted by (used, groups of the last stage), rows by (renamed cells, costs).
    """
    cells, rows, tp = len(used), len(last), shape_cells.shape[1]
    present = np.zeros(cells, dtype=np.int64)
    for i in range(rows):
        for r in range(tp):
            present[shape_cells[last[i], r]] += 1
    renamed = np.empty(cells, dtype=np.int64)
    signature = np.empty(cells, dtype=np.int64)
    for c in range(cells):
        signature[c] = (kind[c] * 4096 + used[c]) * 4096 + present[c]
    sorted_cells = np.argsort(signature, kind="mergesort")
    for n in range(cells):
        renamed[sorted_cells[n]] = n
        key[1 + n] = signature[sorted_cells[n]]
    key[0] = layers_done
    code = np.empty(rows, dtype=np.int64)
    for i in range(rows):
        value = 0
        for r in range(tp):  # only an order: it may wrap around, the key below is complete
            value = value * cells + renamed[shape_cells[last[i], r]]
        code[i] = value
        order[i] = i
    for i in range(1, rows):  # insertion sort: rows are few and nearly sorted
        this = order[i]
        k = i - 1
        while k >= 0 and (
            code[order[k]] > code[this]
            or (
                code[order[k]] == code[this]
                and (
                    sums[order[k]] > sums[this]
                    or (sums[order[k]] == sums[this] and tops[order[k]] > tops[this])
                )
            )
        ):
            order[k + 1] = order[k]
            k -= 1
        order[k + 1] = this
    for i in range(rows):
        for r in range(tp):
            key[1 + cells + i * tp + r] = renamed[shape_cells[last[order[i]], r]]


@kernel
def hashed(key: Ints) -> int:
    """A 64-bit mix of the key, to group equal keys by sorting (equality is checked on the keys themselves)."""
    value = np.int64(1469598103934665603)
    for part in key:
        value = (value ^ np.int64(part)) * np.int64(1099511628211)
        value ^= value >> np.int64(29)
    return value


@kernel
def survivors(
    gas: int,
    count: int,
    width: int,
    bound: Floats,
    keys: Ints,
    sync: Floats,
    sums: Floats,
    tops: Floats,
    order: Ints,
    limit: float,
) -> tuple[Ints, float]:
    """Indices of the labels worth keeping, best bound first, and the least bound among those cut for width."""
    alive = np.empty(count, dtype=np.bool_)
    code = np.empty(count, dtype=np.int64)
    for x in range(count):
        alive[x] = bound[x] < limit
        code[x] = hashed(keys[x])
    by_code = np.argsort(code, kind="mergesort")
    begin = 0
    while begin < count:
        end = begin + 1
        while end < count and code[by_code[end]] == code[by_code[begin]]:
            end += 1
        for m in range(begin, end):
            x = by_code[m]
            if not alive[x]:
                continue
            for n in range(max(begin, m - 48), min(end, m + 48)):
                y = by_code[n]
                if n == m or not alive[y] or not np.array_equal(keys[x], keys[y]):
                    continue
                if dominates(gas, sync, sums, tops, order, x, y):
                    alive[y] = False
        begin = end
    kept = np.nonzero(alive)[0]
    kept = kept[np.argsort(bound[kept], kind="mergesort")]
    dropped = np.inf
    if len(kept) > width:
        dropped = bound[kept[width]]
        kept = kept[:width]
    return kept, dropped


@kernel
def search_columns(
    degrees: Ints,
    size: Ints,
    cell_kind: Ints,
    before: Ints,
    cell_bandwidth: Floats,
    thresholds: Ints,
    prefix: Floats,
    params: Floats,
    saved: Floats,
    link: Floats,
    sync: float,
    capacity: Floats,
    state_factor: float,
    shape_cells: Ints,
    shape_kind: Ints,
    shape_zone: Ints,
    room: Ints,
    base: Ints,
    ahead: Floats,
    low: Floats,
    high: Floats,
    box: Floats,
    forced: Ints,
    width: int,
    most_leaves: int,
    tolerance: float,
    incumbent: Floats,
    stop: Ints,
) -> tuple[float, float, Ints, Ints, Ints]:
    """Search one configuration for decisions with synchronisation in the box; see the module.

    degrees: pp, dp, tp, mbs, gas. thresholds [H, K] 0/1: cells whose devices count. box: least and greatest
    synchronisation, seconds. forced [pp, dp]: shape of each group, -1 where free. incumbent [1]: best cost known,
    read again and again (other threads may lower it); tolerance: relative, labels within it of the incumbent are
    pruned. stop [1]: not 0 ends the search.
    Returns (best cost, least bound dropped, ends [pp], shapes [pp, dp], counts [labels, leaves, finished]).
    """
    pp, dp, tp, mbs, gas = degrees
    layers = prefix.shape[1] - 1
    cells, shapes = len(size), len(shape_cells)
    depth = ahead.shape[0]
    na, nb = ahead.shape[4], ahead.shape[5]
    room_for = max(4 * width, 512)
    used = np.zeros((1, cells), dtype=np.int64)
    last = np.zeros((1, dp), dtype=np.int64)
    sums = np.zeros((1, dp))
    tops = np.zeros((1, dp))
    synced = np.zeros(1)
    done = np.zeros(1, dtype=np.int64)
    bounds = np.full(1, box[0])
    new_used = np.empty((room_for, cells), dtype=np.int64)
    new_last = np.empty((room_for, dp), dtype=np.int64)
    new_sums = np.empty((room_for, dp))
    new_tops = np.empty((room_for, dp))
    new_sync = np.empty(room_for)
    new_done = np.empty(room_for, dtype=np.int64)
    new_bound = np.empty(room_for)
    new_parent = np.empty(room_for, dtype=np.int64)
    new_keys = np.empty((room_for, 1 + cells + dp * tp), dtype=np.int64)
    new_order = np.empty((room_for, dp), dtype=np.int64)
    past_parent = np.zeros((pp, width), dtype=np.int64)
    past_done = np.zeros((pp, width), dtype=np.int64)
    past_last = np.zeros((pp, width, dp), dtype=np.int32)
    best_ends = np.zeros(pp, dtype=np.int64)
    best_shapes = np.full((pp, dp), -1, dtype=np.int64)
    best, dropped = np.inf, np.inf
    counts = np.zeros(3, dtype=np.int64)
    allowed = np.empty((dp, shapes), dtype=np.bool_)
    cost_sum = np.empty((dp, shapes))
    cost_top = np.empty((dp, shapes))
    choice = np.empty(dp, dtype=np.int64)
    narrow = np.empty(dp + 1)
    same = np.empty(dp, dtype=np.int64)
    col_used = np.empty(cells, dtype=np.int64)
    costs = np.empty((dp, na, nb))
    one = np.empty((na, nb))
    need = np.zeros(2, dtype=np.int64)
    for j in range(pp):
        count = 0
        kept_alive = min(gas, pp - j) * mbs
        for x in range(len(done)):
            if stop[0] != 0:
                return best, min(dropped, bounds[x]), best_ends, best_shapes, counts
            if bounds[x] >= incumbent[0] * (1 - tolerance):
                continue
            counts[0] += 1
            a = done[x]
            for i in range(dp):
                same[i] = -1
                for k in range(i - 1, -1, -1):
                    alike = j == 0 or (
                        last[x, k] == last[x, i] and sums[x, k] == sums[x, i] and tops[x, k] == tops[x, i]
                    )
                    if alike:
                        same[i] = k
                        break
            leaves, tries = 0, 0
            first_end = layers if j == pp - 1 else a + 1
            for b in range(first_end, layers - (pp - 1 - j) + 1):
                volume = (params[b] - params[a]) * sync
                limit = incumbent[0] * (1 - tolerance)
                possible = True
                for i in range(dp):
                    if i > 0 and same[i] >= 0 and forced[j, i] < 0:
                        k = same[i]
                        allowed[i], cost_sum[i], cost_top[i] = allowed[k], cost_sum[k], cost_top[k]
                        continue
                    some = False
                    for n in range(shapes):
                        allowed[i, n] = False
                        if forced[j, i] >= 0 and forced[j, i] != n:
                            continue
                        kind = shape_kind[n]
                        held = state_factor * (params[b] - params[a]) + kept_alive * (saved[b] - saved[a])
                        if held > capacity[kind] * tp * (1 + 1e-9):
                            continue
                        t = prefix[kind, b] - prefix[kind, a]
                        e = 0.0
                        if j > 0 and link[a] > 0:
                            speed = np.inf
                            for r in range(tp):
                                speed = min(
                                    speed, cell_bandwidth[shape_cells[last[x, i], r], shape_cells[n, r]]
                                )
                            e = link[a] / speed
                        cost_sum[i, n] = sums[x, i] + t + e
                        cost_top[i, n] = max(tops[x, i], t)
                        if j == pp - 1:
                            value = (gas - 1) * cost_top[i, n] + cost_sum[i, n]
                        else:
                            z = shape_zone[n]
                            state = base[z]
                            if room[z] > 0:
                                c = shape_cells[n, 0]
                                state += max(0, min(room[z], (size[c] - used[x, c]) // tp) - 1)
                            value = np.inf
                            for q in range(depth):
                                if high[q] >= cost_top[i, n]:
                                    fixed = (gas - 1) * max(cost_top[i, n], low[q]) + cost_sum[i, n]
                                    value = min(value, fixed + ahead[q, j + 1, state, b, 0, 0])
                        if max(synced[x], box[0]) + value < limit:
                            allowed[i, n] = True
                            some = True
                    if not some:
                        possible = False
                        break
                if not possible:
                    continue
                # depth first over rows: choice[i] is the shape tried for row i
                col_used[:] = used[x]
                narrow[0] = np.inf
                i = 0
                choice[0] = -1
                while i >= 0:
                    tries += 1
                    if tries > 20 * most_leaves or (tries % 4096 == 0 and stop[0] != 0):
                        leaves = most_leaves
                        dropped = min(dropped, bounds[x])
                        break
                    n = choice[i]
                    if n >= 0:  # take the previous try back
                        for r in range(tp):
                            col_used[shape_cells[n, r]] -= 1
                    elif i > 0 and same[i] >= 0 and forced[j, i] < 0:
                        n = choice[same[i]] - 1
                    n += 1
                    placed = False
                    while n < shapes and not placed:
                        if allowed[i, n]:
                            placed = True
                            for r in range(tp):
                                c = shape_cells[n, r]
                                fresh_before = before[c] >= 0 and col_used[before[c]] == 0
                                if col_used[c] >= size[c] or (
                                    fresh_before and col_used[c] == 0 and forced[j, i] < 0
                                ):
                                    placed = False
                                    for s in range(r):
                                        col_used[shape_cells[n, s]] -= 1
                                    break
                                col_used[c] += 1
                            if placed and dp > 1:
                                slow = narrow[i]
                                for k in range(i):
                                    for r in range(tp):
                                        link_speed = cell_bandwidth[
                                            shape_cells[choice[k], r], shape_cells[n, r]
                                        ]
                                        slow = min(slow, link_speed)
                                narrow[i + 1] = slow
                                if volume > box[1] * (1 + 1e-12) * slow:
                                    placed = False
                                    for r in range(tp):
                                        col_used[shape_cells[n, r]] -= 1
                        if not placed:
                            n += 1
                    if not placed:
                        i -= 1
                        continue
                    choice[i] = n
                    if i < dp - 1:
                        i += 1
                        choice[i] = -1
                        continue
                    # a whole column
                    leaves += 1
                    reached = synced[x]
                    if dp > 1 and volume > 0:
                        reached = max(reached, volume / narrow[dp])
                    limit = incumbent[0] * (1 - tolerance)
                    if j == pp - 1:
                        slowest_row = 0.0
                        for k in range(dp):
                            n = choice[k]
                            slowest_row = max(slowest_row, (gas - 1) * cost_top[k, n] + cost_sum[k, n])
                        if reached + slowest_row < min(best, incumbent[0]):
                            best = reached + slowest_row
                            incumbent[0] = min(incumbent[0], best)
                            best_ends[j], at = layers, x
                            for k in range(dp):
                                best_shapes[j, k] = choice[k]
                            for s in range(j - 1, -1, -1):
                                best_ends[s] = past_done[s, at]
                                for k in range(dp):
                                    best_shapes[s, k] = past_last[s, at, k]
                                at = past_parent[s, at]
                        continue
                    for h in range(2):
                        need[h] = 0
                        if h < len(thresholds):
                            for c in range(cells):
                                if thresholds[h, c] > 0:
                                    need[h] += size[c] - col_used[c]
                            need[h] = (need[h] + tp - 1) // tp
                    for k in range(dp):
                        n = choice[k]
                        z = shape_zone[n]
                        state = base[z]
                        if room[z] > 0:
                            c = shape_cells[n, 0]
                            state += min(room[z] - 1, (size[c] - col_used[c]) // tp)
                        row_ahead(
                            gas, cost_sum[k, n], cost_top[k, n], low, high, ahead[:, j + 1], state, b, one
                        )
                        costs[k] = one
                    floor = max(reached, box[0])
                    value = floor + least_for(costs, 0, need[0], pp)
                    if nb > 1 and value < limit:
                        value = max(value, floor + least_for(costs, 1, need[1], pp))
                        if value < limit and not fits_together(costs, need[0], need[1], pp, limit - floor):
                            value = limit
                    if value < limit:
                        new_used[count] = col_used
                        for k in range(dp):
                            n = choice[k]
                            new_last[count, k] = n
                            new_sums[count, k] = cost_sum[k, n]
                            new_tops[count, k] = cost_top[k, n]
                        new_sync[count], new_done[count] = reached, b
                        new_bound[count], new_parent[count] = max(value, bounds[x]), x
                        canonical(
                            b,
                            col_used,
                            new_last[count],
                            new_sums[count],
                            new_tops[count],
                            shape_cells,
                            cell_kind,
                            new_keys[count],
                            new_order[count],
                        )
                        count += 1
                        if count == room_for:
                            chosen, cut = survivors(
                                gas,
                                count,
                                width,
                                new_bound,
                                new_keys,
                                new_sync,
                                new_sums,
                                new_tops,
                                new_order,
                                limit,
                            )
                            dropped = min(dropped, cut)
                            count = len(chosen)
                            new_used[:count] = new_used[chosen]
                            new_last[:count] = new_last[chosen]
                            new_sums[:count] = new_sums[chosen]
                            new_tops[:count] = new_tops[chosen]
                            new_sync[:count] = new_sync[chosen]
                            new_done[:count] = new_done[chosen]
                            new_bound[:count] = new_bound[chosen]
                            new_parent[:count] = new_parent[chosen]
                            new_keys[:count] = new_keys[chosen]
                            new_order[:count] = new_order[chosen]
                    if leaves >= most_leaves:
                        dropped = min(dropped, bounds[x])
                        i = -1
                if leaves >= most_leaves:
                    break
            counts[1] += leaves
        if j == pp - 1:
            break
        limit = incumbent[0] * (1 - tolerance)
        chosen, cut = survivors(
            gas, count, width, new_bound, new_keys, new_sync, new_sums, new_tops, new_order, limit
        )
        dropped = min(dropped, cut)
        count = len(chosen)
        used, last = new_used[chosen], new_last[chosen]
        sums, tops, synced = new_sums[chosen], new_tops[chosen], new_sync[chosen]
        done, bounds = new_done[chosen], new_bound[chosen]
        past_parent[j, :count] = new_parent[chosen]
        past_done[j, :count] = done
        past_last[j, :count] = last
        if count == 0:
            break
    counts[2] = 1
    return best, dropped, best_ends, best_shapes, counts
