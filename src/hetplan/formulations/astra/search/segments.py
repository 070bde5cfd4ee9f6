"""Mode 2: the Pareto set over strategies and their segments, proven (Astra, Section 3.4 and 3.6).

Strategies are taken by their lower bound; one that the set so far beats in time and money is
skipped, the others go through the compiled search of `segment_kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hetplan.formulations.astra.search.efficiency import Floats
from hetplan.formulations.astra.search.pareto import ROUNDING, tied
from hetplan.formulations.astra.search.segment_figures import (
    FIRST,
    LAST,
    MIDDLE,
    SegmentFigures,
    Shape,
)
from hetplan.formulations.astra.search.segment_kernels import dominated, explore
from hetplan.formulations.astra.search.table import Ints, Strategies
from hetplan.solvers.run import Run

BUFFER = 512  # points that the compiled search hands over at a time
PATIENCE = 512  # vectors of stage counts after which it looks at the clock again


@dataclass(frozen=True)
class SegmentFront:
    """The Pareto set over strategies and segments: seconds ascending, money per iteration
    descending [F].

    strategy [F]: row of the table; stages, layers [F, M]: per type in pool order, of the stages
    between the ends; ends [F, 4]: type and layers of the first stage, then of the last (-1, 0: they
    are one). explored: strategies not skipped; seen, solved: vectors of stage counts. finished:
    whether every strategy was looked at (else nothing is proven).
    """

    seconds: Floats
    money: Floats
    strategy: Ints
    stages: Ints
    layers: Ints
    ends: Ints
    explored: int
    seen: int
    solved: int
    finished: bool

    def shape(self, f: int) -> Shape:
        """The stages of point f."""
        first, first_layers, last, last_layers = self.ends[f].tolist()
        between = tuple(self.stages[f].tolist()), tuple(self.layers[f].tolist())
        return Shape(first, first_layers, last, last_layers, *between)


def segment_front(
    layers: int, table: Strategies, figures: SegmentFigures, run: Run
) -> SegmentFront:
    """Every strategy that may matter, best lower bound first; layers: of the model."""
    P, K = table.columns["pipeline_model_parallel_size"], table.columns["num_micro_batches"]
    bounds, least, pairs = _strategy_bounds(figures, P, K, layers)
    bound, cheapest = bounds.min(axis=0), least.min(axis=0)
    front = _Points.empty(len(figures.c))
    explored, counts, finished = 0, np.zeros(2, np.int64), True
    for r in np.argsort(tied(bound), kind="stable"):
        if bound[r] == np.inf:
            break
        if dominated(bound[r], cheapest[r], front.seconds, front.money):
            continue
        if run.should_stop:
            finished = False
            break
        explored += 1
        exposed = figures.exposed(int(r))
        sizes = (int(P[r]), layers, int(K[r]))
        for q in np.argsort(tied(bounds[:, r]), kind="stable"):
            low = bounds[q, r]
            if low == np.inf:
                break
            if not dominated(low, least[q, r], front.seconds, front.money):
                front, whole = _explore(
                    figures, int(r), pairs[q], exposed, sizes, front, counts, run
                )
                finished &= whole
        if not finished:
            break
    return SegmentFront(
        front.seconds, front.money, front.strategy, front.stages, front.layers, front.ends,
        explored, int(counts[0]), int(counts[1]), finished,
    )  # fmt: skip


def fastest(
    layers: int,
    table: Strategies,
    figures: SegmentFigures,
    run: Run,
    count: int,
    front: SegmentFront,
) -> SegmentFront:
    """The `count` fastest strategies, each on its fastest segments, in a front's form (nothing is
    dominated there)."""
    P, K = table.columns["pipeline_model_parallel_size"], table.columns["num_micro_batches"]
    bounds, _, pairs = _strategy_bounds(figures, P, K, layers)
    bound = bounds.min(axis=0)
    found: list[_Points] = []
    counts, finished = np.zeros(2, np.int64), front.finished
    for r in np.argsort(tied(bound), kind="stable"):
        worst = found[count - 1].seconds[0] if len(found) >= count else np.inf
        if bound[r] >= worst:
            break
        if run.should_stop:
            finished = False
            break
        exposed = figures.exposed(int(r))
        sizes = (int(P[r]), layers, int(K[r]))
        mine = _Points.empty(len(figures.c))
        for q in np.argsort(tied(bounds[:, r]), kind="stable"):
            limit = min(worst, mine.seconds[0] if len(mine.seconds) else np.inf)
            if bounds[q, r] >= limit:
                break
            # A point that costs nothing keeps everything slower out.
            none = np.zeros((1, len(figures.c)), np.int64)
            wall = _Points(
                np.array([limit]),
                np.array([-1.0]),
                np.array([-1]),
                none,
                none,
                np.zeros((1, 4), np.int64),
            )
            better, whole = _explore(figures, int(r), pairs[q], exposed, sizes, wall, counts, run)
            finished &= whole
            mine = better.head() if better.strategy[0] >= 0 else mine
        if len(mine.seconds):
            found.append(mine)
            order = np.argsort(
                tied(np.array([points.seconds[0] for points in found])), kind="stable"
            )
            found = [found[i] for i in order[:count]]
    every = [_Points.empty(len(figures.c)), *found]
    return replace(
        front,
        seconds=np.concatenate([p.seconds for p in every]),
        money=np.concatenate([p.money for p in every]),
        strategy=np.concatenate([p.strategy for p in every]),
        stages=np.concatenate([p.stages for p in every]),
        layers=np.concatenate([p.layers for p in every]),
        ends=np.concatenate([p.ends for p in every]),
        finished=finished,
    )


@dataclass(frozen=True)
class _Points:
    """A front: seconds ascending, money descending [F]; strategy [F]; stages, layers [F, M]; ends
    [F, 4]."""

    seconds: Floats
    money: Floats
    strategy: Ints
    stages: Ints
    layers: Ints
    ends: Ints

    @classmethod
    def empty(cls, types: int) -> _Points:
        none = np.zeros((0, types), np.int64)
        return cls(
            np.zeros(0), np.zeros(0), np.zeros(0, np.int64), none, none, np.zeros((0, 4), np.int64)
        )

    def merged(self, other: _Points) -> _Points:
        """What neither set's points dominate; of equals, up to rounding, the one that was there
        before."""
        joined = [np.concatenate(pair) for pair in zip(self._parts, other._parts, strict=True)]
        order = np.lexsort((tied(joined[1]), tied(joined[0])))
        money = joined[1][order]
        before = np.concatenate([[np.inf], np.minimum.accumulate(money)[:-1]])
        return _Points(*(part[order[money < before * (1 - ROUNDING)]] for part in joined))

    def head(self) -> _Points:
        """The fastest alone."""
        return _Points(
            self.seconds[:1],
            self.money[:1],
            self.strategy[:1],
            self.stages[:1],
            self.layers[:1],
            self.ends[:1],
        )

    @property
    def _parts(self) -> tuple[Floats, Floats, Ints, Ints, Ints, Ints]:
        return self.seconds, self.money, self.strategy, self.stages, self.layers, self.ends


def _explore(
    figures: SegmentFigures,
    r: int,
    pair: tuple[int, int],
    exposed: Floats,
    sizes: tuple[int, int, int],
    front: _Points,
    counts: Ints,
    run: Run,
) -> tuple[_Points, bool]:
    """One strategy with its first and last stage on the types of `pair` through the compiled
    search; returns the front with its points, and whether these are all (the run may stop it on the
    way)."""
    P, N, K = sizes
    kinds = _Kinds.of(figures, r, pair, exposed, (P, N))
    x = np.arange(1, N + 1)
    used = (x <= kinds.cap[:, None]) & (kinds.room[:, None] > 0)
    thetas = np.unique((kinds.c[:, None] * x + kinds.h[:, None])[used])
    phis = np.unique(kinds.exposed[used])
    least, most = _allowed(kinds.exposed, phis)
    B, M = BUFFER, len(kinds.c)
    m = kinds.need.copy()
    seconds, stages, layers = np.empty(B), np.empty((B, M), np.int64), np.empty((B, M), np.int64)
    scratch = np.empty((5, M), np.int64)
    while m[0] >= 0 and not run.should_stop:
        found = int(explore(
            kinds.c, kinds.h, kinds.g, kinds.cap, kinds.need, kinds.room, kinds.rate, P, N, K, thetas, phis,
            least, most, front.seconds, front.money, m, seconds, stages, layers, counts, PATIENCE, scratch,
        ))  # fmt: skip
        if found:
            money = seconds[:found] * (stages[:found] @ kinds.rate)
            points = kinds.points(stages[:found], layers[:found], pair, len(figures.c))
            front = front.merged(_Points(seconds[:found].copy(), money, np.full(found, r), *points))
    return front, bool(m[0] < 0)


def _allowed(exposed: Floats, phis: Floats) -> tuple[Ints, Ints]:
    """(least, most) [phis, M]: layers whose r(n) keeps to each phi; r falls, then rises. None:
    least 1 > most 0."""
    fine = exposed[None, :, :] <= phis[:, None, None]
    some = fine.any(axis=2)
    least = np.where(some, fine.argmax(axis=2) + 1, 1)
    most = np.where(some, exposed.shape[1] - fine[:, :, ::-1].argmax(axis=2), 0)
    return np.ascontiguousarray(least), np.ascontiguousarray(most)


@dataclass(frozen=True)
class _Kinds:
    """Kinds of stages for one strategy and one pair of ends, by ascending c: the first stage, the
    last (unless they are one), then every type that may lie between. place [kinds]: 0 first, 1
    last, 2 + type between."""

    place: Ints
    c: Floats
    h: Floats
    g: Floats
    cap: Ints
    need: Ints
    room: Ints
    rate: Floats
    exposed: Floats

    @classmethod
    def of(
        cls,
        figures: SegmentFigures,
        r: int,
        pair: tuple[int, int],
        exposed: Floats,
        sizes: tuple[int, int],
    ) -> _Kinds:
        """Types without room for a stage between are left out."""
        first, last = pair
        P, N = sizes
        widest = np.minimum(figures.cap[:, :, r], N - P + 1)
        spare = figures.most[:, r] - np.bincount(
            [i for i in pair if i >= 0], minlength=len(figures.c)
        )
        between = [
            i for i in range(len(figures.c)) if spare[i] > 0 and widest[MIDDLE, i] > 0 and P > 2
        ]
        rows = [(0, FIRST, first)] + ([(1, LAST, last)] if last >= 0 else [])
        rows += [(2 + i, MIDDLE, i) for i in between]
        place, kind, of = (np.array(column, np.int64) for column in zip(*rows, strict=True))
        order = np.argsort(figures.c[of, r], kind="stable")
        place, kind, of = place[order], kind[order], of[order]
        extra = np.array([*figures.end_seconds(r, first, last), 0.0])
        return cls(
            place=place,
            c=np.ascontiguousarray(figures.c[of, r]),
            h=figures.h[of, r] + extra[np.minimum(place, 2)],
            g=np.ascontiguousarray(figures.g[of, r]),
            cap=np.ascontiguousarray(widest[kind, of]),
            need=(place < 2).astype(np.int64),
            room=np.where(place < 2, 1, np.minimum(spare[of], P - 2)),
            rate=np.ascontiguousarray(figures.rate[of, r]),
            exposed=np.ascontiguousarray(exposed[kind, of]),
        )

    def points(
        self, stages: Ints, layers: Ints, pair: tuple[int, int], types: int
    ) -> tuple[Ints, Ints, Ints]:
        """(stages, layers [F, M] between the ends in pool order, ends [F, 4])."""
        between, many = np.zeros((2, len(stages), types + 2), np.int64)
        between[:, self.place], many[:, self.place] = stages, layers
        ends = np.column_stack([
            np.full(len(stages), pair[0]), many[:, 0], np.full(len(stages), pair[1]), many[:, 1]
        ])  # fmt: skip
        return between[:, 2:], many[:, 2:], ends


def _strategy_bounds(
    figures: SegmentFigures, P: Ints, K: Ints, N: int
) -> tuple[Floats, Floats, list[tuple[int, int]]]:
    """(lower bound on T, on its money) [Q, R] for every pair of types at the ends, and the pairs
    (last -1: one stage).

    +inf where the segments cannot exist. With W the work in layers and theta the slowest stage's
    time, theta >= W / sum_i(m_i / c_i) and money per second sum_i(m_i rate_i) >= min_i(rate_i c_i)
    sum_i(m_i / c_i), so that theta's money is at least W min_i(rate_i c_i), however the stages lie.
    """
    rows = P.size
    widest = figures.cap.max(axis=0)
    usable = np.where(widest >= 1, figures.most, 0)
    c, h, g = (np.where(usable > 0, part, np.inf) for part in (figures.c, figures.h, figures.g))
    speed, left = np.zeros(rows), P.astype(float)
    room, left_room = np.zeros(rows), P.astype(float)
    paid, left_paid = np.zeros(rows), P.astype(float)
    fast, wide, cheap = (
        np.argsort(key, axis=0) for key in (c, -widest, np.where(usable > 0, figures.rate, np.inf))
    )
    every = np.arange(rows)
    for i in range(len(c)):
        take = np.minimum(left, usable[fast[i], every])
        with np.errstate(divide="ignore", invalid="ignore"):
            speed += np.where(take > 0, take / c[fast[i], every], 0.0)
        left = left - take
        take = np.minimum(left_room, usable[wide[i], every])
        room += take * widest[wide[i], every]
        left_room = left_room - take
        take = np.minimum(left_paid, usable[cheap[i], every])
        paid += take * figures.rate[cheap[i], every]
        left_paid = left_paid - take
    possible = (left == 0) & (room >= N) & (P <= N)
    speed = np.where(speed > 0, speed, np.inf)
    least_h = h.min(axis=0)
    # the work once, and the least reduction
    base = N * c.min(axis=0) + P * least_h + N / P * g.min(axis=0)
    per_layer = np.where(usable > 0, figures.rate * figures.c, np.inf).min(axis=0)
    M = len(c)
    pairs = [(i, -1) for i in range(M)] + [(i, j) for i in range(M) for j in range(M)]
    bounds, money = np.full((2, len(pairs), rows), np.inf)
    for q, (i, j) in enumerate(pairs):
        fine = (
            possible & (figures.cap[FIRST, i] >= 1) & (figures.most[i] >= 1) & ((P == 1) == (j < 0))
        )
        before, behind = figures.ends[0, i], figures.ends[1, i if j < 0 else j]
        if j >= 0:
            fine &= (figures.cap[LAST, j] >= 1) & (figures.most[j] >= 1 + (i == j))
        # Each end takes its stage's time from layers, at that type's speed.
        work = N + before / figures.c[i] + behind / figures.c[i if j < 0 else j]
        once = base + before + behind
        with np.errstate(invalid="ignore"):  # unusable types: inf times 0
            T = once + (K - 1) * (work / speed + least_h)
            slowest = np.maximum(work * per_layer, work / speed * paid) + least_h * paid
            dollars = once * paid + (K - 1) * slowest
        bounds[q] = np.where(fine, T * (1 - 1e-9), np.inf)
        money[q] = np.where(fine, dollars * (1 - 2e-9), np.inf)
    return bounds, money, pairs
