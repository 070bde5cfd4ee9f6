"""The cluster: its file (YAML), its devices in order and what they can do, and the bandwidth and
latency between any two.

Devices are numbered node by node in the file's order. Two devices of one node talk at its
`intra_node_gbit_per_s`, two nodes at the lower of their `network_gbit_per_s`; of latencies the
higher counts. What a device type can do stands in the catalogue, `devices.yaml` beside this module:
figures of datasheets in the units that those print, each entry with its source. The properties of
`DeviceSpec` give SI. A cluster file may add types or override figures (`overridden`).
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hetplan.errors import check_name, require, suggestion
from hetplan.files import read_yaml
from hetplan.profiling.models.operators import Precision
from hetplan.profiling.source_files import SourceFile
from hetplan.schema import Name, PositiveCount, Rate, StrictModel, check_header, parse

GIB = 2**30
EXAMPLE = (
    "`devices: {NAME: {memory_gib: 80, peak_tflops: {fp16: 990, bf16: 990, fp32: 67}, "
    "memory_gb_per_s: 3350}}`"
)

Peaks = Annotated[dict[Precision | Literal["fp8", "fp4"], Rate], Field(min_length=1)]
Price = Annotated[float, Field(ge=0, le=1e6)]


class DeviceOverride(StrictModel):
    """A cluster file's `devices` entry: any part of a catalogue entry, or a whole new type."""

    memory_gib: Rate | None = None
    peak_tflops: Peaks | None = None
    memory_gb_per_s: Rate | None = None
    tdp_w: Rate | None = None
    multiprocessors: PositiveCount | None = None
    price_per_hour: Price | None = None
    source: Name | None = None
    price_source: Name | None = None
    vendor: Name | None = None


class DeviceSpec(DeviceOverride):
    """One device type. Keys carry the datasheet's units; the properties are SI.

    peak_tflops: dense peak by precision of the operands, 8 and 4 bit among them. price_per_hour: US
    dollars per device. tdp_w: watts that the board may draw. multiprocessors: tiles of a product
    that are computed at once. None: not known.
    """

    memory_gib: Rate
    peak_tflops: Peaks
    memory_gb_per_s: Rate
    source: Name
    vendor: Name = "other"

    @property
    def memory_bytes(self) -> float:
        """Nominal memory in bytes."""
        return self.memory_gib * GIB

    @property
    def memory_bytes_per_s(self) -> float:
        """Peak memory bandwidth in bytes per second."""
        return self.memory_gb_per_s * 1e9

    def peak_flops(self, precision: Precision, *, name: str = "device") -> float:
        """Dense peak in FLOP/s; raises InputError where the device has no units for `precision`."""
        require(
            precision in self.peak_tflops,
            "has no peak_tflops for this precision",
            where=name,
            got=precision,
            expected=", ".join(sorted(self.peak_tflops)),
        )
        return self.peak_tflops[precision] * 1e12


class CatalogueFile(StrictModel):
    """`devices.yaml`."""

    format: Literal["hetplan-devices"]
    version: Literal[1]
    devices: dict[Name, DeviceSpec]


@cache
def catalogue() -> dict[str, DeviceSpec]:
    """All catalogued device types by name."""
    path = Path(__file__).with_name("devices.yaml")
    return dict(parse(CatalogueFile, read_yaml(path), where=path.name).devices)


def device(name: str, *, where: str | None = None) -> DeviceSpec:
    """The catalogue's entry `name`; raises InputError that suggests the nearest names, and shows
    what describes a device."""
    near = suggestion(name, catalogue())
    names = "" if near else f"one of {', '.join(catalogue())}, or "
    require(
        name in catalogue(),
        f"unknown device {name[:80]!r}{near}",
        where=where,
        expected=f"{names}in the cluster file its own entry, {EXAMPLE}",
    )
    return catalogue()[name]


def overridden(name: str, override: DeviceOverride, *, where: str) -> DeviceSpec:
    """The catalogue's entry `name` with parts replaced (peaks by precision), or a new type.

    Raises InputError where a new type lacks memory_gib, peak_tflops or memory_gb_per_s.
    """
    base = catalogue().get(name)
    parts = override.model_dump(exclude_none=True)
    if base is None:
        for key in ("memory_gib", "peak_tflops", "memory_gb_per_s"):
            require(
                key in parts,
                f"{key} is missing for a device that the catalogue does not know"
                f"{suggestion(name, catalogue())}",
                where=where,
            )
        return DeviceSpec(**{"source": "the cluster file", **parts})
    merged = base.model_dump() | parts
    merged["peak_tflops"] = {**base.peak_tflops, **(override.peak_tflops or {})}
    if override.source is None and parts:
        merged["source"] = (
            f"{base.source}; changed by the cluster file: {', '.join(sorted(parts))}"[:200]
        )
    if override.price_per_hour is not None and override.price_source is None:
        merged["price_source"] = "the cluster file"
    return DeviceSpec(**merged)


