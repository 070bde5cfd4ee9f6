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
from hetplan.formulations.astra.search.space import Space
from hetplan.formulations.astra.search.table import Ints, Strategies
from hetplan.solvers.run import Run


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
