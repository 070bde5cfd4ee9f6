"""Compiled: the cheapest completion of one pipeline, over zones, for a cap on stage time and on
synchronisation."""

from __future__ import annotations

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.amp.problem import MEMORY_TOLERANCE, Floats, Ints


@kernel
def completions(
    pp: int,
    dp: int,
    window: Ints,
    needs_local: Ints,
    prefix: Floats,
    link: Floats,
    room: Ints,
    stay: Floats,
    leave: Floats,
    level: Ints,
    base: Ints,
    ahead: Floats,
    start: Floats,
    enter: Floats,
) -> None:
    """Backward recursion over stages.

    window [pp, Z, L+1]: furthest end of stage j on zone z starting at layer a. needs_local [Z,
    L+1]: from this end on the stage's parameters must be synchronised inside one cell, which takes
    dp groups' room instead of one. link [L+1] bytes. level [Z, 2] 0/1: does a group of the zone
    count for each threshold.
    Fills ahead [pp, S, L+1, A, B], start [A, B], +inf on entry: seconds of stages j.. and of the
    link into stage j, given the row state (zone and room left in the cell) of stage j - 1, the
    layers done, and at least so many groups of each threshold still to absorb; +inf where
    impossible. start: the whole pipeline. enter [Z, most room + 1, A, B], scratch: stage j on zone
    z entered with u groups' room.
    """
    zones, width = prefix.shape
    layers = width - 1
    na, nb = start.shape
    for j in range(pp - 1, -1, -1):
        for a in range(j, 1 if j == 0 else layers - (pp - j) + 1):
            for z in range(zones):
                for u in range(enter.shape[1]):
                    for ka in range(na):
                        for kb in range(nb):
                            enter[z, u, ka, kb] = np.inf
                top = max(1, room[z])
                for b in range(layers if j == pp - 1 else a + 1, window[j, z, a] + 1):
                    t = prefix[z, b] - prefix[z, a]
                    use = dp if b >= needs_local[z, a] else 1
                    for u in range(1, top + 1):
                        if room[z] > 0 and use > u:
                            continue
                        left = base[z] + (u - use if room[z] > 0 else 0)
                        for ka in range(na):
                            ra = max(0, ka - level[z, 0])
                            for kb in range(nb):
                                rb = max(0, kb - level[z, 1])
                                if j == pp - 1:
                                    value = t if ra == 0 and rb == 0 else np.inf
                                else:
                                    value = t + ahead[j + 1, left, b, ra, rb]
                                enter[z, u, ka, kb] = min(enter[z, u, ka, kb], value)
            if j == 0:
                for z in range(zones):
                    for ka in range(na):
                        for kb in range(nb):
                            start[ka, kb] = min(start[ka, kb], enter[z, max(1, room[z]), ka, kb])
                continue
            for z in range(zones):
                inside = link[a] / stay[z] if link[a] > 0 else 0.0
                for ka in range(na):
                    for kb in range(nb):
                        out = np.inf
                        for y in range(zones):
                            cost = 0.0
                            if leave[z, y] <= 0:
                                continue
                            if link[a] > 0:
                                cost = link[a] / leave[z, y]
                            out = min(out, cost + enter[y, max(1, room[y]), ka, kb])
                        for u in range(max(1, room[z])):
                            value = out
                            if room[z] == 0:
                                value = min(value, inside + enter[z, 1, ka, kb])
                            elif u > 0:
                                value = min(value, inside + enter[z, u, ka, kb])
                            ahead[j, base[z] + u, a, ka, kb] = value


@kernel
def windows(
    pp: int,
    gas: int,
    micro_batch: int,
    tp: int,
    dp: int,
    stage_cap: float,
    sync_cap: float,
    sync: float,
    prefix: Floats,
    params: Floats,
    saved: Floats,
    state_factor: float,
    capacity: Floats,
    sync_in: Floats,
    sync_out: Floats,
    window: Ints,
    needs_local: Ints,
) -> None:
    """Fill in the furthest stage ends and where synchronisation must stay inside a cell; see
    `completions`.

    stage_cap, sync_cap: seconds. A stage on zone z may end at b when its time, its memory (1F1B)
    and its synchronisation at the zone's best bandwidth allow it.
    """
    slack = 1.0 + 1e-12  # rounding of prefix sums must not exclude what is allowed
    zones, width = prefix.shape
    layers = width - 1
    for z in range(zones):
        end = 0
        for a in range(layers + 1):
            end = max(end, a)
            while end < layers and (
                dp == 1 or (params[end + 1] - params[a]) * sync <= sync_cap * slack * sync_out[z]
            ):
                end += 1
            needs_local[z, a] = end + 1
        tightest = sync_cap * slack * max(sync_in[z], sync_out[z])
        for j in range(pp):
            kept = min(gas, pp - j) * micro_batch
            end = 0
            for a in range(layers + 1):
                end = max(end, a)
                while end < layers:
                    b = end + 1
                    if prefix[z, b] - prefix[z, a] > stage_cap * slack:
                        break
                    if dp > 1 and (params[b] - params[a]) * sync > tightest:
                        break
                    held = state_factor * (params[b] - params[a]) + kept * (saved[b] - saved[a])
                    if held > capacity[z] * tp * (1.0 + MEMORY_TOLERANCE):
                        break
                    end = b
                window[j, z, a] = end


@kernel
def absorbs(
    cost: Floats,
    rows: int,
    need: Ints,
    most: int,
    limit: float,
    stairs: Ints,
    reach: Ints,
    after: Ints,
) -> bool:
    """Whether `rows` pipelines, each costing at most `limit`, can absorb `need` groups of both
    thresholds.

    cost [A, B]: of one pipeline that absorbs at least (a, b) groups, non-decreasing in both; the
    last index of a dimension stands for that many or more (up to `most` groups). Scratch: stairs
    [A], for each number of the first threshold the most of the second; reach, after [need[0] + 1].
    """
    na, nb = cost.shape
    for ka in range(na):
        stairs[ka] = -1
        for kb in range(nb):
            if cost[ka, kb] <= limit:
                stairs[ka] = most if kb == nb - 1 and nb > 1 else kb
    if stairs[0] < 0:
        return False
    if nb == 1:
        best = 0
        for ka in range(na):
            if stairs[ka] >= 0:
                best = most if ka == na - 1 else ka
        return bool(best * rows >= need[0])
    wanted = need[0]
    for y in range(wanted + 1):
        reach[y] = -1
    reach[0] = 0
    for _ in range(rows):
        for y in range(wanted + 1):
            after[y] = -1
        for x in range(wanted + 1):
            if reach[x] < 0:
                continue
            for ka in range(na):
                if stairs[ka] >= 0:
                    gain = most if ka == na - 1 and na > 1 else ka
                    y = min(wanted, x + gain)
                    after[y] = max(after[y], reach[x] + stairs[ka])
        for y in range(wanted + 1):
            reach[y] = after[y]
    return bool(reach[wanted] >= need[1])
