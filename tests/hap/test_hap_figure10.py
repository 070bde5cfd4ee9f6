"""HAP's A* as Figure 10 prints it with the prunings of §4.5, and its alternation with the ratios
(§3.1), written again in plain Python for two devices of speeds 1 and 2, where every triple needs
one property at most. Nothing is shared with the package but the data classes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import inf

import numpy as np
import pytest

from hap.hap_cases import tight
from hetplan.formulations.hap import astar
from hetplan.formulations.hap.common import reduced_or_answered
from hetplan.formulations.hap.data import Communication, HapData
from hetplan.formulations.hap.family import FAMILY
from hetplan.formulations.hap.problem import ReducedTheory
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Run
from quick import rest_slow

Pair = tuple[float, float]


@dataclass
class Partial:
    """Q, P(Q) without redundant properties, all that it ever had, tensors communicated, cost(Q) up
    to the last synchronisation, and what the devices have computed since."""

    Q: tuple[int, ...]
    P: frozenset[str]
    ever: frozenset[str]
    communicated: frozenset[str]
    cost: float
    since: Pair
    score: float = 0.0


class Figure10:
    """The search for ratios B of the two devices."""

    def __init__(self, data: HapData, B: Pair, *, once: bool) -> None:
        self.data, self.B, self.once = data, B, once
        sources = {t.post[0]: i for i, t in enumerate(data.triples) if not t.pre}
        # In the file's order, which decides between programs of equal cost. First pruning: beside
        # each consumer of a triple with an empty precondition stands the two as one instruction.
        self.T: list[tuple[tuple[int, ...], frozenset[str], frozenset[str]]] = []
        for i, t in enumerate(data.triples):
            if t.pre and t.pre[0] in sources:
                both = frozenset((t.pre[0], t.post[0]))
                self.T.append(((sources[t.pre[0]], i), frozenset(), both))
            if t.pre:
                self.T.append(((i,), frozenset(t.pre), frozenset(t.post)))

    def work(self, i: int) -> Pair:
        """Seconds of computing on each device."""
        t = self.data.triples[i]
        if isinstance(t, Communication):
            return 0.0, 0.0
        slow, fast = (t.fixed_flops + t.shared_flops * b for b in self.B)
        return slow, fast / 2

    def tensor(self, Q: tuple[int, ...]) -> frozenset[str]:
        """Second pruning: the tensor that an instruction communicates."""
        t = self.data.triples[Q[-1]]
        named = self.once and isinstance(t, Communication)
        return frozenset([t.pre[0].split("|")[0]] if named else [])

    def least_from(self, p: str) -> float:
        """Least computing from a property to the goal with infinite bandwidth."""

        @cache
        def within(p: str, steps: int) -> float:
            if p == self.data.goal:
                return 0.0
            ways = [
                min(self.work(i)) + within(t.post[0], steps - 1)
                for i, t in enumerate(self.data.triples)
                if steps and p in t.pre
            ]
            return min(ways, default=inf)

        return within(p, 9)

    def score(self, q: Partial) -> float:
        """cost(Q) + ecost(Q)."""
        from_start = min(
            min(self.work(i)) + self.least_from(t.post[0])
            for i, t in enumerate(self.data.triples)
            if not t.pre
        )
        return q.cost + max(q.since) + min([from_start, *map(self.least_from, q.P)])

    def appended(self, q: Partial, Q: tuple[int, ...], post: frozenset[str]) -> Partial:
        """Line 8, with the third pruning."""
        cost, since = q.cost, q.since
        for i in Q:
            t, work = self.data.triples[i], self.work(i)
            if isinstance(t, Communication):
                cost += max(since) + t.fixed_seconds + t.shared_seconds * max(self.B)
                since = (0.0, 0.0)
            since = since[0] + work[0], since[1] + work[1]
        ever, done = q.ever | post, q.communicated | self.tensor(Q)
        needed = {
            p
            for other, pre, gives in self.T
            if not gives <= ever and not self.tensor(other) & done
            for p in pre
        }
        P = frozenset(p for p in q.P | post if p in needed or p == self.data.goal)
        return Partial(q.Q + Q, P, ever, done, cost, since)

    def search(self) -> tuple[int, ...] | None:
        """Lines 3 to 21."""
        empty = frozenset[str]()
        S = [Partial((), empty, empty, empty, 0.0, (0.0, 0.0))]
        best, least = None, inf
        while any(q.score < least for q in S):
            q = min(S, key=lambda q: q.score)
            S.remove(q)
            for Q, pre, post in self.T:
                if not pre <= q.P or post <= q.ever or self.tensor(Q) & q.communicated:
                    continue
                new = self.appended(q, Q, post)
                if any(s.P >= new.P and s.cost <= new.cost for s in S):
                    continue
                S = [s for s in S if not (new.P >= s.P and new.cost <= s.cost)]
                if self.data.goal in new.P:
                    if new.cost + max(new.since) < least:
                        best, least = new.Q, new.cost + max(new.since)
                else:
                    new.score = self.score(new)
                    S.append(new)
        return best


def seconds(data: HapData, Q: tuple[int, ...], slow: float) -> float:
    """t(Q, B), the slow device's ratio given."""
    at, since, total = Figure10(data, (slow, 1 - slow), once=False), (0.0, 0.0), 0.0
    for i in Q:
        t, work = data.triples[i], at.work(i)
        if isinstance(t, Communication):
            total += max(since) + t.fixed_seconds + t.shared_seconds * max(slow, 1 - slow)
            since = (0.0, 0.0)
        since = since[0] + work[0], since[1] + work[1]
    return total + max(since)


def best_ratio(data: HapData, Q: tuple[int, ...]) -> float:
    """Of the slow device, by golden sections: t is convex in it."""
    low, high = 0.0, 1.0
    for _ in range(60):
        a, b = high - 0.618034 * (high - low), low + 0.618034 * (high - low)
        low, high = (low, b) if seconds(data, Q, a) <= seconds(data, Q, b) else (a, high)
    return low


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("seed", rest_slow(range(30), 10))
def test_the_search_is_figure_10(seed: int, once: bool) -> None:
    data = tight(seed)[0]
    reduced = reduced_or_answered(data, Run())
    assert isinstance(reduced, ReducedTheory)
    ratios = np.array([[1 / 3, 2 / 3]])
    program, finished, _ = astar.search(reduced, ratios, Run(), once=once)
    printed = Figure10(data, (1 / 3, 2 / 3), once=once).search()
    assert finished
    assert program == (None if printed is None else list(printed))


@pytest.mark.parametrize("seed", rest_slow(range(30), 8))
def test_the_paper_is_the_alternation(seed: int) -> None:
    data, slow = tight(seed)[0], 1 / 3
    seen, costs = set[tuple[int, ...]](), []
    while True:
        Q = Figure10(data, (slow, 1 - slow), once=True).search()
        Q = Q or Figure10(data, (slow, 1 - slow), once=False).search()
        assert Q is not None
        if Q in seen:
            break
        seen.add(Q)
        slow = best_ratio(data, Q)
        costs.append(seconds(data, Q, slow))
    result = solve(FAMILY, data, "paper")
    assert result.objective == pytest.approx(min(costs), rel=1e-7)
    assert result.details["rounds"] == len(seen)
