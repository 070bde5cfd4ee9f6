"""Seconds of operators, of messages, and of whole blocks, for every strategy at once.

Seconds of an operator = theta / (phi eta) (Astra, eq. 25-26): theta FLOPs of a matrix product or
bytes of anything else, phi the datasheet's peak or bandwidth, eta in (0, 1] the share of it that
the operator reaches. The shares are those of `hetplan.profiling.times` (tile quantisation, the
roofline, a floor for launches), so that the search prices an operator exactly as predicted profiles
do. Links reach all of what cluster files state.

Ranks are numbered tensor first, then expert and data, pipeline last, as Megatron-LM does; a node
holds consecutive ranks. A group with stride s and size n stays inside a node when s n <= devices
per node; else each of the min(s, devices) groups that meet in a node gets an equal share of its
network.

The operators of a block are the profiling layer's; sequence parallelism divides the ones that
tensor parallelism leaves whole (Korthikanti et al. 2022, Section 4.2.2). A measured profile
replaces the totals where it has a table; the part that selective recomputation repeats keeps its
analytical share.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.astra.search.facts import ModelFacts
from hetplan.formulations.astra.search.pool import Offer
from hetplan.formulations.astra.search.space import Ints
from hetplan.profiling.operators import Elementwise, Layer, Matmul, launches
from hetplan.profiling.profile import Profile
from hetplan.profiling.times import CORE, DEFAULT_EFFICIENCY, Rates, operator_time

Floats = NDArray[np.float64]


def ring_bandwidth(offer: Offer, stride: Ints, size: Ints) -> Floats:
    """Bytes/s of a ring over groups of that stride and size."""
    shared = offer.network / np.minimum(stride, offer.node_devices)
    return np.where(
        stride * size <= offer.node_devices, offer.intra, np.minimum(offer.intra, shared)
    )


def sender_bandwidth(offer: Offer, stride: Ints, size: Ints) -> Floats:
    """Bytes/s when every device of a node sends out of its group's reach at once (all-to-all, stage
    to stage)."""
    shared = np.full(np.shape(stride), min(offer.intra, offer.network / offer.node_devices))
    return np.where(stride * size <= offer.node_devices, offer.intra, shared)


def latency(offer: Offer, stride: Ints, size: Ints) -> Floats:
    """Seconds per message of such a group."""
    return np.where(stride * size <= offer.node_devices, offer.intra_latency, offer.network_latency)


def ring_seconds(offer: Offer, size: Floats, stride: Ints, ranks: Ints, rounds: int) -> Floats:
    """Ring collective on `size` bytes per rank: rounds (n - 1) (size / (n b) + a); an all-reduce
    has two rounds."""
    moved = rounds * (ranks - 1) / ranks * size
    seconds = moved / ring_bandwidth(offer, stride, ranks)
    return np.asarray(seconds + rounds * (ranks - 1) * latency(offer, stride, ranks))


def message_seconds(offer: Offer, size: Floats, stride: Ints, ranks: Ints) -> Floats:
    """One message (or an all-to-all's slice) of `size` bytes from every rank at once; 0 for groups
    of one."""
    seconds = size / sender_bandwidth(offer, stride, ranks)
    return np.where(ranks > 1, seconds + latency(offer, stride, ranks), 0.0)


# Rows of what `block_seconds` returns: an average block's forward, backward, attention core
# forward, matrix products forward and backward; embedding and head, forward and backward together.
FORWARD, BACKWARD, CORE_FORWARD, PRODUCTS_FORWARD, PRODUCTS_BACKWARD, EMBEDDING, HEAD = range(7)


def block_seconds(
    facts: ModelFacts,
    offer: Offer,
    tensor: Ints,
    micro_batch: Ints,
    sequence_parallel: Ints,
    profile: Profile | None = None,
) -> Floats:
    """[7, R] seconds of all rows, each distinct combination computed once."""
    combined = (tensor * 2**20 + micro_batch) * 2 + sequence_parallel
    distinct, of = np.unique(combined, return_inverse=True)
    keys = [(int(v) >> 21, (int(v) >> 1) & (2**20 - 1), bool(int(v) & 1)) for v in distinct]
    table = np.zeros((7, len(keys)))
    for number, key in enumerate(keys):
        for block, weight in facts.different_blocks:
            table[:5, number] += weight * _layer(block, facts, offer, key)
        for figure, layer in ((EMBEDDING, facts.first), (HEAD, facts.last)):
            table[figure, number] = _layer(layer, facts, offer, key)[:2].sum()
    if profile is not None:
        _overwrite(table, keys, facts, offer, profile)
    return np.asarray(table[:, of])


def _layer(layer: Layer, facts: ModelFacts, offer: Offer, key: tuple[int, int, bool]) -> Floats:
    """[5] forward, backward, core forward, products forward, products backward of one layer."""
    tensor, micro_batch, sequence_parallel = key
    rates = Rates.of(offer.spec, facts.precision, DEFAULT_EFFICIENCY)
    seconds = np.zeros(5)
    for op in layer.operators:
        if sequence_parallel and isinstance(op, Elementwise):
            op = replace(op, split=True)
        time = operator_time(op, rates, micro_batch, tensor)
        seconds[:2] += time.forward, time.backward
        seconds[2] += time.forward * (op.name in CORE)
        if isinstance(op, Matmul):
            seconds[3:] += time.forward, time.backward
    forward, backward = np.sum([launches(op) for op in layer.operators], axis=0)
    floors = np.array([forward, backward]) * DEFAULT_EFFICIENCY.launch_seconds
    seconds[:2] = np.maximum(seconds[:2], floors)
    return seconds


def _overwrite(
    table: Floats,
    keys: list[tuple[int, int, bool]],
    facts: ModelFacts,
    offer: Offer,
    profile: Profile,
) -> None:
    """Take totals from the profile's tables; parts of a block keep their shares."""
    chain = facts.model.layers
    inside = [i for i, layer in enumerate(chain) if layer in facts.blocks]
    for number, (tensor, micro_batch, _) in enumerate(keys):
        measured = profile.table(offer.name, tensor, micro_batch)
        if measured is None:
            continue
        forward = float(np.mean([measured.forward_seconds[i] for i in inside]))
        backward = float(np.mean([measured.backward_seconds[i] for i in inside]))
        scale = forward / table[FORWARD, number]
        table[[CORE_FORWARD, PRODUCTS_FORWARD], number] *= scale
        table[PRODUCTS_BACKWARD, number] *= backward / table[BACKWARD, number]
        table[FORWARD, number], table[BACKWARD, number] = forward, backward
        seconds = measured.seconds()
        table[EMBEDDING, number], table[HEAD, number] = seconds[0], seconds[-1]
