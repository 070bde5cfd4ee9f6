"""A workload as Ditto's problem: pipeline templates of one cluster, one instance per micro-batch
size.

A stage on x devices is tensor parallel here: its layers compute in 1/x of the time and all-reduce
their activations at the bandwidth inside the node. A layer's all-reduced bytes are halved, because
the problem counts one all-reduce for each pass. The problem asks for the same power of two of
devices in every node. Where nodes have other numbers, or the model divides over fewer devices only,
each node is posed as several nodes of M devices (`group_size`), and no stage has more devices.
"""

from collections import Counter
from collections.abc import Mapping

from hetplan.errors import UnsupportedError
from hetplan.formulations.ditto.data import DeviceType, DittoData, Memory, group_sizes
from hetplan.profiling.hardware.cluster import Node
from hetplan.profiling.rates.times import all_reduce_seconds
from hetplan.profiling.workload import Workload

# Nodes that are alike: (device, bandwidth inside in bytes/s, latency inside in seconds).
Kind = tuple[str, float, float]


def micro_batch_sizes(workload: Workload) -> list[int]:
    """The micro-batch sizes with which the problem can be posed: divisors of the global batch for
    which the profile has times of every device type."""
    common = set.intersection(
        *(set(workload.profile.micro_batches(name, 1)) for name in workload.cluster.types)
    )
    return sorted(size for size in common if workload.global_batch % size == 0)


def pose(
    workload: Workload, micro_batch: int, *, memory: bool = True, width: int | None = None
) -> DittoData:
    """The `ditto` data of `workload`.

    micro_batch: samples of a micro-batch. memory: whether memory is a constraint. width: most
    devices of a stage, a power of two up to `group_size`; None: `group_size`.
    Raises UnsupportedError where the profile has no times of single devices for this micro-batch.
    """
    size = width or group_size(workload)
    nodes: Counter[Kind] = Counter()  # nodes of `size` devices of each kind
    for node in workload.cluster.nodes:
        nodes[kind_of(node)] += node.devices // size
    name_of = dict(zip(nodes, kind_names(list(nodes)), strict=True))
    device_types = [
        device_type(workload, kind, name_of[kind], nodes[kind], size, micro_batch) for kind in nodes
    ]
    limits = None
    if memory:
        limits = memory_of(workload, name_of, micro_batch)
    return DittoData(
        micro_batches=workload.global_batch // micro_batch,
        device_types=device_types,
        memory=limits,
    )


def memory_of(workload: Workload, name_of: Mapping[Kind, str], micro_batch: int) -> Memory:
    """The memory constraint of a workload. name_of: kind of nodes -> name of its device type."""
    capacity = workload.device_bytes()
    layers = workload.profile.layers
    per_byte = workload.state_bytes_per_param_byte
    return Memory(
        device_bytes={name: capacity[device] for (device, *_), name in name_of.items()},
        layer_state_bytes=[
            per_byte * layer.held_param_bytes + layer.held_frozen_bytes for layer in layers
        ],
        layer_activation_bytes=[layer.saved_bytes * micro_batch for layer in layers],
    )


def group_size(workload: Workload) -> int:
    """M: the largest power of two that divides every node's number of devices and is a tensor
    degree of the model."""

    def fits(size: int) -> bool:
        divides_nodes = all(node.devices % size == 0 for node in workload.cluster.nodes)
        return workload.model.tensor_degree_fits(size) and divides_nodes

    size = 1
    while fits(2 * size):
        size *= 2
    return size


def kind_of(node: Node) -> Kind:
    """The kind of a node; nodes of one kind become one device type."""
    return (node.device, node.intra_bandwidth, node.intra_latency)


def kind_names(kinds: list[Kind]) -> list[str]:
    """The name of each kind: its device's, numbered where kinds of one device differ in their
    links."""
    kinds_of_device = Counter(device for device, *_ in kinds)
    numbers: Counter[str] = Counter()
    names = []
    for device, *_ in kinds:
        numbers[device] += 1
        if kinds_of_device[device] == 1:
            names.append(device)
        else:
            names.append(f"{device} ({numbers[device]})")
    return names


def device_type(
    workload: Workload, kind: Kind, name: str, nodes: int, devices: int, micro_batch: int
) -> DeviceType:
    """The device type of one kind, with the profile's times of single devices.

    nodes: number of nodes. devices: number of devices of each node.
    """
    device, bandwidth, latency = kind
    table = workload.profile.table(device, 1, micro_batch)
    if table is None:
        raise UnsupportedError(
            f"no times of single devices of {device} for micro-batch {micro_batch}",
            where=f"profile of {workload.profile.model}",
        )

    def layer_all_reduces(x: int) -> list[float]:
        """[L] seconds of one all-reduce of each layer on x devices."""
        seconds = []
        for layer in workload.profile.layers:
            if layer.tensor_bytes:
                size = layer.tensor_bytes / 2 * micro_batch
                seconds.append(all_reduce_seconds(size, x, bandwidth, latency))
            else:
                seconds.append(0.0)
        return seconds

    return DeviceType(
        name=name,
        nodes=nodes,
        devices_per_node=devices,
        forward_seconds=table.forward_seconds,
        backward_seconds=table.backward_seconds,
        allreduce_seconds={str(x): layer_all_reduces(x) for x in group_sizes(devices)[1:]},
    )
