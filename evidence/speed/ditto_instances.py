"""Writes the packaged `ditto` instances and their optima.

    python -m evidence.speed ditto_instances [folder]

Ex1 to Ex5 of Ditto's Figure 8 with GPT-2 XL, 32 and 128 micro-batches, without memory as in the
paper. As the paper does, the layers are profiled on one device (RTX 4090; here hetplan's
prediction, fp16, 4 samples per micro-batch, sequence 1024) and scaled to the others by Figure 8's
relative throughputs. Two heads: as predicted (the product with the vocabulary costs as much as two
blocks and more), and flat (it costs as much as one block).
All-reduces inside a node move the activations of tensor parallelism over PCIe: 12 GB/s on version 3
(V100, A6000 and RTX 3090 in the same hosts), 24 GB/s on version 4 (RTX 4090, A100), which the paper
does not state.
Then three that go beyond the paper: Ex3 with the A100s of Ex5, Ex3 and Ex5 with memory, and three
types of four nodes with eight devices under 98 layers; and a tiny one for checking by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from evidence.speed.packaging import LIBRARY, given_folder, write_proven
from hetplan.formulations.ditto.data import DeviceType, DittoData, Memory, group_sizes
from hetplan.instances.library import Instance
from hetplan.profiling.frameworks import RESERVED_BYTES
from hetplan.profiling.hardware.cluster import GIB, device
from hetplan.profiling.models.model import Model, load_model
from hetplan.profiling.profiles.predict import PREDICTOR
from hetplan.profiling.rates.times import Rates, all_reduce_seconds, layer_time
from hetplan.profiling.workload import STATE_BYTES_PER_PARAM

FOLDER = LIBRARY / "ditto"

# Figure 8: relative throughput on GPT-2 XL; and PCIe bytes/s, memory.
TYPES: dict[str, tuple[float, float, float]] = {
    "v100_16gb": (1.0, 12e9, 16 * GIB),
    "rtx_3090_24gb": (2.0, 12e9, 24 * GIB),
    "rtx_a6000": (2.95, 12e9, 48 * GIB),
    "rtx_4090_24gb": (3.8, 24e9, 24 * GIB),
    "a_100_80gb_pcie": (5.99, 24e9, 80 * GIB),
}
PROFILED, CATALOGUE_NAME = "rtx_4090_24gb", "RTX-4090"
MICRO_BATCH = 4
# Figure 8: devices per node, nodes by type.
CLUSTERS: dict[str, tuple[int, dict[str, int]]] = {
    "ex1": (2, {"v100_16gb": 2, "rtx_3090_24gb": 2}),
    "ex2": (2, {"v100_16gb": 2, "rtx_3090_24gb": 2, "rtx_a6000": 2}),
    "ex3": (2, {"v100_16gb": 4, "rtx_3090_24gb": 3, "rtx_a6000": 2, "rtx_4090_24gb": 2}),
    "ex4": (4, {"v100_16gb": 2, "rtx_3090_24gb": 2, "rtx_a6000": 2}),
    "ex5": (2, {"v100_16gb": 4, "rtx_3090_24gb": 4, "a_100_80gb_pcie": 2}),
}
FIVE_TYPES = (2, {**CLUSTERS["ex3"][1], "a_100_80gb_pcie": 2})
LARGE = (8, {"v100_16gb": 4, "rtx_3090_24gb": 4, "a_100_80gb_pcie": 4})


def posed(
    cluster: tuple[int, dict[str, int]],
    micro_batches: int,
    *,
    flat: bool = False,
    blocks: int = 48,
    memory: bool = False,
) -> DittoData:
    """GPT-2 XL (with that many blocks) on a cluster; see the module for what is assumed."""
    model = load_model("gpt2-xl")
    layers = [model.layers[0], *[model.layers[1]] * blocks, model.layers[-1]]
    spec = device(CATALOGUE_NAME)
    rates = Rates(CATALOGUE_NAME, spec, model.precision)
    profiled = [layer_time(layer, rates, micro_batch=MICRO_BATCH) for layer in layers]
    if flat:
        profiled[-1] = profiled[-2]
    size, nodes = cluster
    kinds = []
    for name, count in nodes.items():
        throughput, bandwidth, _ = TYPES[name]
        slower = TYPES[PROFILED][0] / throughput
        kinds.append(
            DeviceType(
                name=name,
                nodes=count,
                devices_per_node=size,
                forward_seconds=[t.forward * slower for t in profiled],
                backward_seconds=[t.backward * slower for t in profiled],
                allreduce_seconds={
                    # tensor_bytes counts both directions, the problem each
                    str(x): [
                        all_reduce_seconds(
                            layer.tensor_bytes(model.precision) / 2 * MICRO_BATCH, x, bandwidth
                        )
                        for layer in layers
                    ]
                    for x in group_sizes(size)[1:]
                },
            )
        )
    limits = memory_of(model, blocks, nodes) if memory else None
    return DittoData(micro_batches=micro_batches, device_types=kinds, memory=limits)


def memory_of(model: Model, blocks: int, nodes: dict[str, int]) -> Memory:
    """States of mixed-precision Adam and saved activations; 1.5 GiB of each device are not
    usable."""
    layers = [model.layers[0], *[model.layers[1]] * blocks, model.layers[-1]]
    return Memory(
        device_bytes={name: TYPES[name][2] - RESERVED_BYTES for name in nodes},
        layer_state_bytes=[STATE_BYTES_PER_PARAM * float(layer.params) for layer in layers],
        layer_activation_bytes=[
            layer.saved_bytes(model.precision) * MICRO_BATCH for layer in layers
        ],
    )


def tiny() -> DittoData:
    """Six equal layers on one fast and two slow devices: the fast one takes four, 15 seconds in
    all."""
    kinds = [
        DeviceType(
            name=name,
            nodes=nodes,
            devices_per_node=1,
            forward_seconds=[t / 3] * 6,
            backward_seconds=[t * 2 / 3] * 6,
        )
        for name, nodes, t in (("fast", 1, 0.375), ("slow", 2, 1.5))
    ]
    return DittoData(micro_batches=8, device_types=kinds)


def instances() -> Iterator[Instance]:
    """All of them."""
    profile = (
        f"hetplan's predicted profile (predictor {PREDICTOR}; RTX 4090, fp16, micro-batch 4, "
        "sequence 1024), scaled by Figure 8"
    )
    for name, cluster in {**CLUSTERS, "ex3-a100": FIVE_TYPES}.items():
        for micro_batches in (32, 128):
            for flat in (False, True):
                head = "a head like one block" if flat else "the head as predicted"
                yield Instance(
                    problem="ditto",
                    name=f"ditto-{name}-nb{micro_batches}-{'flat' if flat else 'head'}",
                    origin=f"Ditto, Figure 8, {name}: GPT-2 XL, {profile}, {head}",
                    data=posed(cluster, micro_batches, flat=flat),
                )
    for name in ("ex3", "ex5"):
        yield Instance(
            problem="ditto",
            name=f"ditto-{name}-nb32-memory",
            origin=f"Ditto, Figure 8, {name}: GPT-2 XL, {profile}, with memory (Adam, mixed "
            "precision, 1F1B)",
            data=posed(CLUSTERS[name], 32, memory=True),
        )
    yield Instance(
        problem="ditto",
        name="ditto-three-types-96-gpus-nb128",
        origin=f"hetplan: three types of four nodes with eight devices, GPT-2 XL with 94 blocks, "
        f"{profile}",
        data=posed(LARGE, 128, blocks=94),
    )
    yield Instance(
        problem="ditto", name="tiny-fast-slow", origin="hetplan: made up, by hand", data=tiny()
    )


def main(folder: Path) -> None:
    """Write every instance and its record; a missing proof is an error."""
    write_proven(instances(), folder)


if __name__ == "__main__":
    main(given_folder(FOLDER))
