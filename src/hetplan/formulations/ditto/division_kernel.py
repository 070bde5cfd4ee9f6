"""Compiled kernel of Oobleck's divide and conquer over device vectors (Ditto, eq. 1-3).

A state is (x, S, c): all devices of vector x, S stages, interval class c. Its entry is Oobleck's
record of the one best template: T1, t (seconds of the slowest stage k*), k* and T3. Split of a
state: left part with vector y, s stages and layers up to cut; the right part has the rest.
"""

from __future__ import annotations

from hetplan.compiled import kernel
from hetplan.formulations.ditto.problem import Floats, Ints, tie

slack = kernel(tie)


@kernel
def divide(
    x: int,
    parts: Ints,
    fewest: Ints,
    most: Ints,
    begins: Ints,
    ends: Ints,
    interval: Ints,
    micro_batches: int,
    total: Floats,
    t1: Floats,
    slowest: Floats,
    position: Ints,
    t3: Floats,
    split: Ints,
) -> None:
    """Fill the states of vector x from those of smaller vectors; single stages are entered
    beforehand.

    parts: the vectors y with 0 < y < x. fewest, most [X]: numbers of stages that use up a vector.
    begins, ends [C]: a representative of each interval class; interval [L + 1, L + 1] classes.
    total, t1, slowest, position, t3 [X, S + 1, C]; split [X, S + 1, C, 3].
    """
    for y in parts:
        z = x - y
        for stages in range(max(2, fewest[x]), min(most[x], total.shape[1] - 1) + 1):
            for s in range(max(fewest[y], stages - most[z]), min(most[y], stages - fewest[z]) + 1):
                r = stages - s
                for c in range(len(begins)):
                    begin, end = begins[c], ends[c]
                    for cut in range(begin + s, end - r + 1):
                        a, b = interval[begin, cut], interval[cut, end]
                        left, right = slowest[y, s, a], slowest[z, r, b]
                        if left >= right - slack(right):
                            k, t = position[y, s, a], left
                            rest = t3[y, s, a] + t1[z, r, b]
                        else:
                            k, t = s + position[z, r, b], right
                            rest = t3[z, r, b]
                        work = t1[y, s, a] + t1[z, r, b]
                        cost = work + (micro_batches - stages + k - 1) * t + rest
                        if cost < total[x, stages, c]:
                            total[x, stages, c] = cost
                            t1[x, stages, c] = work
                            slowest[x, stages, c] = t
                            position[x, stages, c] = k
                            t3[x, stages, c] = rest
                            split[x, stages, c, 0] = y
                            split[x, stages, c, 1] = s
                            split[x, stages, c, 2] = cut - begin
