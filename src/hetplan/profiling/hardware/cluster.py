"""The cluster: its file (YAML), its devices and their specifications, and the bandwidth and latency
between any two devices.

Devices are numbered node by node in the file's order. Two devices of one node communicate at its
`intra_node_gbit_per_s`, two nodes at the lower of their `network_gbit_per_s` and with the higher of
their latencies.

The catalogue `devices.yaml` beside this module has the specification of every known device type, in
the units of the datasheets and with its source. The properties of `DeviceSpec` are in SI units. A
cluster file may add device types, or override parts of a specification (`overridden`).
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
from pydantic import Field, Strict

from hetplan.errors import check_name, require, suggestion
from hetplan.files import read_yaml
from hetplan.profiling.models.operators import Precision
from hetplan.profiling.source_files import SourceFile
from hetplan.schema import Line, Name, PositiveCount, Rate, StrictModel, check_header, parse

GIB = 2**30
# An entry for `devices` of a cluster file, for messages.
EXAMPLE = (
    "`devices: {NAME: {memory_gib: 80, peak_tflops: {fp16: 990, bf16: 990, fp32: 67}, "
    "memory_gb_per_s: 3350}}`"
)

Peaks = Annotated[dict[Precision | Literal["fp8", "fp4"], Rate], Field(min_length=1)]
Price = Annotated[float, Field(ge=0, le=1e6)]


class DeviceOverride(StrictModel):
    """A cluster file's `devices` entry: any part of a catalogue entry, or a whole new type. The
    units are the units of datasheets."""

    memory_gib: Rate | None = None
    peak_tflops: Peaks | None = None
    """Dense peak by precision of the operands, 8 and 4 bit among them."""
    memory_gb_per_s: Rate | None = None
    """Memory bandwidth."""
    tdp_w: Rate | None = None
    """Watts that the board may draw."""
    multiprocessors: PositiveCount | None = None
    """Tiles of a product computed at the same time."""
    price_per_hour: Price | None = None
    """US dollars per device."""
    source: Name | None = None
    price_source: Name | None = None
    vendor: Name | None = None


class DeviceSpec(DeviceOverride):
    """The specification of one device type: an override with the required parts. Other parts are
    None where they are not known. The properties are in SI units."""

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
    """The schema of `devices.yaml`."""

    format: Literal["hetplan-devices"]
    version: Literal[1]
    devices: dict[Name, DeviceSpec]
    driver_names: dict[Name, list[Name]]
    """Further names of the devices, as drivers and labels of nodes print them."""


@cache
def catalogue_file() -> CatalogueFile:
    """The contents of the device catalogue, read once."""
    path = Path(__file__).with_name("devices.yaml")
    return parse(CatalogueFile, read_yaml(path), where=path.name)


def catalogue() -> dict[str, DeviceSpec]:
    """All catalogued device types by name."""
    return catalogue_file().devices


def device(name: str, *, where: str | None = None) -> DeviceSpec:
    """The catalogue's entry `name`. Raises InputError that suggests the nearest names, and shows an
    example of a device's description."""
    near = suggestion(name, catalogue())
    names = "" if near else f"one of the {len(catalogue())} names in docs/files.md, or "
    require(
        name in catalogue(),
        f"unknown device {name[:80]!r}{near}",
        where=where,
        expected=f"{names}in the cluster file its own entry, {EXAMPLE}",
    )
    return catalogue()[name]


