"""Writes the sets `random` and `scaling` of the library.

    python -m evidence.speed library_instances [folder]

random: `hetplan instances generate`, seeds 0, 1, …, those that have a decision. scaling: one axis
at a time around one workload. Each with its optimum, or with the bound proven in two minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evidence.speed.packaging import LIBRARY, given_folder, write_best
from hetplan.formulations.amp.data import AmpData
from hetplan.formulations.amp.pose import pose as pose_amp
from hetplan.formulations.astra.data import AstraData, DeviceType
from hetplan.formulations.ditto.data import DittoData
from hetplan.formulations.ditto.pose import pose as pose_ditto
from hetplan.formulations.poplar.pose import pose as pose_poplar
from hetplan.instances.generate import draw
from hetplan.instances.library import Instance
from hetplan.profiling.hardware.cluster import Cluster, ClusterFile, build_cluster
from hetplan.profiling.models.model import load_model
from hetplan.profiling.profiles.predict import PREDICTOR
from hetplan.profiling.workload import Workload, make_workload

RANDOM = {
    ("amp", "small"): 20,
    ("amp", "medium"): 16,
    ("ditto", "small"): 20,
    ("ditto", "medium"): 20,
    ("poplar", "small"): 20,
    ("poplar", "medium"): 16,
    ("astra", "small"): 20,
    ("astra", "medium"): 20,
}
TYPES = ("V100-SXM2-16GB", "T4", "A100-SXM4-40GB", "RTX-3090")


def cluster(types: int, nodes: int, per_node: int = 4) -> Cluster:
    """`nodes` nodes of each of the first `types` types."""
    entries = [
        {
            "count": nodes,
            "devices": per_node,
            "device": name,
            "intra_node_gbit_per_s": 256,
            "network_gbit_per_s": 25,
        }
        for name in TYPES[:types]
    ]
    document = {"format": "hetplan-cluster", "version": 1, "name": "scaling", "nodes": entries}
    return build_cluster(ClusterFile.model_validate(document))


def workload(
    types: int = 2, nodes: int = 2, batch: int = 32, model: str = "gpt2-medium"
) -> Workload:
    """The workload around which the axes lie."""
    return make_workload(load_model(model), cluster(types, nodes), batch)


def stretched(data: dict[str, Any], blocks: int) -> dict[str, Any]:
    """The same with another number of blocks: every list of one entry per layer is first + block *
    n + last."""
    layers = (
        len(data["layers"]) if "layers" in data else len(data["device_types"][0]["forward_seconds"])
    )

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: walk(one) for key, one in value.items()}
        if not isinstance(value, list):
            return value
        if len(value) == layers and not isinstance(value[0], list):
            return [value[0], *[value[1]] * blocks, value[-1]]
        return [walk(one) for one in value]

    found = walk(data)
    if "layers" in found:
        found["layers"] = [
            {**layer, "name": f"layer{i}"} for i, layer in enumerate(found["layers"])
        ]
    assert isinstance(found, dict)
    return found


def amp() -> Iterator[tuple[str, Any]]:
    """Layers, devices, types, batch."""
    for blocks in (10, 22, 46, 94):
        yield (
            f"layers-{blocks + 2}",
            AmpData.model_validate(stretched(pose_amp(workload()).model_dump(), blocks)),
        )
    for nodes in (1, 3, 4, 6, 8):
        yield f"devices-{8 * nodes}", pose_amp(workload(nodes=nodes))
    for types in (1, 3, 4):
        yield f"types-{types}", pose_amp(workload(types=types))
    for batch in (16, 64, 128, 256):
        yield f"batch-{batch}", pose_amp(workload(batch=batch))


def ditto() -> Iterator[tuple[str, Any]]:
    """Layers, devices, types, micro-batches."""
    base = pose_ditto(workload(), 1, memory=False)
    for blocks in (10, 46, 94, 190):
        yield f"layers-{blocks + 2}", DittoData.model_validate(stretched(base.model_dump(), blocks))
    for nodes in (1, 3, 4, 6):
        yield f"devices-{8 * nodes}", pose_ditto(workload(nodes=nodes, batch=64), 1, memory=False)
    for types in (1, 3, 4):
        yield f"types-{types}", pose_ditto(workload(types=types, batch=64), 1, memory=False)
    for batch in (16, 64, 256):
        yield f"batch-{batch}", pose_ditto(workload(batch=batch), 1, memory=False)


def poplar() -> Iterator[tuple[str, Any]]:
    """Devices, types, batch, each for ZeRO 1 and 3."""
    for stage in (1, 3):
        for nodes in (1, 4, 16, 64):
            found = pose_poplar(workload(nodes=nodes, batch=32 * nodes, model="llama-0.5b"), stage)
            yield f"devices-{8 * nodes}-zero{stage}", found.data
        for types in (1, 3, 4):
            yield (
                f"types-{types}-zero{stage}",
                pose_poplar(workload(types, 2, 256, "llama-0.5b"), stage).data,
            )
        for batch in (64, 512, 2048):
            yield (
                f"batch-{batch}-zero{stage}",
                pose_poplar(workload(2, 2, batch, "llama-0.5b"), stage).data,
            )


def astra() -> Iterator[tuple[str, Any]]:
    """Layers, stages, types, devices."""

    def made(layers: int = 96, stages: int = 16, types: int = 3) -> AstraData:
        kinds = [
            DeviceType(
                name=f"type{i}",
                max_devices=8 * max(1, round(1.4 * stages / types)),
                layer_seconds=0.004 * 1.7**i,
                p2p_seconds=0.0011 + 0.0006 * i,
            )
            for i in range(types)
        ]
        return AstraData(
            layers=layers, stages=stages, micro_batches=64, data_parallel=8, tensor_parallel=1,
            device_types=kinds,
            equal_layers_per_type=False,
        )  # fmt: skip

    for layers in (24, 48, 192, 384):
        yield f"layers-{layers}", made(layers=layers)
    for stages in (4, 8, 32, 64):
        yield f"stages-{stages}", made(stages=stages)
    for types in (1, 2, 4, 6, 8):
        yield f"types-{types}", made(types=types)


def instances() -> Iterator[Instance]:
    """Both sets."""
    for problem, maker in (("amp", amp), ("astra", astra), ("ditto", ditto), ("poplar", poplar)):
        for name, data in maker():
            times = f"hetplan's predicted profile (predictor {PREDICTOR})"
            if problem == "astra":
                times = "made-up times"
            origin = f"hetplan: {name.replace('-', ' ')}, all else fixed; {times}"
            yield Instance(
                problem=problem, name=f"scaling-{problem}-{name}", origin=origin, data=data
            )
    for (problem, size), count in RANDOM.items():
        for seed in range(count):
            yield draw(problem, seed, size)


def main(folder: Path) -> None:
    """Write every instance with a decision."""
    for instance in instances():
        write_best(instance, folder)


if __name__ == "__main__":
    main(given_folder(LIBRARY))
