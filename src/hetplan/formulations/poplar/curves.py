"""Curves of step seconds t(1), ..., t(mbs) through the points that Algorithm 1 measured, and
devices that are simulated by a curve. mbs is the largest batch that fits on the device.

Poplar divides each measured batch by its seconds, lays a natural cubic spline through these speeds
and reads the spline at every batch. Splines swing: between two measurements they may claim a step
faster than both, which `dips` reports.
Source: Poplar (AAAI 2025), Algorithm 1, "Optimal Batch Size Searching" and appendix "Cubic Spline
Interpolation".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hetplan.errors import require
from hetplan.formulations.poplar.problem import Floats
from hetplan.profiling.profiles.largest_batch import MemoryReading, OutOfMemoryOnDevice


@dataclass(frozen=True)
class CurveDevice:
    """A device that Algorithm 1 can explore, simulated by a curve."""

    seconds: Sequence[float]  # [mbs] t(b) at index b - 1; larger batches do not fit
    # Factor by which a forward pass alone overestimates the largest micro-batch. Of the largest
    # micro-batch the paper says "typically lower than this value", since the backward pass needs
    # memory, too.
    optimism: float = 1.25

    def forward_memory(self, batch: int) -> MemoryReading:
        """The memory that a forward pass takes on a device that holds nothing else. A sample counts
        as one byte."""
        self._check(batch)
        return MemoryReading(
            total=self.optimism * len(self.seconds), before=0.0, after=float(batch)
        )

    def step_seconds(self, batch: int) -> float:
        """Seconds of a step of this batch, by the curve."""
        self._check(batch)
        return self.seconds[batch - 1]

    def _check(self, batch: int) -> None:
        if batch > len(self.seconds):
            raise OutOfMemoryOnDevice(f"{batch} samples do not fit (at most {len(self.seconds)})")


def natural_spline(x: Floats, y: Floats, at: Floats) -> Floats:
    """The values at `at` of the natural cubic spline through the points (x, y). Beyond the first
    and the last point the end pieces of the spline go on.

    x: [m] strictly ascending. y: [m]. With h_i = x_(i+1) - x_i, slope_i = (y_(i+1) - y_i) / h_i and
    M_0 = M_(m-1) = 0, the second derivatives M solve
    h_(i-1) M_(i-1) + 2 (h_(i-1) + h_i) M_i + h_i M_(i+1) = 6 (slope_i - slope_(i-1)).
    One point gives a constant, two a line.
    """
    if len(x) == 1:
        return np.full(len(at), y[0])
    # scipy.interpolate takes a tenth of a second to load, which few plans need
    from scipy.interpolate import CubicSpline

    return np.asarray(CubicSpline(x, y, bc_type="natural")(at))


def spline_curve(points: Mapping[int, float], largest: int) -> Floats:
    """[largest + 1] seconds t(0) = 0, t(1), ..., t(largest), by a natural spline through the speeds
    of the measured points.

    Where the spline is not positive (a swing through zero), the straight line between the
    neighbouring measured times takes its place. points: {batch: seconds} measured.
    """
    batches, seconds = _sorted_points(points)
    at = np.arange(1, largest + 1, dtype=np.float64)
    curve = np.zeros(largest + 1)
    speed = natural_spline(batches, batches / seconds, at)
    by_line = linear_curve(points, largest)[1:]
    curve[1:] = np.divide(at, speed, out=by_line, where=speed > 0)
    within = batches <= largest  # measured seconds stay exactly as they are
    curve[batches[within].astype(np.int64)] = seconds[within]
    return curve


def linear_curve(points: Mapping[int, float], largest: int) -> Floats:
    """[largest + 1] seconds t(0) = 0, t(1), ..., t(largest), by straight lines between the measured
    points.

    Batches smaller than the first point have its seconds, because none of them is known to be
    faster. Beyond the last point the line through the last two points goes on. Where this line does
    not rise, or there is one point only, each further sample takes the seconds per sample of the
    last point.

    points: {batch: seconds} measured.
    """
    batches, seconds = _sorted_points(points)
    at = np.arange(largest + 1, dtype=np.float64)
    curve = np.interp(at, batches, seconds)
    beyond = at > batches[-1]
    slope = seconds[-1] / batches[-1]
    if len(batches) > 1 and seconds[-1] > seconds[-2]:
        slope = (seconds[-1] - seconds[-2]) / (batches[-1] - batches[-2])
    curve[beyond] = seconds[-1] + slope * (at[beyond] - batches[-1])
    curve[0] = 0.0
    return np.asarray(curve)


def _sorted_points(points: Mapping[int, float]) -> tuple[Floats, Floats]:
    """([m] batches ascending, [m] their seconds). Raises InputError for unusable points."""
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
    """One line of text for each two neighbouring measurements between which `curve` [mbs + 1] falls
    below both. points: {batch: seconds} measured."""
    batches, seconds = _sorted_points(points)
    lines = []
    for (left, right), neighbours in zip(pairwise(batches), pairwise(seconds), strict=True):
        between = np.arange(int(left) + 1, min(int(right), len(curve)))
        lower = min(neighbours)
        below = between[curve[between] < lower * (1 - 1e-12)]  # by more than rounding
        if len(below):
            first, last = below[[0, -1]].tolist()
            where = f"batch {first}" if first == last else f"batches {first} to {last}"
            lines.append(
                f"{where}: {curve[below].min():.4g} s, below both neighbouring measurements "
                f"({lower:.4g} s)"
            )
    return lines