def overridden(name: str, override: DeviceOverride, *, where: str) -> DeviceSpec:
    """The catalogue's entry `name` with the parts of `override`, or a new type of these parts.

    Peaks replace those of the same precisions. Raises InputError where a new type lacks memory_gib,
    peak_tflops or memory_gb_per_s.
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
        source = f"{base.source}; changed by the cluster file: {', '.join(sorted(parts))}"
        merged["source"] = source[:200]  # the most characters of a `Name`
    if override.price_per_hour is not None and override.price_source is None:
        merged["price_source"] = "the cluster file"
    return DeviceSpec(**merged)


Floats = NDArray[np.float64]

FORMAT, VERSION = "hetplan-cluster", 1
MAX_DEVICES = 4096
GBIT = 1e9 / 8  # bytes/s per Gbit/s
# The switch of all nodes for whose entries the file gives no uplink; no entry has the number -1.
ONE_SWITCH = (-1, 0)

# Latencies per message where the file gives none. A small message takes several microseconds over
# NVLink or PCIe and tens over Ethernet. NCCL's tuning tables assume 0.6 to 6 us for a hop within a
# node, and 14 us for a hop between nodes.
INTRA_NODE_LATENCY_US = 6.0
NETWORK_LATENCY_US = 20.0

Microseconds = Annotated[float, Field(ge=0, le=1e9)]
NodeCount = Annotated[int, Field(ge=1, le=MAX_DEVICES)]
RankCount = Annotated[int, Field(ge=2, le=MAX_DEVICES), Strict(False)]  # JSON has keys of text


class NodeEntry(StrictModel):
    """One entry of `nodes`: equal nodes of equal devices. A rack whose devices communicate as those
    of a node do (NVL72) is one node."""

    count: NodeCount = 1
    """Number of nodes."""
    devices: NodeCount
    """Devices of each node."""
    device: Name
    """Type of the devices."""
    intra_node_gbit_per_s: Rate
    """Between two devices of a node, per direction."""
    network_gbit_per_s: Rate
    """In and out of a node, per direction."""
    intra_node_latency_us: Microseconds = INTRA_NODE_LATENCY_US
    """Per message."""
    network_latency_us: Microseconds = NETWORK_LATENCY_US
    """Per message."""
    all_reduce_gbit_per_s: dict[RankCount, Rate] = Field(default_factory=dict, max_length=64)
    """Number of ranks inside the node -> bus bandwidth that large all-reduces of so many ranks
    reach, as nccl-tests and `hetplan profile quick` report it. Numbers in between are interpolated.
    Without it, the curve of the nearest measured fabric counts."""
    nodes_per_switch: NodeCount = MAX_DEVICES
    """Nodes under one switch; the entry's nodes fill one switch after the other."""
    uplink_gbit_per_s: Rate | None = None
    """A node's part of the links from its switch to all other switches, when every node sends;
    None: these links are no limit."""
    rails: bool = False
    """Whether every device has a network card of its own, with an even part of network_gbit_per_s.
    """
    flow_gbit_per_s: Rate | None = None
    """The most Gbit/s of one message between nodes, as measured fabrics have it; None: the rate of
    the card. Several messages together reach the card's rate."""


class ClusterFile(StrictModel):
    """The schema of a cluster file."""

    format: Literal["hetplan-cluster"]
    version: Literal[1]
    name: Name
    nodes: list[NodeEntry] = Field(min_length=1, max_length=MAX_DEVICES)
    devices: dict[Name, DeviceOverride] = Field(default_factory=dict)
    assumed: list[Line] = Field(default_factory=list)
    """The assumptions of `hetplan cluster detect`, as sentences for the user; the planner ignores
    them."""


@dataclass(frozen=True)
class ClusterDevice:
    """One device of a cluster."""

    type: str
    node: int  # number of its node


@dataclass(frozen=True)
class Node:
    """One node, in bytes per second and seconds per message."""

    device: str  # the type of its devices
    devices: int  # number of its devices
    intra_bandwidth: float  # between two of its devices, per direction
    network_bandwidth: float  # in and out of the node, per direction
    intra_latency: float
    network_latency: float
    switch: tuple[int, int] = ONE_SWITCH  # the switch above it: (entry of the file, number)
    switch_nodes: int = MAX_DEVICES  # the most nodes under that switch
    uplink: float = math.inf  # its part of the switch's links to other switches
    rails: bool = False  # whether every device has a network card of its own, an even part
    # (ranks, bytes/s of bus bandwidth) of large all-reduces inside it, by ascending ranks, where
    # the cluster file states them
    all_reduce: tuple[tuple[int, float], ...] = ()
    flow: float = math.inf  # the most bytes/s of one message between nodes


