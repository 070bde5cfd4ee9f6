"""The profile: what one model costs per layer on every device type, tensor degree and micro-batch
size.

A JSON file `hetplan-profile`, predicted by hetplan or measured elsewhere; the planner only ever
sees this. Beside it, files of what was measured on devices (`hetplan profile`):
collectives (`hetplan-collectives`) have a latency and a bandwidth for each operation and kind of
group: a message of n bytes takes a + n/b. That line is fitted to the fastest of the repeats: what
is slower was disturbed, and medians of small messages are mostly disturbance. A batch curve
(`hetplan-batch-curve`) has the seconds per micro-batch of one whole model on one device, and how
much fits; the strategy `poplar` reads it in place of the profile's step times and memory model.

SI units: seconds of one micro-batch on one device of a tensor group, bytes per sample (parameters:
bytes).
Layer times exclude the tensor-parallel all-reduce, which is priced from `tensor_bytes`; a measured
profile whose times include it says `tensor_bytes` 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, SerializerFunctionWrapHandler, Strict, model_serializer, model_validator

from hetplan.errors import require
from hetplan.profiling.models import Model, check_made_for
from hetplan.profiling.operators import Precision
from hetplan.schema import (
    Bytes,
    Count,
    Date,
    Document,
    Name,
    Positive,
    PositiveCount,
    Seconds,
    SecondsRow,
    StrictModel,
)


class WithoutEmpty(StrictModel):
    """Written without the keys that hold None or an empty list."""

    @model_serializer(mode="wrap")
    def _without_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value not in (None, [])}


class Provenance(WithoutEmpty):
    """Where the numbers come from. calibrated: whether measurements corrected a prediction.

    learned: device types predicted with an efficiency learned from measured operators; others have
    the plain roofline. predictor: the version of what predicted them; None of files before 2.
    sources: whose measurements the predictor learned from.
    """

    kind: Literal["predicted", "measured"]
    source: Name
    date: Date
    calibrated: bool = False
    learned: list[Name] = Field(default_factory=list)
    predictor: PositiveCount | None = None
    sources: list[Name] = Field(default_factory=list)


class ProfileLayer(StrictModel):
    """What does not depend on the device, whole layer.

    param_bytes: owned parameters; tied_param_bytes: a copy of an earlier layer's (tied embeddings),
    needed by a stage without that layer. activation_bytes: sent to the next layer, per sample.
    tensor_bytes: all-reduced in a tensor group, forward and backward, per sample. saved_bytes: kept
    for the backward pass, per sample; replicated_saved_bytes: the part that tensor parallelism does
    not divide.
    """

    name: Name
    param_bytes: Bytes
    tied_param_bytes: Bytes = 0.0
    activation_bytes: Bytes
    tensor_bytes: Bytes
    saved_bytes: Bytes
    replicated_saved_bytes: Bytes = 0.0

    @model_validator(mode="after")
    def _part_of_saved(self) -> Self:
        require(
            self.replicated_saved_bytes <= self.saved_bytes,
            f"replicated_saved_bytes is {self.replicated_saved_bytes!r}, "
            f"expected at most saved_bytes ({self.saved_bytes!r})",
        )
        return self

    @property
    def held_param_bytes(self) -> float:
        """Parameters that a stage of this layer alone holds."""
        return self.param_bytes + self.tied_param_bytes


class Readings(StrictModel):
    """What a measurement tells beside medians, per layer [L]: spreads are the slowest less the
    fastest repeat.

    optimizer_seconds: one update. saved_bytes: kept from forward to backward, whole micro-batch.
    peak_bytes: needed beside at the passes' peak; null where the device keeps no such books.
    """

    forward_spread_seconds: SecondsRow
    backward_spread_seconds: SecondsRow
    optimizer_seconds: SecondsRow
    saved_bytes: list[Bytes]
    peak_bytes: list[Bytes] | None = None


HOST = ("forward_host_seconds", "backward_host_seconds")


class ProfileTable(WithoutEmpty):
    """Seconds per layer [L] of one micro-batch on `tensor` devices of one type. readings: of
    measured tables. *_host_seconds: what the host takes to launch a pass's kernels, part of its
    seconds as `hetplan.profiling.times.together` says; none of measured tables. interval: factors
    of all seconds of a predicted table, low and high, by what the predictor's operators were off on
    models left out."""

    device: Name
    tensor: PositiveCount
    micro_batch: PositiveCount
    forward_seconds: SecondsRow
    backward_seconds: SecondsRow
    forward_host_seconds: SecondsRow = Field(default_factory=list)
    backward_host_seconds: SecondsRow = Field(default_factory=list)
    interval: Annotated[tuple[Positive, Positive], Strict(False)] | None = None
    readings: Readings | None = None

    def spread(self) -> list[float] | None:
        """Forward + backward spread per layer [L], None where nothing was measured."""
        if self.readings is None:
            return None
        both = self.readings.forward_spread_seconds, self.readings.backward_spread_seconds
        return [f + b for f, b in zip(*both, strict=True)]

    def seconds(self) -> list[float]:
        """Forward + backward per layer [L]."""
        return [f + b for f, b in zip(self.forward_seconds, self.backward_seconds, strict=True)]


class Profile(Document):
    """A profile: layers [L], tables of [L] entries each. sequence: tokens per sample, null for
    images."""

    format: Literal["hetplan-profile"] = "hetplan-profile"
    version: Literal[1] = 1
    model: Name
    sequence: PositiveCount | None = None
    precision: Precision
    provenance: Provenance
    layers: list[ProfileLayer] = Field(min_length=1, max_length=4096)
    tables: list[ProfileTable] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        seen: dict[tuple[str, int, int], int] = {}
        expected = f"entries, expected one per layer ({len(self.layers)})"
        for i, table in enumerate(self.tables):
            for key in ("forward_seconds", "backward_seconds", *HOST):
                length = len(getattr(table, key) or (self.layers if key in HOST else ()))
                require(length == len(self.layers), f"tables[{i}].{key} has {length} {expected}")
            for key, row in table.readings or ():
                if row is not None:
                    require(
                        len(row) == len(self.layers),
                        f"tables[{i}].readings.{key} has {len(row)} {expected}",
                    )
            before = seen.setdefault((table.device, table.tensor, table.micro_batch), i)
            require(
                before == i,
                f"tables[{i}] repeats tables[{before}] (same device, tensor, micro_batch)",
            )
        return self

    def devices(self) -> tuple[str, ...]:
        """Device types with at least one table, in order of appearance."""
        return tuple(dict.fromkeys(table.device for table in self.tables))

    def table(self, device: str, tensor: int, micro_batch: int) -> ProfileTable | None:
        """The table of that device type, tensor degree and micro-batch, or None."""
        return self._by_key.get((device, tensor, micro_batch))

    def micro_batches(self, device: str, tensor: int) -> tuple[int, ...]:
        """The micro-batch sizes with a table of that device type and tensor degree, ascending."""
        return tuple(sorted(m for d, t, m in self._by_key if (d, t) == (device, tensor)))

    @cached_property
    def _by_key(self) -> dict[tuple[str, int, int], ProfileTable]:
        return {(table.device, table.tensor, table.micro_batch): table for table in self.tables}


load_profile = Profile.load


def perturbed(
    profile: Profile, factors: Mapping[str, Sequence[float] | NDArray[np.float64]]
) -> Profile:
    """The profile with each layer's forward and backward seconds multiplied.

    factors: device type -> the factor of every layer [L]. A device type without an entry keeps its
    seconds.
    """
    unchanged = np.ones(len(profile.layers))
    tables = []
    for table in profile.tables:
        row = np.asarray(factors.get(table.device, unchanged), float)
        seconds = {
            "forward_seconds": (row * table.forward_seconds).tolist(),
            "backward_seconds": (row * table.backward_seconds).tolist(),
        }
        tables.append(table.model_copy(update=seconds))
    return Profile(**{**dict(profile), "tables": tables})


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
