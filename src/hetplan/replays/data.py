"""The numbers that a replay reads, as they stand in files: instances of problem `joint` are these.

Sets    l layers in a chain, n nodes, d devices (numbered node by node), G samples of an iteration.
Data    per device type, tensor degree and micro-batch the seconds of every layer; bytes of weights,
        of what passes between layers, of what tensor ranks join and of what is kept; links and
        memory.
"""

import math
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, Strict, model_validator

from hetplan.plans.making import common_fields
from hetplan.plans.plan import Plan, PlanWorkload, Recomputation
from hetplan.profiling.frameworks import Framework
from hetplan.profiling.rates.collectives import CollectiveCurve
from hetplan.profiling.rates.products import MoveCurve
from hetplan.schema import (
    Count,
    Name,
    NonNegative,
    Positive,
    PositiveCount,
    Row,
    StrictModel,
    check_length,
)
from hetplan.text import grouped


class Node(StrictModel):
    """Equal devices behind one network card: bytes/s and seconds per message inside the node and of
    the card, per direction. switch: under which one it is, None: under one that all others
    without are; uplink_bandwidth: its part of that switch's links to all others, None: they are no
    limit. rails: every device has a card of its own, an even part of the bandwidth. all_reduce: by
    the number of ranks, where such a fabric was measured."""

    device: Name
    devices: Annotated[int, Field(ge=1, le=4096)]
    intra_bandwidth: Positive
    intra_latency: NonNegative
    network_bandwidth: Positive
    network_latency: NonNegative
    switch: Count | None = None
    uplink_bandwidth: Positive | None = None
    rails: bool = False
    all_reduce: dict[Annotated[PositiveCount, Strict(False)], CollectiveCurve] = Field(
        default_factory=dict
    )


class DeviceType(StrictModel):
    """memory_bytes: that training can use. update: seconds of an optimizer's step by the bytes that
    it moves."""

    memory_bytes: NonNegative
    update: MoveCurve


class Kept(StrictModel):
    """Bytes per sample of one layer under one mode of recomputation.

    saved: from forward to backward pass. working: needed beside while the layer is computed again.
    Tensor ranks divide both but for the replicated parts. gathered, gathered_working: what sequence
    parallel ranks, who divide everything else, gather and keep whole.
    """

    saved_bytes: NonNegative
    replicated_saved_bytes: NonNegative = 0.0
    working_bytes: NonNegative = 0.0
    replicated_working_bytes: NonNegative = 0.0
    gathered_bytes: NonNegative = 0.0
    gathered_working_bytes: NonNegative = 0.0


class Layer(StrictModel):
    """One layer. param_bytes: weights; tied_param_bytes: a copy of the first layer's, which a stage
    without that layer needs. activation_bytes: sent to the next layer, per sample. tensor_bytes:
    all-reduced in a tensor group, forward and backward, per sample. kept: by mode."""

    name: Name
    param_bytes: NonNegative
    tied_param_bytes: NonNegative = 0.0
    activation_bytes: NonNegative
    tensor_bytes: NonNegative
    kept: dict[Recomputation, Kept] = Field(min_length=1)


class Table(StrictModel):
    """Seconds of every layer [L] for one micro-batch on one device of a tensor group, and what the
    host takes of them (`hetplan.profiling.rates.times.together`). repeated: by mode, the share of
    the forward pass that the backward pass repeats (1 or more: all of it)."""

    type: Name
    tensor: PositiveCount
    micro_batch: PositiveCount
    forward_seconds: Row
    backward_seconds: Row
    forward_host_seconds: Row
    backward_host_seconds: Row
    repeated: dict[Recomputation, Row] = Field(default_factory=dict)


