"""Mode 2: strategies whose stages lie on different types of device (Astra, Section 3.4), proven over all
segments.

For every strategy of the table the stages become segments of an `astra` problem: c and h per type from the
pricing, embedding and head spread evenly over the layers (unequal stages can absorb them), and max_layers
from the memory filter, every stage counted as if it were the first of the pipeline, so that any order of the
segments fits.
Beyond eq. 22 the price has the exposed gradient reduction and the optimizer, linear in a stage's layers:
max_s n_s g.
Interleaving and block-wise recomputation are left out: Megatron-LM has them for equal stages only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetplan.errors import DisagreementError
from hetplan.formulations.astra.data import AstraData, DeviceType
from hetplan.formulations.astra.exact import optimum
from hetplan.formulations.astra.problem import compile_problem
from hetplan.formulations.astra.search.blocks import EMBEDDING, HEAD
from hetplan.formulations.astra.search.efficiency import Floats
from hetplan.formulations.astra.search.facts import ModelFacts
from hetplan.formulations.astra.search.memory import stage_bytes
from hetplan.formulations.astra.search.pool import Offer
from hetplan.formulations.astra.search.pricing import Assumptions, Priced
from hetplan.formulations.astra.search.segment_kernels import dominated, explore
from hetplan.formulations.astra.search.space import Space
from hetplan.formulations.astra.search.table import Ints, Strategies
from hetplan.solvers.run import Run

BUFFER = 512  # points that the compiled search hands over at a time


def segment_space(space: Space) -> Space:
    """The part of `space` that stages of different sizes can take."""
    return replace(
        space,
        interleaving=False,
        recompute=tuple(g for g in space.recompute if g != "hybrid"),
        recompute_method=tuple(m for m in space.recompute_method if m == "uniform"),
    )


@dataclass(frozen=True)
class SegmentFigures:
    """Per type (rows, pool order) and strategy: c, h, g [M, R] seconds, cap [M, R] layers, most [M, R]
    stages.

    rate [M, R]: money per second of one stage; offloaded [R]: share of the optimizer states on the host.
    """

    c: Floats
    h: Floats
    g: Floats
    cap: Ints
    most: Ints
    rate: Floats
    offloaded: Floats

    def take(self, rows: Ints) -> SegmentFigures:
        """Those strategies."""
        return SegmentFigures(
            c=self.c[:, rows],
            h=self.h[:, rows],
            g=self.g[:, rows],
            cap=self.cap[:, rows],
            most=self.most[:, rows],
            rate=self.rate[:, rows],
            offloaded=self.offloaded[rows],
        )


def segment_figures(
    facts: ModelFacts, table: Strategies, offers: Sequence[Offer], given: Assumptions, *, offload: bool = True
) -> SegmentFigures:
    """The figures of all strategies on all types; offload: whether optimizer states may move to the host."""
    priced = [Priced(facts, table, offer, given) for offer in offers]
    offloaded = np.clip(np.max([_share_needed(p) for p in priced], axis=0), 0.0, float(offload))
    rows: list[tuple[Floats, ...]] = [_linear(p, offloaded) for p in priced]
    group = priced[0].tp * priced[0].dp
    return SegmentFigures(
        c=np.stack([row[0] for row in rows]),
        h=np.stack([p.crossing_seconds for p in priced]),
        g=np.stack([row[1] for row in rows]),
        cap=np.stack([_cap(p, offloaded) for p in priced]),
        most=np.stack([np.minimum(p.pp, p.offer.most // group) for p in priced]),
        rate=np.stack([group * (p.offer.price_per_second or 0.0) for p in priced]),
        offloaded=offloaded,
    )


def _linear(priced: Priced, offloaded: Floats) -> tuple[Floats, Floats]:
    """(c, g): seconds per layer of a stage, and of what follows the last micro-batch, at an average stage."""
    layers = -(-priced.facts.layers // priced.pp)
    ends = (priced.blocks.row(EMBEDDING) + priced.blocks.row(HEAD)) / priced.facts.layers
    end_params = sum(priced.end_params) / priced.facts.layers
    dense, experts = layers * (priced.stage_params + end_params), layers * priced.expert_stage_params
    forward, backward = layers * priced.forward, layers * priced.backward
    reduction = priced.exposed_reduction(dense, experts, forward, backward)
    update = priced.optimizer_seconds(priced.optimizer_params(dense, experts), offloaded, backward)
    return priced.layers_seconds(layers) / layers + ends, (reduction + update) / layers


def _first_stage(priced: Priced, layers: Ints) -> tuple[Floats, Floats]:
    """(bytes, optimizer states) of a stage of so many layers at the front, with the larger of embedding and
    head."""
    flight = np.minimum(priced.K, priced.pp).astype(float)
    embedding = stage_bytes(priced, layers, flight, 1.0, (priced.pp == 1).astype(float))
    head = stage_bytes(priced, layers, flight, (priced.pp == 1).astype(float), 1.0)
    larger = embedding[0] >= head[0]
    return np.where(larger, embedding[0], head[0]), np.where(larger, embedding[1], head[1])


def _share_needed(priced: Priced) -> Floats:
    """The share of states to offload so that an average stage fits on this type."""
    needed, states = _first_stage(priced, -(-priced.facts.layers // priced.pp))
    return np.asarray((needed - priced.offer.spec.memory_bytes) / states)


def _cap(priced: Priced, offloaded: Floats) -> Ints:
    """The most layers that fit on one stage [R], by bisection (memory grows with layers)."""
    low = np.zeros_like(priced.pp)
    high = np.full_like(priced.pp, priced.facts.layers)
    while (low < high).any():
        middle = (low + high + 1) // 2
        needed, states = _first_stage(priced, middle)
        fits = needed - offloaded * states <= priced.offer.spec.memory_bytes
        low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
    return low


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


def segment_instance(
    facts: ModelFacts,
    table: Strategies,
    offers: Sequence[Offer],
    figures: SegmentFigures,
    r: int,
    slowest: float,
) -> AstraData:
    """Strategy r as an `astra` instance: the segments whose reduction takes at most `slowest` seconds."""
    by_reduction = [
        facts.layers
        if g == 0
        else int(np.searchsorted(g * np.arange(1, facts.layers + 1), slowest, side="right"))
        for g in figures.g[:, r]
    ]
    kinds = [
        DeviceType(
            name=offer.name,
            max_devices=offer.most,
            layer_seconds=float(figures.c[i, r]),
            p2p_seconds=float(figures.h[i, r]),
            max_layers=min(int(figures.cap[i, r]), by_reduction[i]),
        )
        for i, offer in enumerate(offers)
    ]
    return AstraData(
        layers=facts.layers,
        stages=int(table.columns["pipeline_model_parallel_size"][r]),
        micro_batches=int(table.columns["num_micro_batches"][r]),
        data_parallel=int(table.columns["data_parallel_size"][r]),
        tensor_parallel=int(table.columns["tensor_model_parallel_size"][r]),
        device_types=kinds,
        equal_layers_per_type=False,
    )


def slowest_reduction(figures: SegmentFigures, r: int, stages: Ints, layers: Ints) -> float:
    """max_s n_s g of the segments: stages of a type are filled as evenly as they go."""
    return max(
        (
            float(figures.g[i, r]) * -(-int(layers[i]) // int(stages[i]))
            for i in range(len(stages))
            if stages[i]
        ),
        default=0.0,
    )


def confirm(instance: AstraData, pipeline_seconds: float) -> None:
    """The exact method of problem `astra` must find the same optimum; raises DisagreementError otherwise."""
    found = optimum(compile_problem(instance), Run())
    if found.bound is None or abs(found.bound - pipeline_seconds) > 1e-9 * pipeline_seconds:
        raise DisagreementError(
            f"segments cost {pipeline_seconds!r} s, the exact method of astra says {found.bound!r}"
        )
