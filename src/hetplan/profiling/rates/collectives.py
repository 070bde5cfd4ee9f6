"""Seconds of collectives and messages: measured curves per fabric, latency and bandwidth elsewhere.

An all-reduce among the GPUs of one node follows the curve that was measured on its fabric (vTrain's
nccl-tests tables from 1 MiB on, vidur's below and of messages); all-gather and reduce-scatter are
its halves. Other links take a latency for each step of a ring and the bytes that pass the slowest
link over what collectives reach of its bandwidth (Patarasuk and Yuan 2009).
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from hetplan.errors import require
from hetplan.profiling.hardware.cluster import Node
from hetplan.profiling.rates.shipped import Curve, Estimate, shipped
from hetplan.schema import NonNegative, Positive, StrictModel

# Bytes that pass a rank's slowest link, in parts of (n - 1) / n times the size, and steps of a ring
# in parts of n - 1. The size is that of the whole tensor on every rank.
PARTS = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0}


@dataclass(frozen=True)
class Chips:
    """Which nodes a measured fabric stands for: device types whose names begin so, in nodes whose
    cluster file states at least `Wires.least` of `bandwidth` (bytes/s per direction).

    Where a file states more or less than `bandwidth`, the part of the curve that grows with the
    bytes is stretched in proportion. curves: the fabric whose curves are taken. reached: (ranks,
    bytes/s of bus bandwidth of large all-reduces) where that is known of this fabric, but not its
    curve; source: from where.
    """

    fabric: str
    names: tuple[str, ...]
    bandwidth: float
    curves: str
    reached: tuple[tuple[int, float], ...] = ()
    source: str = ""


@dataclass(frozen=True)
class Wires:
    """The measured fabrics, and what collectives reach of other links.

    Datasheets: NVLink 2 (V100, six links) 150 GB/s per direction, NVLink 3 (A100) 300, NVLink 4
    (H100) 450. inside: share of a PCIe link (NVLink's, which protocols leave: 370 of 450 GB/s,
    NVIDIA/nccl-tests#212). low, high: of what no curve was measured for, a guess. least: share of a
    fabric's bandwidth that a cluster file must state to be taken for it (an H800 has 200 of an
    H100's 450 GB/s).
    """

    inside: float = 0.8
    low: float = 0.7
    high: float = 1.6
    least: float = 0.4
    chips: tuple[Chips, ...] = (
        Chips("a100-nvswitch", ("A100-SXM", "A800-SXM"), 300e9, "a100-nvswitch"),
        Chips("v100-nvlink", ("V100-SXM",), 150e9, "v100-nvlink"),
        Chips("a100-pairs", ("A100-PCIE", "A800-PCIE"), 300e9, "a100-pairs"),
        Chips(
            "h100-nvswitch",
            ("H100-SXM", "H800-SXM", "H200-SXM", "GH200"),
            450e9,
            "a100-nvswitch",
            ((2, 368e9), (4, 368e9), (5, 420e9), (6, 440e9), (7, 460e9), (8, 480e9)),
            "NVIDIA/nccl#1455",
        ),
    )


WIRES = Wires()


@dataclass(frozen=True)
class Fabric:
    """The links of a group: bytes/s per direction, seconds per step, share of the bandwidth that
    collectives reach, and the measured fabric that they are, if any."""

    bandwidth: float
    latency: float
    share: float
    chips: Chips | None = None


def node_fabric(node: Node, wires: Wires = WIRES) -> Fabric:
    """The fabric inside a node, by its device type and `intra_node_gbit_per_s`."""
    served = (
        chips
        for chips in wires.chips
        if node.device.startswith(chips.names)
        and node.intra_bandwidth >= wires.least * chips.bandwidth
    )
    return Fabric(node.intra_bandwidth, node.intra_latency, wires.inside, next(served, None))


def collective_seconds(
    operation: str, size: float, ranks: int, fabric: Fabric, wires: Wires = WIRES
) -> Estimate:
    """Seconds of one collective, or of a message.

    operation: all-reduce, all-gather, reduce-scatter, all-to-all or send. size: bytes of the whole
    tensor: what is reduced, gathered or exchanged, all parts together; of a message its own. ranks:
    n >= 1 (1 gives 0). Raises InputError for another operation.
    """
    require(
        operation == "send" or operation in PARTS,
        "unknown collective",
        got=operation,
        expected=", ".join(["send", *PARTS]),
    )
    if ranks < 2 or size <= 0:
        return Estimate(0.0, 0.0, 0.0, "nothing to send")
    drawn, chips = stretched(fabric, operation, ranks), fabric.chips
    if drawn is None or chips is None:
        steps = 1.0 if operation == "send" else PARTS[operation] * (ranks - 1)
        moved = size if operation == "send" else size * steps / ranks
        seconds = steps * fabric.latency + moved / (fabric.share * fabric.bandwidth)
        source = "latency and bandwidth"
        return Estimate(seconds, wires.low * seconds, wires.high * seconds, source)
    curve = curve_of(chips.curves, operation, ranks)
    assert curve is not None
    seconds = drawn.at(size)
    if operation != "send":  # the start of a half of an all-reduce is half of its start
        seconds *= PARTS[operation] / PARTS["all-reduce"]
    source = f"{curve.origin} on {curve.fabric}"
    low, high = curve.errors.low, curve.errors.high
    if chips.reached:
        source, low, high = f"{source}, scaled by {chips.source}", wires.low, wires.high
    return Estimate(seconds, low * seconds, high * seconds, source)


class CollectiveCurve(StrictModel):
    """Seconds of a collective by the bytes of each rank: a start, and what grows with the bytes,
    `stretch` times. log2_bytes, seconds [B]: straight lines in logarithms between; beyond its ends
    the curve goes on at the rate of the last knots, and below at its start."""

    log2_bytes: list[NonNegative]
    seconds: list[Positive]
    stretch: Positive = 1.0

    def at(self, size: float) -> float:
        """Seconds of `size` > 0 bytes."""
        start, end = self.seconds[0], 2 ** self.log2_bytes[-1]
        drawn = 2 ** float(np.interp(math.log2(size), self.log2_bytes, np.log2(self.seconds)))
        return start + (drawn * max(size / end, 1.0) - start) * self.stretch


@cache
def curve_of(fabric: str, operation: str, ranks: int) -> Curve | None:
    """The measured curve that serves an operation of so many ranks; None where there is none."""
    kind = operation if operation == "send" else "all-reduce"
    asked = (fabric, kind, 2 if kind == "send" else ranks)
    return next(
        (c for c in shipped().collectives if (c.fabric, c.operation, c.ranks) == asked), None
    )


@cache
def stretched(fabric: Fabric, operation: str, ranks: int) -> CollectiveCurve | None:
    """The measured curve that serves an operation of so many ranks, stretched to this fabric: of a
    message its own, of any collective the all-reduce's. None where none was measured."""
    chips = fabric.chips
    curve = curve_of(chips.curves, operation, ranks) if chips else None
    if chips is None or curve is None:
        return None
    stretch = chips.bandwidth / fabric.bandwidth
    if chips.reached and operation != "send":
        largest = PARTS["all-reduce"] * (ranks - 1) / ranks * 2 ** curve.log2_bytes[-1]
        known = dict(chips.reached) if operation == "all-reduce" else {}
        stretch *= largest / curve.seconds[-1] / known.get(ranks, chips.reached[0][1])
    return CollectiveCurve(log2_bytes=curve.log2_bytes, seconds=curve.seconds, stretch=stretch)
