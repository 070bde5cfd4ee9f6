"""Which link a group of ranks talks over, and what share of it, in Megatron-LM's rank order
(vectorised).

Ranks are numbered tensor first, then expert and data, pipeline last; a node holds consecutive
ranks. A group with stride s and size n stays inside a node when s n <= devices per node; else each
of the min(s, devices) groups that meet in a node gets an equal share of its network.
"""

from __future__ import annotations

import numpy as np

from hetplan.formulations.astra.search.efficiency import (
    EfficiencyModel,
    Floats,
    Traffic,
    transfer_seconds,
)
from hetplan.formulations.astra.search.pool import Offer
from hetplan.formulations.astra.search.table import Ints


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


def ring_seconds(
    offer: Offer,
    kind: str,
    size: Floats,
    stride: Ints,
    ranks: Ints,
    rounds: int,
    model: EfficiencyModel,
) -> Floats:
    """Ring collective on `size` bytes per rank: rounds (n - 1) (size / (n b eta) + a); an
    all-reduce has two rounds."""
    moved = rounds * (ranks - 1) / ranks * size
    inside = stride * ranks <= offer.node_devices
    traffic = Traffic(
        offer.name, kind, np.asarray(moved, float), ranks.astype(float), (~inside).astype(float)
    )
    seconds = transfer_seconds(traffic, ring_bandwidth(offer, stride, ranks), model)
    return np.asarray(seconds + rounds * (ranks - 1) * latency(offer, stride, ranks))


def message_seconds(
    offer: Offer, kind: str, size: Floats, stride: Ints, ranks: Ints, model: EfficiencyModel
) -> Floats:
    """One message (or an all-to-all's slice) of `size` bytes from every rank at once; 0 for groups
    of one."""
    inside = stride * ranks <= offer.node_devices
    traffic = Traffic(
        offer.name, kind, np.asarray(size, float), ranks.astype(float), (~inside).astype(float)
    )
    seconds = transfer_seconds(traffic, sender_bandwidth(offer, stride, ranks), model)
    return np.where(ranks > 1, seconds + latency(offer, stride, ranks), 0.0)
