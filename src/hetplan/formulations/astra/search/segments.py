"""Mode 2: the proven Pareto set over strategies and their segments (Astra, Section 3.4 and 3.6).

A strategy fixes degrees and options. A segment is the consecutive stages on one type of devices;
the P stages of a strategy make segments. Only the first stage has the embedding, and only the last
one has the head. A stage is therefore of kind FIRST, MIDDLE or LAST. The ends are the first and the
last stage.

Sets   i types; s stages, of kinds; m_i stages on type i; n_s layers of stage s, N layers in all
Data   K micro-batches; per type c seconds of a layer and h seconds of a stage's exchange with the
       next stage (FIRST and LAST: with the seconds of embedding or head); cap, the most layers of a
       stage that fit in memory; rate, money per second of one stage
       r(n) seconds of the gradient reduction that computation does not hide, and of the optimizer,
       for a stage of n layers
       g with g n <= r(n) for all n
Min    T = sum_s (n_s c + h) + (K-1) max_s (n_s c + h) + max_s r(n_s)   and   T sum_i m_i rate_i

For fixed m the money per second is fixed, so the least T is also the least money. theta stands for
the time of the slowest stage, phi for the slowest r(n_s). r(n) first falls and then rises, since
more layers first hide a reduction and then add to it. So {n: r(n) <= phi} is an interval.

Strategies are taken in the order of their lower bounds. A strategy whose bound is beaten in time
and money by the Pareto set so far is skipped. For the others, every vector m of stage counts is
bounded. Where that bound is not beaten either, the least T is found for every choice of the ends.

Eq. 22 has equal layers per type and no embedding or head. This search has both, as modes 1 and 3.
The memory of a MIDDLE stage is that of the second stage of the pipeline, so that the stages fit in
any order. Interleaving and block-wise recomputation are left out, since Megatron-LM has them only
for equal stages.
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
from hetplan.formulations.astra.search.memory import (
    fullest_chunk,
    share_needed,
    stage_bytes,
    usable_bytes,
)
from hetplan.formulations.astra.search.pricing import EMBEDDING, HEAD, Priced, after_pipeline
from hetplan.formulations.astra.search.result import pareto, tied
from hetplan.formulations.astra.search.space import Space
from hetplan.formulations.astra.search.table import Strategies
from hetplan.replays.arrays import Floats, Ints
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.facts import ModelFacts
from hetplan.replays.offers import Offer
from hetplan.solvers.run import Run, Stopped

# Seconds that a strategy, and the stages of one, count towards the budget of a run.
STRATEGY_SECONDS, STAGES_SECONDS = 2e-4, 1e-4

SHRINK = 1.0 - 1e-12  # factor of lower bounds, which rounding must not make too large


def segment_space(space: Space) -> Space:
    """The part of `space` that is possible with stages of different sizes."""
    return replace(
        space,
        interleaving=False,
        recompute=tuple(g for g in space.recompute if g != "hybrid"),
        recompute_method=tuple(m for m in space.recompute_method if m == "uniform"),
    )


FIRST, MIDDLE, LAST = range(3)


class Stages(NamedTuple):
    """The stages of one kind on one type."""

    kind: int  # FIRST, MIDDLE or LAST
    type: int  # number of the type in the pool
    number: int  # number of stages
    layers: int  # layers of all these stages together

    @property
    def each(self) -> list[int]:
        """Layers of each stage. They differ by at most one, and the larger numbers come last."""
        base, more = divmod(self.layers, self.number)
        return [base] * (self.number - more) + [base + 1] * more


@dataclass(frozen=True)
class SegmentData:
    """The data of the module's docstring for M types, in the order of the pool, and R strategies;
    `segment_figures` makes it. A single stage is of kind FIRST and has embedding and head."""

    c: Floats  # [M, R] seconds of a layer
    h: Floats  # [M, R] seconds of a stage's exchange with the next stage
    ends: Floats  # [2, M, R] seconds of embedding and head
    g: Floats  # [M, R] seconds with g n <= r(n) for all n
    cap: Ints  # [3, M, R] most layers of a FIRST, MIDDLE and LAST stage
    most: Ints  # [M, R] most stages on the type
    rate: Floats  # [M, R] money per second of one stage
    offloaded: Floats  # [R] share of the optimizer states on the host
    exposed: Callable[[int], Floats]  # strategy -> [3, M, N] r(n) by kind and type for n = 1..N

    def take(self, rows: Ints) -> "SegmentData":
        """The data of the strategies `rows`."""
        return SegmentData(
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
        """(seconds, seconds) of embedding and head on the first stage and on the last one.

        first, last: types of these stages; last = -1 where the first stage is also the last.
        """
        embedding, head = self.ends[:, :, r]
        if last < 0:
            return float(embedding[first] + head[first]), 0.0
        return float(embedding[first]), float(head[last])


def segment_figures(
    facts: ModelFacts,
    table: Strategies,
    offers: Sequence[Offer],
    assumed: Assumptions,
    *,
    offload: bool = True,
) -> SegmentData:
    """The data of all strategies of a table on all types. offload: whether optimizer states may
    move to the host."""
    priced = [Priced(facts, table, offer, assumed) for offer in offers]
    # The share of optimizer states on the host is that of stages of equal size, as in mode 1. `cap`
    # then leaves out the stages that do not fit with this share.
    layers = -(-facts.layers // priced[0].pp)  # of a stage of equal size, rounded up
    largest_share = np.max([share_needed(p, layers) for p in priced], axis=0)
    most_offloaded = 1.0 if offload else 0.0
    offloaded = np.clip(largest_share, 0.0, most_offloaded)
    stage_devices = priced[0].tp * priced[0].cp * priced[0].dp
    ends = np.stack([[p.blocks[EMBEDDING], p.blocks[HEAD]] for p in priced], axis=1)

    @lru_cache(maxsize=1)  # the search asks for one strategy many times in a row
    def exposed(r: int) -> Floats:
        return np.stack([_exposed(p, r, float(offloaded[r])) for p in priced], axis=1)

    return SegmentData(
        # never 0, because the search divides by it
        c=np.maximum([p.layers_seconds(np.ones_like(p.pp)) for p in priced], 1e-30),
        h=np.stack([p.crossing_seconds for p in priced]),
        ends=ends,
        g=np.stack([_least_exposed(p, offloaded) for p in priced]),
        cap=np.stack([_caps(p, offloaded) for p in priced], axis=1),
        most=np.stack([np.minimum(p.pp, p.offer.most // stage_devices) for p in priced]),
        # 0 without a price: the money of such a search is unknown, see `OnSegments.money_of`
        rate=np.stack([stage_devices * (p.offer.price_per_second or 0.0) for p in priced]),
        offloaded=offloaded,
        exposed=exposed,
    )


def after_layers(priced: Priced, r: int, share: float) -> tuple[Floats, Floats]:
    """(exposed reduction [3, N], optimizer [3, N]): seconds of strategy r after the last
    micro-batch, on a stage of each kind with 1 to N layers.

    share: share of the optimizer states on the host.
    """
    N = priced.facts.layers
    # 3 N copies of the strategy, one for each kind and number of layers
    copies = priced.table.take(np.full(3 * N, r))
    priced_copies = Priced(priced.facts, copies, priced.offer, priced.assumed)
    # the times of one block are those of strategy r in all copies: they are not computed again
    priced_copies.blocks = np.repeat(priced.blocks[:, [r]], 3 * N, axis=1)
    embedding, head = (params[0] for params in priced_copies.end_params)  # of any copy
    params_of_first = embedding
    if priced.pp[r] == 1:  # the first stage is also the last
        params_of_first = embedding + head
    params_of_ends = np.repeat([params_of_first, 0.0, head], N)
    layers = np.tile(np.arange(1, N + 1), 3)
    reduction, optimizer = after_pipeline(
        priced_copies, layers, params_of_ends, np.full(3 * N, share)
    )
    return reduction.reshape(3, N), optimizer.reshape(3, N)


def _least_exposed(priced: Priced, offloaded: Floats) -> Floats:
    """[R] g: r(N) / N of a MIDDLE stage. It bounds all r(n) / n, which never rise with n: bytes and
    the computation that hides them are in proportion to n, and the further seconds of r(n), which
    one bucket takes, grow no faster than n."""
    all_layers = np.full_like(priced.pp, priced.facts.layers)
    no_ends = np.zeros(priced.table.rows)
    reduction, optimizer = after_pipeline(priced, all_layers, no_ends, offloaded)
    return (reduction + optimizer) / priced.facts.layers * SHRINK


def _exposed(priced: Priced, r: int, share: float) -> Floats:
    """[3, N] r(n) of strategy r on one type. Where rounding breaks the rule that r(n) falls and
    then rises, values are raised until it holds."""
    reduction, optimizer = after_layers(priced, r, share)
    values = np.add(reduction, optimizer)
    for row in values:
        low = int(np.argmin(row))
        row[low:] = np.maximum.accumulate(row[low:])
        row[: low + 1] = np.maximum.accumulate(row[low::-1])[::-1]
    return values


def _caps(priced: Priced, offloaded: Floats) -> Ints:
    """[3, R] the most layers of a stage of each kind that fit in memory, by bisection, since memory
    grows with layers."""
    alone = (priced.pp == 1).astype(float)
    last_place = priced.pp - 1
    zero = np.zeros_like(priced.pp)
    # (number of the stage in the pipeline, whether it has the embedding, whether it has the head)
    first = (zero, 1.0, alone)
    middle = (np.minimum(last_place, 1), 0.0, 0.0)
    last = (last_place, alone, 1.0)
    caps = []
    for place, embedding, head in (first, middle, last):
        low, high = zero, np.full_like(priced.pp, priced.facts.layers)
        while (low < high).any():
            layers = (low + high + 1) // 2
            chunks = (fullest_chunk(priced, layers),)  # wherever the stage begins
            needed, states = stage_bytes(priced, layers, place, embedding, head, chunks)
            fits = needed - offloaded * states <= usable_bytes(priced)
            low, high = np.where(fits, layers, low), np.where(fits, high, layers - 1)
        caps.append(low)
    return np.stack(caps)


def segment_instance(
    table: Strategies,
    offers: Sequence[Offer],
    figures: SegmentData,
    r: int,
    stages: Sequence[Stages],
) -> AstraData:
    """Strategy r on the segments `stages` as an instance of problem `astra`.

    Each kind of stage on a type is a device type of the instance, with devices for as many stages.
    p2p_seconds of the first and the last stage count embedding and head.

    Problem `astra` has no r(n). So only numbers of layers with r(n) <= phi are allowed, where phi
    is the slowest r(n) of `stages`; they are an interval. Its upper end limits max_layers. A stage
    of `astra` may have one layer. Where the interval begins above 1, the layers before its
    beginning are taken out of the instance's layers, and p2p_seconds counts their time.
    """
    exposed = figures.exposed(r)
    degrees = {name: int(column[r]) for name, column in table.columns.items()}
    data, tensor = degrees["data_parallel_size"], degrees["tensor_model_parallel_size"]
    phi = max(exposed[part.kind, part.type, n - 1] for part in stages for n in part.each)
    last_type = stages[-1].type if len(stages) > 1 else -1
    seconds_of_first, seconds_of_last = figures.end_seconds(r, stages[0].type, last_type)
    end_seconds = (seconds_of_first, 0.0, seconds_of_last)  # by kind
    device_types = []
    layers = sum(part.layers for part in stages)
    for kind, i, count, _ in stages:
        allowed = np.flatnonzero(exposed[kind, i] <= phi) + 1  # numbers of layers
        taken_out = int(allowed[0]) - 1  # layers of each such stage
        layers -= count * taken_out
        seconds, transfer = float(figures.c[i, r]), float(figures.h[i, r])
        most_layers = min(int(figures.cap[kind, i, r]), int(allowed[-1]))
        device_types.append(
            DeviceType(
                name=offers[i].name + ("-first", "", "-last")[kind],
                max_devices=count * data * tensor,
                layer_seconds=seconds,
                p2p_seconds=transfer + end_seconds[kind] + taken_out * seconds,
                max_layers=most_layers - taken_out,
            )
        )
    return AstraData(
        layers=layers,
        stages=degrees["pipeline_model_parallel_size"],
        micro_batches=degrees["num_micro_batches"],
        data_parallel=data,
        tensor_parallel=tensor,
        device_types=device_types,
        equal_layers_per_type=False,
    )


@dataclass(frozen=True)
class Point:
    """A strategy on segments."""

    seconds: float  # T, seconds of an iteration
    money: float  # money of an iteration
    strategy: int  # row of the table
    stages: tuple[Stages, ...]  # in pipeline order


class Front:
    """The Pareto set of F points. No point dominates another: it is not at least as good in both
    time and money, and better in one of them. Points are in ascending order of seconds, and thus in
    descending order of money."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.seconds, self.money = np.zeros((2, 0))  # [F] of the points

    def limits(self, paid: Floats) -> Floats:
        """[V] the seconds from which on a point is beaten: some point of the set is no slower and
        costs no more. +inf where the set is empty.

        paid: [V] money per second of the points. A point of the set that costs nothing costs no
        more than any other, so that only its seconds count.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            by_money = np.where(self.money <= 0, 0.0, self.money / paid[:, None])
        return np.asarray(np.maximum(self.seconds, by_money).min(axis=1, initial=np.inf))

    def add(self, point: Point) -> None:
        """Add a point, and drop the points that are beaten. Of points that differ only by rounding,
        the first stays."""
        points = [*self.points, point]
        seconds, money = np.append(self.seconds, point.seconds), np.append(self.money, point.money)
        # `pareto` compares throughputs, and uses nothing but their order: -seconds have the same
        kept = pareto(-seconds, money)
        self.points = [points[i] for i in kept]
        self.seconds, self.money = seconds[kept], money[kept]


class SegmentSearch:
    """The search over the strategies of a table for the Pareto set and the fastest strategies."""

    front: Front  # the Pareto set
    fastest: dict[int, Point]  # strategy -> its fastest segments; exact for the `count` fastest
    explored: int  # number of strategies that were not skipped
    seen: int  # number of vectors of stage counts that were bounded
    solved: int  # number of pairs of such a vector and ends for which the least T was found
    finished: bool  # whether all strategies were explored or skipped; else nothing is proven

    def __init__(
        self, layers: int, table: Strategies, figures: SegmentData, run: Run, count: int
    ) -> None:
        """Search until the end, or until `run` stops it.

        layers: number of layers of the model. count: number of the fastest strategies to find.
        """
        self.layers, self.figures, self.run, self.count = layers, figures, run, count
        self.P = table.columns["pipeline_model_parallel_size"]
        self.K = table.columns["num_micro_batches"]
        self.front, self.fastest = Front(), {}
        self.explored = self.seen = self.solved = 0
        self.finished = True
        bounds, paid = strategy_bounds(figures, self.P, self.K, layers)
        try:
            order = np.argsort(tied(bounds), kind="stable")
            for r in order[np.isfinite(bounds[order])].tolist():
                if bounds[r] < self.limit_of_one(r, paid[r]):
                    run.check(STRATEGY_SECONDS)
                    self.explored += 1
                    self.explore(r)
        except Stopped:
            self.finished = False

    def top(self) -> list[Point]:
        """The `count` fastest strategies, each on its fastest segments."""
        points = list(self.fastest.values())
        order = np.argsort(tied(np.array([p.seconds for p in points])), kind="stable")
        return [points[i] for i in order[: self.count]]

    def limit(self, r: int, paid: Floats) -> Floats:
        """[V] seconds from which on segments of strategy r are neither in the Pareto set nor among
        the fastest. paid: [V] their money per second."""
        times = sorted(point.seconds for point in self.fastest.values())
        slowest = times[self.count - 1] if len(times) >= self.count else np.inf
        best_of_strategy = self.fastest[r].seconds if r in self.fastest else np.inf
        return np.maximum(self.front.limits(paid), min(slowest, best_of_strategy))

    def limit_of_one(self, r: int, paid: float) -> float:
        """The `limit` for segments that cost `paid` money per second."""
        return float(self.limit(r, np.array([paid]))[0])

    def explore(self, r: int) -> None:
        """Add the points of strategy r. Raises Stopped where the run has to stop."""
        figures = self.figures
        N = self.layers
        P = int(self.P[r])
        K = int(self.K[r])
        c, h, rate = figures.c[:, r], figures.h[:, r], figures.rate[:, r]
        types = range(len(c))
        pairs = product(types, types) if P > 1 else ((i, -1) for i in types)
        kinds_by_ends = [StageKinds(figures, r, pair, N, K) for pair in pairs]
        # at least: embedding and head each on its fastest type
        end_seconds = figures.ends[:, :, r].min(axis=1).sum()
        for m in stage_counts(P, figures.most[:, r]):
            self.run.check(STRATEGY_SECONDS)
            self.seen += len(m)
            # For a lower bound all layers are on the fastest type in the sum of all stages, and
            # layers are divisible in the slowest stage.
            work = N * np.where(m > 0, c, np.inf).min(axis=1) + m @ h + end_seconds
            # The slowest stage is fastest where all take equally long, theta: n = (theta - h) / c.
            slowest = (N + m @ (h / c)) / (m @ (1 / c))
            bound = (work + (K - 1) * slowest) * SHRINK
            m = m[bound < self.limit(r, m @ rate)]
            if not len(m):
                continue
            for kinds in kinds_by_ends:
                self.solve(r, kinds, m[kinds.possible(m)])

    def solve(self, r: int, kinds: "StageKinds", m: Ints) -> None:
        """Add the points of strategy r with the ends of `kinds`. m: [V, types] stage counts."""
        counts = kinds.counts(m)
        paid = m @ self.figures.rate[:, r]
        bound, theta, phi, work = kinds.lower_bounds(counts)
        not_beaten = np.flatnonzero(bound < self.limit(r, paid))
        by_bound = not_beaten[np.argsort(bound[not_beaten], kind="stable")]
        for v in by_bound.tolist():
            limit = self.limit_of_one(r, paid[v])
            if bound[v] >= limit:
                continue
            self.run.check(STAGES_SECONDS)
            self.solved += 1
            start = (float(work[v]), float(theta[v]), float(phi[v]))
            seconds, n = kinds.least_time(counts[v], start, limit)
            if seconds < limit:
                money = seconds * float(paid[v])
                point = Point(seconds, money, r, kinds.stages(counts[v], n))
                self.front.add(point)
                if r not in self.fastest or seconds < self.fastest[r].seconds:
                    self.fastest[r] = point


class StageKinds:
    """The kinds of stages of one strategy with given types of the ends, by ascending c: the FIRST
    stage, the LAST stage where it is another one, and MIDDLE stages on every type.

    Q is the number of kinds.
    """

    kind: Ints  # [Q] FIRST, MIDDLE or LAST
    type: Ints  # [Q] number of the type
    c: Floats  # [Q] seconds of a layer
    h: Floats  # [Q] further seconds of a stage
    g: Floats  # [Q] seconds with g n <= r(n)
    cap: Ints  # [Q] most layers of a stage
    needed: Ints  # [types] number of the ends on each type

    def __init__(self, figures: SegmentData, r: int, pair: tuple[int, int], N: int, K: int) -> None:
        """r: the strategy. pair: types of the first and the last stage; last = -1 for a pipeline of
        one stage. N: layers. K: micro-batches."""
        first, last = pair
        ends = [(FIRST, first), (LAST, last)] if last >= 0 else [(FIRST, first)]
        middles = [(MIDDLE, i) for i in range(len(figures.c))]
        in_order = sorted([*ends, *middles], key=lambda row: figures.c[row[1], r])
        self.kind, self.type = np.array(in_order).T
        self.N, self.K, self.figures, self.r = N, K, figures, r
        self.needed = np.bincount([i for _, i in ends], minlength=len(figures.c))
        seconds_of_first, seconds_of_last = figures.end_seconds(r, first, last)
        end_seconds = np.array([seconds_of_first, 0.0, seconds_of_last])
        self.c, self.g = figures.c[self.type, r], figures.g[self.type, r]
        self.h = figures.h[self.type, r] + end_seconds[self.kind]
        self.cap = figures.cap[self.kind, self.type, r]

    @cached_property
    def exposed(self) -> Floats:
        """[Q, N] r(n) of each kind for n = 1..N."""
        return np.asarray(self.figures.exposed(self.r)[self.kind, self.type])

    @cached_property
    def stage_seconds(self) -> Floats:
        """[Q, N] seconds of a stage of each kind with 1 to N layers."""
        return np.asarray(self.c[:, None] * np.arange(1, self.N + 1) + self.h[:, None])

    @cached_property
    def thetas(self) -> Floats:
        """[A] the values that theta can have, ascending."""
        return np.unique(self.stage_seconds[np.arange(1, self.N + 1) <= self.cap[:, None]])

    @cached_property
    def phis(self) -> Floats:
        """[B] the values that phi can have, ascending."""
        return np.unique(self.exposed[np.arange(1, self.N + 1) <= self.cap[:, None]])

    @cached_property
    def by_theta(self) -> Ints:
        """[A, Q] the most layers of a stage that takes at most theta seconds."""
        rows = zip(self.stage_seconds, self.cap, strict=True)
        return np.array([np.searchsorted(row[:cap], self.thetas, "right") for row, cap in rows]).T

    @cached_property
    def by_phi(self) -> tuple[Ints, Ints]:
        """(fewest [B, Q], most [B, Q]) layers of a stage with r(n) <= phi; (1, 0) where no number
        of layers has that. These layers are an interval."""
        allowed = self.exposed[None, :, :] <= self.phis[:, None, None]  # [B, Q, N]
        possible = allowed.any(axis=2)
        fewest = np.where(possible, allowed.argmax(axis=2) + 1, 1)
        most = np.where(possible, self.N - allowed[:, :, ::-1].argmax(axis=2), 0)
        return fewest, most

    def possible(self, m: Ints) -> NDArray[np.bool_]:
        """[V] whether there are stages for the ends. m: [V, types] stage counts per type."""
        return np.asarray((m >= self.needed).all(axis=1))

    def counts(self, m: Ints) -> Ints:
        """[V, Q] stage counts per kind. m: [V, types] stage counts per type."""
        return np.where(self.kind == MIDDLE, (m - self.needed)[:, self.type], 1)

    def stages(self, m: Ints, n: Ints) -> tuple[Stages, ...]:
        """The stages in pipeline order; MIDDLE stages with more layers come later.

        m: [Q] stage counts. n: [Q] layers of all stages of a kind together.
        """
        rows = zip(self.kind.tolist(), self.type.tolist(), m.tolist(), n.tolist(), strict=True)
        parts = [Stages(*row) for row in rows]
        present = [part for part in parts if part.number]
        return tuple(sorted(present, key=lambda part: (part.kind, part.layers / part.number)))

    def lower_bounds(self, m: Ints) -> tuple[Floats, Floats, Floats, Floats]:
        """([V] of T, [V] of theta, [V] of phi, [V] of the work): lower bounds. The work is the sum
        of the times of all stages. Bounds of theta and phi treat layers as divisible.

        m: [V, Q] stage counts.
        """
        c, h, g, N = self.c, self.h, self.g, self.N
        work, _ = self.least_work(m, np.ones_like(self.cap), self.cap)
        # every stage has at least one layer
        theta = np.where(m > 0, c + h, 0.0).max(axis=1)
        theta = np.maximum(theta, (N + m @ (h / c)) / (m @ (1 / c)))
        phi = np.where(m > 0, g, 0.0).max(axis=1)
        if (g > 0).all():  # with g = 0 the bound below would be 0 or undefined
            phi = np.maximum(phi, N / (m @ (1 / g)))
        total = work + (self.K - 1) * theta + phi
        return total * SHRINK, theta * SHRINK, phi * SHRINK, work

    def least_time(
        self, m: Ints, start: tuple[float, float, float], limit: float
    ) -> tuple[float, Ints]:
        """(least T, [Q] layers of all stages of each kind together).

        Where no T is below `limit`, the first is `limit` or more, and the layers mean nothing.

        All pairs of a theta and a phi whose T can be below the limit are computed at once.
        m: [Q] stage counts. start: lower bounds on the work, theta and phi.
        """
        work, theta, phi = start
        waits = self.K - 1  # how often theta counts beside the work
        # Candidates for theta are thetas[first:last], for phi phis[left:right]. They begin with the
        # last value that is at most the lower bound, since rounding may have put a value below the
        # bound that it equals. A candidate too many does no harm: some layers take its T or less.
        first = max(0, int(np.searchsorted(self.thetas, theta, side="right")) - 1)
        last = int(np.searchsorted(work + waits * self.thetas + phi, limit))
        left = max(0, int(np.searchsorted(self.phis, phi, side="right")) - 1)
        right = int(np.searchsorted(work + waits * theta + self.phis, limit))
        if first >= last or left >= right:
            return np.inf, m
        thetas, phis = self.thetas[first:last, None], self.phis[None, left:right]
        fewest, most_by_phi = (layers[None, left:right] for layers in self.by_phi)
        most = np.minimum(self.by_theta[first:last, None], most_by_phi)
        total, n = self.least_work(m, fewest, most)
        total = total + waits * thetas + phis
        best = np.unravel_index(int(total.argmin()), total.shape)
        return float(total[best]), n[best]

    def least_work(self, m: Ints, low: Ints, cap: Ints) -> tuple[Floats, Ints]:
        """([...] least sum of the times of all stages, [..., Q] layers of all stages of each kind
        together); the sum is +inf where there are no such layers.

        Every stage gets `low` layers. Further layers go to the fastest kinds first, up to `cap`.
        m: [..., Q] stage counts. low, cap: [..., Q] fewest and most layers of a stage.
        """
        m, low, cap = np.broadcast_arrays(m, low, cap)
        n = m * low
        extra = self.N - n.sum(axis=-1)
        possible = ~((m > 0) & (cap < low)).any(axis=-1) & (extra >= 0)
        room = m * np.maximum(cap - low, 0)
        room_before = room.cumsum(axis=-1) - room  # in the faster kinds
        n = n + np.clip(extra[..., None] - room_before, 0, room)
        all_placed = n.sum(axis=-1) == self.N
        work = n @ self.c + m @ self.h
        return np.where(possible & all_placed, work, np.inf), n


def strategy_bounds(figures: SegmentData, P: Ints, K: Ints, N: int) -> tuple[Floats, Floats]:
    """([R] of T, +inf where no segments exist; [R] of money per second): lower bounds of each
    strategy.

    The slowest stage takes theta >= h + W / sum_i(m_i / c_i): the P stages together have the work
    of W layers, and m_i stages of type i compute m_i / c_i layers per second. W is N, and for each
    of embedding and head the number of layers that take the same time, on the type where that is
    fewest. h is the least of any type, and `speed` the largest sum that P stages can have.
    """
    widest = figures.cap.max(axis=0)  # [M, R] most layers of any stage on the type
    usable = np.where(widest >= 1, figures.most, 0)  # [M, R] stages

    def least(values: Floats) -> Floats:
        """[R] the least of values [M, R] over the usable types."""
        return np.asarray(np.where(usable > 0, values, np.inf).min(axis=0))

    def least_sum(values: Floats) -> Floats:
        """[R] the least sum of values [M, R] over P stages, no more on a type than are usable."""
        order = np.argsort(values, axis=0)
        room, ordered = (np.take_along_axis(a, order, axis=0) for a in (usable, values))
        before = room.cumsum(axis=0) - room
        return np.asarray((np.clip(P - before, 0, room) * ordered).sum(axis=0))

    enough_stages = usable.sum(axis=0) >= P
    # the negative of a least sum of negatives is a largest sum
    room_for_layers = -least_sum(-widest.astype(float)) >= N
    # Layers per second of all stages. Without usable types it is 0; 1e-300 lets it divide.
    speed = np.maximum(-least_sum(-1 / figures.c), 1e-300)
    embedding, head = figures.ends
    ends = least(embedding) + least(head)
    work = N + least(embedding / figures.c) + least(head / figures.c)
    h = least(figures.h)
    # the largest stage has at least N / P layers
    once = N * least(figures.c) + P * h + N / P * least(figures.g) + ends
    with np.errstate(invalid="ignore"):  # no usable type: inf times 0
        T = once + (K - 1) * (work / speed + h)
    # lowered by far more than rounding, since a strategy is skipped by this bound alone
    bound = np.where(enough_stages & room_for_layers, T * (1 - 1e-9), np.inf)
    return bound, least_sum(figures.rate) * (1 - 1e-9)
