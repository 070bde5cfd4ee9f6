"""Random `amp` instances that are small enough to enumerate and nasty enough to matter."""

from __future__ import annotations

from random import Random
from typing import Any

from hetplan.formulations.amp.data import AmpData

BATCHES = (1, 2, 3, 4, 6, 8, 12)


def instance(seed: int, devices: int | None = None) -> AmpData:
    """The instance of `seed`: 1 to 4 devices (or `devices`, 6 is bearable), 1 to 5 layers, 1 to 3
    types.

    Among the seeds: homogeneous and mixed clusters, node-structured and arbitrary bandwidths,
    layers without activations, parameters or all-reduces, equal and uneven layers, tables missing
    for some types or degrees, global batches that no degrees divide, memory that binds and memory
    that nothing fits into.
    """
    rng = Random(seed)
    count = devices or rng.choice((1, 2, 3, 4, 4, 4, 4))
    layers = rng.choice((1, 2, 3, 4, 4, 5, 5))
    types = [f"type{i}" for i in range(rng.randint(1, min(3, count)))]
    placed = [{"type": rng.choice(types), "node": rng.randrange(2)} for _ in range(count)]
    if rng.random() < 0.5:
        placed.sort(key=lambda device: (device["node"], device["type"]))
    chain = make_layers(rng, layers)
    document: dict[str, Any] = {
        "devices": placed,
        "bandwidth": make_bandwidth(rng, placed),
        "layers": chain,
        "layer_seconds": make_tables(rng, count, layers, types),
        "global_batch": rng.choice(BATCHES),
    }
    if rng.random() < 0.4:
        document["memory"] = make_memory(rng, types, chain)
    return AmpData.model_validate(document)


def make_layers(rng: Random, count: int) -> list[dict[str, Any]]:
    """Equal layers or uneven ones, with zeros sprinkled in; sizes near those that make a link cost
    0.1 s."""

    def size(scale: float) -> float:
        return 0.0 if rng.random() < 0.25 else rng.uniform(0.1, 1.0) * scale

    scales = [rng.choice((0.0, 5.0, 50.0)) for _ in range(3)]
    keys = ("param_bytes", "activation_bytes", "tensor_bytes")
    rows = [
        {key: size(scale) for key, scale in zip(keys, scales, strict=True)} for _ in range(count)
    ]
    if rng.random() < 0.4:
        rows = [rows[0]] * count
    return [{"name": f"layer{i}", **row} for i, row in enumerate(rows)]


def make_bandwidth(rng: Random, devices: list[dict[str, Any]]) -> list[list[float]]:
    """Two levels by node, a level per pair of nodes and types, or an arbitrary symmetric matrix."""
    kind = rng.choice(("nodes", "levels", "arbitrary"))
    inside, across = rng.uniform(20, 200), rng.uniform(2, 50)
    levels: dict[tuple[Any, ...], float] = {}
    matrix = [[0.0] * len(devices) for _ in devices]
    for a, left in enumerate(devices):
        for b, right in enumerate(devices[:a]):
            if kind == "nodes":
                value = inside if left["node"] == right["node"] else across
            elif kind == "levels":
                key = tuple(sorted((tuple(left.values()), tuple(right.values()))))
                value = levels.setdefault(key, rng.uniform(2, 200))
            else:
                value = rng.uniform(2, 200)
            matrix[a][b] = matrix[b][a] = value
    return matrix


def make_tables(rng: Random, devices: int, layers: int, types: list[str]) -> list[dict[str, Any]]:
    """Seconds that shrink with the tensor degree and grow with the micro-batch; some are
    missing."""
    speeds = [rng.uniform(0.5, 4.0) for _ in types]
    work = [rng.choice((1.0, 1.0, rng.uniform(0.0, 3.0), 0.0)) for _ in range(layers)]
    rough = rng.random() < 0.5  # type ratios that differ from layer to layer
    gaps = rng.random() < 0.3
    shrink = rng.choice((0.2, 0.5, 0.8))
    batches = rng.choice(((1, 2), (1, 2), (1, 3), (2, 4)))
    entries = [
        {
            "type": name,
            "tensor": tensor,
            "micro_batch": batch,
            "seconds": [
                w * batch**0.9 / speed / tensor**shrink * (rng.uniform(0.7, 1.4) if rough else 1.0)
                for w in work
            ],
        }
        for tensor in range(1, devices + 1)
        if devices % tensor == 0
        for batch in batches
        for name, speed in zip(types, speeds, strict=True)
        if not (gaps and rng.random() < 0.25)
    ]
    for name in types:  # every type needs one table at least
        if not any(entry["type"] == name for entry in entries):
            entries.append({"type": name, "tensor": 1, "micro_batch": batches[0], "seconds": work})
    return entries


def make_memory(rng: Random, types: list[str], layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Capacities from far too small to ample, relative to an even split of what one device would
    hold."""
    factor, per_sample = rng.uniform(1, 8), rng.uniform(0, 20)
    whole = factor * sum(layer["param_bytes"] for layer in layers) + per_sample * len(layers)
    memory: dict[str, Any] = {
        "device_bytes": {
            name: whole * rng.choice((0.1, 0.4, 0.7, 1.0, 2.0, 4.0)) for name in types
        },
        "state_bytes_per_param_byte": factor,
        "layer_bytes_per_sample": [per_sample * rng.choice((0.0, 1.0, 1.0, 2.0)) for _ in layers],
    }
    # A generator of its own, so that instances without frozen weights stay as they were.
    of_frozen = Random(factor)
    if of_frozen.random() < 0.5:
        each = whole / len(layers)
        frozen = [each * of_frozen.choice((0.0, 0.1, 0.6)) for _ in layers]
        memory["layer_frozen_bytes"] = frozen
    return memory
