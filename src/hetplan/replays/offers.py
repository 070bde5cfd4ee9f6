"""Offers: device types with their number of devices, their links and their prices.

An `Offer` describes all devices of one type. Its links come from a cluster (`offers_of_cluster`),
or from the machines in which the type is usually sold (`offer_of`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hetplan.errors import require
from hetplan.profiling.hardware.cluster import (
    GBIT,
    INTRA_NODE_LATENCY_US,
    MAX_DEVICES,
    NETWORK_LATENCY_US,
    Cluster,
    DeviceSpec,
    Node,
    catalogue,
    device,
)
from hetplan.profiling.rates.collectives import all_reduce_bus_bandwidth
from hetplan.text import grouped


class UsualMachine(NamedTuple):
    """The machine in which a type of device is usually sold, in the units of datasheets."""

    node_devices: int  # devices of one node
    intra: float  # Gbit/s of one device to another of the node, in one direction
    network: float  # Gbit/s of the node
    host_link: float  # GB/s of one device to its host
    host_memory: float  # GB/s of the host's memory, per device


class MachineLinks(NamedTuple):
    """The number of devices of a node, and its links in bytes/s; the fields are those of
    `Offer`."""

    node_devices: int
    intra: float
    network: float
    host_link: float
    host_memory: float


# The usual machine of each device, by prefix of the device's name. The first prefix that fits
# counts, so that cards for PCIe slots stand before the prefixes of their kin.
#
# node_devices: a rack of GB200 or GB300 NVL72 is one scale-up domain of 72 devices. A GB10 and a
#     Strix Halo are whole machines, whose device and host share one memory.
# intra: NVLink totals of the datasheets, in both directions: V100 300, A100 600, A800 and H800 400,
#     H100 and H200 900, B200 to GB300 1,800 GB/s. Infinity Fabric: MI300X and MI325X 896, MI355X
#     1,075 GB/s. Gaudi 2 and 3: 21 Ethernet ports of 100 and 200 Gbit/s. Cards for PCIe slots: PCIe
#     5.0 x16, 64 GB/s less a fifth (an A800: PCIe 4.0), since a bridge joins at most four of them.
# network: one adapter per device, of 100 Gbit/s (V100), 200 (A100, A800), 400 (H100, H800, H20,
#     H200, B200, GB200, MI300X to MI355X) and 800 (B300, GB300). Gaudi 2 and 3: three Ethernet
#     ports per device.
# host_link: PCIe x16 of generation 3 (V100), 4 (A100, A800) and 5 (H100, H800, H200): 16, 32 and 64
#     GB/s in one direction, less a fifth for protocol. GH200: NVLink-C2C, 450 GB/s.
# host_memory: an eighth of two sockets' DDR4-2666 (6 channels each), DDR4-3200 (8) and DDR5-4800
#     (8). GH200: LPDDR5X, 500 GB/s.
_MACHINES: Mapping[str, UsualMachine] = {
    "V100-SXM": UsualMachine(8, 1200, 800, 12.5, 32),
    "A100-SXM": UsualMachine(8, 2400, 1600, 25, 51),
    "A800-PCIE": UsualMachine(8, 200, 100, 25, 51),
    "A800": UsualMachine(8, 1600, 1600, 25, 51),
    "H100-PCIE": UsualMachine(8, 400, 400, 50, 77),
    "H100-NVL": UsualMachine(8, 400, 400, 50, 77),
    "H100": UsualMachine(8, 3600, 3200, 50, 77),
    "H800-PCIE": UsualMachine(8, 400, 400, 50, 77),
    "H800": UsualMachine(8, 1600, 3200, 50, 77),
    "H200-NVL": UsualMachine(8, 400, 400, 50, 77),
    "H200": UsualMachine(8, 3600, 3200, 50, 77),
    "GH200": UsualMachine(4, 3600, 800, 450, 500),
    "H20": UsualMachine(8, 3600, 3200, 50, 77),
    "B200": UsualMachine(8, 7200, 3200, 50, 77),
    "B300": UsualMachine(8, 7200, 6400, 50, 77),
    "GB200": UsualMachine(72, 7200, 28800, 225, 250),
    "GB300": UsualMachine(72, 7200, 57600, 225, 250),
    "MI300X": UsualMachine(8, 3584, 3200, 50, 77),
    "MI325X": UsualMachine(8, 3584, 3200, 50, 77),
    "MI350X": UsualMachine(8, 4300, 3200, 50, 77),
    "MI355X": UsualMachine(8, 4300, 3200, 50, 77),
    "GB10": UsualMachine(1, 400, 200, 273, 273),
    "Strix-Halo": UsualMachine(1, 400, 10, 256, 256),
    "Gaudi2": UsualMachine(8, 2100, 2400, 25, 51),
    "Gaudi3": UsualMachine(8, 4200, 4800, 50, 77),
}
# All other devices: eight on PCIe 4.0 x16, one adapter of 100 Gbit/s, and the host of an A100.
_PLAIN = UsualMachine(8, 200.0, 100.0, 25.0, 51.0)


@dataclass(frozen=True)
class Offer:
    """One type of device: its specification, its number of devices and its links, in SI units."""

    name: str  # the catalogue's name of the type
    spec: DeviceSpec
    most: int  # number of devices of this type
    node_devices: int  # devices of one node
    intra: float  # bytes/s between two devices of a node
    network: float  # bytes/s in and out of one node, shared by all its devices
    host_link: float  # bytes/s of one device to its host
    host_memory: float  # bytes/s of the host's memory, per device
    intra_latency: float = INTRA_NODE_LATENCY_US * 1e-6  # seconds per message within a node
    network_latency: float = NETWORK_LATENCY_US * 1e-6  # seconds per message between nodes
    switch_nodes: int = MAX_DEVICES  # nodes under one switch
    uplink: float = math.inf  # bytes/s of one node to nodes under other switches
    flow: float = math.inf  # the most bytes/s of one message between nodes
    all_reduce: tuple[tuple[int, float], ...] = ()  # see `Node.all_reduce`

    @property
    def price_per_second(self) -> float | None:
        """Dollars per device and second."""
        price = self.spec.price_per_hour
        return None if price is None else price / 3600.0

    @property
    def node(self) -> Node:
        """A node full of devices of this type."""
        return Node(
            device=self.name,
            devices=self.node_devices,
            intra_bandwidth=self.intra,
            network_bandwidth=self.network,
            intra_latency=self.intra_latency,
            network_latency=self.network_latency,
            flow=self.flow,
            all_reduce=self.all_reduce,
        )


def find_device(name: str) -> tuple[str, DeviceSpec]:
    """(name, specification) of the catalogue's entry `name`.

    The beginning of a name will do (`A800`), where only one entry has it. Of several entries with
    this beginning only those in SXM form count. Raises InputError where several entries, or none,
    remain.
    """
    entries = catalogue()
    if name in entries:
        return name, entries[name]
    near = [other for other in entries if other.lower().startswith(name.lower())]
    in_sxm_form = [other for other in near if "-SXM" in other]
    near = in_sxm_form or near
    require(
        len(near) <= 1,
        "several devices have that name",
        got=name,
        expected=f"one of {', '.join(near)}",
    )
    if not near:
        return name, device(name)  # raises InputError that suggests the nearest names
    return near[0], entries[near[0]]


def links_of(name: str) -> MachineLinks:
    """The links of the usual machine with a device. name: the device's name in the catalogue."""
    machines = (machine for prefix, machine in _MACHINES.items() if name.startswith(prefix))
    machine = next(machines, _PLAIN)
    return MachineLinks(
        machine.node_devices,
        intra=machine.intra * GBIT,
        network=machine.network * GBIT,
        host_link=machine.host_link * 1e9,
        host_memory=machine.host_memory * 1e9,
    )


