"""Files of what was measured on devices: collectives, and batch curves of whole models. SI units.

Collectives (`hetplan-collectives`, JSON, written by `hetplan profile collectives`) have a latency
and a bandwidth for each operation and kind of group: a message of n bytes takes a + n/b. That line
is fitted to the fastest of the repeats: what is slower was disturbed, and medians of small messages
are mostly disturbance.

A batch curve (`hetplan-batch-curve`, JSON, written by `hetplan profile batch-curve`) has the
seconds per micro-batch of one whole model on one device, and how much fits. The planner's `poplar`
strategy reads it in place of the profile's step times and of the memory model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from hetplan.errors import require
from hetplan.profiling.models import Model, check_made_for
from hetplan.profiling.operators import Precision
from hetplan.profiling.profile import Provenance
from hetplan.schema import (
    Bytes,
    Count,
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

    def seconds(self, size: float) -> float:
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


class CurvePoint(StrictModel):
    """Seconds of forward + backward of one micro-batch (the median of the repeats; none of them out
    of memory).

    spread_seconds: slowest less fastest repeat.
    """

    micro_batch: PositiveCount
    seconds: Annotated[Seconds, Field(gt=0)]
    spread_seconds: Seconds = 0.0


class BatchCurve(Document):
    """One device's curve. device: its type as in cluster files. sequence: tokens per sample.

    memory_bytes: the limit that was kept. devices: size of the ZeRO group that shares the model
    states. largest [4]: by ZeRO stage, the largest micro-batch within the limit, 0 where not even
    one sample fits. zero_stage: the lowest stage at which one does, None for none.
    saved_bytes_per_sample: activations, measured. tried_up_to: the micro-batch at which trying
    stopped whatever would still fit, None: nothing says so.
    """

    format: Literal["hetplan-batch-curve"] = "hetplan-batch-curve"
    version: Literal[1] = 1
    model: Name
    sequence: PositiveCount
    precision: Precision
    device: Name
    devices: PositiveCount
    memory_bytes: Annotated[Bytes, Field(gt=0)]
    provenance: Provenance
    zero_stage: Annotated[int, Field(ge=0, le=3)] | None
    largest: list[Count] = Field(min_length=4, max_length=4)
    saved_bytes_per_sample: Annotated[Bytes, Field(gt=0)] | None = None
    tried_up_to: PositiveCount | None = None
    points: list[CurvePoint] = Field(max_length=100_000)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        sizes = [point.micro_batch for point in self.points]
        most, end = max(self.largest), self.tried_up_to
        require(
            sizes == sorted(set(sizes)),
            "points are not in ascending order of micro_batch, each once",
        )
        require(sizes or not most, f"largest is {self.largest}, but points is empty")
        require(
            end is None or most <= end,
            f"largest is {self.largest}, expected at most tried_up_to ({end})",
        )
        first = next((stage for stage, size in enumerate(self.largest) if size), None)
        require(
            first == self.zero_stage,
            f"zero_stage is {self.zero_stage}, expected {first}, the first of largest above 0",
        )
        return self

    @property
    def measured(self) -> dict[int, float]:
        """{micro-batch: seconds}."""
        return {point.micro_batch: point.seconds for point in self.points}


def check_curve(curve: BatchCurve, model: Model, devices: int) -> None:
    """Raise InputError unless the curve is of this model, and measured for a ZeRO group of that
    size."""
    where = f"batch curve of {curve.device}"
    check_made_for(model, curve.model, curve.sequence, curve.precision, where=where)
    require(
        curve.devices == devices,
        "devices differs from the workload's",
        where=where,
        got=curve.devices,
        expected=f"{devices}",
    )
