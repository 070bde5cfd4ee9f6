"""A workload as Ditto's problem: pipeline templates of one cluster, one instance per micro-batch
size.

A stage on x devices is tensor parallel here: its layers compute in 1/x of the time and all-reduce
their activations at the node's own bandwidth, half of the bytes in each direction, as the problem
has it. The problem wants the same power of two of devices in every node. Where nodes have other
numbers, or the model divides over fewer devices only, each node is posed as several of M devices, M
as `group_size`: no stage is wider than that.
"""

from collections import Counter

from hetplan.errors import UnsupportedError
from hetplan.formulations.ditto.data import DeviceType, DittoData, Memory, group_sizes
from hetplan.profiling.hardware.cluster import Node
from hetplan.profiling.rates.times import all_reduce_seconds
from hetplan.profiling.workload import Workload


def micro_batch_sizes(workload: Workload) -> list[int]:
    """The sizes with which the problem can be posed: divisors of the global batch that every type
    has times for."""
    common = set.intersection(
        *(set(workload.profile.micro_batches(name, 1)) for name in workload.cluster.types)
    )
    return sorted(size for size in common if workload.global_batch % size == 0)


def pose(
    workload: Workload, micro_batch: int, *, memory: bool = True, width: int | None = None
) -> DittoData:
    """The `ditto` data of `workload` with micro-batches of that many samples.

    width: most devices of a stage, a power of two up to `group_size`, which it is by default.
    Raises UnsupportedError where the profile has no times of single devices for this micro-batch.
    """
    cluster, profile, size = workload.cluster, workload.profile, width or group_size(workload)
    nodes: Counter[Kind] = Counter()
    for node in cluster.nodes:
        nodes[kind_of(node)] += node.devices // size
    names = kind_names(list(nodes))
    kinds = [
        device_type(workload, kind, name, nodes[kind], size, micro_batch)
        for kind, name in zip(nodes, names, strict=True)
    ]
    capacity = workload.device_bytes()
    return DittoData(
        micro_batches=workload.global_batch // micro_batch,
        device_types=kinds,
        memory=Memory(
            device_bytes={name: capacity[kind[0]] for kind, name in zip(nodes, names, strict=True)},
            layer_state_bytes=[
                workload.state_bytes_per_param_byte * layer.held_param_bytes
                for layer in profile.layers
            ],
            layer_activation_bytes=[layer.saved_bytes * micro_batch for layer in profile.layers],
        )
        if memory
        else None,
    )


def group_size(workload: Workload) -> int:
    """M: the largest power of two that divides every node's devices and is a tensor degree of the
    model."""
    size = 1
    while workload.model.tensor_degree_fits(2 * size) and all(
        node.devices % (2 * size) == 0 for node in workload.cluster.nodes
    ):
        size *= 2
    return size


Kind = tuple[str, float, float]


def kind_of(node: Node) -> Kind:
    """The key of nodes that are alike: device, bandwidth and latency inside."""
    return (node.device, node.intra_bandwidth, node.intra_latency)


def kind_names(kinds: list[Kind]) -> list[str]:
    """The device's name, numbered where nodes of one device differ in their links."""
    seen = Counter(kind[0] for kind in kinds)
    numbers: Counter[str] = Counter()
    names = []
    for device, *_ in kinds:
        numbers[device] += 1
        names.append(device if seen[device] == 1 else f"{device} ({numbers[device]})")
    return names


def device_type(
    workload: Workload, kind: Kind, name: str, nodes: int, devices: int, micro_batch: int
) -> DeviceType:
    """One type with the profile's times of single devices."""
    device, bandwidth, latency = kind
    table = workload.profile.table(device, 1, micro_batch)
    if table is None:
        raise UnsupportedError(
            f"no times of single devices of {device} for micro-batch {micro_batch}",
            where=f"profile of {workload.profile.model}",
        )
    return DeviceType(
        name=name,
        nodes=nodes,
        devices_per_node=devices,
        forward_seconds=table.forward_seconds,
        backward_seconds=table.backward_seconds,
        allreduce_seconds={
            str(x): [
                all_reduce_seconds(layer.tensor_bytes / 2 * micro_batch, x, bandwidth, latency)
                if layer.tensor_bytes
                else 0.0
                for layer in workload.profile.layers
            ]
            for x in group_sizes(devices)[1:]
        },
    )
