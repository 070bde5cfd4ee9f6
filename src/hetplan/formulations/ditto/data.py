"""Data and decision of problem `ditto`, as they stand in files.

Sets   i in 0..m-1 device types, l in 0..L-1 layers, k in 0..S-1 stages.
Data   N_b micro_batches; per type n_i nodes of M devices, forward and backward seconds of each
       layer for one micro-batch on one device, allreduce_seconds[x][l] seconds of one all-reduce of
       layer l on x devices of one node; optional memory.
Decide S contiguous nonempty stages over all layers, each on x in {1, 2, 4, ..., M} devices of one
type.
Source Ditto, Section 3; Oobleck (SOSP 2023), Section 4.1.2; the memory constraint is hetplan's
(1F1B).
"""

from typing import Self

from pydantic import Field, model_validator

from hetplan.errors import require
from hetplan.schema import (
    Count,
    Name,
    NonNegative,
    PositiveCount,
    Row,
    StrictModel,
    check_every_type,
    check_length,
)

MOST_LAYERS = 4096


class DeviceType(StrictModel):
    """`nodes` nodes of one type; `allreduce_seconds` has one row per size 2, 4, …,
    devices_per_node."""

    name: Name
    nodes: Count
    devices_per_node: PositiveCount
    forward_seconds: Row
    backward_seconds: Row
    allreduce_seconds: dict[str, Row] = Field(default_factory=dict)


class Memory(StrictModel):
    """The optional memory constraint: a stage keeps min(N_b, S - k) micro-batches alive under
    1F1B."""

    device_bytes: dict[Name, NonNegative]
    layer_state_bytes: Row
    layer_activation_bytes: Row


class DittoData(StrictModel):
    """`data` of a `ditto` instance; every row has L entries."""

    micro_batches: PositiveCount
    device_types: list[DeviceType] = Field(min_length=1, max_length=64)
    memory: Memory | None = None

    @property
    def layers(self) -> int:
        """L."""
        return len(self.device_types[0].forward_seconds)

    @property
    def devices_per_node(self) -> int:
        """M."""
        return self.device_types[0].devices_per_node

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        size, seen = self.devices_per_node, dict[str, int]()
        whole = size <= 1024 and not size & (size - 1)
        require(whole, f"devices_per_node is {size}, expected a power of two up to 1024")
        few = 1 <= self.layers <= MOST_LAYERS
        require(few, f"{self.layers} layers, expected 1 to {MOST_LAYERS}")
        for i, kind in enumerate(self.device_types):
            where, before = f"device_types[{i}]", seen.setdefault(kind.name, i)
            repeats = f"{where}.name repeats device_types[{before}].name ({kind.name!r})"
            require(before == i, repeats)
            got = f"{where}.devices_per_node is {kind.devices_per_node}"
            require(kind.devices_per_node == size, f"{got}, expected {size} everywhere")
            self._check_rows(kind, where)
        if self.memory is not None:
            self._check_memory(self.memory)
        return self

    def _check_rows(self, kind: DeviceType, where: str) -> None:
        expected = [str(x) for x in group_sizes(self.devices_per_node)[1:]]
        listed, got = (", ".join(x) or "none" for x in (expected, sorted(kind.allreduce_seconds)))
        sizes = f"{where}.allreduce_seconds has sizes {got[:80]}"
        require({*kind.allreduce_seconds} == {*expected}, f"{sizes}, expected {listed}")
        rows = {"forward_seconds": kind.forward_seconds, "backward_seconds": kind.backward_seconds}
        rows |= {f"allreduce_seconds.{x}": row for x, row in kind.allreduce_seconds.items()}
        for name, row in rows.items():
            check_length(row, self.layers, f"{where}.{name}", "layer")

    def _check_memory(self, memory: Memory) -> None:
        for name in ("layer_state_bytes", "layer_activation_bytes"):
            check_length(getattr(memory, name), self.layers, f"memory.{name}", "layer")
        check_every_type(memory.device_bytes, (kind.name for kind in self.device_types))


class DittoStage(StrictModel):
    """Layers [first, last) on `devices` devices of one node of type `type`."""

    first: Count
    last: Count
    type: Name
    devices: PositiveCount


class DittoDecision(StrictModel):
    """`decision` of a `ditto` instance: the pipeline template, stages in order."""

    stages: list[DittoStage]


def group_sizes(devices_per_node: int) -> list[int]:
    """The numbers of devices that a stage may have: 1, 2, 4, …, M."""
    return [1 << j for j in range(devices_per_node.bit_length())]
