"""Curves t(1..mbs) through points that Algorithm 1 measured, and devices made of a curve.

Where not even one sample fits on some device, the ZeRO stage is raised (`pose`).
Poplar divides each measured time by its batch, lays a natural cubic spline through these speeds and
reads the curve at every batch. Splines swing: between two measurements they may claim a step faster
than both, which `dips` reports.
Source: Poplar (AAAI 2025), Algorithm 1, "Optimal Batch Size Searching" and appendix "Cubic Spline
Interpolation".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.errors import require
from hetplan.formulations.poplar.problem import Floats
from hetplan.profiling.profiles.largest_batch import MemoryReading, OutOfMemoryOnDevice


@dataclass(frozen=True)
class CurveDevice:
    """A device made of a curve: seconds[b - 1] of each batch that fits; one more does not.

    optimism: by how much a forward pass alone overestimates the largest micro-batch (the paper:
    "typically lower than this value", since the backward pass needs memory too).
    """

    seconds: Sequence[float]
    optimism: float = 1.25

    def forward_memory(self, batch: int) -> MemoryReading:
        """One byte per sample, nothing before."""
        self._check(batch)
        return MemoryReading(
            total=self.optimism * len(self.seconds), before=0.0, after=float(batch)
        )

    def step_seconds(self, batch: int) -> float:
        """The curve."""
        self._check(batch)
        return self.seconds[batch - 1]

    def _check(self, batch: int) -> None:
        if batch > len(self.seconds):
            raise OutOfMemoryOnDevice(f"{batch} samples do not fit (at most {len(self.seconds)})")


def natural_spline(x: Floats, y: Floats, at: Floats) -> Floats:
    """The natural cubic spline through (x, y), evaluated at `at` (outside [x0, xn]: the end
    pieces).

    x [m] strictly ascending, y [m]. Second derivatives M solve h_(i-1) M_(i-1) + 2 (h_(i-1) + h_i)
    M_i + h_i M_(i+1) = 6 (slope_i - slope_(i-1)) with M = 0 at both ends. One point gives a
    constant, two a line.
    """
    if len(x) == 1:
        return np.full(len(at), y[0])
    # scipy.interpolate takes a tenth of a second to load, which few plans need
    from scipy.interpolate import CubicSpline

    return np.asarray(CubicSpline(x, y, bc_type="natural")(at))


def spline_curve(points: Mapping[int, float], largest: int) -> Floats:
    """t(1..largest) by a natural spline through the measured points: [largest + 1] seconds, t(0) =
    0.

    points: {batch: seconds} measured; the spline goes through their speeds. Where it is not
    positive (a swing through zero) the straight line between the neighbouring measured times is
    taken.
    """
    batches, seconds = _sorted_points(points)
    at = np.arange(1, largest + 1, dtype=np.float64)
    curve = np.zeros(largest + 1)
    speed = natural_spline(batches, batches / seconds, at)
    curve[1:] = np.divide(at, speed, out=np.full(largest, -1.0), where=speed > 0)
    broken = curve[1:] <= 0
    curve[1:][broken] = linear_curve(points, largest)[1:][broken]
    curve[batches[batches <= largest].astype(np.int64)] = seconds[batches <= largest]  # to the bit
    return curve


def linear_curve(points: Mapping[int, float], largest: int) -> Floats:
    """t(1..largest) by straight lines: [largest + 1] seconds, t(0) = 0.

    Below the first point its time (a smaller batch is not known to be faster); beyond the last one
    the slope of the last piece, or the last point's speed where that would be faster or there is no
    piece.
    """
    batches, seconds = _sorted_points(points)
    at = np.arange(largest + 1, dtype=np.float64)
    curve = np.interp(at, batches, seconds)
    beyond = at > batches[-1]
    slope = seconds[-1] / batches[-1]
    if len(batches) > 1:
        slope = max((seconds[-1] - seconds[-2]) / (batches[-1] - batches[-2]), 0.0) or slope
    curve[beyond] = seconds[-1] + slope * (at[beyond] - batches[-1])
    curve[0] = 0.0
    return np.asarray(curve)


def _sorted_points(points: Mapping[int, float]) -> tuple[Floats, Floats]:
    require(points, "curve without a measured point", expected="at least one {batch: seconds}")
    for batch, seconds in points.items():
        require(
            batch >= 1 and np.isfinite(seconds) and seconds > 0,
            f"measured point of batch {batch}",
            got=seconds,
            expected="batch >= 1 and seconds > 0",
        )
    batches = np.array(sorted(points), dtype=np.float64)
    return batches, np.array([points[int(b)] for b in batches])


def dips(points: Mapping[int, float], curve: Floats) -> list[str]:
    """Where `curve` [mbs + 1] falls below both measurements around it, a line per gap between
    two."""
    batches, seconds = _sorted_points(points)
    lines = []
    for a, b, ta, tb in zip(batches, batches[1:], seconds, seconds[1:], strict=False):
        inside = np.arange(int(a) + 1, min(int(b), len(curve)))
        low = min(ta, tb)
        below = inside[curve[inside] < low * (1 - 1e-12)]
        if len(below):
            first, last = below[[0, -1]].tolist()
            lines.append(
                (f"batch {first}" if first == last else f"batches {first} to {last}")
                + f": {curve[below].min():.4g} s, below both neighbouring measurements "
                f"({low:.4g} s)"
            )
    return lines
