"""Bytes per device of every strategy at once: the memory filter of Section 3.3 (eq. 20-21).

A stage keeps weights, gradients and optimizer states of its layers, and the activations of the
micro-batches in flight:
min(K, P - j) on stage j of 1F1B; interleaved, min(K v, 2 (P - j - 1) + (v - 1) P + 1) chunks of 1/v
of a stage (Narayanan et al. 2021, Section 2.2). First and last stage bind: the first keeps most in
flight, the last has the head.
Optimizer states are offloaded `auto`: the smallest share that makes the stage fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetplan.formulations.astra.search.efficiency import Floats
from hetplan.formulations.astra.search.facts import ModelFacts
from hetplan.formulations.astra.search.pool import Offer
from hetplan.formulations.astra.search.pricing import STATE_BYTES, Assumptions, Priced
from hetplan.formulations.astra.search.space import GRANULARITIES
from hetplan.formulations.astra.search.table import Ints, Strategies


def saved_bytes(priced: Priced, layers: Ints) -> tuple[Floats, Floats]:
    """(kept per micro-batch by a stage of so many layers, needed once more while one is
    recomputed), bytes.

    Without recomputation everything is kept; selective frees the attention core; a fully recomputed
    layer keeps its input, `uniform` one input for each group of layers, and one layer (or group) is
    whole while it is recomputed.
    """
    split, whole, core = priced.facts.saved
    replicated = np.where(priced.sp == 1, whole / priced.tp, whole)
    entire = (split / priced.tp + replicated) * priced.mbs
    frugal = entire - core / priced.tp * priced.mbs
    boundary = priced.facts.boundary_bytes * priced.mbs / np.where(priced.sp == 1, priced.tp, 1)
    again = priced.fully_recomputed(layers)
    group = np.where(priced.method == 1, np.maximum(priced.recomputed, 1), 1)
    selective = (priced.granularity == GRANULARITIES.index("selective")) | (
        priced.granularity == GRANULARITIES.index("hybrid")
    )
    kept = np.ceil(again / group) * boundary + (layers - again) * np.where(
        selective, frugal, entire
    )
    working = np.where(
        again > 0, np.minimum(group, layers) * entire, np.where(selective, entire - frugal, 0.0)
    )
    return kept, working


def in_flight(priced: Priced, stage: Ints) -> Floats:
    """Micro-batches (in whole stages' worth) that stage number `stage` keeps at its peak."""
    plain = np.minimum(priced.K, priced.pp - stage)
    chunks = 2 * (priced.pp - stage - 1) + (priced.v - 1) * priced.pp + 1
    interleaved = np.minimum(priced.K * priced.v, chunks) / priced.v
    return np.asarray(np.where(priced.interleaved, interleaved, plain), dtype=np.float64)


def end_activations(priced: Priced) -> tuple[Floats, Floats]:
    """Bytes that embedding (per micro-batch in flight) and head (once) keep."""
    precision = priced.facts.precision
    result = []
    for layer in (priced.facts.first, priced.facts.last):
        whole = layer.replicated_saved_bytes(precision)
        split = layer.saved_bytes(precision) - whole
        result.append(
            (split / priced.tp + np.where(priced.sp == 1, whole / priced.tp, whole)) * priced.mbs
        )
    return result[0], result[1]


def stage_bytes(
    priced: Priced, layers: Ints, flight: Floats, first: Floats | float, last: Floats | float
) -> tuple[Floats, Floats]:
    """(all bytes, optimizer states among them) of a stage with so many layers and micro-batches in
    flight.

    first, last: whether the stage holds embedding or head.
    """
    weight, gradient, state = STATE_BYTES[priced.facts.precision]
    embedding, head = priced.end_params
    dense = layers * priced.stage_params + first * embedding + last * head
    experts = layers * priced.expert_stage_params
    kept, working = saved_bytes(priced, layers)
    before, behind = end_activations(priced)
    states = priced.optimizer_params(dense, experts) * state
    activations = flight * (kept + first * before) + working + last * behind
    return (weight + gradient) * (
        dense + experts
    ) + states + activations + priced.given.reserved_bytes, states


def offload_share(priced: Priced) -> Floats:
    """Share of the optimizer states to offload so that every device fits [R]; > 1: does not fit
    even so.

    Stages between the ends hold as many layers as the first, without its embedding and with fewer
    micro-batches in flight: they fit, with no more offloaded, where it does.
    """
    return np.maximum(share_needed(priced, priced.facts.layers // priced.pp), 0.0)


def share_needed(priced: Priced, layers: Ints) -> Floats:
    """The same for stages of so many layers; below 0: there is room to spare."""
    alone = (priced.pp == 1).astype(float)
    capacity = priced.offer.spec.memory_bytes
    front, front_states = stage_bytes(
        priced, layers, in_flight(priced, np.zeros_like(priced.pp)), 1.0, alone
    )
    back, back_states = stage_bytes(priced, layers, in_flight(priced, priced.pp - 1), alone, 1.0)
    return np.asarray(
        np.maximum((front - capacity) / front_states, (back - capacity) / back_states)
    )


def stage_peaks(
    facts: ModelFacts,
    table: Strategies,
    r: int,
    stages: Sequence[tuple[Offer, int]],
    offloaded: float,
    given: Assumptions,
) -> tuple[float, ...]:
    """Bytes per device of every stage of strategy r, in pipeline order; stages: (type, layers) of
    each."""
    P = len(stages)
    priced = Priced(facts, table.take(np.full(P, r)), stages[0][0], given)
    place = np.arange(P)
    layers = np.array([layers for _, layers in stages], dtype=np.int64)
    first, last = (place == 0).astype(float), (place == P - 1).astype(float)
    total, states = stage_bytes(priced, layers, in_flight(priced, place), first, last)
    return tuple(float(v) for v in total - offloaded * states)
