"""Measured collectives, a JSON file `hetplan-collectives`: a latency and a bandwidth for each
operation and kind of group.

A message of n bytes takes a + n/b. That line is fitted to the fastest of the repeats: what is
slower was disturbed, and medians of small messages are mostly disturbance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from hetplan.errors import require
from hetplan.profiling.profiles.profile import Provenance
from hetplan.schema import (
    Bytes,
    Document,
    Name,
    PositiveCount,
    Seconds,
    StrictModel,
)

OPERATIONS = (
    "send",
    "all-reduce",
    "all-gather",
    "grouped-broadcast",
    "reduce-scatter",
    "all-to-all",
)


class SizePoint(StrictModel):
    """Seconds of one operation on `bytes` of every rank: fastest and median of the repeats."""

    bytes: Annotated[Bytes, Field(gt=0)]
    seconds: Annotated[Seconds, Field(gt=0)]
    median_seconds: Annotated[Seconds, Field(gt=0)]


class FittedCollective(StrictModel):
    """One operation on one kind of group (its ranks within a node, one of every node, or all).

    r_squared: of the fit, by relative errors; null where all sizes took equally long.
    """

    operation: Name
    group: Literal["node", "between", "all"]
    ranks: PositiveCount
    latency_seconds: Seconds
    bytes_per_second: Annotated[float, Field(gt=0, le=1e18)]
    r_squared: float | None
    points: list[SizePoint] = Field(min_length=2)

    def operation_seconds(self, size: float) -> float:
        """Modelled seconds of `size` bytes per rank."""
        return self.latency_seconds + size / self.bytes_per_second


class Collectives(Document):
    """All operations on all groups of one job."""

    format: Literal["hetplan-collectives"] = "hetplan-collectives"
    version: Literal[1] = 1
    backend: Name
    device: Name
    ranks: PositiveCount
    provenance: Provenance
    fits: list[FittedCollective]

    def ring(self, operation: str) -> tuple[float, float]:
        """(bytes per second, seconds per message) of the links of a ring over all ranks that takes
        as long as measured.

        A ring of n ranks makes n - 1 rounds (all-reduce: twice as many), each moving one n-th of a
        reduction's bytes, or an all-gather's bytes of one rank. Raises InputError where the
        operation was not measured on all ranks.
        """
        fits = [
            fit
            for fit in self.fits
            if (fit.operation, fit.group) == (operation, "all") and fit.ranks > 1
        ]
        require(
            fits,
            "collectives were not measured on all ranks",
            where=f"collectives on {self.device}",
            got=operation,
        )
        n, fit = fits[0].ranks, fits[0]
        rounds = 2 * (n - 1) if operation == "all-reduce" else n - 1
        part = 1.0 if operation == "all-gather" else 1.0 / n
        return rounds * part * fit.bytes_per_second, fit.latency_seconds / rounds


@dataclass(frozen=True)
class Line:
    """a + n/b: latency in seconds, bandwidth in bytes/s; r_squared as in `FittedCollective`."""

    latency: float
    bandwidth: float
    r_squared: float | None


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line with the least sum of squared relative errors and neither part negative.

    sizes: bytes, at least two of them different. Where the best line would have a negative latency,
    it goes through the origin; where times fall with the size, the bandwidth is that of the largest
    message.
    """
    n, t = np.asarray(sizes, float), np.asarray(seconds, float)
    weight = 1.0 / t
    a, slope = np.linalg.lstsq(np.stack([weight, n * weight], axis=1), np.ones_like(t), rcond=None)[
        0
    ]
    if a < 0:
        a, slope = 0.0, float((n * weight).sum() / ((n * weight) ** 2).sum())
    if slope <= 0:
        largest = int(np.argmax(n))
        slope = t[largest] / n[largest]
        a = 0.0
    rest = float((((a + slope * n) * weight - 1) ** 2).sum())
    whole = float(((t.mean() * weight - 1) ** 2).sum())
    return Line(float(a), float(1 / slope), 1 - rest / whole if whole > 0 else None)
