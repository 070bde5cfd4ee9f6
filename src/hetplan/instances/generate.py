"""Generates random instances from catalogued devices, published models and networks as they are
sold.

`draw(problem, seed)` returns the same instance as long as the predictor does not change: the
instance's `origin` names the predictor's version. A packaged instance of an earlier version stays
as it is. A cluster has 1 to 4 device types, 1 to 3 nodes of each type, the same number of devices
(a power of two) in every node, and one network bandwidth. A model comes from the zoo. The functions
of the families draw everything else. Size `small` has at most 8 devices, for general solvers;
`medium` has at most 32.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetplan.errors import InputError, look_up, require
from hetplan.instances.library import Instance
from hetplan.profiling.hardware.cluster import Cluster, ClusterFile, build_cluster, catalogue
from hetplan.profiling.models.model import load_model
from hetplan.profiling.profiles.predict import PREDICTOR
from hetplan.profiling.workload import Workload, make_workload
from hetplan.text import devices_counted

SIZES: Mapping[str, int] = {"small": 8, "medium": 32}  # size -> most devices
MODELS = (
    "gpt2",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "bert-base",
    "bert-large",
    "llama-0.5b",
    "llama-1.1b",
)
NETWORK_GBIT = (1, 10, 25, 100, 200, 400)  # Ethernet and InfiniBand
LINK_GBIT = (64, 128, 256, 1200, 2400, 4800)  # PCIe and NVLink
# How many workloads are drawn until a family can make an instance of one: some models do not fit in
# memory, and some clusters do not allow a family's degrees.
TRIES = 50


@dataclass(frozen=True)
class Draw:
    """A source of random clusters and workloads."""

    rng: random.Random
    most: int  # the most devices of a cluster

    def cluster(self) -> Cluster:
        """A random cluster of catalogued device types."""
        rng = self.rng
        # At most half of the devices are in one node, so that there can be two nodes.
        per_node = rng.choice([n for n in (1, 2, 4, 8) if n <= self.most // 2])
        nodes_left = self.most // per_node
        # The first 25 types of the catalogue: a seed's instance stays the same as the catalogue
        # grows.
        candidates = sorted(list(catalogue())[:25])
        types = rng.sample(candidates, rng.randint(1, min(4, nodes_left)))
        network = rng.choice(NETWORK_GBIT)
        nodes = []
        for number, name in enumerate(types):
            types_after = len(types) - number - 1  # each needs a node
            # There are at most as many types as nodes, so that a node is left for each type.
            count = rng.randint(1, min(3, nodes_left - types_after))
            nodes_left -= count
            nodes.append(
                {
                    "count": count,
                    "devices": per_node,
                    "device": name,
                    "intra_node_gbit_per_s": rng.choice(LINK_GBIT),
                    "network_gbit_per_s": network,
                }
            )
        document = {"format": "hetplan-cluster", "version": 1, "name": "random", "nodes": nodes}
        return build_cluster(ClusterFile.model_validate(document))

    def workload(
        self, model: str | None = None, batches: tuple[int, ...] = (16, 32, 64, 128)
    ) -> Workload:
        """A random workload: a model (None: one of MODELS) on a random cluster with one of the
        global batch sizes."""
        loaded = load_model(model or self.rng.choice(MODELS))
        cluster = self.cluster()
        return make_workload(loaded, cluster, self.rng.choice(batches))


def draw(problem: str, seed: int, size: str = "small") -> Instance:
    """The random instance of a problem that belongs to `seed`.

    size: a key of SIZES. Raises InputError for an unknown problem or size.
    """
    require(
        problem in MAKERS,
        "no generator for the problem",
        got=problem,
        expected=f"one of {', '.join(MAKERS)}",
    )
    most = look_up("unknown size", size, SIZES)
    rng = random.Random(f"{problem}-{size}-{seed}")
    for _ in range(TRIES):
        made = MAKERS[problem](Draw(rng, most))
        if made is not None:
            data, description = made
            command = f"hetplan instances generate {problem} --seed {seed} --size {size}"
            return Instance(
                problem=problem,
                name=f"random-{problem}-{size}-{seed}",
                origin=f"{command}: {description}, predicted profile (predictor {PREDICTOR})",
                data=data,
            )
    raise InputError(f"no instance in {TRIES} tries", where=f"{problem}, seed {seed}, size {size}")


def workload_text(workload: Workload) -> str:
    """A workload's model, devices and batch as text."""
    devices = devices_counted(workload.cluster.counts())
    return f"{workload.model.name} on {devices}, batch {workload.global_batch}"


# (the data of an instance, a description of the workload that they pose)
DescribedData = tuple[Any, str]


def amp(source: Draw) -> DescribedData | None:
    """A random instance of amp. It has memory limits with probability 1/2."""
    from hetplan.formulations.amp.pose import pose

    workload = source.workload()
    memory = source.rng.random() < 0.5
    description = workload_text(workload)
    if memory:
        description += ", with memory"
    return pose(workload, memory=memory), description


