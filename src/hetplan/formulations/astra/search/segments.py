"""Mode 2: the Pareto set over strategies and their segments, proven (Astra, Section 3.4 and 3.6).

Strategies are taken by their lower bound; one that the set so far beats in time and money is skipped, the others go
through the compiled search of `segment_kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetplan.formulations.astra.search.efficiency import Floats
from hetplan.formulations.astra.search.facts import ModelFacts
from hetplan.formulations.astra.search.segment_figures import SegmentFigures
from hetplan.formulations.astra.search.segment_kernels import dominated, explore
from hetplan.formulations.astra.search.table import Ints, Strategies
from hetplan.solvers.run import Run

BUFFER = 512  # points that the compiled search hands over at a time


@dataclass(frozen=True)
class SegmentFront:
    """The Pareto set over strategies and segments: seconds ascending, money per iteration descending [F].

    strategy [F]: row of the table; stages, layers [F, M]: per type in pool order. explored: strategies not
    skipped; seen, solved: vectors of stage counts. finished: whether every strategy was looked at (else
    nothing is proven).
    """

    seconds: Floats
    money: Floats
    strategy: Ints
    stages: Ints
    layers: Ints
    explored: int
    seen: int
    solved: int
    finished: bool


def segment_front(facts: ModelFacts, table: Strategies, figures: SegmentFigures, run: Run) -> SegmentFront:
    """Every strategy that may matter, best lower bound first."""
    P, K = table.columns["pipeline_model_parallel_size"], table.columns["num_micro_batches"]
    bound, cheapest = _strategy_bounds(figures, P, K, facts.layers)
    front = _Points.empty(len(figures.c))
    explored, counts, finished = 0, np.zeros(2, np.int64), True
    for r in np.argsort(bound, kind="stable"):
        if bound[r] == np.inf:
            break
        if dominated(bound[r], bound[r] * cheapest[r], front.seconds, front.money):
            continue
        if run.should_stop:
            finished = False
            break
        explored += 1
        front = _explore(figures, int(r), (int(P[r]), facts.layers, int(K[r])), front, counts)
    return SegmentFront(
        front.seconds, front.money, front.strategy, front.stages, front.layers,
        explored, int(counts[0]), int(counts[1]), finished,
    )  # fmt: skip


@dataclass(frozen=True)
class _Points:
    """A front: seconds ascending, money descending [F]; strategy [F]; stages, layers [F, M]."""

    seconds: Floats
    money: Floats
    strategy: Ints
    stages: Ints
    layers: Ints

    @classmethod
    def empty(cls, types: int) -> _Points:
        none = np.zeros((0, types), np.int64)
        return cls(np.zeros(0), np.zeros(0), np.zeros(0, np.int64), none, none)

    def merged(self, other: _Points) -> _Points:
        """What neither set's points dominate; of equals the one that was there before."""
        joined = [np.concatenate(pair) for pair in zip(self._parts, other._parts, strict=True)]
        order = np.lexsort((joined[1], joined[0]))
        money = joined[1][order]
        before = np.concatenate([[np.inf], np.minimum.accumulate(money)[:-1]])
        return _Points(*(part[order[money < before]] for part in joined))

    @property
    def _parts(self) -> tuple[Floats, Floats, Ints, Ints, Ints]:
        return self.seconds, self.money, self.strategy, self.stages, self.layers


def _explore(
    figures: SegmentFigures, r: int, sizes: tuple[int, int, int], front: _Points, counts: Ints
) -> _Points:
    """One strategy through the compiled search; returns the front with its points."""
    P, N, K = sizes
    order = np.argsort(figures.c[:, r], kind="stable")
    back = np.argsort(order)
    c, h, g, rate = (
        np.ascontiguousarray(part[order, r]) for part in (figures.c, figures.h, figures.g, figures.rate)
    )
    widest = np.minimum(figures.cap[order, r], N - P + 1)
    most = np.where(widest >= 1, figures.most[order, r], 0)
    x = np.arange(1, N + 1)
    used = (x <= widest[:, None]) & (most[:, None] > 0)
    thetas = np.unique((c[:, None] * x + h[:, None])[used])
    phis = np.unique((g[:, None] * x)[used])
    m = np.zeros(len(c), np.int64)
    seconds = np.empty(BUFFER)
    stages, layers = np.empty((BUFFER, len(c)), np.int64), np.empty((BUFFER, len(c)), np.int64)
    while m[0] >= 0:
        found = int(explore(
            c, h, g, widest, most, rate, P, N, K, thetas, phis, front.seconds, front.money, m,
            seconds, stages, layers, counts,
        ))  # fmt: skip
        if found:
            money = seconds[:found] * (stages[:found] @ rate)
            points = (stages[:found][:, back], layers[:found][:, back])
            front = front.merged(_Points(seconds[:found].copy(), money, np.full(found, r), *points))
    return front


def _strategy_bounds(figures: SegmentFigures, P: Ints, K: Ints, N: int) -> tuple[Floats, Floats]:
    """(lower bound on T, least money per second) of every strategy; +inf where the segments cannot exist."""
    rows = P.size
    usable = np.where(figures.cap >= 1, figures.most, 0)
    c, h, g = (np.where(usable > 0, part, np.inf) for part in (figures.c, figures.h, figures.g))
    speed, left = np.zeros(rows), P.astype(float)
    room, left_room = np.zeros(rows), P.astype(float)
    paid, left_paid = np.zeros(rows), P.astype(float)
    fast, wide, cheap = (
        np.argsort(key, axis=0) for key in (c, -figures.cap, np.where(usable > 0, figures.rate, np.inf))
    )
    every = np.arange(rows)
    for i in range(len(c)):
        take = np.minimum(left, usable[fast[i], every])
        with np.errstate(divide="ignore", invalid="ignore"):
            speed += np.where(take > 0, take / c[fast[i], every], 0.0)
        left = left - take
        take = np.minimum(left_room, usable[wide[i], every])
        room += take * figures.cap[wide[i], every]
        left_room = left_room - take
        take = np.minimum(left_paid, usable[cheap[i], every])
        paid += take * figures.rate[cheap[i], every]
        left_paid = left_paid - take
    possible = (left == 0) & (room >= N) & (P <= N)
    theta = N / np.where(speed > 0, speed, np.inf) + h.min(axis=0)
    bound = N * c.min(axis=0) + P * h.min(axis=0) + (K - 1) * theta + N / P * g.min(axis=0)
    return np.where(possible, bound * (1 - 1e-9), np.inf), paid * (1 - 1e-9)
