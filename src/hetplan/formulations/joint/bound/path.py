"""The shortest path over runs of layers, from the last layer to the first."""

import numpy as np
from numpy.typing import NDArray

from hetplan.compiled import kernel
from hetplan.replays.arrays import Floats

Ints = NDArray[np.int64]
# Where a message of a stage comes from: its own node, another one of its type, one of another type,
# or anywhere (stages across nodes; the ends of the chain).
SAME, ALIKE, UNLIKE, OPEN = range(4)


@kernel
def shortest(
    kinds: Ints,
    seconds: Floats,
    waits: Floats,
    joins: Floats,
    sent: Floats,
    weights: Floats,
    caps: Floats,
    slack: Floats,
    after: Ints,
    best: Floats,
) -> None:
    """(4) and (5) into best [L + 1, Q + 1, 4, K, H + 1]: layers from l on, behind a run inside a
    node of type q or (Q) across nodes, whose next message comes from there; state of the path,
    changes between nodes (H: or more). Four durations count: forward passes of a micro-batch and of
    the last one, backward passes of both.

    kinds [J]: q of a way, or Q. seconds [4, J, L + 1]: added up over layers. waits [2, 4, J]: of a
    message, per byte. joins [3, J]: seconds per byte of weights behind the last pass, cost per
    byte of weights, cost of a run. sent [2, L + 1]: bytes that pass a cut, and weights, added up.
    weights [K, 4, J]: costs of a run by the state behind it. caps [K + 1, 4]: how often its seconds
    count against slack[3], and in the last row, in all passes. slack [4, L + 1]: what is left
    behind the way to l; the way out from l; the way there and back behind l; what caps leave.
    after [K, J]: state with the run, -1: none."""
    last, types = best.shape[0] - 1, best.shape[1] - 1
    states, changes = best.shape[3] - 1, best.shape[4] - 1
    run, own, full = np.empty(4), np.empty(4), caps[states + 1]
    best[:] = np.inf
    best[last, :, OPEN, 0, 0] = 0.0
    reached = np.empty(best.shape[3:])
    for l in range(last - 1, -1, -1):
        for way in range(len(kinds) * (OPEN + 1)):
            j, into = divmod(way, OPEN + 1)
            across = kinds[j] == types
            if waits[0, into, j] == np.inf or (l == 0 and into != OPEN):
                continue
            step = int(across or into in (ALIKE, UNLIKE))
            reached[:] = np.inf
            for end in range(l + 1, last + 1):
                held = sent[1, end] - sent[1, l]
                left = slack[0, l] - max(slack[1, l], joins[0, j] * held)
                total = 0.0
                for x in range(4):
                    run[x] = seconds[x, j, end] - seconds[x, j, l]
                    total += full[x] * run[x]
                if total > left:
                    break
                for back in range(OPEN + 1):
                    if waits[0, back, j] == np.inf:
                        continue
                    total = 0.0
                    for x in range(4):
                        at, source = (l, into) if x < 2 else (end, back)
                        own[x] = run[x] + waits[x % 2, source, j] * sent[0, at]
                        total += full[x] * own[x]
                    if total > left:
                        continue
                    room = min(slack[3, l], left - own[1] - own[3] - slack[2, end])
                    for k in range(states + 1):
                        least = best[end, kinds[j], back, k, 0]
                        for h in range(1, changes + 1):
                            least = min(least, best[end, kinds[j], back, k, h])
                        if after[k, j] < 0 or least == np.inf:
                            continue
                        spent, cost = 0.0, joins[1, j] * held + joins[2, j]
                        for x in range(4):
                            spent += caps[k, x] * own[x]
                            cost += weights[k, x, j] * own[x]
                        if spent > room:
                            continue
                        for h in range(changes + 1):
                            value = best[end, kinds[j], back, k, h] + cost
                            more = min(h + step, changes)
                            reached[after[k, j], more] = min(reached[after[k, j], more], value)
            for before in range(types + 1):
                same, wide = before == kinds[j], across or before == types
                if l == 0 or (wide == (into == OPEN) and (wide or same == (into != UNLIKE))):
                    best[l, before, into] = np.minimum(best[l, before, into], reached)
