"""A batch curve, a JSON file `hetplan-batch-curve`: seconds per micro-batch of one whole model on
one device, and how much fits.

The strategy `poplar` reads it in place of the profile's step times and memory model.
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