Floats = NDArray[np.float64]

FORMAT, VERSION = "hetplan-cluster", 1
MAX_DEVICES = 4096
GBIT = 1e9 / 8  # bytes/s per Gbit/s
ONE_SWITCH = (-1, 0)  # of nodes that are all under one

# Per message, where the file gives none: a small message takes several microseconds over NVLink or
# PCIe and tens over Ethernet (NCCL's own tuning tables assume 0.6-6 us for a hop within a node, 14
# us for one between).
INTRA_NODE_LATENCY_US = 6.0
NETWORK_LATENCY_US = 20.0

Microseconds = Annotated[float, Field(ge=0, le=1e9)]
NodeCount = Annotated[int, Field(ge=1, le=MAX_DEVICES)]


class NodeEntry(StrictModel):
    """One entry of `nodes`: equal nodes of equal devices. A rack whose devices talk as those of a
    node do (NVL72) is one node."""

    count: NodeCount = 1  # nodes of the entry
    devices: NodeCount  # devices of a node
    device: Name  # their type
    intra_node_gbit_per_s: Rate
    network_gbit_per_s: Rate
    intra_node_latency_us: Microseconds = INTRA_NODE_LATENCY_US
    network_latency_us: Microseconds = NETWORK_LATENCY_US
    # nodes under one switch; the entry's nodes fill one switch after the other
    nodes_per_switch: NodeCount = MAX_DEVICES
    # a node's part of its switch's links to all other switches where every node sends; None: as
    # much as its own network
    uplink_gbit_per_s: Rate | None = None
    # whether every device has a network card of its own, an even part of network_gbit_per_s
    rails: bool = False


class ClusterFile(StrictModel):
    """The schema of a cluster file."""

    format: Literal["hetplan-cluster"]
    version: Literal[1]
    name: Name
    nodes: list[NodeEntry] = Field(min_length=1, max_length=MAX_DEVICES)
    devices: dict[Name, DeviceOverride] = Field(default_factory=dict)


@dataclass(frozen=True)
class ClusterDevice:
    """One device: its type and its node's number."""

    type: str
    node: int


@dataclass(frozen=True)
class Node:
    """One node, in bytes per second and seconds per message."""

    device: str  # the type of its devices
    devices: int
    intra_bandwidth: float
    network_bandwidth: float
    intra_latency: float
    network_latency: float
    switch: tuple[int, int] = ONE_SWITCH  # the switch that it is under: (entry, number)
    switch_nodes: int = MAX_DEVICES  # the most nodes under that switch
    uplink: float = math.inf  # its part of the switch's links to other switches
    rails: bool = False  # whether every device has an even part of the network for itself


@dataclass(frozen=True)
class Cluster:
    """Nodes in order and the specification of every device type that they use. file: the user's
    file that describes it, None for an example and for a cluster that was changed."""

    name: str
    nodes: tuple[Node, ...]
    specs: Mapping[str, DeviceSpec]
    file: SourceFile | None = field(default=None, compare=False, repr=False)

    @cached_property
    def devices(self) -> tuple[ClusterDevice, ...]:
        """All devices, node by node; a device's number is its place here."""
        return tuple(
            ClusterDevice(n.device, i) for i, n in enumerate(self.nodes) for _ in range(n.devices)
        )

    @cached_property
    def types(self) -> tuple[str, ...]:
        """Device types in order of first appearance."""
        return tuple(dict.fromkeys(node.device for node in self.nodes))

    def counts(self) -> dict[str, int]:
        """Number of devices by type."""
        return {t: sum(n.devices for n in self.nodes if n.device == t) for t in self.types}

    def bandwidth(self) -> Floats:
        """[D, D] bytes/s, symmetric; the diagonal carries the node's own figure (nobody sends to
        himself)."""
        network = np.array([n.network_bandwidth for n in self.nodes])
        beyond = np.minimum(network, [n.uplink for n in self.nodes])
        switches = {n.switch: number for number, n in enumerate(self.nodes)}
        under = np.array([switches[n.switch] for n in self.nodes])
        between = np.where(
            np.equal.outer(under, under),
            np.minimum.outer(network, network),
            np.minimum.outer(beyond, beyond),
        )
        return self._by_device([n.intra_bandwidth for n in self.nodes], between)

    def latency(self) -> Floats:
        """[D, D] seconds per message, symmetric, 0 on the diagonal."""
        network = np.array([n.network_latency for n in self.nodes])
        matrix = self._by_device(
            [n.intra_latency for n in self.nodes], np.maximum.outer(network, network)
        )
        np.fill_diagonal(matrix, 0.0)
        return matrix

    def part(self, nodes: Sequence[int], name: str | None = None) -> "Cluster":
        """The cluster of some of the nodes, in the given order; specifications of types without
        nodes are left out."""
        kept = tuple(self.nodes[n] for n in nodes)
        types = {node.device for node in kept}
        return Cluster(
            name or self.name,
            kept,
            {kind: spec for kind, spec in self.specs.items() if kind in types},
        )

    def devices_of(self, nodes: Sequence[int]) -> list[int]:
        """Numbers of the devices of some nodes, node by node: what `part(nodes)` numbers 0, 1, …"""
        ends = [0, *accumulate(node.devices for node in self.nodes)]
        return [number for node in nodes for number in range(ends[node], ends[node + 1])]

    def price_per_hour(self) -> float | None:
        """Dollars per hour of all devices; None where one has no known price."""
        prices = [(self.specs[n.device].price_per_hour, n.devices) for n in self.nodes]
        known = [price * count for price, count in prices if price is not None]
        return sum(known) if len(known) == len(prices) else None

    def _by_device(self, inside: list[float], between: Floats) -> Floats:
        """[D, D] from figures within nodes [N] and between nodes [N, N]."""
        table = between.copy()
        np.fill_diagonal(table, inside)
        node = np.array([d.node for d in self.devices])
        return np.asarray(table[np.ix_(node, node)], dtype=np.float64)


