"""Mode 2: strategies whose stages lie on different types of device (Astra, Section 3.4), proven
over all segments.

For every strategy of the table the stages become segments of an `astra` problem: c and h per type
from the pricing.
Beyond eq. 22, which knows equal layers alone, the first stage has the embedding's seconds on its
type and the last one the head's, as in modes 1 and 3; every type is tried for either. max_layers
come from the memory filter: the first stage with the embedding, the last with the head, those
between as if second of the pipeline, so that any order of them fits. The exposed gradient reduction
and the optimizer add max_s r(n_s).
Interleaving and block-wise recomputation are left out: Megatron-LM has them for equal stages only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetplan.errors import DisagreementError
from hetplan.formulations.astra.data import AstraData, DeviceType
from hetplan.formulations.astra.evaluate import evaluate
from hetplan.formulations.astra.exact import solve
from hetplan.formulations.astra.search.facts import ModelFacts
from hetplan.formulations.astra.search.pool import Offer
from hetplan.formulations.astra.search.pricing import (
    Assumptions,
    Priced,
    after_pipeline,
    in_flight,
    share_needed,
    stage_bytes,
)
from hetplan.formulations.astra.search.space import Ints, Space, Strategies
from hetplan.formulations.astra.search.timing import EMBEDDING, HEAD, Floats
from hetplan.solvers.result import OPTIMAL_GAP
from hetplan.solvers.run import Run


def segment_space(space: Space) -> Space:
    """The part of `space` that stages of different sizes can take."""
    return replace(
        space,
        interleaving=False,
        recompute=tuple(g for g in space.recompute if g != "hybrid"),
        recompute_method=tuple(m for m in space.recompute_method if m == "uniform"),
    )


FIRST, MIDDLE, LAST = range(3)


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

    def take(self, rows: Ints) -> SegmentFigures:
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
        if last < 0:
            return float(before[first] + behind[first]), 0.0
        return float(before[first]), float(behind[last])


def segment_figures(
    facts: ModelFacts,
    table: Strategies,
    offers: Sequence[Offer],
    given: Assumptions,
    *,
    offload: bool = True,
) -> SegmentFigures:
    """The figures of all strategies on all types; offload: whether optimizer states may move to the
    host."""
    priced = [Priced(facts, table, offer, given) for offer in offers]
    layers = -(-facts.layers // priced[0].pp)
    offloaded = np.clip(
        np.max([share_needed(p, layers) for p in priced], axis=0), 0.0, float(offload)
    )
    group = priced[0].tp * priced[0].dp
    ends = np.stack([[p.blocks.row(EMBEDDING), p.blocks.row(HEAD)] for p in priced], axis=1)

    def exposed(r: int) -> Floats:
        return np.stack([_exposed(p, r, float(offloaded[r])) for p in priced], axis=1)

    return SegmentFigures(
        c=np.stack([p.layers_seconds(np.ones_like(p.pp)) for p in priced]),
        h=np.stack([p.crossing_seconds for p in priced]),
        ends=ends,
        g=np.stack([_least_exposed(p, offloaded) for p in priced]),
        cap=np.stack([_caps(p, offloaded) for p in priced], axis=1),
        most=np.stack([np.minimum(p.pp, p.offer.most // group) for p in priced]),
        rate=np.stack([group * (p.offer.price_per_second or 0.0) for p in priced]),
        offloaded=offloaded,
        exposed=exposed,
    )


def _after(
    priced: Priced, layers: Ints, ends: Floats, passes: tuple[Floats, Floats], share: Floats
) -> Floats:
    """Seconds after the last micro-batch of stages with so many layers and `ends` parameters
    besides."""
    dense, experts = layers * priced.stage_params + ends, layers * priced.expert_stage_params
    reduction, update = after_pipeline(
        priced, dense, experts, layers * passes[0], layers * passes[1], share
    )
    return reduction + update


def _least_exposed(priced: Priced, offloaded: Floats) -> Floats:
    """g: r(N) / N of a middle stage; r(n) / n never rises with n."""
    every = np.full_like(priced.pp, priced.facts.layers)
    passes = (priced.forward, priced.backward)
    least = _after(priced, every, np.zeros(priced.table.rows), passes, offloaded)
    return least / priced.facts.layers * (1 - 1e-12)


def _exposed(priced: Priced, r: int, share: float) -> Floats:
    """r(n) of strategy r on one type [3, N]: falling, then rising (made so, upwards, where
    rounding says otherwise)."""
    N = priced.facts.layers
    one = Priced(priced.facts, priced.table.take(np.full(3 * N, r)), priced.offer, priced.given)
    embedding, head = (part[0] for part in one.end_params)
    alone = float(priced.pp[r] == 1)
    ends = np.repeat([embedding + alone * head, 0.0, head], N)
    layers = np.tile(np.arange(1, N + 1), 3)
    passes = (np.full(3 * N, priced.forward[r]), np.full(3 * N, priced.backward[r]))
    values = _after(one, layers, ends, passes, np.full(3 * N, share)).reshape(3, N)
    for row in values:
        low = int(np.argmin(row))
        row[low:] = np.maximum.accumulate(row[low:])
        row[: low + 1] = np.maximum.accumulate(row[low::-1])[::-1]
    return values


def _stage(priced: Priced, kind: int, layers: Ints) -> tuple[Floats, Floats]:
    """(bytes, optimizer states) of a stage of so many layers of that kind."""
    alone = (priced.pp == 1).astype(float)
    place = (np.zeros_like(priced.pp), np.minimum(priced.pp - 1, 1), priced.pp - 1)[kind]
    first, last = ((1.0, alone), (0.0, 0.0), (alone, 1.0))[kind]
    return stage_bytes(priced, layers, in_flight(priced, place), first, last)


def _caps(priced: Priced, offloaded: Floats) -> Ints:
    """The most layers that fit on one stage of each kind [3, R], by bisection (memory grows with
    layers)."""
    caps = []
    for kind in (FIRST, MIDDLE, LAST):
        low = np.zeros_like(priced.pp)
        high = np.full_like(priced.pp, priced.facts.layers)
        while (low < high).any():
            middle = (low + high + 1) // 2
            needed, states = _stage(priced, kind, middle)
            fits = needed - offloaded * states <= priced.offer.spec.memory_bytes
            low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
        caps.append(low)
    return np.stack(caps)


def segment_instance(
    facts: ModelFacts,
    table: Strategies,
    offers: Sequence[Offer],
    figures: SegmentFigures,
    r: int,
    shape: Shape,
) -> tuple[AstraData, float]:
    """Strategy r as an `astra` instance, and the seconds of the slowest reduction and optimizer of
    `shape`.

    The instance has as many stages of each kind and type as `shape` has, the first and the last
    stage as types of their own with their extra seconds in p2p_seconds, and max_layers such that no
    reduction is slower. Where a reduction needs some layers to hide behind, those are counted in
    p2p_seconds as well.
    """
    exposed = figures.exposed(r)
    group = int(
        table.columns["tensor_model_parallel_size"][r] * table.columns["data_parallel_size"][r]
    )
    parts = shape.parts
    slowest = max(
        max(exposed[kind, i, n - 1] for n in spread(count, layers))
        for kind, i, count, layers in parts
    )
    extra = figures.end_seconds(r, shape.first, shape.last)
    kinds, layers = [], facts.layers
    for kind, i, count, _ in parts:
        fine = np.flatnonzero(exposed[kind, i] <= slowest)
        hidden = int(fine[0])  # layers that every such stage has beyond one
        ends = (extra[0], 0.0, extra[1])[kind]
        layers -= count * hidden
        kinds.append(
            DeviceType(
                name=offers[i].name + ("-first", "", "-last")[kind],
                max_devices=count * group,
                layer_seconds=float(figures.c[i, r]),
                p2p_seconds=float(figures.h[i, r]) + ends + hidden * float(figures.c[i, r]),
                max_layers=min(int(figures.cap[kind, i, r]), int(fine[-1]) + 1) - hidden,
            )
        )
    instance = AstraData(
        layers=layers,
        stages=int(table.columns["pipeline_model_parallel_size"][r]),
        micro_batches=int(table.columns["num_micro_batches"][r]),
        data_parallel=int(table.columns["data_parallel_size"][r]),
        tensor_parallel=int(table.columns["tensor_model_parallel_size"][r]),
        device_types=kinds,
        equal_layers_per_type=False,
    )
    return instance, float(slowest)


@dataclass(frozen=True)
class Shape:
    """Which stages a pipeline has: types and layers of the first and the last (-1, 0 where they are
    one), and of those between the stages and the layers together of each type [M]."""

    first: int
    first_layers: int
    last: int
    last_layers: int
    stages: tuple[int, ...]
    layers: tuple[int, ...]

    @property
    def parts(self) -> list[tuple[int, int, int, int]]:
        """(kind, type, stages, layers together) in pipeline order, the fullest between the ends
        last."""
        between = [
            (MIDDLE, i, m, n)
            for i, (m, n) in enumerate(zip(self.stages, self.layers, strict=True))
            if m
        ]
        between.sort(key=lambda part: part[3] / part[2])
        end = [(LAST, self.last, 1, self.last_layers)] if self.last >= 0 else []
        return [(FIRST, self.first, 1, self.first_layers), *between, *end]


def spread(stages: int, layers: int) -> list[int]:
    """Layers of each stage, as even as they go, the fuller ones last."""
    base, more = divmod(layers, stages)
    return [base] * (stages - more) + [base + 1] * more


def confirm(instance: AstraData, pipeline_seconds: float) -> None:
    """The exact method of problem `astra` must find the same optimum; raises DisagreementError
    otherwise."""
    decision = solve(instance, Run()).decision
    best = None if decision is None else evaluate(instance, decision).objective
    if best is None or abs(best - pipeline_seconds) > OPTIMAL_GAP * pipeline_seconds:
        raise DisagreementError(
            f"segments cost {pipeline_seconds!r} s, the exact method of astra says {best!r}"
        )
