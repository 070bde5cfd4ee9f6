"""Seconds of collectives and messages: measured curves per fabric, latency and bandwidth elsewhere.

A fabric is the set of links between the GPUs of a node. An all-reduce follows the curve that was
measured on its fabric with as many ranks. On A100 and V100 these are vTrain's nccl-tests tables
from 1 MiB on and vidur's below; on H100 behind NVSwitch and on L40S over PCIe those of NVIDIA's
aiconfigurator. Messages follow vidur's curve. An all-gather, a reduce-scatter or an all-to-all
follows its own curve where one was measured, and takes half of an all-reduce elsewhere.

Numbers of ranks between two measured ones are interpolated. That matters over PCIe, where ranks
share the host's bridges: two L40S reach 20 GB/s, four of them 5 and eight of them 1.4. Other cards
in PCIe slots take the curve of L40S, and Blackwell takes that of H100, in proportion to the
bandwidth. A cluster file may state what all-reduces of its nodes reach instead.

On other links, a collective takes a latency for each step of a ring, and the bytes that pass the
slowest link over the part of its bandwidth that collectives reach (Patarasuk and Yuan 2009).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from hetplan.errors import require
from hetplan.profiling.hardware.cluster import Node
from hetplan.profiling.rates.shipped import Curve, Estimate, shipped
from hetplan.schema import NonNegative, Positive, StrictModel

# The factor p of each collective over n ranks: p (n - 1) / n times the size passes a rank's slowest
# link, in p (n - 1) steps of a ring. The size counts the whole tensor.
PARTS = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0}


@dataclass(frozen=True)
class MeasuredFabric:
    """The nodes for which a measured fabric stands.

    They have devices of the given types, and a cluster file that states a bandwidth from the share
    `least` of `bandwidth` to the share `most` of it. Where the file states more or less than
    `bandwidth`, the part of the curve that grows with the bytes is stretched in proportion.
    """

    fabric: str  # name of the fabric
    names: tuple[str, ...]  # prefixes of the device types' names
    bandwidth: float  # bytes/s per direction
    curves: str  # the fabric whose measured curves serve, a key of `CURVE_BANDWIDTHS`
    # An H800 has 200 of an H100's 450 GB/s.
    least: float = 0.4
    most: float = math.inf
    # the name of the machine that was measured, where the curves are those of another fabric
    borrowed: str = ""
    # (ranks, bytes/s of bus bandwidth that large all-reduces reach), by ascending ranks, where the
    # cluster file states them
    reached: tuple[tuple[int, float], ...] = ()


# Bandwidths of the datasheets, per direction, in bytes/s, of the machines whose curves are shipped:
# NVLink 2 (V100, six links), NVLink 3 (A100), NVLink 4 (H100), PCIe 4.0 x16 (L40S).
NVLINK_2, NVLINK_3, NVLINK_4, NVLINK_5 = 150e9, 300e9, 450e9, 900e9
# One direction of 16 lanes: 8, 16 and 32 GT/s a lane in 128b/130b code (PCI Express Base
# Specification, revisions 3 to 5).
PCIE_3, PCIE_4, PCIE_5 = 15.75e9, 31.5e9, 63e9
CURVE_BANDWIDTHS = {
    "a100-nvswitch": NVLINK_3,
    "a100-pairs": NVLINK_3,
    "v100-nvlink": NVLINK_2,
    "h100-nvswitch": NVLINK_4,
    "l40s-pcie": PCIE_4,
}


# Cards in PCIe slots, by generation (their datasheets); prefixes of the names of a catalogue.
PCIE_3_CARDS = ("P4", "P100-PCIE", "V100-PCIE", "V100S-PCIE", "T4", "RTX-20", "Titan", "GTX")
PCIE_4_CARDS = (
    *("A2", "A4", "A5", "A6", "A10", "A16", "A30", "A100-PCIE", "A800-PCIE", "L4", "L20"),
    *("RTX-30", "RTX-40", "RTX-5000-Ada", "RTX-6000-Ada", "RTX-A"),
)
PCIE_5_CARDS = ("H100-PCIE", "H100-NVL", "H200-NVL", "RTX-50", "RTX-PRO")


def pcie(generation: int, bandwidth: float, *names: str) -> MeasuredFabric:
    """The fabric of cards in PCIe slots of one generation, for which L40S were measured.

    Cards whose cluster file states more than the slot has are joined by bridges. Where it states
    less than half of it, the figure is taken for a measured one, and no curve applies.
    """
    return MeasuredFabric(
        f"pcie-{generation}",
        names,
        bandwidth,
        "l40s-pcie",
        least=0.5,
        most=1.1,
        borrowed="L40S over PCIe 4",
    )


@dataclass(frozen=True)
class FabricRates:
    """The measured fabrics, and the share of other links' bandwidth that collectives reach."""

    # The share of a PCIe link's bandwidth that collectives reach, taken from NVLink, where
    # protocols leave 370 of 450 GB/s (NVIDIA/nccl-tests#212).
    inside: float = 0.8
    # The interval of estimates without a measured curve, over their seconds: a guess.
    low: float = 0.7
    high: float = 1.6
    # Bytes/s per direction from which on links that nobody measured are taken to be switched, as
    # NVLink is: a cluster file's all-reduces then stretch the curves of H100, else those of L40S.
    switched: float = 100e9
    fabrics: tuple[MeasuredFabric, ...] = (
        MeasuredFabric("a100-nvswitch", ("A100-SXM", "A800-SXM"), NVLINK_3, "a100-nvswitch"),
        MeasuredFabric("v100-nvlink", ("V100-SXM",), NVLINK_2, "v100-nvlink"),
        MeasuredFabric("a100-pairs", ("A100-PCIE", "A800-PCIE"), NVLINK_3, "a100-pairs"),
        MeasuredFabric(
            "h100-nvswitch",
            ("H100-SXM", "H800-SXM", "H200-SXM", "GH200"),
            NVLINK_4,
            "h100-nvswitch",
        ),
        MeasuredFabric(
            "nvlink-5",
            ("B200", "B300", "GB200", "GB300"),
            NVLINK_5,
            "h100-nvswitch",
            borrowed="H100 over NVLink 4",
        ),
        MeasuredFabric("l40s-pcie", ("L40S",), PCIE_4, "l40s-pcie", least=0.5, most=1.1),
        pcie(3, PCIE_3, *PCIE_3_CARDS),
        pcie(4, PCIE_4, *PCIE_4_CARDS),
        pcie(5, PCIE_5, *PCIE_5_CARDS),
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
    """The fabric inside a node, by its device type, its intra-node bandwidth, and what the cluster
    file states of its all-reduces."""
    measured = None
    for candidate in rates.fabrics:
        share = node.intra_bandwidth / candidate.bandwidth
        if node.device.startswith(candidate.names) and candidate.least <= share <= candidate.most:
            measured = candidate
            break
    if node.all_reduce:
        measured = stated_fabric(node, measured, rates)
    return Fabric(node.intra_bandwidth, node.intra_latency, rates.inside, measured)


def stated_fabric(
    node: Node, measured: MeasuredFabric | None, rates: FabricRates
) -> MeasuredFabric:
    """The fabric of a node whose all-reduces the cluster file states: their curves have the form of
    the measured fabric's, or of the nearest one where none stands for the node."""
    if measured is None:
        curves = "h100-nvswitch" if node.intra_bandwidth >= rates.switched else "l40s-pcie"
        measured = MeasuredFabric("stated", (), CURVE_BANDWIDTHS[curves], curves)
    return replace(measured, borrowed="the cluster file", reached=node.all_reduce)


def with_intra_bandwidth(node: Node, bandwidth: float) -> Node:
    """The node with `bandwidth` bytes/s between two of its devices. Its all-reduces change in
    proportion, even where another kind of link has this bandwidth."""
    factor = bandwidth / node.intra_bandwidth
    all_reduce = tuple((ranks, factor * rate) for ranks, rate in node.all_reduce)
    changed = replace(node, intra_bandwidth=bandwidth, all_reduce=all_reduce)
    before, after = node_fabric(node).measured, node_fabric(changed).measured
    if before is None or (after is not None and after.fabric == before.fabric):
        return changed
    counts = range(2, node.devices + 1)
    rates = tuple((ranks, factor * all_reduce_bus_bandwidth(node, ranks)) for ranks in counts)
    return replace(changed, all_reduce=rates)


def borrowed_curves(nodes: Iterable[Node], rates: FabricRates = FABRIC_RATES) -> list[str]:
    """One line for each device type whose all-reduces inside nodes follow the curves of another
    machine, although its cluster file states one figure for its links."""
    lines = {}
    for node in nodes:
        measured = node_fabric(node, rates).measured
        if measured is None or not measured.borrowed or measured.reached or node.devices < 2:
            continue
        bus = [
            f"{all_reduce_bus_bandwidth(node, ranks) * 8e-9:.3g} Gbit/s among {ranks}"
            for ranks in sorted({2, node.devices})
        ]
        lines[node.device] = (
            f"all-reduces inside nodes of {node.device} follow the curves of {measured.borrowed}: "
            f"{', '.join(bus)}; all_reduce_gbit_per_s in the cluster file says otherwise "
            "(hetplan profile quick measures it)"
        )
    return list(lines.values())


def all_reduce_bus_bandwidth(node: Node, ranks: int, size: float = 2.0**29) -> float:
    """Bus bandwidth in bytes/s of an all-reduce of `size` bytes among `ranks` >= 2 of a node."""
    seconds = collective_seconds("all-reduce", size, ranks, node_fabric(node)).seconds
    return PARTS["all-reduce"] * (ranks - 1) / ranks * size / seconds


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
    curve = stretched(fabric, operation, ranks)
    measured_fabric = fabric.measured
    if curve is None or measured_fabric is None:  # no curve without a measured fabric
        steps, moved = 1.0, size
        if operation != "send":
            steps = PARTS[operation] * (ranks - 1)
            moved = size * steps / ranks
        seconds = steps * fabric.latency + moved / (fabric.share * fabric.bandwidth)
        source = "latency and bandwidth"
        return Estimate(seconds, rates.low * seconds, rates.high * seconds, source)
    measured, factor = measured_curve(measured_fabric.curves, operation, ranks)
    assert measured is not None  # `curve` is this one, stretched
    seconds = factor * curve.at(size)
    source = f"{measured.origin} on {measured.fabric}"
    low, high = measured.errors.low, measured.errors.high
    if measured_fabric.borrowed:
        source = f"{source}, in proportion"
        low = rates.low
        high = rates.high
        if measured_fabric.reached:
            source = f"{source} to the cluster file's all-reduces"
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
        start = self.seconds[0]
        last_size = 2 ** self.log2_bytes[-1]
        curve = 2 ** float(np.interp(math.log2(size), self.log2_bytes, np.log2(self.seconds)))
        return start + (curve * max(size / last_size, 1.0) - start) * self.stretch


def measured_curve(fabric: str, operation: str, ranks: int) -> tuple[Curve | None, float]:
    """(shipped curve, factor on its seconds) of an operation of `ranks` ranks. An operation without
    a curve of its own takes half of the all-reduce's; a reduce-scatter takes the all-gather's.
    (None, 1) where none was measured."""
    own = "all-gather" if operation == "reduce-scatter" else operation
    curve = curve_of(fabric, own, ranks)
    if curve is None and operation in PARTS:
        curve = curve_of(fabric, "all-reduce", ranks)
        return curve, PARTS[operation] / PARTS["all-reduce"]  # the start is divided, too
    return curve, 1.0


@cache
def curve_of(fabric: str, operation: str, ranks: int) -> Curve | None:
    """The shipped curve of an operation of `ranks` ranks, for a message that of two.

    Between two measured numbers of ranks, logarithms of seconds are interpolated over logarithms of
    ranks. More ranks than measured take the curve of the most over PCIe, where the host's bridges
    are the limit whatever the number; elsewhere None, as for an operation that nobody measured.
    """
    curves = {
        curve.ranks: curve
        for curve in shipped().collectives
        if (curve.fabric, curve.operation) == (fabric, operation)
    }
    if operation == "send":
        return curves.get(2)
    if not curves or ranks in curves:
        return curves.get(ranks)
    most = max(curves)
    if ranks > most:
        return curves[most] if fabric == "l40s-pcie" else None
    fewer = curves[max(n for n in curves if n < ranks)]
    more = curves[min(n for n in curves if n > ranks)]
    return between(fewer, more, ranks)


def between(fewer: Curve, more: Curve, ranks: int) -> Curve:
    """The curve of a number of ranks between those of two curves."""
    span = math.log2(more.ranks / fewer.ranks)
    share = math.log2(ranks / fewer.ranks) / span
    knots = [x for x in more.log2_bytes if fewer.log2_bytes[0] <= x <= fewer.log2_bytes[-1]]
    low, high = (
        np.interp(knots, curve.log2_bytes, np.log2(curve.seconds)) for curve in (fewer, more)
    )
    seconds = np.exp2((1 - share) * low + share * high).tolist()
    wider = max((fewer, more), key=lambda curve: curve.errors.high / curve.errors.low)
    return wider.model_copy(update={"ranks": ranks, "log2_bytes": knots, "seconds": seconds})


@cache
def stretched(fabric: Fabric, operation: str, ranks: int) -> CollectiveCurve | None:
    """The curve of `measured_curve`, stretched to the bandwidth of this fabric; None where none was
    measured."""
    measured = fabric.measured
    if measured is None:
        return None
    curve, _ = measured_curve(measured.curves, operation, ranks)
    if curve is None:
        return None
    stretch = CURVE_BANDWIDTHS[measured.curves] / fabric.bandwidth
    if measured.reached and operation != "send":
        # The figures are of all-reduces; other collectives of as many ranks change in proportion.
        reached = bus_bandwidth_stated(measured.reached, ranks)
        reduces = curve_of(measured.curves, "all-reduce", ranks)
        assert reduces is not None  # every fabric with curves has those of all-reduces
        # the bytes on a link over the seconds of the last knot, over the bus bandwidth reached here
        link_bytes = PARTS["all-reduce"] * (ranks - 1) / ranks * 2 ** reduces.log2_bytes[-1]
        stretch = link_bytes / reduces.seconds[-1] / reached
    return CollectiveCurve(log2_bytes=curve.log2_bytes, seconds=curve.seconds, stretch=stretch)


def bus_bandwidth_stated(reached: Sequence[tuple[int, float]], ranks: int) -> float:
    """Bytes/s of `ranks` ranks by the stated ones: interpolated in logarithms, and beyond them the
    nearest."""
    stated_ranks, rates = zip(*reached, strict=True)
    logs = np.interp(math.log2(ranks), np.log2(stated_ranks), np.log2(rates))
    return float(2**logs)
