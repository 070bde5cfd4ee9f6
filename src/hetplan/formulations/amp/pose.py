"""A workload as an AMP problem: degrees, placement, micro-batch and stages (AMP, NeurIPS 2022,
Section 3)."""

from hetplan.formulations.amp.data import AmpData, Device, Layer, LayerSeconds, Memory
from hetplan.profiling.workload import Workload


def pose(workload: Workload, *, memory: bool = True) -> AmpData:
    """The `amp` data of `workload`.

    The layers' times leave out tensor-parallel all-reduces: the problem computes their times from
    `tensor_bytes` and the bandwidth of each tensor group. A tied head counts its copy of the
    embedding, because Megatron's last stage holds one; a plan with a single stage is thereby
    charged twice for the embedding.

    memory: whether to add the memory constraint, which AMP itself ignores.
    """
    cluster, profile = workload.cluster, workload.profile
    layers = [
        Layer(
            name=layer.name,
            param_bytes=layer.held_param_bytes,
            activation_bytes=layer.activation_bytes,
            tensor_bytes=layer.tensor_bytes,
        )
        for layer in profile.layers
    ]
    tables = [
        LayerSeconds(
            type=table.device,
            tensor=table.tensor,
            micro_batch=table.micro_batch,
            seconds=table.layer_seconds(),
        )
        for table in profile.tables
        if table.device in cluster.types
    ]
    frozen = [layer.held_frozen_bytes for layer in profile.layers]
    constraint = None
    if memory:
        constraint = Memory(
            device_bytes=workload.device_bytes(),
            state_bytes_per_param_byte=workload.state_bytes_per_param_byte,
            layer_bytes_per_sample=[layer.saved_bytes for layer in profile.layers],
            layer_frozen_bytes=frozen if any(frozen) else None,
        )
    return AmpData(
        devices=[Device(type=device.type, node=device.node) for device in cluster.devices],
        bandwidth=cluster.bandwidth().tolist(),
        layers=layers,
        layer_seconds=tables,
        global_batch=workload.global_batch,
        memory=constraint,
    )
