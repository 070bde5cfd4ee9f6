"""Seconds of collectives and messages: measured curves per fabric, latency and bandwidth elsewhere.

A fabric is the set of links between the GPUs of a node. An all-reduce follows the curve that was
measured on its fabric: vTrain's nccl-tests tables from 1 MiB on, vidur's below. Messages follow
vidur's curve. An all-gather and a reduce-scatter take half of an all-reduce each.

On other links, a collective takes a latency for each step of a ring, and the bytes that pass the
slowest link over the part of its bandwidth that collectives reach (Patarasuk and Yuan 2009).
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from hetplan.errors import require
from hetplan.profiling.hardware.cluster import Node
from hetplan.profiling.rates.shipped import Curve, Estimate, shipped
from hetplan.schema import NonNegative, Positive, StrictModel

# The factor p of each collective over n ranks: p (n - 1) / n times the size passes a rank's slowest
# link, in p (n - 1) steps of a ring. The size is that of the whole tensor.
PARTS = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0}


@dataclass(frozen=True)
class MeasuredFabric:
    """The nodes for which a measured fabric stands.

    They have devices of the given types, and a cluster file that states at least the share
    `FabricRates.least` of `bandwidth`. Where the file states more or less than `bandwidth`, the
    part of the curve that grows with the bytes is stretched in proportion.
    """

    fabric: str  # name of the fabric
    names: tuple[str, ...]  # prefixes of the device types' names
    bandwidth: float  # bytes/s per direction
    curves: str  # the fabric whose measured curves serve
    # (ranks, bytes/s of bus bandwidth that large all-reduces reach) of a fabric that has no
    # measured curve of its own
    reached: tuple[tuple[int, float], ...] = ()
    source: str = ""  # the source of `reached`


@dataclass(frozen=True)
class FabricRates:
    """The measured fabrics, and the share of other links' bandwidth that collectives reach.

    Bandwidths of the datasheets, per direction: NVLink 2 (V100, six links) 150 GB/s, NVLink 3
    (A100) 300 GB/s, NVLink 4 (H100) 450 GB/s.
    """

    # The share of a PCIe link's bandwidth that collectives reach, taken from NVLink, where
    # protocols leave 370 of 450 GB/s (NVIDIA/nccl-tests#212).
    inside: float = 0.8
    # The interval of estimates without a measured curve, over their seconds: a guess.
    low: float = 0.7
    high: float = 1.6
    # The share of a fabric's bandwidth that a cluster file must state, for the fabric to stand for
    # its nodes (an H800 has 200 of an H100's 450 GB/s).
    least: float = 0.4
    fabrics: tuple[MeasuredFabric, ...] = (
        MeasuredFabric("a100-nvswitch", ("A100-SXM", "A800-SXM"), 300e9, "a100-nvswitch"),
        MeasuredFabric("v100-nvlink", ("V100-SXM",), 150e9, "v100-nvlink"),
        MeasuredFabric("a100-pairs", ("A100-PCIE", "A800-PCIE"), 300e9, "a100-pairs"),
        MeasuredFabric(
            "h100-nvswitch",
            ("H100-SXM", "H800-SXM", "H200-SXM", "GH200"),
            450e9,
            "a100-nvswitch",
            ((2, 368e9), (4, 368e9), (5, 420e9), (6, 440e9), (7, 460e9), (8, 480e9)),
            "NVIDIA/nccl#1455",
        ),
    )


FABRIC_RATES = FabricRates()


@dataclass(frozen=True)
class Fabric:
    """The links between the ranks of a group."""

    bandwidth: float  # bytes/s per direction
    latency: float  # seconds per step of a ring
    share: float  # share of the bandwidth that collectives reach
    measured: MeasuredFabric | None = None  # the measured fabric that stands for the links, if any


def node_fabric(node: Node, rates: FabricRates = FABRIC_RATES) -> Fabric:
    """The fabric inside a node, by its device type and its intra-node bandwidth."""
    measured = None
    for candidate in rates.fabrics:
        is_wide_enough = node.intra_bandwidth >= rates.least * candidate.bandwidth
        if node.device.startswith(candidate.names) and is_wide_enough:
            measured = candidate
            break
    return Fabric(node.intra_bandwidth, node.intra_latency, rates.inside, measured)


def collective_seconds(
    operation: str, size: float, ranks: int, fabric: Fabric, rates: FabricRates = FABRIC_RATES
) -> Estimate:
    """Seconds of one collective, or of a message.

    operation: all-reduce, all-gather, reduce-scatter, all-to-all or send. size: bytes of the whole
    tensor that is reduced, gathered or exchanged; for send, of the message. ranks: n >= 1 (1 gives
    0). Raises InputError for another operation.
    """
    require(
        operation == "send" or operation in PARTS,
        "unknown collective",
        got=operation,
        expected=", ".join(["send", *PARTS]),
    )
    if ranks < 2 or size <= 0:
        return Estimate(0.0, 0.0, 0.0, "nothing to send")
    curve, measured_fabric = stretched(fabric, operation, ranks), fabric.measured
    if curve is None or measured_fabric is None:  # no curve without a measured fabric
        steps, moved = 1.0, size
        if operation != "send":
            steps = PARTS[operation] * (ranks - 1)
            moved = size * steps / ranks
        seconds = steps * fabric.latency + moved / (fabric.share * fabric.bandwidth)
        source = "latency and bandwidth"
        return Estimate(seconds, rates.low * seconds, rates.high * seconds, source)
    measured = curve_of(measured_fabric.curves, operation, ranks)
    assert measured is not None  # `curve` is this one, stretched
    seconds = curve.at(size)
    if operation != "send":  # the curve is that of an all-reduce; its start is divided, too
        seconds *= PARTS[operation] / PARTS["all-reduce"]
    source = f"{measured.origin} on {measured.fabric}"
    low, high = measured.errors.low, measured.errors.high
    if measured_fabric.reached:
        source, low, high = f"{source}, scaled by {measured_fabric.source}", rates.low, rates.high
    return Estimate(seconds, low * seconds, high * seconds, source)


class CollectiveCurve(StrictModel):
    """Seconds of a collective by the bytes of each rank: `start + stretch (curve - start)`.

    The curve is piecewise linear in the logarithms of bytes and seconds; its start is its first
    value. Fewer bytes than the first knot take the start. Beyond the last knot the seconds grow in
    proportion to the bytes.
    """

    log2_bytes: list[NonNegative]
    """[B] knots: logarithms of the bytes of each rank."""
    seconds: list[Positive]
    """[B] the curve at the knots."""
    stretch: Positive = 1.0
    """Factor on the part that grows with the bytes."""

    def at(self, size: float) -> float:
        """Seconds of `size` > 0 bytes."""
        start, last_size = self.seconds[0], 2 ** self.log2_bytes[-1]
        curve = 2 ** float(np.interp(math.log2(size), self.log2_bytes, np.log2(self.seconds)))
        return start + (curve * max(size / last_size, 1.0) - start) * self.stretch


@cache
def curve_of(fabric: str, operation: str, ranks: int) -> Curve | None:
    """The shipped curve for an operation of `ranks` ranks: a message's own, or the all-reduce's for
    any collective. None where none was measured."""
    wanted = (fabric, "all-reduce", ranks)
    if operation == "send":
        wanted = (fabric, "send", 2)
    for curve in shipped().collectives:
        if (curve.fabric, curve.operation, curve.ranks) == wanted:
            return curve
    return None


@cache
def stretched(fabric: Fabric, operation: str, ranks: int) -> CollectiveCurve | None:
    """The curve of `curve_of`, stretched to the bandwidth of this fabric; None where none was
    measured."""
    measured = fabric.measured
    curve = curve_of(measured.curves, operation, ranks) if measured else None
    if measured is None or curve is None:
        return None
    stretch = measured.bandwidth / fabric.bandwidth
    if measured.reached and operation != "send":
        # the bytes on a link over the seconds of the last knot, over the bus bandwidth reached here
        link_bytes = PARTS["all-reduce"] * (ranks - 1) / ranks * 2 ** curve.log2_bytes[-1]
        # The figures are of all-reduces. Other collectives, and other numbers of ranks, take the
        # figure of the fewest ranks, which is the smallest.
        reached = dict(measured.reached) if operation == "all-reduce" else {}
        reached_with_fewest_ranks = measured.reached[0][1]
        bus_bandwidth = reached.get(ranks, reached_with_fewest_ranks)
        stretch *= link_bytes / curve.seconds[-1] / bus_bandwidth
    return CollectiveCurve(log2_bytes=curve.log2_bytes, seconds=curve.seconds, stretch=stretch)
