"""Seconds of operators without products: what they move over the bandwidth that they reach.

NeuSight measured them in fp32 on P4, P100, V100, T4 and A100, from 16 MB on. The share of the
bandwidth grows with the bytes, and of norms and softmax it depends on the length of a row. Fewer
bytes than were measured are moved at the share of the fewest, and a kernel takes a few
microseconds of its own. Numbers of 16 bits count as their bytes.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from hetplan.profiling.catalogue import DeviceSpec, catalogue
from hetplan.profiling.rates.estimate import Estimate
from hetplan.profiling.rates.shipped import MoveRate, shipped
from hetplan.schema import NonNegative, Positive, StrictModel

# binary: two tensors in, one out. pointwise: one in, one out (activations, casts, copies, scaling).
MoveKind = Literal["binary", "pointwise", "norm", "softmax"]


@dataclass(frozen=True)
class Moving:
    """start_seconds: a kernel's own time on the device (the least that profilers show of an empty
    one, 2 to 4 us; NVIDIA Nsight). row: length where none is given, the middle of what was
    measured. low, high: of a device that was not measured, by the one of the nearest bandwidth
    (`benchmarks/fit_rates.py` prints each device by the others)."""

    start_seconds: float = 3e-6
    row: float = 1536.0
    low: float = 0.72
    high: float = 1.33


MOVING = Moving()


@cache
def rate_of(device: str, bandwidth: float, kind: MoveKind) -> tuple[MoveRate, bool]:
    """The measured rate of a device type, or of the one of the nearest memory bandwidth (False)."""
    rates = [rate for rate in shipped().moves if rate.kind == kind]
    for rate in rates:
        if device in rate.devices:
            return rate, True

    def apart(rate: MoveRate) -> float:
        return abs(math.log(catalogue()[rate.devices[0]].memory_bytes_per_s / bandwidth))

    return min(rates, key=apart), False


class MoveCurve(StrictModel):
    """Seconds by bytes moved: a start, and the bytes over the share of the bandwidth that so many
    reach (log2_bytes, share [B]: straight lines between, constant beyond)."""

    start_seconds: NonNegative
    bytes_per_second: Positive
    log2_bytes: list[NonNegative]
    share: list[Positive]

    def seconds(self, moved: float) -> float:
        """Never less for more bytes."""
        share = float(np.interp(math.log2(max(moved, 1.0)), self.log2_bytes, self.share))
        return self.start_seconds + moved / (self.bytes_per_second * share)


def move_curve(
    kind: MoveKind,
    device: str,
    spec: DeviceSpec,
    *,
    row: float | None = None,
    moving: Moving = MOVING,
) -> MoveCurve:
    """Of one kind of operator on a device type; see `move_seconds`."""
    rate, _ = rate_of(device, spec.memory_bytes_per_s, kind)
    length = math.log2(row or moving.row)
    return MoveCurve(
        start_seconds=moving.start_seconds,
        bytes_per_second=spec.memory_bytes_per_s,
        log2_bytes=rate.log2_bytes,
        share=[float(np.interp(length, rate.log2_row, column)) for column in rate.share],
    )


def move_seconds(
    kind: MoveKind,
    moved: float,
    device: str,
    spec: DeviceSpec,
    *,
    row: float | None = None,
    moving: Moving = MOVING,
) -> Estimate:
    """Seconds of one operator that moves `moved` bytes, what it reads and what it writes.

    device: its catalogue name, by which measurements are looked up. row: numbers in a row of a norm
    or softmax. Never less for more bytes, row for row.
    """
    rate, measured = rate_of(device, spec.memory_bytes_per_s, kind)
    seconds = move_curve(kind, device, spec, row=row, moving=moving).seconds(moved)
    if measured:
        return Estimate(seconds, seconds * rate.errors.low, seconds * rate.errors.high, rate.origin)
    return Estimate(
        seconds, seconds * moving.low, seconds * moving.high, f"{rate.origin} on {rate.devices[0]}"
    )
