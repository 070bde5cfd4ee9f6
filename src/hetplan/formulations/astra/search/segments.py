"""Mode 2: the Pareto set over strategies and their segments, proven (Astra, Section 3.4 and 3.6).

Strategies are taken by their lower bound; one that the set so far beats in time and money is
skipped. Of the others every vector of stage counts per type is bounded; where the bound is not
beaten either, every choice of the first and the last stage's types is solved.

A kind of stage is a type of device, or the first or the last stage on a type (one of each, h with
the embedding's or the head's seconds). For stage counts m and layers n per stage, with c, h
seconds, r(n) exposed seconds of gradient reduction and optimizer, cap the layers that fit:
    T = sum_s (n_s c + h) + (K-1) max_s (n_s c + h) + max_s r(n_s),      money = T sum_i m_i rate_i.
{n: r(n) <= phi} is an interval for every phi (falling, then rising: layers hide a reduction, then
add to it), and g n <= r(n) for all n. For fixed m the rate is fixed, so that the least T is all
that matters.

For every strategy of the table the stages become segments of an `astra` problem: c and h per type
from the pricing.
Beyond eq. 22, which knows equal layers alone, the first stage has the embedding's seconds on its
type and the last one the head's, as in modes 1 and 3; every type is tried for either. max_layers
come from the memory filter: the first stage with the embedding, the last with the head, those
between as if second of the pipeline, so that any order of them fits. The exposed gradient reduction
and the optimizer add max_s r(n_s).
Interleaving and block-wise recomputation are left out: Megatron-LM has them for equal stages only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.astra.data import AstraData, DeviceType
from hetplan.formulations.astra.problem import stage_counts
from hetplan.formulations.astra.search.memory import share_needed, stage_bytes, usable_bytes
from hetplan.formulations.astra.search.pricing import EMBEDDING, HEAD, Priced, after_pipeline
from hetplan.formulations.astra.search.result import pareto, tied
from hetplan.formulations.astra.search.space import Space
from hetplan.formulations.astra.search.table import Strategies
from hetplan.replays.arrays import Floats, Ints
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.facts import ModelFacts
from hetplan.replays.offers import Offer
from hetplan.solvers.run import Run, Stopped

SHRINK = 1.0 - 1e-12  # rounding: a bound must never exceed what it bounds


def segment_space(space: Space) -> Space:
    """The part of `space` that stages of different sizes can take."""
    return replace(
        space,
        interleaving=False,
        recompute=tuple(g for g in space.recompute if g != "hybrid"),
        recompute_method=tuple(m for m in space.recompute_method if m == "uniform"),
    )


FIRST, MIDDLE, LAST = range(3)


class Stages(NamedTuple):
    """So many stages of one kind (FIRST, MIDDLE, LAST) on one type, with their layers together."""

    kind: int
    type: int
    number: int
    layers: int

    @property
    def each(self) -> list[int]:
        """Layers of each stage, as even as they go, the fuller ones last."""
        base, more = divmod(self.layers, self.number)
        return [base] * (self.number - more) + [base + 1] * more


@dataclass(frozen=True)
class SegmentFigures:
    """Per type (rows, pool order) and strategy: c, h [M, R] seconds; ends [2, M, R]: embedding and
    head, seconds.

    g [M, R]: a line through 0 below every r(n); cap [3, M, R] layers of a first, middle and last
    stage (of a pipeline of one stage the first holds both ends); most [M, R] stages; rate [M, R]:
    money per second of one stage. offloaded [R]: share of the optimizer states on the host.
    exposed: for strategy r, r(n) as [3, M, N] for n = 1..N.
    """

    c: Floats
    h: Floats
    ends: Floats
    g: Floats
    cap: Ints
    most: Ints
    rate: Floats
    offloaded: Floats
    exposed: Callable[[int], Floats]

    def take(self, rows: Ints) -> "SegmentFigures":
        """Those strategies."""
        return SegmentFigures(
            c=self.c[:, rows],
            h=self.h[:, rows],
            ends=self.ends[:, :, rows],
            g=self.g[:, rows],
            cap=self.cap[:, :, rows],
            most=self.most[:, rows],
            rate=self.rate[:, rows],
            offloaded=self.offloaded[rows],
            exposed=lambda r: self.exposed(int(rows[r])),
        )

    def end_seconds(self, r: int, first: int, last: int) -> tuple[float, float]:
        """Beyond a middle stage's: of the first stage on type `first`, of the last on `last` (-1:
        they are one)."""
        before, behind = self.ends[:, :, r]
        return (
            (float(before[first] + behind[first]), 0.0)
            if last < 0
            else (float(before[first]), float(behind[last]))
        )


def segment_figures(
    facts: ModelFacts,
    table: Strategies,
    offers: Sequence[Offer],
    assumed: Assumptions,
    *,
    offload: bool = True,
) -> SegmentFigures:
    """The figures of all strategies on all types; offload: whether optimizer states may move to the
    host."""
    priced = [Priced(facts, table, offer, assumed) for offer in offers]
    layers = -(-facts.layers // priced[0].pp)
    offloaded = np.clip(
        np.max([share_needed(p, layers) for p in priced], axis=0), 0.0, float(offload)
    )
    group = priced[0].tp * priced[0].cp * priced[0].dp
    ends = np.stack([[p.blocks[EMBEDDING], p.blocks[HEAD]] for p in priced], axis=1)

    @lru_cache(maxsize=1)  # one strategy is asked for again and again
    def exposed(r: int) -> Floats:
        return np.stack([_exposed(p, r, float(offloaded[r])) for p in priced], axis=1)

    return SegmentFigures(
        # never 0, which the search divides by
        c=np.maximum([p.layers_seconds(np.ones_like(p.pp)) for p in priced], 1e-30),
        h=np.stack([p.crossing_seconds for p in priced]),
        ends=ends,
        g=np.stack([_least_exposed(p, offloaded) for p in priced]),
        cap=np.stack([_caps(p, offloaded) for p in priced], axis=1),
        most=np.stack([np.minimum(p.pp, p.offer.most // group) for p in priced]),
        rate=np.stack([group * (p.offer.price_per_second or 0.0) for p in priced]),
        offloaded=offloaded,
        exposed=exposed,
    )


def after_layers(priced: Priced, r: int, share: float) -> tuple[Floats, Floats]:
    """Seconds after the last micro-batch of stages of each kind with 1 to N layers [3, N]: exposed
    reduction, optimizer."""
    N = priced.facts.layers
    one = Priced(priced.facts, priced.table.take(np.full(3 * N, r)), priced.offer, priced.assumed)
    one.blocks = np.repeat(priced.blocks[:, [r]], 3 * N, axis=1)
    embedding, head = (part[0] for part in one.end_params)
    ends = np.repeat([embedding + float(priced.pp[r] == 1) * head, 0.0, head], N)
    reduction, update = after_pipeline(
        one, np.tile(np.arange(1, N + 1), 3), ends, np.full(3 * N, share)
    )
    return reduction.reshape(3, N), update.reshape(3, N)


def _least_exposed(priced: Priced, offloaded: Floats) -> Floats:
    """g: r(N) / N of a middle stage; r(n) / n never rises with n."""
    reduction, update = after_pipeline(
        priced, np.full_like(priced.pp, priced.facts.layers), np.zeros(priced.table.rows), offloaded
    )
    return (reduction + update) / priced.facts.layers * (1 - 1e-12)


def _exposed(priced: Priced, r: int, share: float) -> Floats:
    """r(n) of strategy r on one type [3, N]: falling, then rising (made so, upwards, where
    rounding says otherwise)."""
    values = np.add(*after_layers(priced, r, share))
    for row in values:
        low = int(np.argmin(row))
        row[low:] = np.maximum.accumulate(row[low:])
        row[: low + 1] = np.maximum.accumulate(row[low::-1])[::-1]
    return values


def _caps(priced: Priced, offloaded: Floats) -> Ints:
    """The most layers that fit on one stage of each kind [3, R], by bisection (memory grows with
    layers)."""
    alone, last = (priced.pp == 1).astype(float), priced.pp - 1
    zero = np.zeros_like(priced.pp)
    caps = []
    # place in the pipeline, share of the embedding, share of the head: first, middle, last
    for place, embedding, head in (
        (zero, 1.0, alone),
        (np.minimum(last, 1), 0.0, 0.0),
        (last, alone, 1.0),
    ):
        low, high = zero, np.full_like(priced.pp, priced.facts.layers)
        while (low < high).any():
            middle = (low + high + 1) // 2
            needed, states = stage_bytes(priced, middle, place, embedding, head)
            fits = needed - offloaded * states <= usable_bytes(priced)
            low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
        caps.append(low)
    return np.stack(caps)


def segment_instance(
    table: Strategies,
    offers: Sequence[Offer],
    figures: SegmentFigures,
    r: int,
    stages: Sequence[Stages],
) -> AstraData:
    """Strategy r on those segments as an `astra` instance.

    The instance has as many stages of each kind and type, the first and the last stage as types of
    their own with their extra seconds in p2p_seconds, and max_layers such that no reduction is
    slower. Where a reduction needs some layers to hide behind, those are counted in p2p_seconds as
    well.
    """
    exposed = figures.exposed(r)
    degrees = {name: int(column[r]) for name, column in table.columns.items()}
    data, tensor = degrees["data_parallel_size"], degrees["tensor_model_parallel_size"]
    slowest = max(exposed[s.kind, s.type, n - 1] for s in stages for n in s.each)
    before, behind = figures.end_seconds(
        r, stages[0].type, stages[-1].type if len(stages) > 1 else -1
    )
    kinds, layers = [], sum(s.layers for s in stages)
    for kind, i, count, _ in stages:
        fine = np.flatnonzero(exposed[kind, i] <= slowest)
        hidden = int(fine[0])  # layers that every such stage has beyond one
        layers -= count * hidden
        seconds, transfer = float(figures.c[i, r]), float(figures.h[i, r])
        kinds.append(
            DeviceType(
                name=offers[i].name + ("-first", "", "-last")[kind],
                max_devices=count * data * tensor,
                layer_seconds=seconds,
                p2p_seconds=transfer + (before, 0.0, behind)[kind] + hidden * seconds,
                max_layers=min(int(figures.cap[kind, i, r]), int(fine[-1]) + 1) - hidden,
            )
        )
    return AstraData(
        layers=layers,
        stages=degrees["pipeline_model_parallel_size"],
        micro_batches=degrees["num_micro_batches"],
        data_parallel=data,
        tensor_parallel=tensor,
        device_types=kinds,
        equal_layers_per_type=False,
    )


@dataclass(frozen=True)
class Point:
    """A strategy (row of the table) on segments: seconds and money per iteration."""

    seconds: float
    money: float
    strategy: int
    stages: tuple[Stages, ...]


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

    def add(self, point: Point) -> None:
        """Take a point, and drop what is beaten; of equals, up to rounding, the first stays."""
        points = [*self.points, point]
        seconds, money = np.append(self.seconds, point.seconds), np.append(self.money, point.money)
        kept = pareto(-seconds, money)
        self.points = [points[i] for i in kept]
        self.seconds, self.money = seconds[kept], money[kept]


class SegmentSearch:
    """The search over the rows of a strategy table. layers: of the model; count: how many of the
    fastest strategies are wanted beside the front.

    front: the Pareto set. fastest: by strategy its fastest segments, complete for the `count`
    fastest. explored: strategies not skipped; seen, solved: vectors of stage counts. finished:
    whether every strategy was looked at (else nothing is proven).
    """

    def __init__(
        self, layers: int, table: Strategies, figures: SegmentFigures, run: Run, count: int
    ) -> None:
        self.layers, self.figures, self.run, self.count = layers, figures, run, count
        self.P = table.columns["pipeline_model_parallel_size"]
        self.K = table.columns["num_micro_batches"]
        self.front, self.fastest = Front(), dict[int, Point]()
        self.explored = self.seen = self.solved = 0
        self.finished = True
        bounds, paid = strategy_bounds(figures, self.P, self.K, layers)
        try:
            order = np.argsort(tied(bounds), kind="stable")
            for r in order[np.isfinite(bounds[order])].tolist():
                if bounds[r] < self.limit(r, paid[[r]])[0]:
                    run.check()
                    self.explored += 1
                    self.explore(r)
        except Stopped:
            self.finished = False

    def top(self) -> list[Point]:
        """The fastest strategies, each on its fastest segments."""
        points = list(self.fastest.values())
        order = np.argsort(tied(np.array([p.seconds for p in points])), kind="stable")
        return [points[i] for i in order[: self.count]]

    def limit(self, r: int, paid: Floats) -> Floats:
        """From which T on segments of strategy r that cost `paid` [V] money per second are neither
        in the front nor among the fastest [V]."""
        times = sorted(point.seconds for point in self.fastest.values())
        slowest = times[self.count - 1] if len(times) >= self.count else np.inf
        own = self.fastest[r].seconds if r in self.fastest else np.inf
        return np.maximum(self.front.limits(paid), min(slowest, own))

    def explore(self, r: int) -> None:
        """Add the points of strategy r; raises Stopped on the way."""
        figures, N, P, K = self.figures, self.layers, int(self.P[r]), int(self.K[r])
        c, h, rate = figures.c[:, r], figures.h[:, r], figures.rate[:, r]
        types = range(len(c))
        pairs = product(types, types) if P > 1 else ((i, -1) for i in types)
        kinds = [Kinds(figures, r, pair, N, K) for pair in pairs]
        ends = figures.ends[:, :, r].min(axis=1).sum()
        for m in stage_counts(P, figures.most[:, r]):
            self.run.check()
            self.seen += len(m)
            # all layers on the fastest type for the work, divisible ones for the slowest stage
            work = N * np.where(m > 0, c, np.inf).min(axis=1) + m @ h + ends
            slowest = (N + m @ (h / c)) / (m @ (1 / c))
            m = m[(work + (K - 1) * slowest) * SHRINK < self.limit(r, m @ rate)]
            for pair in kinds if len(m) else ():
                self.solve(r, pair, m[pair.possible(m)])

    def solve(self, r: int, kinds: "Kinds", m: Ints) -> None:
        """Add the points of strategy r with stage counts m [V, types] and ends as in `kinds`."""
        counts, paid = kinds.counts(m), m @ self.figures.rate[:, r]
        bound, theta, phi, work = kinds.lower_bounds(counts)
        hopeful = np.flatnonzero(bound < self.limit(r, paid))
        for v in hopeful[np.argsort(bound[hopeful], kind="stable")].tolist():
            limit = float(self.limit(r, paid[v : v + 1])[0])
            if bound[v] >= limit:
                continue
            self.run.check()
            self.solved += 1
            start = (float(work[v]), float(theta[v]), float(phi[v]))
            seconds, n = kinds.least_time(counts[v], start, limit)
            if seconds < limit:
                point = Point(seconds, seconds * float(paid[v]), r, kinds.stages(counts[v], n))
                self.front.add(point)
                if r not in self.fastest or seconds < self.fastest[r].seconds:
                    self.fastest[r] = point


class Kinds:
    """Kinds of stages for one strategy and one pair of types at the ends (last -1: one stage), by
    ascending c: the first stage, the last, every type between.

    kind, type, c, h, g, cap [kinds] and exposed [kinds, N] as in the figures. thetas [A], phis [B]:
    ascending values that the slowest stage and the slowest reduction may take. by_theta [A, kinds]:
    the most layers whose stage keeps to theta; by_phi: the least and the most layers [B, kinds]
    whose reduction keeps to phi (none: least 1 > most 0).
    """

    def __init__(
        self, figures: SegmentFigures, r: int, pair: tuple[int, int], N: int, K: int
    ) -> None:
        first, last = pair
        ends = [(FIRST, first), (LAST, last)] if last >= 0 else [(FIRST, first)]
        rows = [*ends, *((MIDDLE, i) for i in range(len(figures.c)))]
        rows.sort(key=lambda row: figures.c[row[1], r])
        self.kind, self.type = np.array(rows).T
        self.N, self.K, self.figures, self.r = N, K, figures, r
        self.needed = np.bincount([i for _, i in ends], minlength=len(figures.c))
        before, behind = figures.end_seconds(r, first, last)
        self.c, self.g = figures.c[self.type, r], figures.g[self.type, r]
        self.h = figures.h[self.type, r] + np.array([before, 0.0, behind])[self.kind]
        self.cap = figures.cap[self.kind, self.type, r]

    @cached_property
    def exposed(self) -> Floats:
        """r(n) of each kind."""
        return np.asarray(self.figures.exposed(self.r)[self.kind, self.type])

    @cached_property
    def stage_seconds(self) -> Floats:
        """[kinds, N] of a stage of 1 to N layers."""
        return np.asarray(self.c[:, None] * np.arange(1, self.N + 1) + self.h[:, None])

    @cached_property
    def thetas(self) -> Floats:
        return np.unique(self.stage_seconds[np.arange(1, self.N + 1) <= self.cap[:, None]])

    @cached_property
    def phis(self) -> Floats:
        return np.unique(self.exposed[np.arange(1, self.N + 1) <= self.cap[:, None]])

    @cached_property
    def by_theta(self) -> Ints:
        rows = zip(self.stage_seconds, self.cap, strict=True)
        return np.array([np.searchsorted(row[:cap], self.thetas, "right") for row, cap in rows]).T

    @cached_property
    def by_phi(self) -> tuple[Ints, Ints]:
        # r(n) falls, then rises, so that the layers that keep to a phi are an interval
        fine = self.exposed[None, :, :] <= self.phis[:, None, None]
        possible = fine.any(axis=2)
        least = np.where(possible, fine.argmax(axis=2) + 1, 1)
        return least, np.where(possible, self.N - fine[:, :, ::-1].argmax(axis=2), 0)

    def possible(self, m: Ints) -> NDArray[np.bool_]:
        """[V] which stage counts per type [V, types] have the ends."""
        return np.asarray((m >= self.needed).all(axis=1))

    def counts(self, m: Ints) -> Ints:
        """Stage counts per type [V, types] as counts per kind [V, kinds]."""
        return np.where(self.kind == MIDDLE, (m - self.needed)[:, self.type], 1)

    def stages(self, m: Ints, n: Ints) -> tuple[Stages, ...]:
        """Counts m and layers n per kind in pipeline order, the fullest between the ends last."""
        rows = zip(self.kind.tolist(), self.type.tolist(), m.tolist(), n.tolist(), strict=True)
        return tuple(
            sorted(
                [Stages(*row) for row in rows if row[2]],
                key=lambda s: (s.kind, s.layers / s.number),
            )
        )

    def lower_bounds(self, m: Ints) -> tuple[Floats, Floats, Floats, Floats]:
        """[V] lower bounds of T for each vector of counts, and their parts: divisible layers for
        the slowest stage and the slowest reduction, and the least work."""
        c, h, g, N = self.c, self.h, self.g, self.N
        work, _ = self.least_work(m, np.ones_like(self.cap), self.cap)
        theta = np.where(m > 0, c + h, 0.0).max(axis=1)
        theta = np.maximum(theta, (N + m @ (h / c)) / (m @ (1 / c)))
        phi = np.where(m > 0, g, 0.0).max(axis=1)
        if (g > 0).all():
            phi = np.maximum(phi, N / (m @ (1 / g)))
        return (work + (self.K - 1) * theta + phi) * SHRINK, theta * SHRINK, phi * SHRINK, work

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
        least, most = (bound[None, left:right] for bound in self.by_phi)
        total, n = self.least_work(m, least, np.minimum(self.by_theta[first:last, None], most))
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
        room = m * np.maximum(cap - low, 0)
        n = n + np.clip(extra[..., None] - (room.cumsum(axis=-1) - room), 0, room)
        return np.where(possible & (n.sum(axis=-1) == self.N), n @ self.c + m @ self.h, np.inf), n


def strategy_bounds(figures: SegmentFigures, P: Ints, K: Ints, N: int) -> tuple[Floats, Floats]:
    """Lower bounds on T, +inf where no segments exist, and on money per second [R].

    With W the work in layers and theta the slowest stage's time, theta >= W / sum_i(m_i / c_i). The
    ends take their seconds from the layers of some type.
    """
    widest = figures.cap.max(axis=0)
    usable = np.where(widest >= 1, figures.most, 0)

    def least(values: Floats) -> Floats:
        """Over the usable types [R]."""
        return np.asarray(np.where(usable > 0, values, np.inf).min(axis=0))

    def least_sum(values: Floats) -> Floats:
        """Over P stages, as many on each type as it has [R]."""
        order = np.argsort(values, axis=0)
        room, ordered = (np.take_along_axis(a, order, axis=0) for a in (usable, values))
        before = room.cumsum(axis=0) - room
        return np.asarray((np.clip(P - before, 0, room) * ordered).sum(axis=0))

    possible = (usable.sum(axis=0) >= P) & (least_sum(-widest.astype(float)) <= -N)
    speed = np.maximum(-least_sum(-1 / figures.c), 1e-300)
    ends = least(figures.ends[0]) + least(figures.ends[1])
    work = N + least(figures.ends[0] / figures.c) + least(figures.ends[1] / figures.c)
    h = least(figures.h)
    once = N * least(figures.c) + P * h + N / P * least(figures.g) + ends
    with np.errstate(invalid="ignore"):  # no usable type: inf times 0
        T = once + (K - 1) * (work / speed + h)
    return np.where(possible, T * (1 - 1e-9), np.inf), least_sum(figures.rate) * (1 - 1e-9)
