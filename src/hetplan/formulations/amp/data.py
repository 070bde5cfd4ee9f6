"""Data and decision of problem `amp`, as they stand in files.

Sets   d in 0..D-1 devices, l in 0..L-1 layers.
Data   bandwidth[d][d'] bytes/s; per layer param_bytes, activation_bytes and tensor_bytes (per
       sample); layer_seconds[(type, tensor, micro_batch)][l] seconds, forward + backward of one
       micro-batch on one tensor group; global_batch samples; optional memory.
Decide degrees (pipeline, data, tensor) with product D, micro_batch, placement, stages.
Source AMP (NeurIPS 2022), Section 3, eq. 1-5; the memory constraint is hetplan's (1F1B).
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
    """One accelerator: the name of its type and the node that it sits in."""

    type: Name
    node: Count


class Layer(StrictModel):
    """One layer of the chain; `activation_bytes` and `tensor_bytes` are per sample."""

    name: Name
    param_bytes: NonNegative
    activation_bytes: NonNegative
    tensor_bytes: NonNegative = 0.0


class LayerSeconds(StrictModel):
    """The table of one device type: seconds [L] of each layer's forward and backward pass for one
    micro-batch on a group of `tensor` such devices."""

    type: Name
    tensor: PositiveCount
    micro_batch: PositiveCount
    seconds: Row


class Memory(StrictModel):
    """The optional memory constraint: 1F1B keeps min(gas, pp - j) micro-batches alive on stage
    j."""

    device_bytes: dict[Name, NonNegative]
    state_bytes_per_param_byte: NonNegative
    layer_bytes_per_sample: Row


class AmpData(StrictModel):
    """`data` of an `amp` instance.

    devices: [D]. bandwidth: [D][D] bytes/s, symmetric, its diagonal ignored. layers: [L].
    layer_seconds: at most one table per type, tensor degree and micro-batch, and at least one per
    type. global_batch: samples per iteration. memory: None where memory does not count.
    """

    devices: list[Device] = Field(min_length=1, max_length=4096)
    bandwidth: Matrix
    layers: list[Layer] = Field(min_length=1, max_length=4096)
    layer_seconds: list[LayerSeconds] = Field(min_length=1)
    global_batch: PositiveCount
    memory: Memory | None = None

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
                rate, back = row[j], self.bandwidth[j][i]
                if rate != back:
                    raise ValueError(
                        f"bandwidth[{i}][{j}] is {rate!r} but bandwidth[{j}][{i}] is {back!r}, "
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
        tabled = {table.type for table in self.layer_seconds}
        missing = {device.type for device in self.devices} - tabled
        if missing:
            raise ValueError(
                f"layer_seconds has no table for device type {min(missing)!r}, "
                "expected one for each type"
            )

    def _check_memory(self, memory: Memory) -> None:
        per_sample = memory.layer_bytes_per_sample
        check_length(per_sample, len(self.layers), "memory.layer_bytes_per_sample", "layer")
        check_every_type(memory.device_bytes, (device.type for device in self.devices))


class AmpDecision(StrictModel):
    """`decision`: placement[stage][data rank][tensor rank] -> device; stages as [first, last)."""

    pipeline: PositiveCount
    data: PositiveCount
    tensor: PositiveCount
    micro_batch: PositiveCount
    placement: list[list[list[Count]]]
    stages: list[Range]
