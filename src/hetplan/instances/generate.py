"""Random instances from what can be: catalogued devices, published models, networks as they are
sold.

`draw(problem, seed)` is the same instance as long as the predictor is: `origin` names its version,
and a packaged instance of an earlier one stays what it was. A cluster has 1 to 4 device types, 1 to
3 nodes of each with the same power of two of devices, and one network; a model is one of the zoo's;
everything else is the family's. `small`: at most 8 devices, for general solvers; `medium`: at most
32.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hetplan.errors import InputError, look_up, require
from hetplan.instances.library import Instance
from hetplan.profiling.hardware.cluster import Cluster, ClusterFile, build_cluster, catalogue
from hetplan.profiling.models.model import load_model
from hetplan.profiling.profiles.predict import PREDICTOR
from hetplan.profiling.workload import Workload, make_workload
from hetplan.text import devices_counted

SIZES: Mapping[str, int] = {"small": 8, "medium": 32}
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
NETWORK_GBIT = (1, 10, 25, 100, 200, 400)
LINK_GBIT = (64, 128, 256, 1200, 2400, 4800)
# Tries of workloads until the family can make an instance of one (memory, degrees).
TRIES = 50


@dataclass(frozen=True)
class Draw:
    """The random numbers and limits that an instance is made from."""

    rng: random.Random
    most: int

    def cluster(self) -> Cluster:
        """Types, nodes and a network."""
        rng = self.rng
        per_node = rng.choice([n for n in (1, 2, 4, 8) if n <= self.most // 2])
        left = self.most // per_node
        # the first of the catalogue: draws of a seed stay what they are as it grows
        types = rng.sample(sorted(list(catalogue())[:25]), rng.randint(1, min(4, left)))
        network, nodes = rng.choice(NETWORK_GBIT), []
        for at, name in enumerate(types):
            count = rng.randint(1, max(1, min(3, left - (len(types) - at - 1))))
            left -= count
            nodes.append(
                {
                    "count": count,
                    "devices": per_node,
                    "device": name,
                    "intra_node_gbit_per_s": rng.choice(LINK_GBIT),
                    "network_gbit_per_s": network,
                }
            )
        return build_cluster(
            ClusterFile.model_validate(
                {"format": "hetplan-cluster", "version": 1, "name": "random", "nodes": nodes}
            )
        )

    def workload(
        self, model: str | None = None, batches: tuple[int, ...] = (16, 32, 64, 128)
    ) -> Workload:
        """A model on a cluster."""
        return make_workload(
            load_model(model or self.rng.choice(MODELS)), self.cluster(), self.rng.choice(batches)
        )


def draw(problem: str, seed: int, size: str = "small") -> Instance:
    """The random instance of `seed`; raises InputError for a problem or a size that there is
    not."""
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
            data, what = made
            command = f"hetplan instances generate {problem} --seed {seed} --size {size}"
            return Instance(
                problem=problem,
                name=f"random-{problem}-{size}-{seed}",
                origin=f"{command}: {what}, predicted profile (predictor {PREDICTOR})",
                data=data,
            )
    raise InputError(f"no instance in {TRIES} tries", where=f"{problem}, seed {seed}, size {size}")


def described(workload: Workload) -> str:
    """Model, devices and batch."""
    devices = devices_counted(workload.cluster.counts())
    return f"{workload.model.name} on {devices}, batch {workload.global_batch}"


Made = tuple[Any, str]


def amp(source: Draw) -> Made | None:
    """A workload, every second one with memory."""
    from hetplan.formulations.amp.pose import pose

    workload, memory = source.workload(), source.rng.random() < 0.5
    return pose(workload, memory=memory), described(workload) + (", with memory" if memory else "")


def ditto(source: Draw) -> Made | None:
    """A workload and one of the micro-batch sizes that it can have, every second one with
    memory."""
    from hetplan.formulations.ditto.pose import micro_batch_sizes, pose

    workload, memory = source.workload(), source.rng.random() < 0.5
    sizes = micro_batch_sizes(workload)
    if not sizes:
        return None
    size = source.rng.choice(sizes)
    what = f"{described(workload)}, micro-batches of {size}" + (", with memory" if memory else "")
    return pose(workload, size, memory=memory), what


def poplar(source: Draw) -> Made | None:
    """A workload at one ZeRO stage; of every second one incomplete tiles of samples cost more, up
    to 40 %."""
    from hetplan.formulations.poplar.data import PoplarData
    from hetplan.formulations.poplar.pose import pose

    rng = source.rng
    workload, stage = source.workload(batches=(64, 256, 1024, 4096)), rng.randrange(4)
    posed = pose(workload, stage)
    if posed.unfit is not None:
        return None
    data, what = posed.data, f"{described(workload)}, ZeRO {stage}"
    if rng.random() < 0.5:
        tile, extra = rng.choice((2, 4, 8)), rng.uniform(0.05, 0.4)
        devices = [
            device.model_copy(
                update={
                    "step_seconds": [
                        t * (1 + extra * ((-b) % tile) / tile)
                        for b, t in enumerate(device.step_seconds, start=1)
                    ]
                }
            )
            for device in data.devices
        ]
        data = PoplarData.model_validate(
            {**data.model_dump(), "devices": [d.model_dump() for d in devices]}
        )
        what += f", incomplete tiles of {tile} cost up to {100 * extra:.0f} % more"
    return data, what


def astra(source: Draw) -> Made | None:
    """Segments of a pipeline: a block's time per type by the profile, stages and degrees drawn."""
    from hetplan.formulations.astra.data import AstraData, DeviceType

    rng = source.rng
    workload = source.workload()
    cluster, profile = workload.cluster, workload.profile
    blocks = len(profile.layers) - 2
    micro_batch = rng.choice(profile.micro_batches(cluster.types[0], 1) or (1,))
    stages, data_parallel = rng.randint(2, min(24, blocks)), rng.choice((1, 2, 4))
    network = min(node.network_bandwidth for node in cluster.nodes)
    kinds = []
    for name in cluster.types:
        table = profile.table(name, 1, micro_batch)
        if table is None:
            return None
        sent = profile.layers[1].activation_bytes * micro_batch / network
        kinds.append(
            DeviceType(
                name=name,
                max_devices=rng.randint(1, stages) * data_parallel,
                layer_seconds=table.layer_seconds()[1],
                p2p_seconds=2 * sent * rng.choice((1.0, rng.uniform(0.5, 2.0))),
            )
        )
    if sum(kind.max_devices // data_parallel for kind in kinds) < stages:
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
    return data, f"blocks of {described(workload)}, {stages} stages, micro-batches of {micro_batch}"


def joint(source: Draw) -> Made | None:
    """A workload, every second one with recomputation to choose from."""
    from hetplan.replays.pose import PLAIN, pose

    workload, again = source.workload(), source.rng.random() < 0.5
    what = described(workload) + (", with recomputation" if again else "")
    return pose(workload, (*PLAIN, "full") if again else PLAIN), what


MAKERS: Mapping[str, Callable[[Draw], Made | None]] = {
    "amp": amp,
    "astra": astra,
    "ditto": ditto,
    "joint": joint,
    "poplar": poplar,
}
