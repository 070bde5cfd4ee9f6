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
from hetplan.solvers.run import Run, Stopped

Pair = tuple[int, int]  # types of the first and of the last stage; last -1: they are one
NOWHERE = Shape(-1, 0, -1, 0, (), ())


@dataclass(frozen=True)
class Point:
    """A strategy (row of the table) on segments: seconds and money per iteration."""

    seconds: float
    money: float
    strategy: int
    shape: Shape


class Front:
    """Points of which none beats another in both: seconds ascending, money descending [F]."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.seconds, self.money = np.zeros((2, 0))

    def limits(self, paid: Floats) -> Floats:
        """From which T on a point that costs `paid` [V] money per second is beaten [V]."""
        with np.errstate(divide="ignore", invalid="ignore"):
            by_money = np.where(self.money <= 0, 0.0, self.money / paid[:, None])
        return np.asarray(np.maximum(self.seconds, by_money).min(axis=1, initial=np.inf))

    def beats(self, seconds: float, money: float) -> bool:
        """Whether some point is as good in both."""
        return bool(((self.seconds <= seconds) & (self.money <= money)).any())

    def add(self, point: Point) -> None:
        """Take a point, and drop what is beaten; of equals, up to rounding, the first stays."""
        points = [*self.points, point]
        seconds, money = np.append(self.seconds, point.seconds), np.append(self.money, point.money)
        order = np.lexsort((tied(money), tied(seconds)))
        before = np.concatenate([[np.inf], np.minimum.accumulate(money[order])[:-1]])
        kept = order[money[order] < before * (1 - ROUNDING)]
        self.points = [points[i] for i in kept]
        self.seconds, self.money = seconds[kept], money[kept]


class SegmentSearch:
    """Every strategy that may matter, best lower bound first; layers: of the model.

    explored: strategies not skipped; seen, solved: vectors of stage counts. finished: whether every
    strategy was looked at (else nothing is proven).
    """

    def __init__(self, layers: int, table: Strategies, figures: SegmentFigures, run: Run) -> None:
        self.layers, self.figures, self.run = layers, figures, run
        self.P = table.columns["pipeline_model_parallel_size"]
        self.K = table.columns["num_micro_batches"]
        self.bounds, self.least, self.pairs = _strategy_bounds(figures, self.P, self.K, layers)
        self.explored = self.seen = self.solved = 0
        self.finished = True

    def front(self) -> list[Point]:
        """The Pareto set over strategies and segments; what is found so far where the run stops."""
        front = Front()
        cheapest = self.least.min(axis=0)
        try:
            for r, bound in self.by_bound(self.bounds.min(axis=0)):
                if front.beats(bound, float(cheapest[r])):
                    continue
                self.run.check()
                self.explored += 1
                exposed = self.figures.exposed(r)
                for q, low in self.by_bound(self.bounds[:, r]):
                    if not front.beats(low, float(self.least[q, r])):
                        self.explore(r, self.pairs[q], exposed, front)
        except Stopped:
            self.finished = False
        return front.points

    def fastest(self, count: int) -> list[Point]:
        """The `count` fastest strategies, each on its fastest segments; those found so far where
        the run stops."""
        points: list[Point] = []
        try:
            for r, bound in self.by_bound(self.bounds.min(axis=0)):
                worst = points[count - 1].seconds if len(points) >= count else np.inf
                if bound >= worst:
                    break
                self.run.check()
                best, exposed = Point(worst, -1.0, -1, NOWHERE), self.figures.exposed(r)
                for q, low in self.by_bound(self.bounds[:, r]):
                    if low >= best.seconds:
                        break
                    front = Front()
                    # a point that costs nothing keeps everything slower out
                    front.add(replace(best, money=-1.0))
                    self.explore(r, self.pairs[q], exposed, front)
                    best = front.points[0] if front.points[0].money >= 0 else best
                points += [best] if best.strategy >= 0 else []
                order = np.argsort(tied(np.array([p.seconds for p in points])), kind="stable")
                points = [points[i] for i in order[:count]]
        except Stopped:
            self.finished = False
        return points

    def by_bound(self, bounds: Floats) -> Iterator[tuple[int, float]]:
        """Indices and bounds, ascending, as far as the bounds are finite."""
        for i in np.argsort(tied(bounds), kind="stable"):
            if bounds[i] == np.inf:
                return
            yield int(i), float(bounds[i])

    def explore(self, r: int, pair: Pair, exposed: Floats, front: Front) -> None:
        """Add the points of strategy r whose first and last stage are on the types of `pair`;
        raises Stopped on the way."""
        sizes = (int(self.P[r]), self.layers, int(self.K[r]))
        kinds = Kinds(self.figures, r, pair, exposed, sizes)
        for m in stage_counts(kinds.P - int(kinds.need.sum()), kinds.room - kinds.need):
            m += kinds.need
            self.seen += len(m)
            m = m[kinds.quick_bounds(m) < front.limits(m @ kinds.rate)]
            bound, theta, phi, work = kinds.lower_bounds(m)
            paid = m @ kinds.rate
            hopeful = np.flatnonzero(bound < front.limits(paid))
            for v in hopeful[np.argsort(bound[hopeful], kind="stable")]:
                limit = float(front.limits(paid[v : v + 1])[0])
                if bound[v] >= limit:
                    continue
                self.run.check()
                self.solved += 1
                start = (float(work[v]), float(theta[v]), float(phi[v]))
                seconds, n = kinds.least_time(m[v], start, limit)
                if seconds < limit:
                    shape = kinds.shape(m[v], n)
                    front.add(Point(seconds, seconds * float(paid[v]), r, shape))
            self.run.check()


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


class Kinds:
    """Kinds of stages for one strategy and one pair of ends, by ascending c: the first stage, the
    last (unless they are one), then every type that may lie between.

    place [kinds]: 0 first, 1 last, 2 + type between. c, h, g, cap, rate, exposed as in the figures;
    need <= stage counts <= room. thetas [A], phis [B]: ascending values that the slowest stage and
    the slowest reduction may take. by_theta [A, kinds]: the most layers whose stage keeps to theta;
    least, most [B, kinds]: the layers whose reduction keeps to phi (none: least 1 > most 0).
    """

    def __init__(
        self,
        figures: SegmentFigures,
        r: int,
        pair: Pair,
        exposed: Floats,
        sizes: tuple[int, int, int],
    ) -> None:
        first, last = pair
        self.P, self.N, self.K = P, N, _ = sizes
        self.pair, self.types = pair, len(figures.c)
        widest = np.minimum(figures.cap[:, :, r], N - P + 1)
        taken = np.bincount([i for i in pair if i >= 0], minlength=self.types)
        spare = figures.most[:, r] - taken
        # types without room for a stage between are left out
        between = [i for i in range(self.types) if spare[i] > 0 and widest[MIDDLE, i] > 0 and P > 2]
        rows = [(0, FIRST, first)] + ([(1, LAST, last)] if last >= 0 else [])
        rows += [(2 + i, MIDDLE, i) for i in between]
        place, kind, of = np.array(sorted(rows, key=lambda row: figures.c[row[2], r])).T
        extra = np.array([*figures.end_seconds(r, first, last), 0.0])
        self.place, self.c, self.g = place, figures.c[of, r], figures.g[of, r]
        self.h = figures.h[of, r] + extra[np.minimum(place, 2)]
        self.cap, self.rate, self.exposed = widest[kind, of], figures.rate[of, r], exposed[kind, of]
        self.need = (place < 2).astype(np.int64)
        self.room = np.where(place < 2, 1, np.minimum(spare[of], P - 2))
        x = np.arange(1, N + 1)
        used = (x <= self.cap[:, None]) & (self.room[:, None] > 0)
        seconds = self.c[:, None] * x + self.h[:, None]
        self.thetas, self.phis = np.unique(seconds[used]), np.unique(self.exposed[used])
        by_theta = [
            np.searchsorted(row[:cap], self.thetas, side="right")
            for row, cap in zip(seconds, self.cap, strict=True)
        ]
        self.by_theta = np.array(by_theta).T
        # r(n) falls, then rises, so that the layers that keep to a phi are an interval
        fine = self.exposed[None, :, :] <= self.phis[:, None, None]
        some = fine.any(axis=2)
        self.least = np.where(some, fine.argmax(axis=2) + 1, 1)
        self.most = np.where(some, N - fine[:, :, ::-1].argmax(axis=2), 0)

    def shape(self, m: Ints, n: Ints) -> Shape:
        """The stages with counts m and layers n per kind."""
        stages, layers = np.zeros((2, self.types + 2), np.int64)
        stages[self.place], layers[self.place] = m, n
        first, last = self.pair
        between = tuple(stages[2:].tolist()), tuple(layers[2:].tolist())
        return Shape(first, int(layers[0]), last, int(layers[1]), *between)

    def quick_bounds(self, m: Ints) -> Floats:
        """What T is at least for each vector [V], with all layers on the fastest kind for the work
        and divisible ones for the slowest stage."""
        c, h = self.c, self.h
        bound = self.N * c[0] + m @ h
        if c[0] > 0:
            bound += (self.K - 1) * (self.N + m @ (h / c)) / (m @ (1 / c))
        return np.asarray(bound * (1.0 - 1e-12))

    def lower_bounds(self, m: Ints) -> tuple[Floats, Floats, Floats, Floats]:
        """What T is at least for each vector [V], and its parts: divisible layers for the slowest
        stage and the slowest reduction, and the least work."""
        c, h, g, N = self.c, self.h, self.g, self.N
        work, _ = self.least_work(m, np.ones_like(c, np.int64), self.cap)
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
        total, n = self.least_work(m, self.least[None, left:right], caps)
        total = total + more * thetas + phis
        best = np.unravel_index(int(total.argmin()), total.shape)
        return float(total[best]), n[best]

    def least_work(self, m: Ints, low: Ints, cap: Ints) -> tuple[Floats, Ints]:
        """Least sum of stage times [...] for counts m and low <= layers <= cap [..., kinds], +inf
        where there are none; and the layers per kind. Kinds are sorted by ascending c: layers
        beyond `low` go to the fastest first."""
        m, low, cap = np.broadcast_arrays(m, low, cap)
        n = m * low
        extra = self.N - n.sum(axis=-1)
        possible = ~((m > 0) & (cap < low)).any(axis=-1) & (extra >= 0)
        work = np.zeros(extra.shape)
        for i, (c, h) in enumerate(zip(self.c, self.h, strict=True)):
            work += m[..., i] * (c * low[..., i] + h)
        for i, c in enumerate(self.c):
            more = np.clip(np.minimum(extra, m[..., i] * (cap[..., i] - low[..., i])), 0, None)
            n[..., i] += more
            extra = extra - more
            work += more * c
        return np.where(possible & (extra == 0), work, np.inf), n


def _strategy_bounds(
    figures: SegmentFigures, P: Ints, K: Ints, N: int
) -> tuple[Floats, Floats, list[Pair]]:
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
