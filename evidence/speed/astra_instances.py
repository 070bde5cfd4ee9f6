"""Writes the packaged `astra` instances and their optima.

    python -m evidence.speed astra_instances [folder]

Astra's models on its A800, H100 and H800 pools, 1024 and 4096 GPUs (Sections 5.2 and 5.3), each a
strategy with a deep pipeline as eq. 22-23 poses it: with the paper's equal layers per type, and
without; kept as they are. Then one with four types, 32 stages and 96 layers, and a tiny one for
checking by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from evidence.speed.packaging import LIBRARY, given_folder, write_proven
from hetplan.formulations.astra.data import AstraData, DeviceType
from hetplan.instances.library import Instance, load_instance

FOLDER = LIBRARY / "astra"

# Written by an earlier search, which posed its best strategy as eq. 22-23 does; its origin says
# how. A search now has embedding and head on the first and last stage, whose instance is one of
# fixed stage counts.
SETTINGS = (
    "llama2-7b-a800-h100-1024-pp8",
    "llama2-13b-a800-h100-1024-pp8",
    "llama2-70b-a800-h100-1024-pp16",
    "llama3-8b-a800-h100-1024-pp8",
    "llama3-70b-a800-h100-h800-4096-pp16",
    "glm-67b-a800-h100-h800-4096-pp32",
    "glm-130b-a800-h100-h800-4096-pp32",
)


def four_types() -> Instance:
    """The largest size that the paper's complexity analysis speaks to: four types, unequal
    transfers."""
    kinds = [
        DeviceType(name=name, max_devices=most, layer_seconds=seconds, p2p_seconds=transfer)
        for name, most, seconds, transfer in (
            ("H100", 640, 0.0031, 0.0011),
            ("H800", 640, 0.0037, 0.0019),
            ("A800", 1024, 0.0089, 0.0014),
            ("V100", 1024, 0.0223, 0.0042),
        )
    ]
    data = AstraData(
        layers=96,
        stages=32,
        micro_batches=64,
        data_parallel=8,
        tensor_parallel=8,
        device_types=kinds,
        equal_layers_per_type=False,
    )
    return Instance(
        problem="astra", name="four-types-32x96", origin="hetplan: made up, by hand", data=data
    )


def tiny() -> Instance:
    """Six layers on three stages of two types: one fast stage of 4 layers and two slow ones, 11.5 s
    in all."""
    kinds = [
        DeviceType(name="fast", max_devices=1, layer_seconds=0.5, p2p_seconds=0.5),
        DeviceType(name="slow", max_devices=2, layer_seconds=1.5, p2p_seconds=0.5),
    ]
    data = AstraData(
        layers=6,
        stages=3,
        micro_batches=3,
        data_parallel=1,
        tensor_parallel=1,
        device_types=kinds,
        equal_layers_per_type=False,
    )
    return Instance(
        problem="astra", name="tiny-two-types", origin="hetplan: made up, by hand", data=data
    )


def both(instance: Instance) -> Iterator[Instance]:
    """The instance, and the same with the paper's own restriction."""
    yield instance
    equal = instance.data.model_copy(update={"equal_layers_per_type": True})
    yield Instance(
        problem="astra", name=f"{instance.name}-equal", origin=instance.origin, data=equal
    )


def instances() -> Iterator[Instance]:
    """All of them."""
    for setting in SETTINGS:
        yield from both(load_instance(FOLDER / f"{setting}.json"))
    yield from both(four_types())
    yield from both(tiny())


def main(folder: Path) -> None:
    """Write every instance and its record; a missing proof is an error."""
    write_proven(instances(), folder)


if __name__ == "__main__":
    main(given_folder(FOLDER))
