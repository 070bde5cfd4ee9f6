"""Random `ditto` instances that are small enough to enumerate and nasty enough to matter."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

from ditto.ditto_oracle import Optimum, solve
from hetplan.formulations.ditto.data import DittoData
from hetplan.profiling.hardware.cluster import ClusterFile, build_cluster
from hetplan.profiling.models.model import Model
from hetplan.profiling.profiles.profile import Profile
from hetplan.profiling.workload import Workload, make_workload

SEEDS = range(240)


@cache
def data_of(seed: int) -> DittoData:
    """The instance of `seed`: 1 to 5 layers, 1 to 3 types, nodes of 1, 2 or 4 devices.

    Among the seeds: equal layers and uneven ones, layers that cost nothing, all-reduces that are
    free or dearer than they save, two types that are the same, types without nodes, fewer
    micro-batches than devices, memory that binds and memory that nothing fits into.
    """
    rng = Random(seed)
    size = rng.choice((1, 2, 2, 4))
    layers = rng.choice((1, 2, 3, 4, 4, 5, 5))
    count = rng.randint(1, 3)
    work = make_work(rng, layers)
    kinds: list[dict[str, Any]] = []
    for i in range(count):
        if kinds and rng.random() < 0.15:
            twin = {**kinds[-1], "name": f"type{i}", "nodes": rng.randint(0, 2)}
            kinds.append(twin)
        else:
            kinds.append(make_kind(rng, f"type{i}", size, work))
    document: dict[str, Any] = {
        "micro_batches": rng.choice((1, 2, 3, 4, 4, 8, 8, 32)),
        "device_types": kinds,
    }
    if rng.random() < 0.4:
        document["memory"] = make_memory(rng, [kind["name"] for kind in kinds], layers)
    return DittoData.model_validate(document)


@cache
def optimum_of(seed: int) -> Optimum | None:
    """Its optimum, None where it is infeasible."""
    return solve(data_of(seed))


@cache
def middle_instance(seed: int) -> DittoData:
    """10 to 16 layers on two or three types of 2 to 8 devices each: beyond enumeration."""
    rng = Random(seed)
    size = rng.choice((1, 2))
    work = make_work(rng, rng.randint(10, 16))
    kinds = [make_kind(rng, f"type{i}", size, work) for i in range(rng.randint(2, 3))]
    kinds = [{**kind, "nodes": rng.randint(2, 8) // size} for kind in kinds]
    return DittoData.model_validate(
        {"micro_batches": rng.choice((12, 24, 40)), "device_types": kinds}
    )


def make_work(rng: Random, layers: int) -> list[float]:
    """Seconds per layer at speed 1: equal, nearly equal (ties), small whole numbers or uneven; some
    0."""
    style = rng.choice(("equal", "whole", "uneven", "nearly"))
    if style == "equal":
        work = [1.0] * layers
    elif style == "nearly":  # equal but for less than the evaluator's tie
        work = [rng.choice((0.2, 1.0, 1.0, 1.0 + 4e-10, 1.0 - 4e-10)) for _ in range(layers)]
    elif style == "whole":
        work = [float(rng.randint(1, 4)) for _ in range(layers)]
    else:
        work = [rng.uniform(0.1, 3.0) for _ in range(layers)]
    if rng.random() < 0.15:
        work[rng.randrange(layers)] = 0.0
    if rng.random() < 0.3:
        work[-1] *= 3.0
    return work


def make_kind(rng: Random, name: str, size: int, work: list[float]) -> dict[str, Any]:
    """A device type: whole or odd speeds, sometimes differing from layer to layer."""
    speed = rng.choice((1.0, 2.0, 4.0, rng.uniform(0.5, 6.0)))
    rough = rng.random() < 0.3
    share = rng.choice((1 / 3, 0.5))
    factors = [rng.uniform(0.7, 1.4) if rough else 1.0 for _ in work]
    seconds = [w / speed * f for w, f in zip(work, factors, strict=True)]
    link = rng.choice((0.0, 0.02, 0.1, 0.6))
    return {
        "name": name,
        "nodes": rng.choice((0, 1, 1, 2, 2, 3)) if size < 4 else rng.choice((0, 1, 1)),
        "devices_per_node": size,
        "forward_seconds": [t * share for t in seconds],
        "backward_seconds": [t * (1 - share) for t in seconds],
        "allreduce_seconds": {
            str(x): [link * (x - 1) / x * rng.choice((0.5, 1.0)) for _ in work]
            for x in (2, 4)
            if x <= size
        },
    }


def make_memory(rng: Random, names: list[str], layers: int) -> dict[str, Any]:
    """Capacities from far too small to ample, relative to what all layers need at once."""
    state = [rng.choice((0.0, 1.0, 2.0)) for _ in range(layers)]
    activation = [rng.choice((0.0, 0.5, 1.0)) for _ in range(layers)]
    whole = sum(state) + 2 * sum(activation)
    return {
        "device_bytes": {
            name: whole * rng.choice((0.1, 0.3, 0.5, 0.7, 1.0, 2.0)) for name in names
        },
        "layer_state_bytes": state,
        "layer_activation_bytes": activation,
    }


def workload_on(
    *nodes: dict[str, Any],
    model: str | Model = "gpt2",
    batch: int = 8,
    profile: Profile | None = None,
) -> Workload:
    """A model on nodes given as the cluster file has them. profile: None: it is predicted."""
    links = {
        "intra_node_gbit_per_s": 80.0,
        "network_gbit_per_s": 10.0,
        "intra_node_latency_us": 0.0,
    }
    header = {"format": "hetplan-cluster", "version": 1, "name": "test"}
    document = {**header, "nodes": [{**links, **node} for node in nodes]}
    cluster = build_cluster(ClusterFile.model_validate(document))
    return make_workload(model, cluster, batch, profile=profile)
