"""The seconds of collectives that a program has.

A collective takes a latency and the bytes of its largest slice over a bandwidth. Source: HAP,
Section 3.2 (fitted latency and bandwidth per collective, the largest slice decides).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from hetplan.errors import UnsupportedError, require
from hetplan.profiling.hardware.cluster import Cluster
from hetplan.profiling.profiles.measured_collectives import OPERATIONS, Collectives

# Collective -> its mirror in the backward pass; the others mirror themselves.
OPPOSITE = {"Reduce-Scatter": "All-Gather", "All-Gather": "Reduce-Scatter"}


@dataclass(frozen=True)
class Price:
    """Seconds of a collective: fixed + shared * largest ratio."""

    fixed: float
    shared: float = 0.0

    def __add__(self, other: "Price") -> "Price":
        return Price(self.fixed + other.fixed, self.shared + other.shared)


@dataclass(frozen=True)
class Links:
    """Bytes per second of each collective of m devices."""

    devices: int
    """m."""
    all_gather: float
    """Of m times the largest slice."""
    broadcast: float
    """Of the whole tensor, in a grouped broadcast of its slices."""
    all_reduce: float
    """Of the whole tensor."""
    reduce_scatter: float
    """Of m times the largest slice."""
    all_to_all: float
    """Of m times the largest slice."""
    latency: float = 2e-5
    """Seconds of a launch; a grouped broadcast has m of them."""
    latencies: Mapping[str, float] = field(default_factory=dict)
    """Measured seconds in place of `latency`, of `all-reduce` and so on; of a grouped broadcast for
    all its launches."""

    def price(self, how: str, size: float) -> Price:
        """The seconds of a collective, by its name, on a tensor of `size` bytes. Slices are padded
        to the largest one, unless they are broadcast one by one (Section 4.4)."""
        name, m = how.removesuffix(" factors"), self.devices
        operation = "all-to-all" if name == "Repartition" else name.lower()
        launches = m if name == "Grouped-Broadcast" else 1
        latency = self.latencies.get(operation, launches * self.latency)
        if name == "All-Reduce":
            return Price(latency + size / self.all_reduce)
        if name == "Grouped-Broadcast":
            return Price(latency + size / self.broadcast)
        of_slices = {"Reduce-Scatter": self.reduce_scatter, "All-Gather": self.all_gather}
        return Price(latency, m * size / of_slices.get(name, self.all_to_all))


def ring(devices: int, bytes_per_second: float, latency: float = 2e-5, sharing: int = 1) -> Links:
    """Rings over links of that speed: an all-gather passes (m - 1) / m of the tensor, an all-reduce
    twice as much (Thakur et al. 2005). In an all-to-all `sharing` devices send (m - 1) / m of their
    slices over one link."""
    once = bytes_per_second / (max(devices - 1, 1) / devices)
    return Links(devices, once, bytes_per_second, once / 2, once, once * devices / sharing, latency)


def links_of(cluster: Cluster) -> Links:
    """Rings over the slowest link between any two devices of the cluster; every hop of an
    all-gather waits for a message."""
    m, nodes = len(cluster.devices), [device.node for device in cluster.devices]
    if m == 1:
        return ring(1, 1e15, 0.0)
    apart = ~np.eye(m, dtype=np.bool_)
    sharing = max(map(nodes.count, nodes)) if len(set(nodes)) > 1 else 1
    latency = max((m - 1) * float(cluster.latency().max()), 1e-6)
    return ring(m, float(cluster.bandwidth()[apart].min()), latency, sharing)


def three_steps(links: Links, bytes_per_second: float) -> Links:
    """Collectives between machines of several devices: each begins with a gather or reduction to
    one device of every machine and ends with a scatter or broadcast from it, both over links of
    that speed. Source: HAP, Section 6."""
    names = ("all_gather", "broadcast", "all_reduce", "reduce_scatter", "all_to_all")
    inside = 2 / bytes_per_second
    return replace(links, **{name: 1 / (1 / getattr(links, name) + inside) for name in names})


def measured_links(measured: Collectives, devices: int) -> Links:
    """Links whose collectives take as long as measured on as many ranks as devices.

    A measured size is that of each rank's own bytes; of a reduce-scatter and an all-to-all, of all
    parts together. Raises UnsupportedError where a collective was not measured on as many ranks.
    Source: HAP, Section 3.2.
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
