"""Seconds of collectives and messages among the devices of one type (Astra, eq. 26).

Ranks are numbered tensor first, then expert and data, pipeline last, as Megatron-LM does; a node
holds consecutive ranks. A group with stride s and size n stays inside a node when s n <= devices
per node; else each of the min(s, devices) groups that meet in a node gets an equal share of its
network. Inside a node collectives take what was measured on its fabric
(`hetplan.profiling.rates.collectives`). Between nodes a ring takes the bytes that pass its slowest
link over what NCCL reaches of it, and the latency of every hop: most are within nodes, as many as
there are nodes lead out of one. Learned links replace both by their share of the bandwidth, which
has latency in it.Nodes under a switch reach what lies under
others at their uplink's rate: of a ring one node sends beyond the switch for all of them, of an
all-to-all every node sends all that leaves it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hetplan.profiling.frameworks import MEGATRON, Framework
from hetplan.profiling.models.operators import DEFAULT_STACK, Stack
from hetplan.profiling.profiles.profile import Profile
from hetplan.profiling.rates.collectives import PARTS, collective_seconds, node_fabric
from hetplan.profiling.rates.efficiency import Group, Learned, LearnedLinks
from hetplan.replays.arrays import Floats, Ints
from hetplan.replays.strategies.offers import Offer

MOST_RANKS = 2**21


@dataclass(frozen=True)
class Assumptions:
    """What pricing and memory assume besides the model and the pool.

    profile: measured layers; where it has no table they are predicted. learned: by device type,
    how much longer its own operators take than predicted. links: learned efficiency of links; None:
    measured fabrics inside nodes, `network_share` between them.
    network_share: what large collectives reach of a node's network: 24 of 25 GB/s for each HDR
    adapter of A800 nodes (NVIDIA/nccl#412), 96 of 100 GB/s for three DGX A100
    (NVIDIA/nccl-tests#119).
    stack: the software that computes; its sequence parallelism is the strategy's.
    bucket_params, bucket_params_per_rank: parameters whose gradients are reduced together, at
    least, and per data rank (Megatron Core, `DistributedDataParallelConfig.bucket_size`).
    framework: what trains, and what it holds on every device; the strategies are Megatron-LM's.
    reserved_bytes: memory of each device that training cannot use, None: what the framework's
    allocator does not count. memory_margin: share of each device's memory that stays free besides.
    """

    framework: Framework = MEGATRON
    reserved_bytes: float | None = None
    memory_margin: float = 0.0
    profile: Profile | None = None
    learned: Mapping[str, Learned] = field(default_factory=dict)
    links: LearnedLinks | None = None
    network_share: float = 0.96
    stack: Stack = DEFAULT_STACK
    bucket_params: float = 40e6
    bucket_params_per_rank: float = 1e6

    @property
    def reserved(self) -> float:
        """Bytes of each device that training cannot use."""
        known = self.reserved_bytes
        return self.framework.reserved_bytes if known is None else known


def group_seconds(
    offer: Offer,
    assumed: Assumptions,
    operation: str,
    size: Floats,
    stride: Ints,
    ranks: Ints,
) -> Floats:
    """[R] seconds of an operation in groups of that stride and so many ranks, all groups at once.

    operation: all-reduce, all-gather (or reduce-scatter, which takes as long), all-to-all, or send
    for one message. size: bytes of the whole tensor, of a message its own.
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