def load_cluster(path: str | os.PathLike[str]) -> Cluster:
    """The cluster of a YAML file; raises InputError with file, path within it, got and expected."""
    where = os.fspath(path)
    value = read_yaml(path)
    check_header(value, FORMAT, VERSION, where=where)
    described = build_cluster(parse(ClusterFile, value, where=where), where=where)
    return replace(described, file=SourceFile.of(path))


def build_cluster(file: ClusterFile, *, where: str = "cluster") -> Cluster:
    """The cluster that a parsed file describes; raises InputError for unknown devices or too many
    of them."""
    total = sum(entry.count * entry.devices for entry in file.nodes)
    require(
        total <= MAX_DEVICES,
        "too many devices",
        where=f"{where}: nodes",
        got=total,
        expected=f"at most {MAX_DEVICES}",
    )
    own = {
        name: overridden(name, override, where=f"{where}: devices.{name}")
        for name, override in file.devices.items()
    }
    specs = {
        entry.device: own.get(entry.device)
        or device(entry.device, where=f"{where}: nodes[{i}].device")
        for i, entry in enumerate(file.nodes)
    }
    nodes = [_node(entry, i, n) for i, entry in enumerate(file.nodes) for n in range(entry.count)]
    return Cluster(file.name, tuple(nodes), specs)


def _node(entry: NodeEntry, place: int, number: int) -> Node:
    """Node `number` of the file's entry at `place`, in SI units."""
    return Node(
        device=entry.device,
        devices=entry.devices,
        intra_bandwidth=entry.intra_node_gbit_per_s * GBIT,
        network_bandwidth=entry.network_gbit_per_s * GBIT,
        intra_latency=entry.intra_node_latency_us * 1e-6,
        network_latency=entry.network_latency_us * 1e-6,
        # without uplinks of their own all nodes are alike
        switch=(place, number // entry.nodes_per_switch) if entry.uplink_gbit_per_s else ONE_SWITCH,
        switch_nodes=entry.nodes_per_switch,
        uplink=(entry.uplink_gbit_per_s or math.inf) * GBIT,
        rails=entry.rails,
    )


def example_cluster(name: str, unknown: str = "unknown example cluster") -> Cluster:
    """A cluster that comes with hetplan, by name; raises InputError that suggests the nearest."""
    check_name(unknown, name, example_clusters())
    return replace(load_cluster(FOLDER / f"{name}.yaml"), file=None)


def open_cluster(
    source: str | os.PathLike[str], unknown: str = "unknown example cluster"
) -> Cluster:
    """A cluster file, or an example by name: a text without suffix and folder, where no such file
    is. unknown: how the complaint about another name begins. Raises InputError."""
    text = os.fspath(source)
    is_name = isinstance(source, str) and Path(text).name == text and not Path(text).suffix
    if is_name and not os.path.exists(text):
        return example_cluster(text, unknown)
    return load_cluster(source)


FOLDER = Path(__file__).with_name("clusters")


def example_clusters() -> tuple[str, ...]:
    """Names of the clusters that come with hetplan."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))
