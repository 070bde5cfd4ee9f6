"""The compiled kernel of the counted paths: label setting on the states that a relaxation cannot
rule out.

Legend as in `paths`. A label (cost, count) of a state (u, a, phase) stands for stages that cover
[a, L) with at most u devices: `count` of them, `cost` without any fee. One label dominates another
if neither is larger, since fewer stages behind leave more memory and more stages to those in front.
A label is *fresh* at the least u that has it and inherited by larger ones; arcs start at fresh
labels only, for what they lead to is inherited just the same.
State number: offset[u] + a; the labels of (phase, state) are begin[phase, state] .. until[phase,
state] - 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetplan.compiled import kernel
from hetplan.formulations.ditto.exact.paths import Line, pieces
from hetplan.formulations.ditto.problem import Floats, Ints
from hetplan.solvers.run import Run

Shorts = NDArray[np.int32]


def label(run: Run, time: Floats, lines: tuple[Line, Line, Line], coords: Ints, *rest: Any) -> int:
    """`set_labels` for all vectors, in pieces; raises `Stopped` where `run` should stop."""
    used = 0
    for begin, end in pieces(time, len(coords)):
        run.check()
        used = set_labels(begin, end, used, time, lines, coords, *rest)
        if used < 0:
            break
    return used


@kernel
def set_labels(
    first_vector: int,
    end_vector: int,
    used: int,
    time: Floats,
    lines: tuple[Line, Line, Line],
    coords: Ints,
    strides: Ints,
    kind: Ints,
    size: Ints,
    delta: Ints,
    after: Ints,
    before: Ints,
    peak_first: Ints,
    first: Ints,
    last: Ints,
    offset: Ints,
    value: Floats,
    front: Floats,
    fee: float,
    cutoff: float,
    begin: Shorts,
    until: Shorts,
    cost: Floats,
    links: Shorts,
    best: Floats,
    best_links: Shorts,
) -> int:
    """All labels that can still lead to a template below `cutoff`; returns their number, -1 if they
    do not fit.

    Of the vectors from first_vector to end_vector; used: labels of those before.
    lines: behind k*, k*, ahead of it, without fees. value, front [2, states]: least costs behind
    and in front of a state with `fee` per stage, front mirrored (see `mirror`). after, before [C,
    R, L + 1]: by stages behind. cost [N]; links [N, 4]: count, fresh, the label behind (-1: none),
    option · L + first layer. best [S + 1], best_links [S + 1, 4]: room for the labels of one state.
    """
    columns = coords.shape[1]
    layers, states, most, room = time.shape[1] - 1, value.shape[1], len(best) - 1, len(cost)
    rows = after.shape[0] - 1
    for u in range(first_vector, end_vector):
        for a in range(first[u], last[u] + 1):
            here = offset[u] + a
            for phase in range(2):
                begin[phase, here] = until[phase, here] = used
                ahead = front[1 - phase, states - 1 - here]
                if value[phase, here] + ahead >= cutoff:
                    continue
                least, largest = most + 1, -1
                for i in range(columns):
                    s = u - strides[i]
                    if coords[u, i] > 0 and first[s] <= a <= last[s]:
                        for n in range(begin[phase, offset[s] + a], until[phase, offset[s] + a]):
                            c = links[n, 0]
                            if cost[n] < best[c]:
                                best[c], best_links[c, 0], best_links[c, 1] = cost[n], c, 0
                                best_links[c, 2], best_links[c, 3] = links[n, 2], links[n, 3]
                                least, largest = min(least, c), max(largest, c)
                if a == layers and phase == 0 and best[0] == np.inf:
                    best[0], best_links[0, 0], best_links[0, 1] = 0.0, 0, 1
                    best_links[0, 2], best_links[0, 3] = -1, -1
                    least, largest = 0, max(largest, 0)
                for r in range(len(kind)):
                    s = u - delta[r]
                    if coords[u, kind[r]] < size[r]:
                        continue
                    window = after if phase == 0 else before
                    for b in range(max(a + 1, first[s]), min(window[0, r, a], last[s]) + 1):
                        for to in range(phase + 1):
                            line = lines[2 if to == 1 else phase]
                            if to < phase and b < peak_first[r, a]:
                                continue
                            more = line[0] + line[1] * time[r, a, b]
                            for n in range(begin[to, offset[s] + b], until[to, offset[s] + b]):
                                c = links[n, 0] + 1
                                if (
                                    links[n, 1] == 0
                                    or c > most
                                    or b > window[min(c - 1, rows), r, a]
                                ):
                                    continue
                                if cost[n] + more < best[c]:
                                    best[c] = cost[n] + more
                                    best_links[c, 0], best_links[c, 1] = c, 1
                                    best_links[c, 2], best_links[c, 3] = n, r * layers + a
                                    least, largest = min(least, c), max(largest, c)
                lowest = np.inf
                for c in range(least, largest + 1):
                    if best[c] < lowest and best[c] + fee * c + ahead < cutoff:
                        lowest = best[c]
                        if used == room:
                            return -1
                        cost[used] = best[c]
                        for i in range(4):
                            links[used, i] = best_links[c, i]
                        used += 1
                    best[c] = np.inf
                until[phase, here] = used
    return used
