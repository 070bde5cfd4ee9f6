"""Data and decision of problem `amp`, as they stand in files.

Sets   d in 0..D-1 devices, l in 0..L-1 layers.
Data   bandwidth[d][d'] bytes/s; per layer param_bytes, activation_bytes and tensor_bytes (per
       sample); layer_seconds[(type, tensor, micro_batch)][l] seconds, forward + backward of one
       micro-batch on one tensor group; global_batch samples; optional memory.
Decide degrees (pipeline, data, tensor) with product D; micro_batch samples; placement, a device for
       each stage, data rank and tensor rank; stages, the layers of each stage. The global batch is
       split into gas = global_batch / (data micro_batch) micro-batches on each pipeline.
Source AMP (NeurIPS 2022), Section 3, eq. 1-5; the memory constraint, for 1F1B, is hetplan's.
"""

from typing import Self

from pydantic import Field, model_validator

from hetplan.schema import (
    SMALLEST,
    Count,
    Matrix,
    Name,
    NonNegative,
    PositiveCount,
    Range,
    Row,
    StrictModel,
    check_every_type,
    check_length,
)


class Device(StrictModel):
    """One accelerator."""

    type: Name
    """Name of the device type."""
    node: Count
    """Number of the node that the device is in."""


class Layer(StrictModel):
    """One layer of the chain."""

    name: Name
    param_bytes: NonNegative
    """Bytes of the layer's parameters on all tensor ranks together."""
    activation_bytes: NonNegative
    """Bytes per sample that a stage with this last layer sends on."""
    tensor_bytes: NonNegative = 0.0
    """Bytes per sample that the tensor ranks all-reduce."""


class LayerSeconds(StrictModel):
    """The measured times of all layers on one device type, for one tensor degree and one size of
    micro-batch."""

    type: Name
    """Name of the device type."""
    tensor: PositiveCount
    """Number of devices in the tensor group."""
    micro_batch: PositiveCount
    """Samples of the micro-batch."""
    seconds: Row
    """[L] seconds of each layer's forward and backward pass of one micro-batch."""


class Memory(StrictModel):
    """The optional memory constraint.

    Under 1F1B stage j of pp stages keeps the activations of min(gas, pp - j) of its gas
    micro-batches.
    """

    device_bytes: dict[Name, NonNegative]
    """Device type -> memory of one device, bytes."""
    state_bytes_per_param_byte: NonNegative
    """Bytes of weights, gradients and optimizer states per byte of parameters."""
    layer_bytes_per_sample: Row
    """[L] bytes per sample of the activations that each layer keeps until its backward pass, on all
    tensor ranks together."""
    layer_frozen_bytes: list[NonNegative] | None = None
    """[L] bytes of each layer's frozen weights, which are not synchronised, on all tensor ranks
    together; None: no weights are frozen."""

    def frozen(self, first: int, last: int) -> list[float]:
        """Bytes of the frozen weights of layers [first, last)."""
        if self.layer_frozen_bytes is None:
            return [0.0] * (last - first)
        return self.layer_frozen_bytes[first:last]


class AmpData(StrictModel):
    """`data` of an `amp` instance."""

    devices: list[Device] = Field(min_length=1, max_length=4096)
    """[D] the devices."""
    bandwidth: Matrix
    """[D][D] bytes/s, symmetric; the diagonal is ignored."""
    layers: list[Layer] = Field(min_length=1, max_length=4096)
    """[L] the layers in the order of the model."""
    layer_seconds: list[LayerSeconds] = Field(min_length=1)
    """Tables of seconds: at most one per type, tensor degree and micro-batch, and at least one per
    type."""
    global_batch: PositiveCount
    """Samples per iteration."""
    memory: Memory | None = None
    """None: memory is not limited."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self._check_bandwidth_is_square()
        self._check_bandwidth_is_symmetric_and_positive()
        self._check_tables_have_one_entry_per_layer()
        self._check_tables_are_distinct()
        self._check_every_type_has_a_table()
        if self.memory is not None:
            self._check_memory(self.memory)
        return self

    def _check_bandwidth_is_square(self) -> None:
        count = len(self.devices)
        if len(self.bandwidth) != count:
            raise ValueError(
                f"bandwidth has {len(self.bandwidth)} rows, expected one per device ({count})"
            )
        for i, row in enumerate(self.bandwidth):
            check_length(row, count, f"bandwidth[{i}]", "device")

    def _check_bandwidth_is_symmetric_and_positive(self) -> None:
        for i, row in enumerate(self.bandwidth):
            for j in range(i):  # the diagonal is ignored
                rate, reverse = row[j], self.bandwidth[j][i]
                if rate != reverse:
                    raise ValueError(
                        f"bandwidth[{i}][{j}] is {rate!r} but bandwidth[{j}][{i}] is {reverse!r}, "
                        "expected a symmetric matrix"
                    )
                if rate < SMALLEST:
                    raise ValueError(
                        f"bandwidth[{i}][{j}] is {rate!r}, "
                        f"expected more than 0 (at least {SMALLEST:g})"
                    )

    def _check_tables_have_one_entry_per_layer(self) -> None:
        for i, table in enumerate(self.layer_seconds):
            check_length(table.seconds, len(self.layers), f"layer_seconds[{i}].seconds", "layer")

    def _check_tables_are_distinct(self) -> None:
        first: dict[tuple[str, int, int], int] = {}
        for i, table in enumerate(self.layer_seconds):
            key = (table.type, table.tensor, table.micro_batch)
            if key in first:
                raise ValueError(
                    f"layer_seconds[{i}] repeats layer_seconds[{first[key]}] "
                    "(same type, tensor, micro_batch)"
                )
            first[key] = i

    def _check_every_type_has_a_table(self) -> None:
        types_with_table = {table.type for table in self.layer_seconds}
        missing = {device.type for device in self.devices} - types_with_table
        if missing:
            raise ValueError(
                f"layer_seconds has no table for device type {min(missing)!r}, "
                "expected one for each type"
            )

    def _check_memory(self, memory: Memory) -> None:
        per_sample = memory.layer_bytes_per_sample
        check_length(per_sample, len(self.layers), "memory.layer_bytes_per_sample", "layer")
        if memory.layer_frozen_bytes is not None:
            frozen = memory.layer_frozen_bytes
            check_length(frozen, len(self.layers), "memory.layer_frozen_bytes", "layer")
        check_every_type(memory.device_bytes, (device.type for device in self.devices))


class AmpDecision(StrictModel):
    """`decision` of an `amp` instance."""

    pipeline: PositiveCount
    """Pipeline-parallel degree: the number of stages."""
    data: PositiveCount
    """Data-parallel degree: the number of pipelines."""
    tensor: PositiveCount
    """Tensor-parallel degree: the number of devices in a tensor group."""
    micro_batch: PositiveCount
    """Samples of a micro-batch."""
    placement: list[list[list[Count]]]
    """[stage][data rank][tensor rank] number of the device."""
    stages: list[Range]
    """[pipeline] layers [first, end) of each stage."""
