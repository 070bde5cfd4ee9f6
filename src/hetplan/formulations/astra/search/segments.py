"""Mode 2: the Pareto set over strategies and their segments, proven (Astra, Section 3.4 and 3.6).

Strategies are taken by their lower bound; one that the set so far beats in time and money is
skipped. Of the others every vector of stage counts is bounded, and solved where the bound is not
beaten either.

A kind of stage is a type of device, or the first or the last stage on a type (one of each, h with
the embedding's or the head's seconds). For stage counts m and layers n per stage, with c, h
seconds, r(n) exposed seconds of gradient reduction and optimizer, cap the layers that fit:
    T = sum_s (n_s c + h) + (K-1) max_s (n_s c + h) + max_s r(n_s),      money = T sum_i m_i rate_i.
{n: r(n) <= phi} is an interval for every phi (falling, then rising: layers hide a reduction, then
add to it), and g n <= r(n) for all n. For fixed m the rate is fixed, so that the least T is all
that matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from hetplan.formulations.astra.search.result import ROUNDING, tied
from hetplan.formulations.astra.search.segment_figures import (
    FIRST,
    LAST,
    MIDDLE,
    SegmentFigures,
    Shape,
)
from hetplan.formulations.astra.search.space import Ints, Strategies
from hetplan.formulations.astra.search.timing import Floats
from hetplan.solvers.run import Run


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
        if front.beats(float(bound[r]), float(cheapest[r])):
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
            if not front.beats(float(low), float(least[q, r])):
                search = _Search.of(_Kinds.of(figures, int(r), pairs[q], exposed, sizes), *sizes)
                front, whole = _explore(search, int(r), pairs[q], front, counts, run)
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
            search = _Search.of(_Kinds.of(figures, int(r), pairs[q], exposed, sizes), *sizes)
            better, whole = _explore(search, int(r), pairs[q], wall, counts, run)
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

    def limits(self, paid: Floats) -> Floats:
        """From which T on a point that costs `paid` [V] money per second is beaten [V]."""
        with np.errstate(divide="ignore", invalid="ignore"):
            by_money = np.where(self.money <= 0, 0.0, self.money / paid[:, None])
        return np.asarray(np.maximum(self.seconds, by_money).min(axis=1, initial=np.inf))

    def beats(self, seconds: float, money: float) -> bool:
        """Whether some point is as good in both."""
        return bool(((self.seconds <= seconds) & (self.money <= money)).any())

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


@dataclass(frozen=True)
class _Search:
    """One strategy with its first and last stage on two types, over all vectors of stage counts.

    thetas [A], phis [B]: ascending values that the slowest stage and the slowest reduction may
    take. by_theta [A, kinds]: the most layers whose stage keeps to theta; least, most [B, kinds]:
    the layers whose reduction keeps to phi (none: least 1 > most 0).
    """

    kinds: _Kinds
    P: int
    N: int
    K: int
    thetas: Floats
    phis: Floats
    by_theta: Ints
    least: Ints
    most: Ints

    @classmethod
    def of(cls, kinds: _Kinds, P: int, N: int, K: int) -> _Search:
        """With the values that a stage of each kind and size has."""
        x = np.arange(1, N + 1)
        used = (x <= kinds.cap[:, None]) & (kinds.room[:, None] > 0)
        seconds = kinds.c[:, None] * x + kinds.h[:, None]
        thetas, phis = np.unique(seconds[used]), np.unique(kinds.exposed[used])
        by_theta = [
            np.searchsorted(row[:cap], thetas, side="right")
            for row, cap in zip(seconds, kinds.cap, strict=True)
        ]
        return cls(kinds, P, N, K, thetas, phis, np.array(by_theta).T, *_allowed(kinds, phis))

    def quick_bounds(self, m: Ints) -> Floats:
        """What T is at least for each vector [V], with all layers on the fastest kind for the work
        and divisible ones for the slowest stage."""
        c, h = self.kinds.c, self.kinds.h
        bound = self.N * c[0] + m @ h
        if c[0] > 0:
            bound += (self.K - 1) * (self.N + m @ (h / c)) / (m @ (1 / c))
        return np.asarray(bound * (1.0 - 1e-12))

    def lower_bounds(self, m: Ints) -> tuple[Floats, Floats, Floats, Floats]:
        """What T is at least for each vector [V], and its parts: divisible layers for the slowest
        stage and the slowest reduction, and the least work."""
        kinds, N = self.kinds, self.N
        c, h, g = kinds.c, kinds.h, kinds.g
        work, _ = least_work(kinds, m, np.ones_like(c, np.int64), kinds.cap, N)
        theta = np.where(m > 0, c + h, 0.0).max(axis=1)
        phi = np.where(m > 0, g, 0.0).max(axis=1)
        if c[0] > 0:
            theta = np.maximum(theta, (N + m @ (h / c)) / (m @ (1 / c)))
        if (g > 0).all():
            phi = np.maximum(phi, N / (m @ (1 / g)))
        shrink = 1.0 - 1e-12  # rounding: a bound must never exceed what it bounds
        bound = (work + (self.K - 1) * theta + phi) * shrink
        return bound, theta * shrink, phi * shrink, work

    def least_time(
        self, m: Ints, start: tuple[float, float, float], limit: float
    ) -> tuple[float, Ints]:
        """Least T below `limit` for counts m (else +inf), and the layers per kind.

        start: the least work, theta and phi that m allows. All pairs of a theta and a phi between
        these and what the limit leaves room for are priced at once.
        """
        work, theta, phi = start
        more = self.K - 1
        first = max(0, int(np.searchsorted(self.thetas, theta, side="right")) - 1)
        last = int(np.searchsorted(work + more * self.thetas + phi, limit))
        left = max(0, int(np.searchsorted(self.phis, phi, side="right")) - 1)
        right = int(np.searchsorted(work + more * theta + self.phis, limit))
        if first >= last or left >= right:
            return np.inf, m
        thetas, phis = self.thetas[first:last, None], self.phis[None, left:right]
        caps = np.minimum(self.by_theta[first:last, None], self.most[None, left:right])
        total, n = least_work(self.kinds, m, self.least[None, left:right], caps, self.N)
        total = total + more * thetas + phis
        best = np.unravel_index(int(total.argmin()), total.shape)
        return float(total[best]), n[best]


def stage_counts(total: int, room: Ints) -> Iterator[Ints]:
    """Blocks [V, kinds] of all vectors 0 <= m <= room that add up to `total`: every value of all
    kinds but the last three in turn, theirs as one block."""
    free = np.flatnonzero(room)
    if not len(free):
        if total == 0:
            yield np.zeros((1, len(room)), np.int64)
        return
    outer, inner, last = free[:-3], free[-3:-1], free[-1]
    axes = np.meshgrid(*(np.arange(room[i] + 1) for i in inner), indexing="ij")
    grid = np.stack(axes, axis=-1).reshape(-1, len(inner)) if axes else np.zeros((1, 0), np.int64)
    for values in product(*(range(room[i] + 1) for i in outer)):
        rest = total - sum(values) - grid.sum(axis=1)
        fits = (rest >= 0) & (rest <= room[last])
        block = np.zeros((int(fits.sum()), len(room)), np.int64)
        block[:, outer], block[:, inner], block[:, last] = values, grid[fits], rest[fits]
        if len(block):
            yield block


def least_work(kinds: _Kinds, m: Ints, low: Ints, cap: Ints, N: int) -> tuple[Floats, Ints]:
    """Least sum of stage times [...] for counts m and low <= layers <= cap [..., kinds], +inf where
    there are none; and the layers per kind. Kinds are sorted by ascending c: layers beyond `low` go
    to the fastest first."""
    m, low, cap = np.broadcast_arrays(m, low, cap)
    n = m * low
    extra = N - n.sum(axis=-1)
    possible = ~((m > 0) & (cap < low)).any(axis=-1) & (extra >= 0)
    work = np.zeros(extra.shape)
    for i, (c, h) in enumerate(zip(kinds.c, kinds.h, strict=True)):
        work += m[..., i] * (c * low[..., i] + h)
    for i, c in enumerate(kinds.c):
        more = np.clip(np.minimum(extra, m[..., i] * (cap[..., i] - low[..., i])), 0, None)
        n[..., i] += more
        extra = extra - more
        work += more * c
    return np.where(possible & (extra == 0), work, np.inf), n


def _explore(
    search: _Search, r: int, pair: tuple[int, int], front: _Points, counts: Ints, run: Run
) -> tuple[_Points, bool]:
    """The front with the points of strategy r whose first and last stage are on the types of
    `pair`, and whether these are all (the run may stop it on the way). counts [2]: vectors of stage
    counts seen, solved."""
    kinds, types = search.kinds, front.stages.shape[1]
    for m in stage_counts(search.P - int(kinds.need.sum()), kinds.room - kinds.need):
        m += kinds.need
        counts[0] += len(m)
        m = m[search.quick_bounds(m) < front.limits(m @ kinds.rate)]
        bound, theta, phi, work = search.lower_bounds(m)
        paid = m @ kinds.rate
        hopeful = np.flatnonzero(bound < front.limits(paid))
        for v in hopeful[np.argsort(bound[hopeful], kind="stable")]:
            if run.should_stop:
                return front, False
            limit = float(front.limits(paid[v : v + 1])[0])
            if bound[v] >= limit:
                continue
            counts[1] += 1
            start = (float(work[v]), float(theta[v]), float(phi[v]))
            seconds, n = search.least_time(m[v], start, limit)
            if seconds < limit:
                money = np.array([seconds * paid[v]])
                stages = kinds.points(m[v : v + 1], n[None], pair, types)
                point = _Points(np.array([seconds]), money, np.array([r]), *stages)
                front = front.merged(point)
        if run.should_stop:
            return front, False
    return front, True


def _allowed(kinds: _Kinds, phis: Floats) -> tuple[Ints, Ints]:
    """(least, most) [phis, kinds]: layers whose r(n) keeps to each phi; r falls, then rises. None:
    least 1 > most 0."""
    fine = kinds.exposed[None, :, :] <= phis[:, None, None]
    some = fine.any(axis=2)
    least = np.where(some, fine.argmax(axis=2) + 1, 1)
    most = np.where(some, kinds.exposed.shape[1] - fine[:, :, ::-1].argmax(axis=2), 0)
    return least, most


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
        sizes: tuple[int, int, int],
    ) -> _Kinds:
        """Types without room for a stage between are left out."""
        first, last = pair
        P, N, _ = sizes
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
