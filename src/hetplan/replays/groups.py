"""Seconds of collectives and messages in groups of ranks on devices of one type.

Ranks are numbered tensor first, then expert and data, pipeline last, as Megatron-LM does; a node
holds consecutive ranks. A group with stride s and size n stays inside a node when s n <= devices
per node; else each of the min(s, devices) groups that meet in a node gets an equal share of its
network. Inside a node collectives take what was measured on its fabric
(`hetplan.profiling.rates.collectives`). Between nodes a ring takes the bytes that pass its slowest
link over what NCCL reaches of it, and the latency of every hop: most are within nodes, as many as
there are nodes lead out of one. Learned links replace both by their share of the bandwidth, which
has latency in it. Nodes under a switch reach what lies under others at their uplink's rate: of a
ring one node sends beyond the switch for all of them, of an all-to-all every node sends all that
leaves it.
"""

from typing import Protocol

import numpy as np

from hetplan.profiling.rates.collectives import PARTS, collective_seconds, node_fabric
from hetplan.profiling.rates.efficiency import Group
from hetplan.replays.arrays import Floats, Numbers
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.offers import Offer

MOST_RANKS = 2**21


class Together(Protocol):
    """Seconds of an operation in groups of ranks: `group_seconds` on one type of device."""

    def __call__(self, operation: str, size: Numbers, stride: Numbers, ranks: Numbers) -> Floats:
        """See `group_seconds`."""
        ...


def group_seconds(
    offer: Offer,
    assumed: Assumptions,
    operation: str,
    size: Numbers,
    stride: Numbers,
    ranks: Numbers,
) -> Floats:
    """Seconds of an operation in all groups of a kind at once, in the shape of the arguments.

    operation: all-reduce, all-gather (or reduce-scatter, which takes as long), all-to-all, or send
    for one message. size: bytes of the whole tensor, of a message its own. stride: ranks from one
    member of a group to the next. ranks: members of a group; 1 takes no time.
    """
    sizes, codes = np.broadcast_arrays(size, stride * MOST_RANKS + ranks)
    seconds = np.zeros(sizes.shape)
    for code in np.unique(codes).tolist():
        of = codes == code
        distinct, place = np.unique(sizes[of], return_inverse=True)
        seconds[of] = one_group(offer, assumed, operation, distinct, *divmod(code, MOST_RANKS))[
            place
        ]
    return seconds


def one_group(
    offer: Offer,
    assumed: Assumptions,
    operation: str,
    sizes: Floats,
    stride: int,
    ranks: int,
) -> Floats:
    """The same of one stride and number of ranks."""
    here, message = offer.node_devices, operation in ("send", "all-to-all")
    if ranks < 2:
        return np.zeros_like(sizes)
    inside, learned = stride * ranks <= here, assumed.links
    if inside and learned is None:
        fabric = node_fabric(offer.node)
        each = [collective_seconds(operation, size, ranks, fabric).seconds for size in sizes]
        return np.array(each)
    parts = PARTS.get(operation, 1.0)
    moved = sizes if operation == "send" else parts * (ranks - 1) / ranks * sizes
    sharing = here if message else min(stride, here)
    network, under = offer.network / sharing, here * offer.switch_nodes
    if stride * ranks > under:  # of a ring the last node under a switch alone sends beyond it
        beside = 1 if message else max(1, under // max(stride, here))
        network = min(network, beside * offer.uplink / sharing)
    if learned is not None:
        group: Group = "node" if inside else "between"
        known = operation if message else "all-reduce"
        shares = np.array([learned.share(known, group, ranks, size) for size in sizes])
        return np.asarray(moved / (offer.intra if inside else min(offer.intra, network)) / shares)
    near = max(1, here // stride)
    nodes = -(-ranks // near)
    if operation == "all-to-all":  # what stays in a node does not pass its network
        moved = (ranks - near) / ranks * sizes
    hops = (nodes - 1) * offer.network_latency + (ranks - nodes) * offer.intra_latency
    seconds = moved / min(offer.intra, assumed.network_share * network)
    return np.asarray(seconds + (offer.network_latency if message else parts * hops))
