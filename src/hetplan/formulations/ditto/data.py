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

from hetplan.schema import (
    Count,
    Name,
    NonNegative,
    PositiveCount,
    Row,
    StrictModel,
    check_distinct_names,
    check_every_type,
    check_length,
)

MOST_LAYERS = 4096
MOST_DEVICES_PER_NODE = 1024


class DeviceType(StrictModel):
    """One type of accelerator.

    nodes: n_i, nodes of this type. devices_per_node: M, the same for all types.
    forward_seconds, backward_seconds: [L] seconds of each layer for one micro-batch on one device.
    allreduce_seconds: for each size x of 2, 4, …, M, as a text, [L] seconds of one all-reduce of
    each layer on x devices of one node.
    """

    name: Name
    nodes: Count
    """n_i."""
    devices_per_node: PositiveCount
    """M."""
    forward_seconds: Row
    """[L] forward pass of each layer."""
    backward_seconds: Row
    """[L] backward pass of each layer."""
    allreduce_seconds: dict[str, Row] = Field(default_factory=dict)
    """"x" -> [L]."""


class Memory(StrictModel):
    """The optional memory constraint: a stage keeps min(N_b, S - k) micro-batches alive under
    1F1B."""

    device_bytes: dict[Name, NonNegative]
    """Device type -> memory of one device."""
    layer_state_bytes: Row
    """[L] parameters with gradients and optimizer states."""
    layer_activation_bytes: Row
    """[L] activations of one micro-batch."""


class DittoData(StrictModel):
    """`data` of a `ditto` instance; every row has L entries."""

    micro_batches: PositiveCount
    """N_b."""
    device_types: list[DeviceType] = Field(min_length=1, max_length=64)
    memory: Memory | None = None
    """None: memory is not limited."""

    @property
    def layers(self) -> int:
        """L, the number of layers."""
        return len(self.device_types[0].forward_seconds)

    @property
    def devices_per_node(self) -> int:
        """M, the number of devices in every node."""
        return self.device_types[0].devices_per_node

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self._check_node_size()
        self._check_layer_count()
        check_distinct_names([kind.name for kind in self.device_types], "device_types")
        for i, kind in enumerate(self.device_types):
            self._check_type(kind, f"device_types[{i}]")
        if self.memory is not None:
            self._check_memory(self.memory)
        return self

    def _check_node_size(self) -> None:
        size = self.devices_per_node
        power_of_two = size & (size - 1) == 0
        if not power_of_two or size > MOST_DEVICES_PER_NODE:
            raise ValueError(
                f"devices_per_node is {size}, expected a power of two up to {MOST_DEVICES_PER_NODE}"
            )

    def _check_layer_count(self) -> None:
        if not 1 <= self.layers <= MOST_LAYERS:
            raise ValueError(f"{self.layers} layers, expected 1 to {MOST_LAYERS}")

    def _check_type(self, kind: DeviceType, where: str) -> None:
        size = self.devices_per_node
        if kind.devices_per_node != size:
            raise ValueError(
                f"{where}.devices_per_node is {kind.devices_per_node}, expected {size} everywhere"
            )
        expected = [str(x) for x in group_sizes(size) if x > 1]
        given = sorted(kind.allreduce_seconds)
        if set(given) != set(expected):
            got = (", ".join(given) or "none")[:80]
            raise ValueError(
                f"{where}.allreduce_seconds has sizes {got}, "
                f"expected {', '.join(expected) or 'none'}"
            )
        check_length(kind.forward_seconds, self.layers, f"{where}.forward_seconds", "layer")
        check_length(kind.backward_seconds, self.layers, f"{where}.backward_seconds", "layer")
        for x, row in kind.allreduce_seconds.items():
            check_length(row, self.layers, f"{where}.allreduce_seconds.{x}", "layer")

    def _check_memory(self, memory: Memory) -> None:
        states, activations = memory.layer_state_bytes, memory.layer_activation_bytes
        check_length(states, self.layers, "memory.layer_state_bytes", "layer")
        check_length(activations, self.layers, "memory.layer_activation_bytes", "layer")
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