def offer_of(name: str, most: int) -> Offer:
    """The offer of `most` devices of a catalogued type in its usual machines. Raises InputError
    where `find_device` does."""
    full_name, spec = find_device(name)
    return Offer(full_name, spec, most, **links_of(full_name)._asdict())


def offers_of_cluster(cluster: Cluster) -> tuple[Offer, ...]:
    """The offer of each device type of a cluster. Where nodes of one type differ, the fewest
    devices, the smallest bandwidths and the largest latencies count, so that every node does at
    least as well. A cluster does not state the links of its hosts; they are those of the usual
    machine."""
    offers = []
    for name, nodes in grouped((node.device, node) for node in cluster.nodes).items():
        usual = links_of(name)
        offer = Offer(
            name=name,
            spec=cluster.specs[name],
            most=sum(node.devices for node in nodes),
            node_devices=min(node.devices for node in nodes),
            intra=min(node.intra_bandwidth for node in nodes),
            network=min(node.network_bandwidth for node in nodes),
            host_link=usual.host_link,
            host_memory=usual.host_memory,
            intra_latency=max(node.intra_latency for node in nodes),
            network_latency=max(node.network_latency for node in nodes),
            switch_nodes=min(node.switch_nodes for node in nodes),
            uplink=min(node.uplink for node in nodes),
            flow=min(node.flow for node in nodes),
            all_reduce=slowest_all_reduces(nodes),
        )
        offers.append(offer)
    return tuple(offers)


def slowest_all_reduces(nodes: Sequence[Node]) -> tuple[tuple[int, float], ...]:
    """(ranks, bytes/s of bus bandwidth) of all-reduces inside the slowest of the nodes, for every
    number of ranks that one of them states; none where the nodes state none."""
    first, *others = nodes
    if all(node.all_reduce == first.all_reduce for node in others):
        return first.all_reduce
    stated = {ranks for node in nodes for ranks, _ in node.all_reduce}
    return tuple(
        (ranks, min(all_reduce_bus_bandwidth(node, ranks) for node in nodes))
        for ranks in sorted(stated)
    )
