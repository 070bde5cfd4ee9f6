"""Seconds of collectives and messages in groups of ranks on devices of one type.

Ranks are numbered as in Megatron-LM: tensor ranks are neighbours, expert and data ranks come next,
and pipeline ranks lie farthest apart. A node has consecutive ranks. A group has n ranks; its stride
s is the distance from one member to the next. The group lies inside one node when s n <= devices
per node. Otherwise min(s, devices per node) such groups share the network of each node equally.

The seconds of an operation are:

- Inside a node, a collective takes the seconds that the node's fabric gives, by measured curves or
  by latency and bandwidth (`hetplan.profiling.rates.collectives`).
- Between nodes, a ring takes the bytes that pass its slowest link over the bandwidth that NCCL
  reaches of it, and the latency of every hop. One hop leads out of each node; the other hops stay
  within nodes.
- With learned links, the seconds of both are bytes over the learned share of the bandwidth. The
  share includes the latency.
- Between switches, a node has the bandwidth of its uplink. In a ring, one node under each switch
  sends to another switch, over the uplinks of all the ring's nodes under its switch. In an
  all-to-all, every node sends over its own uplink.
"""

import math
from typing import Protocol

import numpy as np

from hetplan.profiling.rates.collectives import PARTS, collective_seconds, node_fabric
from hetplan.profiling.rates.efficiency import Group, LearnedLinks
from hetplan.replays.arrays import Floats, Numbers
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.offers import Offer

# Above every number of ranks, so that (stride, ranks) fits into one 64-bit number.
MAX_RANKS = 2**21
MESSAGES = ("send", "all-to-all")  # point-to-point operations; all others are rings


class GroupSeconds(Protocol):
    """The function `group_seconds` with its first two arguments bound."""

    def __call__(self, operation: str, size: Numbers, stride: Numbers, ranks: Numbers) -> Floats:
        """Seconds of a collective of a group; see `group_seconds`."""
        ...


def group_seconds(
    offer: Offer,
    assumed: Assumptions,
    operation: str,
    size: Numbers,
    stride: Numbers,
    ranks: Numbers,
) -> Floats:
    """Seconds of an operation in each of several groups, in the common shape of the last three
    arguments, which may be arrays.

    operation: all-reduce, all-gather, all-to-all, or send for one message. A reduce-scatter takes
    as long as an all-gather. size: bytes of the whole tensor; for send, of the message. stride:
    ranks from one member of a group to the next. ranks: members of a group; 1 takes no time.
    """
    # Groups of equal stride and number of ranks are computed together, each distinct size once.
    sizes, shapes = np.broadcast_arrays(size, stride * MAX_RANKS + ranks)
    seconds = np.zeros(sizes.shape)
    for shape in np.unique(shapes).tolist():
        group_stride, group_ranks = divmod(shape, MAX_RANKS)
        same_shape = shapes == shape
        distinct, inverse = np.unique(sizes[same_shape], return_inverse=True)
        of_distinct = same_shape_seconds(
            offer, assumed, operation, distinct, group_stride, group_ranks
        )
        seconds[same_shape] = of_distinct[inverse]
    return seconds


def same_shape_seconds(
    offer: Offer,
    assumed: Assumptions,
    operation: str,
    sizes: Floats,
    stride: int,
    ranks: int,
) -> Floats:
    """Seconds of an operation for each of `sizes`, in groups of one stride and number of ranks."""
    if ranks < 2:
        return np.zeros_like(sizes)
    inside = stride * ranks <= offer.node_devices
    learned = assumed.links
    if learned is not None:
        return learned_seconds(offer, learned, operation, sizes, stride, ranks, inside=inside)
    if inside:
        fabric = node_fabric(offer.node)
        each = [collective_seconds(operation, size, ranks, fabric).seconds for size in sizes]
        return np.array(each)
    return between_nodes_seconds(offer, assumed, operation, sizes, stride, ranks)


def learned_seconds(
    offer: Offer,
    learned: LearnedLinks,
    operation: str,
    sizes: Floats,
    stride: int,
    ranks: int,
    *,
    inside: bool,
) -> Floats:
    """Seconds of an operation by the learned share of the links' bandwidth, for each of `sizes`.
    inside: whether a group lies inside one node."""
    bandwidth = offer.intra
    group: Group = "node"
    if not inside:
        bandwidth = min(offer.intra, network_bandwidth(offer, operation, stride, ranks))
        group = "between"
    learned_operation = operation if operation in MESSAGES else "all-reduce"
    shares = np.array([learned.share(learned_operation, group, ranks, size) for size in sizes])
    return np.asarray(slowest_link_bytes(operation, sizes, ranks) / bandwidth / shares)


def between_nodes_seconds(
    offer: Offer,
    assumed: Assumptions,
    operation: str,
    sizes: Floats,
    stride: int,
    ranks: int,
) -> Floats:
    """Seconds of an operation by bandwidth and latency, for each of `sizes`, in groups that span
    several nodes."""
    ranks_per_node = max(1, offer.node_devices // stride)
    moved = slowest_link_bytes(operation, sizes, ranks)
    if operation == "all-to-all":  # bytes for ranks of the same node do not pass the network
        moved = (ranks - ranks_per_node) / ranks * sizes
    network = network_bandwidth(offer, operation, stride, ranks)
    seconds = moved / min(offer.intra, assumed.network_share * network)
    if operation in MESSAGES:  # the messages of an all-to-all leave at the same time
        return np.asarray(seconds + offer.network_latency)
    nodes = math.ceil(ranks / ranks_per_node)
    hops = (nodes - 1) * offer.network_latency + (ranks - nodes) * offer.intra_latency
    return np.asarray(seconds + PARTS.get(operation, 1.0) * hops)


def slowest_link_bytes(operation: str, sizes: Floats, ranks: int) -> Floats:
    """Bytes that pass the slowest link of a group, for each of `sizes`."""
    if operation == "send":
        return sizes
    return np.asarray(PARTS.get(operation, 1.0) * (ranks - 1) / ranks * sizes)


def network_bandwidth(offer: Offer, operation: str, stride: int, ranks: int) -> float:
    """Bytes/s that one group has in and out of a node, for groups that span several nodes."""
    devices = offer.node_devices
    # Every device of a node sends messages of its own. A ring passes all its ranks of the node and
    # leaves the node once, and only rings of different groups share the network.
    groups_per_node = devices if operation in MESSAGES else min(stride, devices)
    # A rank of an all-to-all sends to all ranks of other nodes at the same time.
    messages = ranks - max(1, devices // stride) if operation == "all-to-all" else 1
    bandwidth = min(offer.network / groups_per_node, messages * offer.flow)
    switch_devices = devices * offer.switch_nodes
    if stride * ranks <= switch_devices:
        return bandwidth
    uplinks = 1
    if operation not in MESSAGES:
        # the ring's nodes under a switch, of which one alone sends to other switches: a member in
        # every node, or in every (stride / devices)-th
        uplinks = max(1, switch_devices // max(stride, devices))
    return min(bandwidth, uplinks * offer.uplink / groups_per_node)
