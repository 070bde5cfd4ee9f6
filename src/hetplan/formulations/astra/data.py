"""Data and decision of problem `astra`, as they stand in files.

Sets   i in 0..M-1 device types, s in 0..P-1 stages.
Data   N layers, P stages, K micro_batches, D data_parallel, T tensor_parallel.
       Of each device type i: max_devices; c_i layer_seconds, forward and backward pass of one layer
       for one micro-batch; h_i p2p_seconds, one transfer between stages; max_layers, the most
       layers of a stage that fits in memory, where there is a limit.
Decide for each stage s a type and its number of layers n_s >= 1.
Min    sum_s (n_s c + h) + (K-1) max_s (n_s c + h),  c and h of the stage's type.
S.t.   (1) sum_s n_s = N
       (2) (stages on type i) D T <= max_devices_i
       (3) n_s <= max_layers of its type
       (4) with equal_layers_per_type, all stages of a type hold the same number of layers.
Source Astra, Section 3.4, eq. 22-23. (3) is hetplan's: it states the memory filter of Section 3.3
as a limit of each stage.
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
    """One type of accelerator."""

    name: Name
    max_devices: Count
    """Number of devices of this type."""
    layer_seconds: NonNegative
    """c_i, forward and backward pass of one layer for one micro-batch."""
    p2p_seconds: NonNegative
    """h_i, transfer of one micro-batch from one stage to the next."""
    max_layers: Count | None = None
    """The most layers of one stage of this type; None: no limit."""


class AstraData(StrictModel):
    """`data` of an `astra` instance."""

    layers: Annotated[int, Field(ge=1, le=4096)]
    """N."""
    stages: PositiveCount
    """P."""
    micro_batches: PositiveCount
    """K, micro-batches of each pipeline in an iteration."""
    data_parallel: PositiveCount
    """D, the data-parallel degree: number of pipelines."""
    tensor_parallel: PositiveCount
    """T, the tensor-parallel degree of every stage."""
    device_types: list[DeviceType] = Field(min_length=1, max_length=64)
    equal_layers_per_type: bool
    """Whether (4) holds."""

    @model_validator(mode="after")
    def _type_names_are_distinct(self) -> Self:
        check_distinct_names(
            [device_type.name for device_type in self.device_types], "device_types"
        )
        return self


class AstraStage(StrictModel):
    """One stage of the pipeline."""

    type: Name
    """Name of the device type."""
    layers: PositiveCount
    """Number of layers."""


class AstraDecision(StrictModel):
    """`decision` of an `astra` instance: the stages in pipeline order. Their order does not change
    the objective."""

    stages: list[AstraStage]
