"""A batch curve, a JSON file `hetplan-batch-curve`: the seconds of micro-batches of one whole model
on one device, and the largest micro-batches that fit.

The strategy `poplar` reads it in place of the profile's seconds and of the memory model.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hetplan.errors import require
from hetplan.profiling.models.model import Model, check_made_for
from hetplan.profiling.models.operators import Precision
from hetplan.profiling.profiles.profile import Provenance
from hetplan.schema import (
    Bytes,
    Count,
    Document,
    Name,
    PositiveCount,
    Seconds,
    StrictModel,
)


class CurvePoint(StrictModel):
    """The measured seconds of the forward and backward pass of one micro-batch.

    The measurement is repeated. A micro-batch has a point only if no repeat runs out of memory.
    """

    micro_batch: PositiveCount
    """Samples."""
    seconds: Annotated[Seconds, Field(gt=0)]
    """Median of the repeats."""
    spread_seconds: Seconds = 0.0
    """The slowest less the fastest repeat."""


class BatchCurve(Document):
    """The curve of one device."""

    format: Literal["hetplan-batch-curve"] = "hetplan-batch-curve"
    version: Literal[1] = 1
    model: Name
    sequence: PositiveCount
    """Tokens per sample."""
    precision: Precision
    device: Name
    """Device type, as in cluster files."""
    devices: PositiveCount
    """Devices of the ZeRO group that shares the model states."""
    memory_bytes: Annotated[Bytes, Field(gt=0)]
    """The limit of the measurement."""
    provenance: Provenance
    zero_stage: Annotated[int, Field(ge=0, le=3)] | None
    """The lowest ZeRO stage at which one sample fits; None: it fits at none."""
    largest: list[Count] = Field(min_length=4, max_length=4)
    """[4] by ZeRO stage, the largest micro-batch within the limit; 0: not even one sample fits."""
    saved_bytes_per_sample: Annotated[Bytes, Field(gt=0)] | None = None
    """Measured bytes of activations."""
    tried_up_to: PositiveCount | None = None
    """The micro-batch at which trying stopped although more might fit; None: unknown."""
    points: list[CurvePoint] = Field(max_length=100_000)
    """Ascending."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        sizes = [point.micro_batch for point in self.points]
        largest_of_all = max(self.largest)
        tried_up_to = self.tried_up_to
        require(
            sizes == sorted(set(sizes)),
            "points are not in ascending order of micro_batch, each once",
        )
        require(sizes or not largest_of_all, f"largest is {self.largest}, but points is empty")
        require(
            tried_up_to is None or largest_of_all <= tried_up_to,
            f"largest is {self.largest}, expected at most tried_up_to ({tried_up_to})",
        )
        lowest_stage = next((stage for stage, size in enumerate(self.largest) if size), None)
        require(
            lowest_stage == self.zero_stage,
            f"zero_stage is {self.zero_stage}, expected {lowest_stage}, the first of largest "
            "above 0",
        )
        return self

    @property
    def measured(self) -> dict[int, float]:
        """Micro-batch -> measured seconds."""
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