class ReplayData(StrictModel):
    """The numbers that a replay reads. See the module; element_bytes: of a weight; gradient_bytes:
    of its gradient where replicas exchange it; logit_elements, logit_bytes: per sample, of what the
    last layer keeps for the loss; reserved_bytes: of each device, beside its usable memory;
    hidden_reduces: whether tensor ranks' collectives hide behind products; framework: what it holds
    beside what the model needs."""

    model: Name = "model"
    cluster: Name = "cluster"
    global_batch: PositiveCount
    sequence: PositiveCount | None = None
    precision: Literal["fp16", "bf16", "fp32"] = "fp16"
    stack: Name = "fused"
    element_bytes: PositiveCount
    gradient_bytes: Positive
    logit_elements: NonNegative = 0.0
    logit_bytes: NonNegative = 0.0
    reserved_bytes: NonNegative = 0.0
    hidden_reduces: bool = False
    framework: Framework
    tensor_degrees: list[PositiveCount] = Field(min_length=1)
    nodes: list[Node] = Field(min_length=1, max_length=4096)
    types: dict[Name, DeviceType] = Field(min_length=1)
    layers: list[Layer] = Field(min_length=1, max_length=4096)
    tables: list[Table] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self._check_layers_have_equal_modes()
        self._check_every_node_has_a_type_and_tables()
        self._check_tables_are_distinct()
        for i, table in enumerate(self.tables):
            self._check_rows(table, f"tables[{i}]")
        return self

    def _check_layers_have_equal_modes(self) -> None:
        modes = set(self.layers[0].kept)
        if "none" not in modes:
            raise ValueError("layers[0].kept lacks the mode 'none'")
        for l, layer in enumerate(self.layers):
            if set(layer.kept) != modes:
                raise ValueError(f"layers[{l}].kept has other modes than layers[0]")

    def _check_every_node_has_a_type_and_tables(self) -> None:
        tabled = {table.type for table in self.tables}
        for name in dict.fromkeys(node.device for node in self.nodes):
            if name not in self.types:
                raise ValueError(f"types lacks {name!r}, the device of a node")
            if name not in tabled:
                raise ValueError(f"tables has none of {name!r}")

    def _check_tables_are_distinct(self) -> None:
        first: dict[tuple[str, int, int], int] = {}
        for i, table in enumerate(self.tables):
            key = (table.type, table.tensor, table.micro_batch)
            if key in first:
                raise ValueError(f"tables[{i}] repeats tables[{first[key]}]")
            first[key] = i

    def _check_rows(self, table: Table, where: str) -> None:
        rows = {
            "forward_seconds": table.forward_seconds,
            "backward_seconds": table.backward_seconds,
            "forward_host_seconds": table.forward_host_seconds,
            "backward_host_seconds": table.backward_host_seconds,
        }
        for mode in self.modes:
            if mode != "none":
                rows[f"repeated.{mode}"] = table.repeated.get(mode, [])
        for name, row in rows.items():
            check_length(row, len(self.layers), f"{where}.{name}", "layer")

    @property
    def devices(self) -> list[tuple[str, int]]:
        """[D] type and node of every device."""
        return [(node.device, n) for n, node in enumerate(self.nodes) for _ in range(node.devices)]

    @cached_property
    def uplinks(self) -> dict[int, float]:
        """Bytes/s of a switch's links to all others, which the nodes under it share."""
        each = ((n.switch, n.uplink_bandwidth or math.inf) for n in self.nodes)
        under = grouped((switch, rate) for switch, rate in each if switch is not None)
        return {switch: sum(rates) for switch, rates in under.items()}

    @property
    def modes(self) -> tuple[Recomputation, ...]:
        """Modes of recomputation to choose from."""
        return tuple(self.layers[0].kept)

    @property
    def common_fields(self) -> dict[str, Any]:
        """What all plan files for these data have in common."""
        return common_fields(
            PlanWorkload(
                model=self.model,
                cluster=self.cluster,
                global_batch=self.global_batch,
                sequence=self.sequence,
                precision=self.precision,
                framework=self.framework.name,
                stack=self.stack,
                layers=[layer.name for layer in self.layers],
            ),
            self.devices,
        )

    def plan(self, replicas: Any, **more: Any) -> Plan:
        """A plan file for these data. more: other fields of it. Raises pydantic's ValidationError
        where the plan breaks a rule of the file."""
        return Plan.model_validate({**self.common_fields, "replicas": replicas, **more})
