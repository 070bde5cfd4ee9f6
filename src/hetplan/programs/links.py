"""The seconds of the collectives of an SPMD program.

A collective takes a latency plus the bytes of its largest slice divided by a bandwidth. Source:
HAP, Section 3.2, which fits a latency and a bandwidth for each collective.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from hetplan.errors import UnsupportedError, require
from hetplan.profiling.hardware.cluster import Cluster
from hetplan.profiling.profiles.measured_collectives import OPERATIONS, Collectives

# Collective -> its mirror in the backward pass. All other collectives are their own mirrors.
OPPOSITE = {"Reduce-Scatter": "All-Gather", "All-Gather": "Reduce-Scatter"}


@dataclass(frozen=True)
class Price:
    """Seconds of a collective: fixed + shared * (largest ratio of a device)."""

    fixed: float
    """Seconds that do not depend on the ratios."""
    shared: float = 0.0
    """Seconds that the largest ratio multiplies."""

    def __add__(self, other: "Price") -> "Price":
        return Price(self.fixed + other.fixed, self.shared + other.shared)


@dataclass(frozen=True)
class Links:
    """Bandwidths and latencies of the collectives of m devices. A bandwidth is in bytes per second;
    its comment says which bytes count."""

    devices: int
    """m, the number of devices."""
    all_gather: float
    """Bandwidth for m times the largest slice."""
    broadcast: float
    """Bandwidth for the whole tensor, in a grouped broadcast of its slices."""
    all_reduce: float
    """Bandwidth for the whole tensor."""
    reduce_scatter: float
    """Bandwidth for m times the largest slice."""
    all_to_all: float
    """Bandwidth for m times the largest slice."""
    latency: float = 2e-5
    """Seconds of a launch. A grouped broadcast has m launches, every other collective one."""
    latencies: Mapping[str, float] = field(default_factory=dict)
    """Name of a collective, such as `all-reduce` -> its measured latency in place of `latency`.
    That of a grouped broadcast is for all its launches."""

    def price(self, how: str, size: float) -> Price:
        """The seconds of the collective `how` on a tensor of `size` bytes. Slices are padded to the
        largest one, except in a grouped broadcast, which sends them one by one (HAP, Section 4.4).
        """
        name, m = how.removesuffix(" factors"), self.devices
        operation = "all-to-all" if name == "Repartition" else name.lower()
        launches = m if name == "Grouped-Broadcast" else 1
        latency = self.latencies.get(operation, launches * self.latency)
        if name == "All-Reduce":
            return Price(latency + size / self.all_reduce)
        if name == "Grouped-Broadcast":
            return Price(latency + size / self.broadcast)
        of_slices = {"Reduce-Scatter": self.reduce_scatter, "All-Gather": self.all_gather}
        bandwidth = of_slices.get(name, self.all_to_all)
        return Price(latency, m * size / bandwidth)


def ring(devices: int, bytes_per_second: float, latency: float = 2e-5, sharing: int = 1) -> Links:
    """Rings of m devices over links of `bytes_per_second`. Source: Thakur et al. 2005.

    An all-gather and a reduce-scatter pass (m - 1) / m of the tensor over each link, an all-reduce
    twice as much. In an all-to-all, `sharing` devices send (m - 1) / m of their slices over one
    link.
    """
    # bandwidth for a whole tensor; `max`, because a single device passes nothing: a divisor of 0
    once = bytes_per_second / (max(devices - 1, 1) / devices)
    return Links(
        devices,
        all_gather=once,
        broadcast=bytes_per_second,
        all_reduce=once / 2,
        reduce_scatter=once,
        all_to_all=once * devices / sharing,
        latency=latency,
    )


def links_of(cluster: Cluster) -> Links:
    """Rings over the slowest link between any two devices of the cluster. The latency is that of
    the m - 1 messages which follow each other in an all-gather, at least 1 us. Collectives of a
    single device take next to no time."""
    m = len(cluster.devices)
    nodes = [device.node for device in cluster.devices]
    if m == 1:
        return ring(1, 1e15, 0.0)  # a bandwidth in place of an infinite one
    several_nodes = len(set(nodes)) > 1
    # in an all-to-all the devices of the fullest node share its network link
    sharing = max(map(nodes.count, nodes)) if several_nodes else 1
    latency = max((m - 1) * float(cluster.latency().max()), 1e-6)
    between_devices = ~np.eye(m, dtype=np.bool_)
    slowest = float(cluster.bandwidth()[between_devices].min())
    return ring(m, slowest, latency, sharing)


def three_steps(links: Links, bytes_per_second: float) -> Links:
    """The links of collectives between machines of several devices.

    Each collective begins with a gather or reduction to one device of every machine, and ends with
    a scatter or broadcast from it. Both steps are inside machines, over links of
    `bytes_per_second`. Source: HAP, Section 6.
    """
    names = ("all_gather", "broadcast", "all_reduce", "reduce_scatter", "all_to_all")
    inside = 2 / bytes_per_second
    return replace(links, **{name: 1 / (1 / getattr(links, name) + inside) for name in names})


def measured_links(measured: Collectives, devices: int) -> Links:
    """The links by which collectives take the seconds measured on `devices` ranks.

    The size of a measured collective is that of one rank's input: the whole tensor for an
    all-reduce and a reduce-scatter, the rank's slice for the others. Raises UnsupportedError where
    some collective was not measured on `devices` ranks. Source: HAP, Section 3.2.
    """
    fits = {fit.operation: fit for fit in measured.fits if fit.ranks == devices}
    lacking = [name for name in OPERATIONS if name != "send" and name not in fits]
    require(
        not lacking,
        "collectives were not measured on all devices of the cluster",
        where=f"collectives on {measured.device}",
        got=f"{measured.ranks} ranks",
        expected=f"{', '.join(lacking)} on {devices}",
        kind=UnsupportedError,
    )
    speed = {name: fit.bytes_per_second for name, fit in fits.items()}
    return Links(
        devices,
        all_gather=devices * speed["all-gather"],
        broadcast=devices * speed["grouped-broadcast"],
        all_reduce=speed["all-reduce"],
        reduce_scatter=speed["reduce-scatter"],
        all_to_all=devices * speed["all-to-all"],
        latencies={name: fit.latency_seconds for name, fit in fits.items()},
    )
