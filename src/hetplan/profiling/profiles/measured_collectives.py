"""Measured collectives, a JSON file `hetplan-collectives`: a latency and a bandwidth for each
operation and kind of group.

An operation on n bytes takes a + n / b seconds, with latency a and bandwidth b. The line is fitted
to the fastest repeats. Slower repeats were disturbed, and the medians of small messages are mostly
disturbance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from hetplan.errors import InputError
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
    """The measured seconds of one operation at one size."""

    bytes: Annotated[Bytes, Field(gt=0)]
    """Bytes of every rank."""
    seconds: Annotated[Seconds, Field(gt=0)]
    """Seconds of the fastest repeat."""
    median_seconds: Annotated[Seconds, Field(gt=0)]
    """Median of the repeats."""


class FittedCollective(StrictModel):
    """The measured seconds of one operation on one kind of group, and the line fitted to them."""

    operation: Name
    """One of `OPERATIONS`."""
    group: Literal["node", "between", "all"]
    """Ranks within a node, one rank of every node, or all ranks."""
    ranks: PositiveCount
    """Number of ranks."""
    latency_seconds: Seconds
    bytes_per_second: Annotated[float, Field(gt=0, le=1e18)]
    r_squared: float | None
    """Coefficient of determination of the relative errors; None where all sizes took equally long.
    """
    points: list[SizePoint] = Field(min_length=2)

    def operation_seconds(self, size: float) -> float:
        """Seconds of the operation on `size` bytes per rank, by the fitted line."""
        return self.latency_seconds + size / self.bytes_per_second


class Collectives(Document):
    """The fitted operations on all groups of one job."""

    format: Literal["hetplan-collectives"] = "hetplan-collectives"
    version: Literal[1] = 1
    backend: Name
    """Communication library, such as "nccl"."""
    device: Name
    """Device type."""
    ranks: PositiveCount
    """Ranks of the job."""
    provenance: Provenance
    fits: list[FittedCollective]

    def ring(self, operation: str) -> tuple[float, float]:
        """(bytes/s, seconds per message) of the links of a ring over all ranks that would take as
        long as the fitted operation.

        An all-reduce over n ranks has 2 (n - 1) rounds, any other operation n - 1. Each round moves
        one n-th of a rank's bytes, in an all-gather all of them. Raises InputError where the
        operation was not measured on all ranks.
        """
        fit = None
        for candidate in self.fits:
            measured = (candidate.operation, candidate.group)
            if measured == (operation, "all") and candidate.ranks > 1:
                fit = candidate
                break
        if fit is None:
            raise InputError(
                "collectives were not measured on all ranks",
                where=f"collectives on {self.device}",
                got=operation,
            )
        rounds = fit.ranks - 1
        if operation == "all-reduce":
            rounds = 2 * (fit.ranks - 1)
        part = 1.0 if operation == "all-gather" else 1.0 / fit.ranks  # of the bytes, in each round
        return rounds * part * fit.bytes_per_second, fit.latency_seconds / rounds


@dataclass(frozen=True)
class Line:
    """The fitted line a + n / b of an operation's seconds on n bytes."""

    latency: float  # a, seconds
    bandwidth: float  # b, bytes/s
    r_squared: float | None  # see `FittedCollective`


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line with the least sum of squared relative errors, with a latency of at least 0 and a
    positive bandwidth.

    Where the best line has a negative latency, the result is the best line through the origin.
    Where seconds fall as bytes grow, the largest message gives the bandwidth.

    sizes: bytes n, at least two of them different. seconds: t, all positive.
    """
    n, t = np.asarray(sizes, float), np.asarray(seconds, float)
    # The relative error (a + slope n) / t - 1 is linear in a and slope = 1 / b.
    weight = 1.0 / t
    columns = np.stack([weight, n * weight], axis=1)
    (a, slope), *_ = np.linalg.lstsq(columns, np.ones_like(t), rcond=None)
    if a < 0:  # the slope with the least squares when a is 0
        a = 0.0
        slope = float((n * weight).sum() / ((n * weight) ** 2).sum())
    if slope <= 0:
        largest = int(np.argmax(n))
        slope = t[largest] / n[largest]
        a = 0.0
    squares = float((((a + slope * n) * weight - 1) ** 2).sum())
    squares_of_mean = float(((t.mean() * weight - 1) ** 2).sum())
    r_squared = None
    if squares_of_mean > 0:
        r_squared = 1 - squares / squares_of_mean
    return Line(float(a), float(1 / slope), r_squared)
