"""What collectives cost: a latency and a bandwidth each, linear in the bytes of the largest slice.

Source: HAP, Section 3.2 (fitted latency and bandwidth per collective, the largest slice decides).
"""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.profiling.cluster import Cluster

OPPOSITE = {"Reduce-Scatter": "All-Gather", "All-Gather": "Reduce-Scatter"}


@dataclass(frozen=True)
class Price:
    """fixed + shared * largest ratio, in seconds."""

    fixed: float
    shared: float = 0.0

    def __add__(self, other: Price) -> Price:
        return Price(self.fixed + other.fixed, self.shared + other.shared)

    def divided(self, parts: int) -> Price:
        """One of so many equal parts."""
        return Price(self.fixed / parts, self.shared / parts)


@dataclass(frozen=True)
class Links:
    """Bytes per second of each collective, for m devices: all-reduces count the whole tensor, the
    others m times the largest slice, grouped broadcasts the tensor and one latency per device.
    latency: seconds per launch."""

    devices: int
    all_gather: float
    broadcast: float
    all_reduce: float
    reduce_scatter: float
    all_to_all: float
    latency: float = 2e-5

    def price(self, how: str, size: float) -> Price:
        """A collective by its name, on a tensor of `size` bytes."""
        if how == "All-Reduce":
            return self.reduce_all(size)
        if how == "Reduce-Scatter":
            return self.scatter(size)
        if how.startswith("All-Gather"):
            return self.gather(size)
        if how.startswith("Grouped-Broadcast"):
            return self.broadcast_group(size)
        return self.exchange(size)  # All-To-All and Repartition

    def mirrored(self, how: str, size: float) -> Price:
        """The collective that stands for it in the backward pass."""
        return self.price(OPPOSITE.get(how, how), size)

    def reduce_all(self, size: float) -> Price:
        """All-Reduce of `size` bytes."""
        return Price(self.latency + size / self.all_reduce)

    def gather(self, size: float) -> Price:
        """All-Gather of slices padded to the largest."""
        return Price(self.latency, self.devices * size / self.all_gather)

    def broadcast_group(self, size: float) -> Price:
        """One broadcast per slice, without padding. Source: HAP, Section 4.4."""
        return Price(self.devices * self.latency + size / self.broadcast)

    def scatter(self, size: float) -> Price:
        """Reduce-Scatter into slices padded to the largest."""
        return Price(self.latency, self.devices * size / self.reduce_scatter)

    def exchange(self, size: float) -> Price:
        """All-To-All."""
        return Price(self.latency, self.devices * size / self.all_to_all)


def measured_by_hap(devices: int) -> Links:
    """The figures in HAP's artefact, for GPUs of machines on 10.4 Gbit/s (Section 7.1)."""
    return Links(devices, 9.46e9, 9.15e9, 5.91e9, 9.74e9, 2.46e10)


def ring(devices: int, bytes_per_second: float, latency: float = 2e-5, sharing: int = 1) -> Links:
    """Rings over links of that speed: an all-gather passes (m - 1) / m of the tensor, an all-reduce
    twice that
    (Thakur et al. 2005); in an all-to-all `sharing` devices send (m - 1) / m of their slices over
    one link."""
    part = max(devices - 1, 1) / devices
    once = bytes_per_second / part
    exchange = once * devices / sharing
    return Links(devices, once, bytes_per_second, once / 2, once, exchange, latency)


def links_of(cluster: Cluster) -> Links:
    """Rings over the slowest link between any two devices of the cluster, with its latency."""
    matrix, delay = cluster.bandwidth(), cluster.latency()
    m = len(cluster.devices)
    if m == 1:
        return ring(1, 1e15, 0.0)
    i, j = min(
        ((i, j) for i in range(m) for j in range(m) if i != j), key=lambda pair: matrix[pair]
    )
    nodes = [device.node for device in cluster.devices]
    sharing = max(nodes.count(node) for node in set(nodes)) if len(set(nodes)) > 1 else 1
    return ring(m, float(matrix[i, j]), max(float(delay[i, j]), 1e-6), sharing)