def ditto(source: Draw) -> DescribedData | None:
    """A random instance of ditto, with one of the micro-batch sizes that the workload allows; None
    where it allows none. It has memory limits with probability 1/2."""
    from hetplan.formulations.ditto.pose import micro_batch_sizes, pose

    workload = source.workload()
    memory = source.rng.random() < 0.5
    sizes = micro_batch_sizes(workload)
    if not sizes:
        return None
    size = source.rng.choice(sizes)
    description = f"{workload_text(workload)}, micro-batches of {size}"
    if memory:
        description += ", with memory"
    return pose(workload, size, memory=memory), description


def poplar(source: Draw) -> DescribedData | None:
    """A random instance of poplar at one ZeRO stage; None where the model does not fit.

    With probability 1/2, micro-batches that do not fill whole tiles of samples cost up to 40 %
    more.
    """
    from hetplan.formulations.poplar.data import PoplarData
    from hetplan.formulations.poplar.pose import pose

    rng = source.rng
    workload = source.workload(batches=(64, 256, 1024, 4096))
    stage = rng.randrange(4)
    posed = pose(workload, stage)
    if posed.unfit is not None:
        return None
    data = posed.data
    description = f"{workload_text(workload)}, ZeRO {stage}"
    if rng.random() < 0.5:
        tile = rng.choice((2, 4, 8))
        extra = rng.uniform(0.05, 0.4)
        document = data.model_dump()
        for device in document["devices"]:
            device["step_seconds"] = with_tiles(device["step_seconds"], tile, extra)
        data = PoplarData.model_validate(document)
        description += f", incomplete tiles of {tile} cost up to {100 * extra:.0f} % more"
    return data, description


def with_tiles(step_seconds: Sequence[float], tile: int, extra: float) -> list[float]:
    """The seconds of micro-batches of 1, 2, 3, … samples on a device that computes whole tiles.

    step_seconds: the seconds without tiles. tile: samples of a tile. A micro-batch whose last tile
    lacks m samples takes `extra * m / tile` of its seconds longer.
    """
    seconds = []
    for samples, plain_seconds in enumerate(step_seconds, start=1):
        missing = (-samples) % tile  # samples that the last tile lacks
        seconds.append(plain_seconds * (1 + extra * missing / tile))
    return seconds


def astra(source: Draw) -> DescribedData | None:
    """A random instance of astra: the segments of a pipeline of a model's blocks.

    The profile gives the seconds of a block on each device type; stages and degrees are drawn. None
    where the profile lacks a table, or the devices do not suffice for the stages.
    """
    from hetplan.formulations.astra.data import AstraData, DeviceType

    rng = source.rng
    workload = source.workload()
    cluster, profile = workload.cluster, workload.profile
    blocks = len(profile.layers) - 2  # without embedding and head
    # Where the profile has no micro-batch, it has no table for one of 1 sample either.
    micro_batch = rng.choice(profile.micro_batches(cluster.types[0], 1) or (1,))
    stages = rng.randint(2, min(24, blocks))
    data_parallel = rng.choice((1, 2, 4))
    network = min(node.network_bandwidth for node in cluster.nodes)
    kinds = []
    for name in cluster.types:
        table = profile.table(name, 1, micro_batch)
        if table is None:
            return None
        # Layer 1 is the first block.
        message_seconds = profile.layers[1].activation_bytes * micro_batch / network
        max_devices = rng.randint(1, stages) * data_parallel
        # The links of a type may be slower or faster than the network.
        link_factor = rng.choice((1.0, rng.uniform(0.5, 2.0)))
        kind = DeviceType(
            name=name,
            max_devices=max_devices,
            layer_seconds=table.layer_seconds()[1],
            p2p_seconds=2 * message_seconds * link_factor,  # activations there, gradients back
        )
        kinds.append(kind)
    stages_of_types = [kind.max_devices // data_parallel for kind in kinds]  # at most
    if sum(stages_of_types) < stages:
        return None
    data = AstraData(
        layers=blocks,
        stages=stages,
        micro_batches=max(1, workload.global_batch // (micro_batch * data_parallel)),
        data_parallel=data_parallel,
        tensor_parallel=1,
        device_types=kinds,
        equal_layers_per_type=rng.random() < 0.5,
    )
    return (
        data,
        f"blocks of {workload_text(workload)}, {stages} stages, micro-batches of {micro_batch}",
    )


def joint(source: Draw) -> DescribedData | None:
    """A random instance of joint. With probability 1/2, plans may choose recomputation."""
    from hetplan.replays.pose import PLAIN, pose

    workload = source.workload()
    description = workload_text(workload)
    recomputations = PLAIN
    if source.rng.random() < 0.5:
        recomputations = (*PLAIN, "full")
        description += ", with recomputation"
    return pose(workload, recomputations), description


# Problem -> the function that makes a random instance of it; None: it cannot make one of the
# workload that it drew.
MAKERS: Mapping[str, Callable[[Draw], DescribedData | None]] = {
    "amp": amp,
    "astra": astra,
    "ditto": ditto,
    "joint": joint,
    "poplar": poplar,
}
