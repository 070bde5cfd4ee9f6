"""A workload as Ditto's problem: pipeline templates of one cluster, one instance per micro-batch size.

A stage on x devices is tensor parallel here: its layers compute in 1/x of the time and all-reduce their
activations at the node's own bandwidth, half of the bytes in each direction, as the problem has it.
"""

from __future__ import annotations

from collections import Counter

from hetplan.errors import UnsupportedError
from hetplan.formulations.ditto.data import DeviceType, DittoData, Memory, group_sizes
from hetplan.profiling.cluster import Node
from hetplan.profiling.times import all_reduce_seconds
from hetplan.profiling.workload import Workload


def micro_batch_sizes(workload: Workload) -> list[int]:
    """The sizes with which the problem can be posed: divisors of the global batch that every type has times for."""
    common = set.intersection(
        *(set(workload.profile.micro_batches(name, 1)) for name in workload.cluster.types)
    )
    return sorted(size for size in common if workload.global_batch % size == 0)


def pose(workload: Workload, micro_batch: int, *, memory: bool = True) -> DittoData:
    """The `ditto` data of `workload` with micro-batches of that many samples.

    Raises UnsupportedError where nodes differ in their number of devices or have no power of two of them, or
    where the profile has no times of single devices for this micro-batch.
    """
    cluster, profile = workload.cluster, workload.profile
    sizes = {node.devices for node in cluster.nodes}
    if len(sizes) > 1 or next(iter(sizes)) & (next(iter(sizes)) - 1):
        raise UnsupportedError(
            "Ditto's template needs equal nodes",
            where=cluster.name,
            got=", ".join(str(size) for size in sorted(sizes)),
            expected="one power of two of devices in every node",
        )
    nodes = Counter(kind_of(node) for node in cluster.nodes)
    names = kind_names(list(nodes))
    kinds = [
        device_type(workload, kind, name, nodes[kind], next(iter(sizes)), micro_batch)
        for kind, name in zip(nodes, names, strict=True)
    ]
    capacity = workload.device_bytes()
    return DittoData(
        micro_batches=workload.global_batch // micro_batch,
        device_types=kinds,
        memory=Memory(
            device_bytes={name: capacity[kind[0]] for kind, name in zip(nodes, names, strict=True)},
            layer_state_bytes=[
                workload.state_bytes_per_param_byte * layer.held_param_bytes for layer in profile.layers
            ],
            layer_activation_bytes=[layer.saved_bytes * micro_batch for layer in profile.layers],
        )
        if memory
        else None,
    )


Kind = tuple[str, float, float]


def kind_of(node: Node) -> Kind:
    """What makes nodes alike: device, bandwidth and latency inside."""
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
    layers = workload.profile.layers
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
                for layer in layers
            ]
            for x in group_sizes(devices)[1:]
        },
    )
