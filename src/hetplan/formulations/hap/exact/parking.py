"""Compiled: steps that some optimal program never takes in a state of needs.

Where a computation of no cost gives a needed property from others that are needed anyway (a slice of a whole
tensor), only that is done: the state without the property is reached at no cost, and whatever completes the
larger state completes the smaller one, in the same stages and with no more work.

A property p is parked while something else is needed, q, that cannot be derived without p or what gives p at no cost:
a step that costs anything does not settle p now. For in a program where it did, q is there before that
step, and with it p for nothing; dropping the step takes work from a stage or joins two, which costs no more. So of
the optimal programs one with the fewest costly steps never settles a parked property. This keeps the search from
computing a residual stream anew late in a block, which sums alone forbid only when almost nothing is missing.
"""

from __future__ import annotations

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.hap.exact.kernels import Flags
from hetplan.formulations.hap.problem import Ints


@kernel
def given_free(need: Ints, free: Flags, by_first: Ints, by: Ints, pre_first: Ints, pre: Ints) -> int:
    """A step of no cost that gives a needed property from other needed ones that it does not give; -1: none."""
    W = len(need)
    for i in range(W):
        if need[i] < 0:
            break
        for b in range(by_first[need[i]], by_first[need[i] + 1]):
            s = by[b]
            if not free[s]:
                continue
            had = True
            for q in range(pre_first[s], pre_first[s + 1]):
                here = False
                for j in range(W):
                    here = here or (j != i and need[j] == pre[q])
                had = had and here
            if had:
                return int(s)
    return -1


@kernel
def parking(
    by_first: Ints, by: Ints, pre_first: Ints, pre: Ints, post_first: Ints, post: Ints, free: Flags
) -> Flags:
    """[P, P]: entry (p, q) tells that q cannot be derived without p or a property that gives p at no cost."""
    P, steps = len(by_first) - 1, len(free)
    use_first = np.zeros(P + 1, np.int64)
    for q in range(len(pre)):
        use_first[pre[q] + 1] += 1
    for p in range(P):
        use_first[p + 1] += use_first[p]
    use, at = np.empty(len(pre), np.int64), use_first[:-1].copy()
    for s in range(steps):
        for q in range(pre_first[s], pre_first[s + 1]):
            use[at[pre[q]]] = s
            at[pre[q]] += 1
    found = np.zeros((P, P), np.bool_)
    banned, known = np.empty(P, np.bool_), np.empty(P, np.bool_)
    missing, stack = np.empty(steps, np.int64), np.empty(P, np.int64)
    for p in range(P):
        banned[:] = False
        banned[p] = True
        stack[0], size = p, 1
        while size:
            size -= 1
            w = stack[size]
            for b in range(by_first[w], by_first[w + 1]):
                s = by[b]
                if free[s] and pre_first[s + 1] - pre_first[s] == 1 and not banned[pre[pre_first[s]]]:
                    banned[pre[pre_first[s]]] = True
                    stack[size] = pre[pre_first[s]]
                    size += 1
        known[:] = False
        size = 0
        for s in range(steps):
            missing[s] = pre_first[s + 1] - pre_first[s]
            if missing[s] == 0:
                for q in range(post_first[s], post_first[s + 1]):
                    if not banned[post[q]] and not known[post[q]]:
                        known[post[q]] = True
                        stack[size] = post[q]
                        size += 1
        while size:
            size -= 1
            w = stack[size]
            for c in range(use_first[w], use_first[w + 1]):
                s = use[c]
                missing[s] -= 1
                if missing[s] == 0:
                    for q in range(post_first[s], post_first[s + 1]):
                        if not banned[post[q]] and not known[post[q]]:
                            known[post[q]] = True
                            stack[size] = post[q]
                            size += 1
        for q in range(P):
            found[p, q] = not known[q]
    return found


@kernel
def parked(need: Ints, step: int, post_first: Ints, post: Ints, without: Flags) -> bool:
    """Whether everything needed that a step gives is parked by what is needed besides."""
    W = len(need)
    for i in range(W):
        if need[i] < 0:
            break
        given = False
        for q in range(post_first[step], post_first[step + 1]):
            given = given or post[q] == need[i]
        if not given:
            continue
        parked = False
        for j in range(W):
            if need[j] < 0:
                break
            if j == i or not without[need[i], need[j]]:
                continue
            also = False
            for q in range(post_first[step], post_first[step + 1]):
                also = also or post[q] == need[j]
            if not also:
                parked = True
                break
        if not parked:
            return False
    return True
