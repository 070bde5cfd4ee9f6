"""The shortest path over runs of layers, from the last layer to the first."""

import numpy as np
from numpy.typing import NDArray

from hetplan.compiled import kernel
from hetplan.replays.arrays import Floats

Ints = NDArray[np.int64]
# Where a message of a stage comes from: its own node, another one of its type, one of another type;
# between a stage across nodes and one whose type has a single node; or anywhere (between any other
# stage and one across nodes; the ends of the chain).
SAME, ALIKE, UNLIKE, SOLE, OPEN = range(5)
SOURCES = OPEN + 1
# The durations of a run, forward and backward: of the first micro-batch, of the last one, and of
# one sample on the average of all passes.
DURATIONS = 6
TOTAL = 4  # the number of the first of the two averages


@kernel
def drop_dominated(costs: Floats, ordered: bool) -> None:
    """Leave out of [K, H + 2] the costs that are no less than those of more changes, or also of
    later states, and write the least of each state into the last column."""
    states, changes = costs.shape[0] - 1, costs.shape[1] - 2
    least = np.full(changes + 1, np.inf)  # of later states, by changes
    for k in range(states, -1, -1):
        costs[k, changes + 1] = np.inf
        more = np.inf
        for h in range(changes, -1, -1):
            if costs[k, h] >= min(more, least[h]):
                costs[k, h] = np.inf
            more = min(more, costs[k, h])
            if ordered:
                least[h] = min(least[h], more)
        costs[k, changes + 1] = more


@kernel
def shortest(
    kinds: Ints,
    sole: NDArray[np.bool_],
    seconds: Floats,
    waits: Floats,
    joins: Floats,
    sent: Floats,
    weights: Floats,
    caps: Floats,
    slack: Floats,
    after: Ints,
    ordered: bool,
    best: Floats,
) -> int:
    """The number of sums compared. Puts (4) and (5) into best [L + 1, Q + 1, 5, K, H + 2]: layers
    from l on, behind a run inside a node of type q or (Q) across nodes, whose next message comes
    from there; state of the path, changes between nodes (H: or more; H + 1: the least of all).

    kinds [J]: q of a way, or Q. sole [Q + 1]: whether the type has a single node. seconds
    [6, J, L + 1]: durations added up over layers. waits [3, 5, J]: of a message of the first
    micro-batch, of the last one, and of one sample, per byte. joins [3, J]: seconds per byte of
    weights behind the last pass, cost per byte of weights, cost of a run. sent [2, L + 1]: bytes
    that pass a cut, and weights, added up. weights [K or 1, 6, J]: costs of a run by the state
    behind it. caps [K + 1, 2]: samples whose averages count against slack[3], and in the last row,
    in all passes. slack [5, L + 1]: what is left behind the way to l; the way out from l; the way
    there and back behind l; what caps leave; the least cost of the layers before l. ceiling: the
    last entry of slack[4]. after [K, J]: state with the run, -1: none. ordered: whether a later
    state allows all that an earlier one does, as more changes always do; then an earlier one that
    costs no less is left out."""
    last, types = best.shape[0] - 1, best.shape[1] - 1
    states, changes = best.shape[3] - 1, best.shape[4] - 2
    run, own, full = np.empty(6), np.empty(6), caps[states + 1]
    ceiling = slack[4, last]
    best[:] = np.inf
    best[last, :, OPEN, 0, 0] = best[last, :, OPEN, 0, changes + 1] = 0.0
    least = np.full(best.shape[:3], np.inf)  # of all states and changes
    least[last, :, OPEN] = 0.0
    reached, compared = np.empty(best.shape[3:]), 0
    for l in range(last - 1, -1, -1):
        for way in range(len(kinds) * SOURCES):
            j, into = divmod(way, SOURCES)
            across = kinds[j] == types
            if waits[0, into, j] == np.inf or (l == 0 and into != OPEN):
                continue
            step = int(across or into in (ALIKE, UNLIKE))
            reached[:] = np.inf
            lowest = np.inf
            for end in range(l + 1, last + 1):
                held = sent[1, end] - sent[1, l]
                left = slack[0, l] - max(slack[1, l], joins[0, j] * held)
                for x in range(6):
                    run[x] = seconds[x, j, end] - seconds[x, j, l]
                if full[0] * run[4] + full[1] * run[5] > left:
                    break
                for back in range(SOURCES):
                    behind = least[end, kinds[j], back]
                    if behind == np.inf or waits[0, back, j] == np.inf:
                        continue
                    for x in range(3):
                        own[2 * x] = run[2 * x] + waits[x, into, j] * sent[0, l]
                        own[2 * x + 1] = run[2 * x + 1] + waits[x, back, j] * sent[0, end]
                    if full[0] * own[4] + full[1] * own[5] > left:
                        continue
                    room = min(slack[3, l], left - own[2] - own[3] - slack[2, end])
                    fixed = joins[1, j] * held + joins[2, j]
                    cost = fixed
                    for x in range(6):
                        cost += weights[0, x, j] * own[x]
                    if behind + cost + slack[4, l] > ceiling and len(weights) == 1:
                        continue
                    compared += states + 1
                    for k in range(states + 1):
                        if best[end, kinds[j], back, k, changes + 1] == np.inf:
                            continue
                        # The last state is the only one asked for: too few layers are left for it.
                        if len(weights) > 1 and k + 1 + l < states:
                            continue
                        if after[k, j] < 0 or caps[k, 0] * own[4] + caps[k, 1] * own[5] > room:
                            continue
                        if len(weights) > 1:
                            cost = fixed
                            for x in range(6):
                                cost += weights[k, x, j] * own[x]
                        for h in range(changes + 1):
                            value = best[end, kinds[j], back, k, h] + cost
                            if value + slack[4, l] > ceiling:
                                continue
                            more = min(h + step, changes)
                            if value < reached[after[k, j], more]:
                                reached[after[k, j], more] = value
                                lowest = min(lowest, value)
            if lowest == np.inf:
                continue
            for before in range(types + 1):
                if l > 0:
                    if before == types or across:
                        single = sole[before] or sole[kinds[j]]
                        source = SOLE if single else OPEN
                        if into != source:
                            continue
                    elif (into == UNLIKE) == (before == kinds[j]) or into > UNLIKE:
                        continue
                least[l, before, into] = min(least[l, before, into], lowest)
                best[l, before, into] = np.minimum(best[l, before, into], reached)
        for before in range(types + 1):
            for into in range(SOURCES):
                if least[l, before, into] < np.inf:
                    drop_dominated(best[l, before, into], ordered)
    return compared
