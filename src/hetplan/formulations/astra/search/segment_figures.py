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
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hetplan.formulations.astra.data import AstraData, DeviceType
from hetplan.formulations.astra.search.facts import ModelFacts
from hetplan.formulations.astra.search.pool import Offer
from hetplan.formulations.astra.search.pricing import (
    Assumptions,
    Priced,
    after_pipeline,
    share_needed,
    stage_bytes,
)
from hetplan.formulations.astra.search.space import Ints, Space, Strategies
from hetplan.formulations.astra.search.timing import EMBEDDING, HEAD, Floats


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
    group = priced[0].tp * priced[0].dp
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
    embedding, head = (part[0] for part in one.end_params)
    ends = np.repeat([embedding + float(priced.pp[r] == 1) * head, 0.0, head], N)
    reduction, update = after_pipeline(
        one, np.tile(np.arange(1, N + 1), 3), ends, np.full(3 * N, share)
    )
    return reduction.reshape(3, N), update.reshape(3, N)


def _least_exposed(priced: Priced, offloaded: Floats) -> Floats:
    """g: r(N) / N of a middle stage; r(n) / n never rises with n."""
    every = np.full_like(priced.pp, priced.facts.layers)
    reduction, update = after_pipeline(priced, every, np.zeros(priced.table.rows), offloaded)
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
            fits = needed - offloaded * states <= priced.offer.spec.memory_bytes
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