@dataclass(frozen=True)
class Cluster:
    """The nodes of a cluster, and the specification of every device type that they use."""

    name: str
    nodes: tuple[Node, ...]  # in the order that numbers the devices
    specs: Mapping[str, DeviceSpec]  # device type -> its specification
    # the user's file that describes it; None for an example and for a cluster that was changed
    file: SourceFile | None = field(default=None, compare=False, repr=False)

    @cached_property
    def devices(self) -> tuple[ClusterDevice, ...]:
        """All devices, node by node; a device's number is its index here."""
        return tuple(
            ClusterDevice(node.device, n)
            for n, node in enumerate(self.nodes)
            for _ in range(node.devices)
        )

    @cached_property
    def types(self) -> tuple[str, ...]:
        """Device types in order of first appearance."""
        return tuple(dict.fromkeys(node.device for node in self.nodes))

    def counts(self) -> dict[str, int]:
        """Device type -> number of its devices."""
        counts = dict.fromkeys(self.types, 0)
        for node in self.nodes:
            counts[node.device] += node.devices
        return counts

    def bandwidth(self) -> Floats:
        """[D, D] bytes/s of a message between two devices, symmetric. The diagonal has the
        bandwidth within the node, although no device sends to itself."""
        network = np.array([node.network_bandwidth for node in self.nodes])
        beyond_switch = np.minimum(network, [node.uplink for node in self.nodes])
        # switch -> the number of one of its nodes, which no other switch has
        switches = {node.switch: n for n, node in enumerate(self.nodes)}
        switch_of_node = np.array([switches[node.switch] for node in self.nodes])
        between = np.where(
            np.equal.outer(switch_of_node, switch_of_node),
            np.minimum.outer(network, network),
            np.minimum.outer(beyond_switch, beyond_switch),
        )
        flow = np.array([node.flow for node in self.nodes])
        between = np.minimum(between, np.minimum.outer(flow, flow))
        return self._by_device([node.intra_bandwidth for node in self.nodes], between)

    def latency(self) -> Floats:
        """[D, D] seconds per message between two devices, symmetric; 0 on the diagonal."""
        network = np.array([node.network_latency for node in self.nodes])
        between = np.maximum.outer(network, network)
        matrix = self._by_device([node.intra_latency for node in self.nodes], between)
        np.fill_diagonal(matrix, 0.0)
        return matrix

    def part(self, nodes: Sequence[int], name: str | None = None) -> "Cluster":
        """The cluster of some of the nodes, in the given order; specifications of types without
        nodes are left out."""
        chosen = tuple(self.nodes[n] for n in nodes)
        types = {node.device for node in chosen}
        specs = {kind: spec for kind, spec in self.specs.items() if kind in types}
        return Cluster(name or self.name, chosen, specs)

    def devices_of(self, nodes: Sequence[int]) -> list[int]:
        """The numbers of the devices of some nodes, node by node; in the cluster `part(nodes)` the
        same devices have the numbers 0, 1, …"""
        begins = [0, *accumulate(node.devices for node in self.nodes)]
        return [device for n in nodes for device in range(begins[n], begins[n + 1])]

    def price_per_hour(self) -> float | None:
        """Dollars per hour of all devices; None where the price of one is not known."""
        prices = []
        for node in self.nodes:
            price = self.specs[node.device].price_per_hour
            if price is None:
                return None
            prices.append(price * node.devices)
        return sum(prices)

    def _by_device(self, inside: list[float], between: Floats) -> Floats:
        """[D, D] the value of each pair of devices, from values within nodes [N] and between nodes
        [N, N]."""
        by_node = between.copy()
        np.fill_diagonal(by_node, inside)
        node_of_device = np.array([device.node for device in self.devices])
        by_device = by_node[np.ix_(node_of_device, node_of_device)]
        return np.asarray(by_device, dtype=np.float64)


