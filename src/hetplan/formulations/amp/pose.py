"""A workload as an AMP problem: degrees, placement, micro-batch and stages (AMP, NeurIPS 2022,
Section 3)."""

from hetplan.formulations.amp.data import AmpData, Device, Layer, LayerSeconds, Memory
from hetplan.profiling.workload import Workload


def pose(workload: Workload, *, memory: bool = True) -> AmpData:
    """The `amp` data of `workload`; with `memory` also the memory constraint that AMP itself
    ignores.

    Layer times leave out tensor-parallel all-reduces, which the problem prices from `tensor_bytes`
    at the bandwidth of each group. A tied head counts its copy of the embedding, as Megatron's last
    stage holds one; a plan with a single stage is thereby charged for it twice.
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
    return AmpData(
        devices=[Device(type=device.type, node=device.node) for device in cluster.devices],
        bandwidth=cluster.bandwidth().tolist(),
        layers=layers,
        layer_seconds=tables,
        global_batch=workload.global_batch,
        # the optional constraint: states of mixed-precision Adam and saved activations, 1F1B
        memory=Memory(
            device_bytes=workload.device_bytes(),
            state_bytes_per_param_byte=workload.state_bytes_per_param_byte,
            layer_bytes_per_sample=[layer.saved_bytes for layer in workload.profile.layers],
        )
        if memory
        else None,
    )
