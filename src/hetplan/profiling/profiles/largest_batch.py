"""Algorithm 1 of the paper: what each device can hold and how fast it is, by trying.

A device is anything that can run one forward and backward pass of a given micro-batch: a live GPU,
or a curve. The estimate from one forward pass bounds the search; doubling brackets the largest
micro-batch, binary search finds it, and every pass that fits is a measured point. Departures from
the printed algorithm, without which it does not end: the binary search keeps `low` at a batch that
ran and moves by at least one.
Source: Poplar (AAAI 2025), Algorithm 1, "Heterogeneity Aware".
"""

from dataclasses import dataclass, field
from typing import Protocol

from hetplan.errors import HetplanError, require


class OutOfMemoryOnDevice(HetplanError):
    """A pass of that micro-batch does not fit on the device."""


@dataclass(frozen=True)
class MemoryReading:
    """The memory of a device around a forward pass, in bytes."""

    total: float
    before: float
    """Allocated before the pass."""
    after: float
    """Allocated after it."""


class TrialDevice(Protocol):
    """What Algorithm 1 asks of a device."""

    def forward_memory(self, batch: int) -> MemoryReading:
        """The memory around a forward pass of `batch` samples; raises OutOfMemoryOnDevice."""

    def step_seconds(self, batch: int) -> float:
        """Seconds of one forward and backward pass without collectives; raises
        OutOfMemoryOnDevice."""


@dataclass(frozen=True)
class Awareness:
    """What Algorithm 1 finds on a device."""

    largest: int
    """The largest micro-batch, mbs; 0 where not even one sample fits."""
    points: dict[int, float] = field(default_factory=dict)
    """Micro-batch -> measured seconds of a forward and backward pass."""
    tried: tuple[int, ...] = ()
    """All micro-batches, in the order in which they were tried."""


def explore(device: TrialDevice) -> Awareness:
    """Algorithm 1 on one device: estimate, doubling, binary search."""
    try:
        reading = device.forward_memory(1)
    except OutOfMemoryOnDevice:
        return Awareness(0)
    per_sample = reading.after - reading.before
    require(
        per_sample > 0,
        "memory of a forward pass",
        got=per_sample,
        expected="more than 0 bytes per sample",
    )
    high = int((reading.total - reading.before) / per_sample)
    points: dict[int, float] = {}
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        try:
            points[batch] = device.step_seconds(batch)
        except OutOfMemoryOnDevice:
            return False
        return True

    low, batch = 0, 1
    while batch <= high:
        if not fits(batch):
            high = batch - 1
            break
        low, batch = batch, 2 * batch
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return Awareness(low, points, tuple(tried))
