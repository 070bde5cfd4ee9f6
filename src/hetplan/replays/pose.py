"""The sixth problem of a workload: its numbers, gathered into one self-contained instance."""

import math
from collections.abc import Collection, Sequence

from hetplan.plans.plan import Recomputation
from hetplan.profiling.hardware.cluster import Node as ClusterNode
from hetplan.profiling.models import operators
from hetplan.profiling.models.operators import ELEMENT_BYTES, REPEATED
from hetplan.profiling.profiles.profile import ProfileTable
from hetplan.profiling.rates.collectives import node_fabric, stretched
from hetplan.profiling.rates.products import move_curve
from hetplan.profiling.rates.times import Rates, kept_bytes, repeated_share
from hetplan.profiling.workload import Workload
from hetplan.replays.costs import Costs
from hetplan.replays.data import DeviceType, Kept, Layer, Node, ReplayData, Table
from hetplan.replays.memory import inputs_bytes, logits_of
from hetplan.schema import derived

GATHERED_AGAIN = ("operators", "full")  # recomputation that does not keep them in blocks
PLAIN: tuple[Recomputation, ...] = ("none",)


def pose(workload: Workload, modes: Sequence[Recomputation] = PLAIN) -> ReplayData:
    """The instance of a workload. modes: of recomputation, which plans may choose from; the first
    is `none`. Learned links are not part of it (`Costs` takes them). Raises InputError where a
    number is out of range."""
    model, cluster, profile = workload.model, workload.cluster, workload.profile
    width = ELEMENT_BYTES[workload.precision]
    exchanged = workload.stack.gradient_bytes
    logits, logit_bytes = logits_of(model.layers[-1], workload.precision)
    largest = max(node.devices for node in cluster.nodes)
    usable, switches = workload.device_bytes(), dict.fromkeys(n.switch for n in cluster.nodes)
    with derived(f"{model.name} on {cluster.name}"):
        return ReplayData(
            model=model.name,
            cluster=cluster.name,
            global_batch=workload.global_batch,
            sequence=workload.sequence,
            precision=workload.precision,
            stack=workload.stack.name,
            element_bytes=width,
            gradient_bytes=width if exchanged is None else exchanged,
            logit_elements=logits,
            logit_bytes=logit_bytes,
            reserved_bytes=workload.reserved_bytes,
            hidden_reduces=workload.stack.hidden_reduces,
            framework=workload.framework,
            tensor_degrees=[t for t in range(1, largest + 1) if model.tensor_degree_fits(t)],
            nodes=[node_of(node, switches) for node in cluster.nodes],
            types={
                kind: DeviceType(
                    memory_bytes=usable[kind],
                    update=move_curve("binary", kind, cluster.specs[kind]),
                )
                for kind in cluster.types
            },
            layers=[
                Layer(
                    name=layer.name,
                    param_bytes=layer.param_bytes,
                    tied_param_bytes=layer.tied_param_bytes,
                    activation_bytes=layer.activation_bytes,
                    tensor_bytes=layer.tensor_bytes,
                    kept={mode: kept_of(workload, l, mode) for mode in modes},
                )
                for l, layer in enumerate(profile.layers)
            ],
            tables=[
                table_of(workload, table, [mode for mode in modes if mode != "none"])
                for table in profile.tables
                if table.device in usable
            ],
        )


def node_of(node: ClusterNode, switches: Collection[tuple[int, int]]) -> Node:
    """The node with the measured all-reduces of its fabric. switches: of the cluster, in order."""
    fabric, limited = node_fabric(node), node.uplink < math.inf
    curves = {n: stretched(fabric, "all-reduce", n) for n in range(2, node.devices + 1)}
    return Node(
        device=node.device,
        devices=node.devices,
        intra_bandwidth=node.intra_bandwidth,
        intra_latency=node.intra_latency,
        network_bandwidth=node.network_bandwidth,
        network_latency=node.network_latency,
        switch=[*switches].index(node.switch) if limited else None,
        uplink_bandwidth=node.uplink if limited else None,
        rails=node.rails,
        all_reduce={n: curve for n, curve in curves.items() if curve is not None},
    )


def table_of(workload: Workload, table: ProfileTable, modes: Sequence[Recomputation]) -> Table:
    """A table of the profile with what each mode repeats."""
    none = [0.0] * len(table.forward_seconds)
    spec = workload.cluster.specs[table.device]
    rates = Rates(table.device, spec, workload.precision, workload.stack)
    repeated: dict[Recomputation, list[float]] = {}
    for mode in modes:
        shares = {
            layer.operators: repeated_share(layer, mode, rates, table.micro_batch, table.tensor)
            for layer in workload.model.layers
        }
        repeated[mode] = [shares[layer.operators] for layer in workload.model.layers]
    return Table(
        type=table.device,
        tensor=table.tensor,
        micro_batch=table.micro_batch,
        forward_seconds=table.forward_seconds,
        backward_seconds=table.backward_seconds,
        forward_host_seconds=table.forward_host_seconds or none,
        backward_host_seconds=table.backward_host_seconds or none,
        repeated=repeated,
    )


def kept_of(workload: Workload, at: int, mode: Recomputation) -> Kept:
    """What a layer keeps and needs. Without recomputation the profile says it, which may have been
    measured; the rest follows from what one device keeps and what two tensor ranks do."""
    layer, precision = workload.model.layers[at], workload.precision
    posed, repeats = workload.profile.layers[at], layer.kind in REPEATED
    gathered = gathered_bytes(workload, layer)
    before = workload.profile.layers[at - 1].activation_bytes if at else 0.0
    again = repeats and mode in GATHERED_AGAIN
    if mode == "none":
        saved, whole = posed.saved_bytes, posed.replicated_saved_bytes
        return Kept(saved_bytes=saved, replicated_saved_bytes=whole, gathered_bytes=gathered)
    saved, halved = (kept_bytes(layer, mode, precision, tensor, before) for tensor in (1, 2))
    whole = min(max(2 * halved - saved, 0.0), saved)
    all_of_it = sum(t.size(precision) for t in layer.saved)
    undivided = sum(t.size(precision) for t in layer.saved if not t.split)
    return Kept(
        saved_bytes=saved,
        replicated_saved_bytes=whole,
        working_bytes=max(all_of_it - saved, 0.0) if repeats else 0.0,
        replicated_working_bytes=max(undivided - whole, 0.0) if repeats else 0.0,
        gathered_bytes=0.0 if again else gathered,
        gathered_working_bytes=gathered if again else 0.0,
    )


def gathered_bytes(workload: Workload, layer: operators.Layer) -> float:
    """Bytes per sample of the inputs of products that sequence parallel ranks gather and keep."""
    return workload.framework.whole_inputs * inputs_bytes(layer, workload.precision)


def costs_of(workload: Workload, mode: Recomputation = "none") -> Costs:
    """The workload's costs under a mode of recomputation: made once, kept with the workload."""

    def posed() -> Costs:
        modes = tuple(dict.fromkeys((*PLAIN, mode)))
        return Costs(pose(workload, modes), mode, workload.links)

    return workload.answers.once((Costs, mode), posed)
