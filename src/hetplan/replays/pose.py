"""The numbers of a workload's replays: an instance of problem `joint`, and the costs from it."""

import math
from collections.abc import Collection, Sequence

from hetplan.plans.plan import Recomputation
from hetplan.profiling.hardware.cluster import Node as ClusterNode
from hetplan.profiling.models import operators
from hetplan.profiling.models.operators import BLOCKS, ELEMENT_BYTES, REPEATED
from hetplan.profiling.profiles.profile import ProfileTable
from hetplan.profiling.rates.collectives import node_fabric, stretched
from hetplan.profiling.rates.products import move_curve
from hetplan.profiling.rates.times import (
    Rates,
    kept_bytes,
    product_bytes,
    repeated_share,
    weight_share,
)
from hetplan.profiling.workload import Workload
from hetplan.replays.costs import Costs
from hetplan.replays.data import (
    DeviceType,
    Kept,
    Layer,
    Node,
    ReplayData,
    Table,
    UnusedGradient,
)
from hetplan.replays.memory import (
    head_of,
    inputs_bytes,
    logits_of,
    weight_shapes,
    working_gradients,
)
from hetplan.replays.model_states import STAGES
from hetplan.schema import derived

# Modes of recomputation in which the blocks do not keep gathered inputs, but gather them again.
GATHERED_AGAIN = ("operators", "full")
PLAIN: tuple[Recomputation, ...] = ("none",)


def pose(
    workload: Workload,
    modes: Sequence[Recomputation] = PLAIN,
    zero_levels: Sequence[int] = STAGES,
) -> ReplayData:
    """The instance of a workload.

    Learned efficiency of links is not part of it; `Costs` takes it apart. Raises InputError where a
    number is out of range.

    modes: the modes of recomputation that plans may choose; the first one is `none`. zero_levels:
    the ZeRO levels that they may choose.
    """
    model, cluster, profile = workload.model, workload.cluster, workload.profile
    element_bytes = ELEMENT_BYTES[workload.precision]
    gradient_bytes = workload.stack.gradient_bytes
    if gradient_bytes is None:
        gradient_bytes = element_bytes
    logits, logit_bytes = logits_of(model.layers[-1], workload.precision)
    head_weight = head_input = 0.0
    if workload.framework.unused_gradients:
        head_weight, head_input = head_of(model.layers[-1], workload.precision)
    largest_node = max(node.devices for node in cluster.nodes)  # tensor groups lie within a node
    usable_bytes = workload.device_bytes()
    products = [product_bytes(layer, workload.precision) for layer in model.layers]
    switches = dict.fromkeys(node.switch for node in cluster.nodes)
    repeating_modes = [mode for mode in modes if mode != "none"]
    with derived(f"{model.name} on {cluster.name}"):
        types = {
            name: DeviceType(
                memory_bytes=usable_bytes[name],
                update=move_curve("binary", name, cluster.specs[name]),
            )
            for name in cluster.types
        }
        layers = [
            Layer(
                name=layer.name,
                param_bytes=layer.param_bytes,
                tied_param_bytes=layer.tied_param_bytes,
                frozen_bytes=layer.frozen_bytes,
                frozen_tied_bytes=layer.frozen_tied_bytes,
                cast_bytes=layer.cast_bytes,
                activation_bytes=layer.activation_bytes,
                tensor_bytes=layer.tensor_bytes,
                kept={mode: kept_of(workload, l, mode) for mode in modes},
                product_bytes=products[l][0],
                replicated_product_bytes=products[l][1],
                unused_gradients=unused_gradients_of(workload, model.layers[l]),
            )
            for l, layer in enumerate(profile.layers)
        ]
        tables = [
            table_of(workload, table, repeating_modes)
            for table in profile.tables
            if table.device in usable_bytes
        ]
        return ReplayData(
            model=model.name,
            cluster=cluster.name,
            global_batch=workload.global_batch,
            sequence=workload.sequence,
            precision=workload.precision,
            stack=workload.stack.name,
            element_bytes=element_bytes,
            gradient_bytes=gradient_bytes,
            logit_elements=logits,
            logit_bytes=logit_bytes,
            unused_head_bytes=head_weight,
            head_input_bytes=head_input,
            reserved_bytes=workload.reserved_bytes,
            hidden_reduces=workload.stack.hidden_reduces,
            framework=workload.framework,
            zero_levels=sorted(zero_levels),
            tensor_degrees=[t for t in range(1, largest_node + 1) if model.tensor_degree_fits(t)],
            nodes=[node_of(node, switches) for node in cluster.nodes],
            types=types,
            layers=layers,
            tables=tables,
        )