def load_cluster(path: str | os.PathLike[str]) -> Cluster:
    """The cluster of a YAML file. Raises InputError with file, path within it, got and expected."""
    where = os.fspath(path)
    value = read_yaml(path)
    check_header(value, FORMAT, VERSION, where=where)
    cluster = build_cluster(parse(ClusterFile, value, where=where), where=where)
    return replace(cluster, file=SourceFile.of(path))


def build_cluster(file: ClusterFile, *, where: str = "cluster") -> Cluster:
    """The cluster that a parsed file describes. where: the file, for messages. Raises InputError
    for unknown device types and for too many devices."""
    total = sum(entry.count * entry.devices for entry in file.nodes)
    require(
        total <= MAX_DEVICES,
        "too many devices",
        where=f"{where}: nodes",
        got=total,
        expected=f"at most {MAX_DEVICES}",
    )
    specs_of_file = {
        name: overridden(name, override, where=f"{where}: devices.{name}")
        for name, override in file.devices.items()
    }
    specs = {}
    nodes = []
    for i, entry in enumerate(file.nodes):
        spec = specs_of_file.get(entry.device)
        if spec is None:
            spec = device(entry.device, where=f"{where}: nodes[{i}].device")
        specs[entry.device] = spec
        nodes += [_node(entry, i, number) for number in range(entry.count)]
    return Cluster(file.name, tuple(nodes), specs)


def _node(entry: NodeEntry, index: int, number: int) -> Node:
    """Node `number` of the entry at `index` of the file's nodes, in SI units."""
    switch = ONE_SWITCH  # without uplinks, it does not matter which nodes share a switch
    if entry.uplink_gbit_per_s:
        switch = (index, number // entry.nodes_per_switch)
    return Node(
        device=entry.device,
        devices=entry.devices,
        intra_bandwidth=entry.intra_node_gbit_per_s * GBIT,
        network_bandwidth=entry.network_gbit_per_s * GBIT,
        intra_latency=entry.intra_node_latency_us * 1e-6,
        network_latency=entry.network_latency_us * 1e-6,
        switch=switch,
        switch_nodes=entry.nodes_per_switch,
        uplink=(entry.uplink_gbit_per_s or math.inf) * GBIT,
        rails=entry.rails,
        all_reduce=tuple(
            (ranks, gbit * GBIT) for ranks, gbit in sorted(entry.all_reduce_gbit_per_s.items())
        ),
        flow=(entry.flow_gbit_per_s or math.inf) * GBIT,
    )


def example_cluster(name: str, unknown: str = "unknown example cluster") -> Cluster:
    """A cluster that comes with hetplan, by name. unknown: the beginning of the message for an
    unknown name. Raises InputError that suggests the nearest name."""
    check_name(unknown, name, example_clusters())
    return replace(load_cluster(FOLDER / f"{name}.yaml"), file=None)


def open_cluster(
    source: str | os.PathLike[str], unknown: str = "unknown example cluster"
) -> Cluster:
    """The cluster of a file, or an example cluster.

    `source` is the name of an example if it is a text without suffix and folder, and no file has
    that path. unknown: the beginning of the message for an unknown name. Raises InputError.
    """
    text = os.fspath(source)
    is_name = isinstance(source, str) and Path(text).name == text and not Path(text).suffix
    if is_name and not os.path.exists(text):
        return example_cluster(text, unknown)
    return load_cluster(source)


FOLDER = Path(__file__).with_name("clusters")  # with the example clusters


def example_clusters() -> tuple[str, ...]:
    """Names of the clusters that come with hetplan."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))
