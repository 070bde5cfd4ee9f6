"""Poplar's Algorithm 1: the largest micro-batch of a device, and the seconds of smaller ones, by
trials.

A device is anything that can run one forward and backward pass of a given micro-batch: a live GPU,
or a curve. An estimate from one forward pass bounds the search from above. Doubling brackets the
largest micro-batch and binary search finds it. Every trial that fits is a measured point.

The printed algorithm does not end. Here the binary search keeps `low` at a micro-batch that ran,
and every step moves `low` or `high` by at least one.

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

    total: float  # memory of the device
    before: float  # allocated before the pass
    after: float  # allocated after the pass


class TrialDevice(Protocol):
    """A device on which Algorithm 1 tries micro-batches."""

    def forward_memory(self, batch: int) -> MemoryReading:
        """The memory around a forward pass of `batch` samples; raises OutOfMemoryOnDevice."""

    def step_seconds(self, batch: int) -> float:
        """Seconds of one forward and backward pass without collectives; raises
        OutOfMemoryOnDevice."""


@dataclass(frozen=True)
class Awareness:
    """The result of Algorithm 1 on a device."""

    # the largest micro-batch, `mbs` in the paper; 0 where not even one sample fits
    largest: int
    # micro-batch -> measured seconds of a forward and backward pass
    points: dict[int, float] = field(default_factory=dict)
    tried: tuple[int, ...] = ()  # all micro-batches, in the order of their trials


def explore(device: TrialDevice) -> Awareness:
    """The largest micro-batch of a device and its measured points, by Algorithm 1."""
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
    high = int((reading.total - reading.before) / per_sample)  # larger micro-batches cannot fit
    points: dict[int, float] = {}
    tried: list[int] = []

    def fits(batch: int) -> bool:
        """Try a micro-batch, and keep its seconds where it fits."""
        tried.append(batch)
        try:
            points[batch] = device.step_seconds(batch)
        except OutOfMemoryOnDevice:
            return False
        return True

    low, batch = 0, 1  # `low` is the largest micro-batch that ran; 0: none so far
    while batch <= high:
        if not fits(batch):
            high = batch - 1
            break
        low, batch = batch, 2 * batch
    while low < high:
        middle = (low + high + 1) // 2  # rounded up, so that it is more than `low`
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return Awareness(low, points, tuple(tried))
