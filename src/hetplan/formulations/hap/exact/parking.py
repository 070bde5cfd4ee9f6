"""Steps that some optimal program never takes in a state of needs.

Where a computation of no cost gives a needed property from others that are needed anyway (a slice
of a whole tensor), only that is done: the state without the property is reached at no cost, and
whatever completes the larger state completes the smaller one, in the same stages and with no more
work.

A property p is parked while something else is needed, q, that cannot be derived without p or what
gives p at no cost: a step that costs anything does not settle p now. For in a program where it did,
q is there before that step, and with it p for nothing; dropping the step takes work from a stage or
joins two, which costs no more. So of the optimal programs one with the fewest costly steps never
settles a parked property. This keeps the search from computing a residual stream anew late in a
block, which sums alone forbid only when almost nothing is missing.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.hap.exact.kernels import Flags
from hetplan.formulations.hap.problem import Ints
from hetplan.solvers.run import Run


@kernel
def given_free(
    rows: Ints, u: int, free: Flags, by_first: Ints, by: Ints, pre_first: Ints, pre: Ints
) -> int:
    """A step of no cost that gives a property of state u, rows [·, W], from others of it that it
    does not give; -1: none."""
    W = rows.shape[1]
    for i in range(W):
        p = rows[u, i]
        if p < 0:
            break
        for b in range(by_first[p], by_first[p + 1]):
            s = by[b]
            had = free[s]
            for q in range(pre_first[s], pre_first[s + 1]):
                here = False
                for j in range(W):
                    here = here or (j != i and rows[u, j] == pre[q])
                had = had and here
            if had:
                return int(s)
    return -1


def parking(
    by_first: Ints,
    by: Ints,
    pre_first: Ints,
    pre: Ints,
    post_first: Ints,
    post: Ints,
    free: Flags,
    run: Run,
) -> Flags:
    """[P, P]: entry (p, q) tells that q cannot be derived without p or a property that gives p at
    no cost.

    Raises `Stopped` where `run` should stop.
    """
    P = len(by_first) - 1
    pres = [pre[i:j].tolist() for i, j in pairwise(pre_first.tolist())]
    posts = [post[i:j].tolist() for i, j in pairwise(post_first.tolist())]
    # known [q, p]: whether q can be had although p, and what gives p at no cost, cannot
    allowed = np.ones((P, P), np.bool_)
    for p in range(P):
        run.check()
        stack, banned = [p], {p}
        while stack:
            w = stack.pop()
            for s in by[by_first[w] : by_first[w + 1]]:
                if free[s] and len(pres[s]) == 1 and pres[s][0] not in banned:
                    banned.add(pres[s][0])
                    stack.append(pres[s][0])
        allowed[list(banned), p] = False
    known = np.zeros((P, P), np.bool_)
    changed = set(range(len(free)))
    while changed:  # all p at once; a step again when something that it needs has become known
        again: set[int] = set()
        for s in sorted(changed):
            run.check()
            had = known[pres[s]].all(axis=0)
            for q in posts[s]:
                more = had & allowed[q] & ~known[q]
                if more.any():
                    known[q] |= more
                    again.add(q)
        changed = {s for s, needs in enumerate(pres) if not again.isdisjoint(needs)}
    return np.ascontiguousarray(~known.T)


@kernel
def parked(rows: Ints, u: int, step: int, post_first: Ints, post: Ints, without: Flags) -> bool:
    """Whether everything of state u, rows [·, W], that a step gives is parked by what is needed
    besides."""
    W = rows.shape[1]
    for i in range(W):
        here = False
        for q in range(post_first[step], post_first[step + 1]):
            here = here or post[q] == rows[u, i]
        if not here:
            continue
        found = False
        for j in range(W):
            other = rows[u, j]
            if other < 0 or not without[rows[u, i], other] or j == i:
                continue
            given = False
            for q in range(post_first[step], post_first[step + 1]):
                given = given or post[q] == other
            found = found or not given
        if not found:
            return False
    return True
