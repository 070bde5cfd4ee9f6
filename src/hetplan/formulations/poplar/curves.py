"""Performance curves t(1..mbs) from a few measured points, and what an interpolation does to them.

Poplar divides each measured time by its batch, lays a natural cubic spline through these speeds and
reads the curve at every batch (Poplar, "Optimal Batch Size Searching" and appendix "Cubic Spline
Interpolation").
Splines swing: between two measurements they may claim a step faster than both, which `dips`
reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hetplan.errors import InputError
from hetplan.formulations.poplar.problem import Floats

Quantity = Literal["speed", "seconds"]


def natural_spline(x: Floats, y: Floats, at: Floats) -> Floats:
    """The natural cubic spline through (x, y), evaluated at `at` (outside [x0, xn]: the end
    pieces).

    x [m] strictly ascending, y [m]. Second derivatives M solve h_(i-1) M_(i-1) + 2 (h_(i-1) + h_i)
    M_i + h_i M_(i+1) = 6 (slope_i - slope_(i-1)) with M = 0 at both ends. One point gives a
    constant, two a line.
    """
    if len(x) == 1:
        return np.full(len(at), y[0])
    h, slope = np.diff(x), np.diff(y) / np.diff(x)
    second = np.zeros(len(x))
    if len(x) > 2:
        system = np.diag(2.0 * (h[:-1] + h[1:])) + np.diag(h[1:-1], 1) + np.diag(h[1:-1], -1)
        second[1:-1] = np.linalg.solve(system, 6.0 * np.diff(slope))
    i = np.clip(np.searchsorted(x, at, side="right") - 1, 0, len(x) - 2)
    left, right = at - x[i], x[i + 1] - at
    cubic = (second[i] * right**3 + second[i + 1] * left**3) / (6.0 * h[i])
    return np.asarray(
        cubic
        + (y[i] / h[i] - second[i] * h[i] / 6.0) * right
        + (y[i + 1] / h[i] - second[i + 1] * h[i] / 6.0) * left
    )


def spline_curve(points: Mapping[int, float], largest: int, quantity: Quantity = "speed") -> Floats:
    """t(1..largest) by a natural spline through the measured points: [largest + 1] seconds, t(0) =
    0.

    points: {batch: seconds} measured. quantity: what the spline interpolates. Where it is not
    positive (a swing through zero) the straight line between the neighbouring measured times is
    taken.
    """
    batches, seconds = _sorted_points(points)
    at = np.arange(1, largest + 1, dtype=np.float64)
    curve = np.zeros(largest + 1)
    if quantity == "speed":
        speed = natural_spline(batches, batches / seconds, at)
        curve[1:] = np.divide(at, speed, out=np.full(largest, -1.0), where=speed > 0)
    else:
        curve[1:] = natural_spline(batches, seconds, at)
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
    if not points:
        raise InputError("curve without a measured point", expected="at least one {batch: seconds}")
    for batch, seconds in points.items():
        if batch < 1 or not (np.isfinite(seconds) and seconds > 0):
            raise InputError(
                f"measured point of batch {batch}",
                got=seconds,
                expected="batch >= 1 and seconds > 0",
            )
    batches = np.array(sorted(points), dtype=np.float64)
    return batches, np.array([points[int(b)] for b in batches])


@dataclass(frozen=True)
class Dip:
    """Batches first..last of an interpolated curve lie below both measurements around them.

    lowest: the least interpolated seconds among them; measured: the smaller of the two
    measurements, in seconds.
    """

    first: int
    last: int
    lowest: float
    measured: float

    def __str__(self) -> str:
        place = (
            f"batch {self.first}"
            if self.first == self.last
            else f"batches {self.first} to {self.last}"
        )
        return f"{place}: {self.lowest:.4g} s, below both neighbouring measurements ({self.measured:.4g} s)"


def dips(points: Mapping[int, float], curve: Floats) -> list[Dip]:
    """Where `curve` [mbs + 1] falls below both measurements around it, one entry per gap between
    two."""
    batches, seconds = _sorted_points(points)
    found = []
    for a, b, ta, tb in zip(batches, batches[1:], seconds, seconds[1:], strict=False):
        inside = np.arange(int(a) + 1, min(int(b), len(curve)))
        low = min(ta, tb)
        below = inside[curve[inside] < low * (1 - 1e-12)]
        if len(below):
            found.append(Dip(int(below[0]), int(below[-1]), float(curve[below].min()), float(low)))
    return found
