"""Data and decision of problem `astra`, as they stand in files.

Sets   i in 0..M-1 device types, s in 0..P-1 stages.
Data   N layers, P stages, K micro_batches, D data_parallel, T tensor_parallel; per type
       max_devices, c_i layer_seconds (one layer, one micro-batch, forward + backward), h_i
       p2p_seconds (one stage's transfer), optionally max_layers (what one stage of that type can
       hold in memory).
Decide for each stage s a type and its number of layers n_s >= 1.
Min    sum_s (n_s c + h) + (K-1) max_s (n_s c + h),  c and h of the stage's type.
S.t.   (1) sum_s n_s = N
       (2) (stages on type i) D T <= max_devices_i
       (3) n_s <= max_layers of its type
       (4) with equal_layers_per_type, all stages of a type hold the same number of layers.
Source Astra, Section 3.4, eq. 22-23; (3) is hetplan's: the memory filter of Section 3.3 stated on
the segments.
"""

from typing import Annotated, Self

from pydantic import Field, model_validator

from hetplan.schema import (
    Count,
    Name,
    NonNegative,
    PositiveCount,
    StrictModel,
    check_distinct_names,
)


class DeviceType(StrictModel):
    """One type of accelerator.

    max_devices: devices of this type. layer_seconds: c_i, forward and backward pass of one layer
    for one micro-batch. p2p_seconds: h_i, the transfer of one micro-batch from one stage to the
    next. max_layers: the most layers of one stage on it; None for no limit.
    """

    name: Name
    max_devices: Count
    layer_seconds: NonNegative
    p2p_seconds: NonNegative
    max_layers: Count | None = None


class AstraData(StrictModel):
    """`data` of an `astra` instance."""

    layers: Annotated[int, Field(ge=1, le=4096)]
    stages: PositiveCount
    micro_batches: PositiveCount
    data_parallel: PositiveCount
    tensor_parallel: PositiveCount
    device_types: list[DeviceType] = Field(min_length=1, max_length=64)
    equal_layers_per_type: bool

    @model_validator(mode="after")
    def _type_names_are_distinct(self) -> Self:
        check_distinct_names([kind.name for kind in self.device_types], "device_types")
        return self


class AstraStage(StrictModel):
    """One stage of the pipeline: the name of its device type and its number of layers."""

    type: Name
    layers: PositiveCount


class AstraDecision(StrictModel):
    """`decision` of an `astra` instance: the stages in pipeline order (their order does not change
    the objective)."""

    stages: list[AstraStage]
