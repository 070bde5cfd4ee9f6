"""The numbers that a replay reads, as they stand in files: the instances of problem `joint`.

Sets    l layers in a chain, n nodes, d devices (numbered node by node), G samples of an iteration.
Data    for each device type, tensor degree and micro-batch: the seconds of every layer;
        for each layer: bytes of weights, of activations and gradients sent to its neighbours, of
        all-reduces in tensor groups, and of tensors kept for the backward pass;
        for each node: its links; for each device type: its memory.
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


class Node(StrictModel):
    """A node: equal devices behind one network card. Bandwidths are bytes/s per direction,
    latencies seconds per message."""

    device: Name
    """Type of the devices."""
    devices: Annotated[int, Field(ge=1, le=4096)]
    """Number of devices."""
    intra_bandwidth: Positive
    """Between two devices of the node."""
    intra_latency: NonNegative
    network_bandwidth: Positive
    """Bytes/s of the network card."""
    network_latency: NonNegative
    switch: Count | None = None
    """Number of the switch above the node; None: one switch above all nodes without a number."""
    uplink_bandwidth: Positive | None = None
    """The node's part of the links from its switch to other switches; None: they are no limit."""
    rails: bool = False
    """Whether every device has a card of its own, an even part of the bandwidth."""
    flow_bandwidth: Positive | None = None
    """The most bytes/s of one message between nodes; None: the bytes/s of the card."""
    all_reduce: dict[Annotated[PositiveCount, Strict(False)], CollectiveCurve] = Field(
        default_factory=dict
    )
    """Number of ranks -> measured curve of an all-reduce inside the node, where one was measured.
    """


class DeviceType(StrictModel):
    """The memory and the optimizer's speed of one device type."""

    memory_bytes: NonNegative
    """Bytes of a device that training can use."""
    update: MoveCurve
    """Seconds of an optimizer's step, by the bytes that it moves."""


class Kept(StrictModel):
    """The bytes per sample that one layer keeps under one mode of recomputation.

    Saved bytes are kept from the forward to the backward pass. Working bytes are needed in addition
    in the layer's backward pass, for what it computes again and, where the framework counts them,
    for gradients.
    """

    saved_bytes: NonNegative
    replicated_saved_bytes: NonNegative = 0.0
    """The part of `saved_bytes` that every tensor rank keeps whole without sequence parallelism."""
    working_bytes: NonNegative = 0.0
    replicated_working_bytes: NonNegative = 0.0
    """The same part of `working_bytes`."""
    gathered_bytes: NonNegative = 0.0
    """The part of `saved_bytes` that sequence-parallel ranks, which divide all other tensors,
    gather and keep whole."""
    gathered_working_bytes: NonNegative = 0.0
    """The same part of `working_bytes`."""


class UnusedGradient(StrictModel):
    """The gradient of a weight that nobody reads. All layers of a device share one of a shape."""

    rows: PositiveCount
    """Rows of the weight."""
    columns: PositiveCount
    divided: Literal["rows", "columns", "nothing"] = "nothing"
    """The dimension of the weight that tensor ranks divide."""


class Layer(StrictModel):
    """The bytes of one layer."""

    name: Name
    param_bytes: NonNegative
    """Bytes of its trained weights."""
    tied_param_bytes: NonNegative = 0.0
    """Bytes of trained weights shared with the first layer; a stage without that layer holds a copy
    of them."""
    frozen_bytes: NonNegative = 0.0
    """Bytes in which it holds its frozen weights, which are neither reduced nor updated."""
    frozen_tied_bytes: NonNegative = 0.0
    """Bytes of frozen weights shared with the first layer; copied as those of `tied_param_bytes`.
    """
    cast_bytes: NonNegative = 0.0
    """Bytes of the largest frozen weight that a product casts from fewer bits."""
    activation_bytes: NonNegative
    """Bytes per sample sent to the next layer."""
    tensor_bytes: NonNegative
    """Bytes per sample all-reduced in a tensor group, in both passes."""
    kept: dict[Recomputation, Kept] = Field(min_length=1)
    """Mode of recomputation -> the bytes that the layer keeps."""
    product_bytes: NonNegative | None = None
    """Bytes per sample of the outputs of its products with trained weights. A pass of weights needs
    their gradients; None: unknown, counted as what the layer keeps from its forward pass."""
    replicated_product_bytes: NonNegative = 0.0
    """The part of `product_bytes` that every tensor rank has whole."""
    unused_gradients: list[UnusedGradient] = Field(default_factory=list)
    """Gradients of its weights that nobody reads, where the framework makes such gradients."""