def node_of(node: ClusterNode, switches: Collection[tuple[int, int]]) -> Node:
    """The node with the measured all-reduces of its fabric. switches: the switches of the cluster,
    in the order of its nodes."""
    fabric = node_fabric(node)
    curves = {n: stretched(fabric, "all-reduce", n) for n in range(2, node.devices + 1)}
    has_uplink = node.uplink < math.inf
    return Node(
        device=node.device,
        devices=node.devices,
        intra_bandwidth=node.intra_bandwidth,
        intra_latency=node.intra_latency,
        network_bandwidth=node.network_bandwidth,
        network_latency=node.network_latency,
        switch=[*switches].index(node.switch) if has_uplink else None,
        uplink_bandwidth=node.uplink if has_uplink else None,
        rails=node.rails,
        flow_bandwidth=node.flow if node.flow < math.inf else None,
        all_reduce={n: curve for n, curve in curves.items() if curve is not None},
    )


def table_of(workload: Workload, table: ProfileTable, modes: Sequence[Recomputation]) -> Table:
    """A table of the profile with the share of the forward pass that each mode repeats."""
    no_seconds = [0.0] * len(table.forward_seconds)
    spec = workload.cluster.specs[table.device]
    rates = Rates(table.device, spec, workload.precision, workload.stack)
    model = workload.model
    different, size = set(model.first_alike), (table.micro_batch, table.tensor)
    repeated: dict[Recomputation, list[float]] = {}
    for mode in modes:
        shares = {l: repeated_share(model.layers[l], mode, rates, *size) for l in different}
        repeated[mode] = [shares[l] for l in model.first_alike]
    of_weights = {l: weight_share(model.layers[l], rates, *size) for l in different}
    return Table(
        type=table.device,
        tensor=table.tensor,
        micro_batch=table.micro_batch,
        forward_seconds=table.forward_seconds,
        backward_seconds=table.backward_seconds,
        forward_host_seconds=table.forward_host_seconds or no_seconds,
        backward_host_seconds=table.backward_host_seconds or no_seconds,
        weight_shares=[of_weights[l] for l in model.first_alike],
        repeated=repeated,
    )


def kept_of(workload: Workload, l: int, mode: Recomputation) -> Kept:
    """The bytes that layer l keeps under a mode of recomputation.

    Without recomputation the profile states these bytes, which may have been measured. Otherwise
    they follow from the layer's saved tensors (`kept_bytes`).
    """
    layer, precision = workload.model.layers[l], workload.precision
    gathered = gathered_bytes(workload, layer)
    working = replicated_working = 0.0
    if workload.framework.activation_gradients and layer.kind in REPEATED:
        working, replicated_working = working_gradients(layer, precision)
    if mode == "none":
        profiled = workload.profile.layers[l]
        return Kept(
            saved_bytes=profiled.saved_bytes,
            replicated_saved_bytes=profiled.replicated_saved_bytes,
            working_bytes=working,
            replicated_working_bytes=replicated_working,
            gathered_bytes=gathered,
        )
    input_bytes = workload.profile.layers[l - 1].activation_bytes if l else 0.0
    # kernels are fused with their neighbours by a compiler (`operators.Stack.kernels`)
    compiled = workload.stack.kernels < 1
    saved = kept_bytes(layer, mode, precision, 1, input_bytes, compiled=compiled)
    # Each of two tensor ranks keeps replicated + (saved - replicated) / 2 bytes.
    on_each_of_two = kept_bytes(layer, mode, precision, 2, input_bytes, compiled=compiled)
    # The limits hold but for rounding.
    replicated = min(max(2 * on_each_of_two - saved, 0.0), saved)
    gathers_again = False
    if layer.kind in REPEATED:
        all_bytes = sum(t.size(precision) for t in layer.saved)
        all_replicated = sum(t.size(precision) for t in layer.saved if not t.split)
        # What is kept already is not held again. A kept input may exceed all tensors of a layer.
        working += max(all_bytes - saved, 0.0)
        replicated_working += max(all_replicated - replicated, 0.0)
        gathers_again = mode in GATHERED_AGAIN
    return Kept(
        saved_bytes=saved,
        replicated_saved_bytes=replicated,
        working_bytes=working,
        replicated_working_bytes=replicated_working,
        gathered_bytes=0.0 if gathers_again else gathered,
        gathered_working_bytes=gathered if gathers_again else 0.0,
    )


def unused_gradients_of(workload: Workload, layer: operators.Layer) -> list[UnusedGradient]:
    """The unused gradients of a block's weights, one for each shape; none where the framework makes
    none, and for other layers."""
    if not workload.framework.unused_gradients or layer.kind not in BLOCKS:
        return []
    return [
        UnusedGradient(rows=shape.rows, columns=shape.columns, divided=shape.divided)
        for shape in weight_shapes(layer)
    ]


def gathered_bytes(workload: Workload, layer: operators.Layer) -> float:
    """Bytes per sample of the inputs of products that sequence-parallel ranks gather and keep; 0
    where the framework does not keep them."""
    if not workload.framework.whole_inputs:
        return 0.0
    return inputs_bytes(layer, workload.precision)


def costs_of(workload: Workload, mode: Recomputation = "none") -> Costs:
    """The workload's costs under a mode of recomputation; the workload caches them."""

    def new_costs() -> Costs:
        modes = tuple(dict.fromkeys((*PLAIN, mode)))
        return Costs(pose(workload, modes), mode, workload.links)

    return workload.answers.once((Costs, mode), new_costs)