class Table(StrictModel):
    """Seconds of every layer for one micro-batch on one device of a tensor group."""

    type: Name
    """Type of the device."""
    tensor: PositiveCount
    """Ranks of the tensor group."""
    micro_batch: PositiveCount
    """Samples."""
    forward_seconds: Row
    """[L] of a layer's forward pass."""
    backward_seconds: Row
    """[L] of a layer's backward pass."""
    forward_host_seconds: Row
    """[L] the host's launches within the pass (`hetplan.profiling.rates.times.together`)."""
    backward_host_seconds: Row
    weight_shares: Row = Field(default_factory=list)
    """[L] the share of a layer's backward pass that the gradients of its weights take; empty:
    unknown, counted as half of the pass in layers with weights."""
    repeated: dict[Recomputation, Row] = Field(default_factory=dict)
    """Mode of recomputation -> [L] the share of the forward pass that the backward pass repeats; 1:
    all of it."""


class ReplayData(StrictModel):
    """The numbers that a replay reads; `pose.pose` derives them from a workload."""

    model: Name = "model"
    cluster: Name = "cluster"
    global_batch: PositiveCount
    """Samples of an iteration."""
    sequence: PositiveCount | None = None
    """Tokens per sample; None for images."""
    precision: Literal["fp16", "bf16", "fp32"] = "fp16"
    stack: Name = "fused"
    """Name of the software stack."""
    element_bytes: PositiveCount
    """Bytes of a weight."""
    gradient_bytes: Positive
    """Bytes of a weight's gradient where replicas exchange it."""
    logit_elements: NonNegative = 0.0
    """Logits per sample that the last layer keeps for the loss."""
    logit_bytes: NonNegative = 0.0
    """Bytes of these logits per sample."""
    unused_head_bytes: NonNegative = 0.0
    """Bytes of the unused gradient of the last layer's weight, where the framework makes one."""
    head_input_bytes: NonNegative = 0.0
    """Bytes per sample of that layer's input; 0 where there is no such gradient."""
    reserved_bytes: NonNegative = 0.0
    """Bytes of each device besides its usable memory."""
    hidden_reduces: bool = False
    """Whether all-reduces of tensor groups hide behind products."""
    framework: Framework
    """The memory that it needs besides the model's."""
    tensor_degrees: list[PositiveCount] = Field(min_length=1)
    """Degrees that plans may choose."""
    zero_levels: list[Annotated[int, Field(ge=0, le=3)]] = Field(default=[0, 1, 2, 3], min_length=1)
    """ZeRO levels that plans may choose."""
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
        place_of: dict[tuple[str, int, int], int] = {}
        for i, table in enumerate(self.tables):
            key = (table.type, table.tensor, table.micro_batch)
            if key in place_of:
                raise ValueError(f"tables[{i}] repeats tables[{place_of[key]}]")
            place_of[key] = i

    def _check_rows(self, table: Table, where: str) -> None:
        rows = {
            "forward_seconds": table.forward_seconds,
            "backward_seconds": table.backward_seconds,
            "forward_host_seconds": table.forward_host_seconds,
            "backward_host_seconds": table.backward_host_seconds,
        }
        if table.weight_shares:
            rows["weight_shares"] = table.weight_shares
        for mode in self.modes:
            if mode != "none":
                # a mode that the table lacks counts as a row of the wrong length
                rows[f"repeated.{mode}"] = table.repeated.get(mode, [])
        for name, row in rows.items():
            check_length(row, len(self.layers), f"{where}.{name}", "layer")

    @property
    def devices(self) -> list[tuple[str, int]]:
        """[D] (type, number of the node) of every device."""
        return [(node.device, n) for n, node in enumerate(self.nodes) for _ in range(node.devices)]

    @cached_property
    def uplinks(self) -> dict[int, float]:
        """Switch -> bytes/s of its links to all other switches, which the nodes under it share."""
        parts: dict[int, list[float]] = {}
        for node in self.nodes:
            if node.switch is not None:
                parts.setdefault(node.switch, []).append(node.uplink_bandwidth or math.inf)
        return {switch: sum(of_nodes) for switch, of_nodes in parts.items()}

    @property
    def modes(self) -> tuple[Recomputation, ...]:
        """The modes of recomputation that plans may choose."""
        return tuple(self.layers[0].kept)

    def acting_level(self, zero: int, *, one_virtual_stage: bool) -> int:
        """The ZeRO level that a level acts as in plans without further degrees: on pipelines a
        framework treats levels above its highest one for pipelines as that one.

        one_virtual_stage: whether every replica is one stage of one chunk.
        """
        if one_virtual_stage:
            return zero
        return min(zero, max(self.framework.pipeline_levels))

    def own_levels(self, *, one_virtual_stage: bool) -> list[int]:
        """The levels of `zero_levels` that act as themselves, ascending."""
        return [
            zero
            for zero in sorted(set(self.zero_levels))
            if self.acting_level(zero, one_virtual_stage=one_virtual_stage) == zero
        ]

    @property
    def common_fields(self) -> dict[str, Any]:
        """The fields of a plan file that are equal in all plans for these data."""
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
        """A plan for these data. replicas, more: the other fields of the plan file. Raises
        pydantic's ValidationError where the plan breaks a rule of the file."""
        return Plan.model_validate({**self.common_fields, "replicas": replicas, **more})
