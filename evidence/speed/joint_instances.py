"""Writes the packaged `joint` instances and their best-known plans.

    python -m evidence.speed joint_instances [folder] [--seconds S] [--only PATTERN]

Tiny ones (transformers of one or two blocks on two or three devices), the eight workloads of
docs/workloads.md, clusters of two kinds of nodes whose fastest plans are not those of the papers,
clusters of three types, 64 GPUs, and random ones of `hetplan instances generate joint`. All have
hetplan's predicted profile.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from evidence.speed.packaging import LIBRARY, add_to_library
from hetplan.formulations import family
from hetplan.instances.generate import draw
from hetplan.instances.library import Instance
from hetplan.planner.variants import useful_modes
from hetplan.profiling.hardware.cluster import Cluster, ClusterFile, build_cluster, example_cluster
from hetplan.profiling.models.model import Model, load_model
from hetplan.profiling.models.zoo import gpt2, llama, text_model
from hetplan.profiling.profiles.predict import PREDICTOR
from hetplan.profiling.workload import make_workload
from hetplan.replays.pose import pose
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run

FOLDER = LIBRARY / "joint"
Nodes = list[tuple[int, int, str, float, float]]  # nodes, devices each, type, Gbit/s in and between

DOCUMENTED = {
    "amp": ("gpt2-medium", "amp-mixed", 32),
    "astra": ("llama2-7b", "astra-64", 512),
    "hap": ("bert-base", "hap-64", 256),
    "poplar": ("llama-0.5b", "poplar-b", 64),
    "ditto": ("gpt2-medium", "ditto-ex1", 32),
    "home": ("llama-1.1b", "home", 32),
    "department": ("llama2-7b", "department", 64),
    "company": ("llama2-13b", "company", 512),
}
MIXED: dict[str, tuple[str, int, Nodes]] = {
    "two-kinds-gpt2-xl": (
        "gpt2-xl", 128,
        [(1, 8, "A100-SXM4-80GB", 4800, 100), (2, 4, "V100-SXM2-32GB", 1200, 25)],
    ),
    "two-kinds-llama2-7b": (
        "llama2-7b", 256,
        [(2, 8, "A100-SXM4-40GB", 4800, 100), (4, 4, "A6000", 128, 25)],
    ),
    "desk-gpt2-large": (
        "gpt2-large", 24, [(1, 2, "RTX-3090", 128, 10), (1, 1, "RTX-4090", 128, 10)],
    ),
    "three-types-gpt2-xl": (
        "gpt2-xl", 64,
        [(1, 4, "A100-SXM4-40GB", 4800, 100), (1, 4, "V100-SXM2-16GB", 1200, 25),
         (1, 4, "T4", 64, 25)],
    ),
    "three-types-llama-1.1b": (
        "llama-1.1b", 48,
        [(1, 2, "A6000", 128, 10), (1, 4, "RTX-3090", 128, 10), (1, 2, "RTX-4090", 128, 10)],
    ),
    "three-types-bert-large": (
        "bert-large", 96,
        [(2, 2, "L4", 64, 25), (1, 4, "T4", 64, 25), (1, 2, "V100-SXM2-16GB", 1200, 25)],
    ),
    "sixty-four-gpus-llama2-13b": (
        "llama2-13b", 256,
        [(2, 8, "H100-SXM5-80GB", 7200, 400), (4, 8, "A100-SXM4-80GB", 4800, 200),
         (2, 8, "V100-SXM2-32GB", 1200, 100)],
    ),
    "sixty-four-gpus-gpt2-xl": (
        "gpt2-xl", 128,
        [(8, 4, "V100-SXM2-16GB", 1200, 25), (8, 4, "T4", 64, 25)],
    ),
}  # fmt: skip
TINY: list[Nodes] = [
    [(1, 2, "T4", 64, 10)],
    [(2, 1, "T4", 64, 10)],
    [(1, 1, "V100-SXM2-16GB", 64, 10), (1, 1, "T4", 64, 10)],
    [(1, 2, "V100-SXM2-16GB", 1200, 10), (1, 1, "T4", 64, 10)],
    [(1, 1, "A100-SXM4-40GB", 4800, 25), (1, 2, "L4", 64, 25)],
    [(3, 1, "RTX-3090", 64, 1)],
]


def cluster(name: str, nodes: Nodes) -> Cluster:
    """A cluster of such nodes."""
    keys = ("count", "devices", "device", "intra_node_gbit_per_s", "network_gbit_per_s")
    entries = [dict(zip(keys, node, strict=True)) for node in nodes]
    document = {"format": "hetplan-cluster", "version": 1, "name": name, "nodes": entries}
    return build_cluster(ClusterFile.model_validate(document))


def tiny_model(kind: str, blocks: int) -> Model:
    """A transformer of so many blocks, 256 wide."""
    shape = gpt2(blocks, 256, 4) if kind == "gpt2" else llama(blocks, 256, 4, 768)
    return load_model(text_model(f"tiny-{kind}-{blocks}", "made up", 256, shape))


def posed(name: str, model: str | Model, on: Cluster, batch: int) -> Instance:
    """A workload with its useful modes of recomputation."""
    workload = make_workload(model, on, batch)
    data: Any = pose(workload, ("none", *useful_modes(workload)))
    origin = f"{workload.model.name} on {on.name}, batch {batch}, hetplan's predicted profile"
    origin = f"{origin} (predictor {PREDICTOR})"
    return Instance(problem="joint", name=name, origin=origin, data=data)


def instances() -> Iterator[Instance]:
    """All of them."""
    for n, nodes in enumerate(TINY):
        for kind, blocks, batch in (("gpt2", 1, 2), ("llama", 2, 3)):
            on = cluster(f"tiny {n}", nodes)
            yield posed(f"tiny-joint-{kind}-{n}", tiny_model(kind, blocks), on, batch)
    for name, (model, on_name, batch) in DOCUMENTED.items():
        yield posed(f"joint-{name}", model, example_cluster(on_name), batch)
    for name, (model, batch, nodes) in MIXED.items():
        yield posed(f"joint-{name}", model, cluster(name, nodes), batch)
    for seed in range(10):
        yield draw("joint", seed, "small")
    for seed in range(4):
        yield draw("joint", seed, "medium")


def main() -> None:
    """Write every instance with the best plan of the time that it has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--only", default="*")
    options = parser.parse_args()
    for instance in instances():
        if not fnmatch(instance.name, options.only):
            continue
        run = Run(Options(time_limit=options.seconds, seed=0))
        result = solve(family("joint"), instance.data, "auto", run)
        if result.decision is None:
            print(f"{instance.name}: {result.status}, left out")
            continue
        add_to_library(options.folder, instance, result, packed=True)
        gap = "no bound" if result.gap is None else f"gap {100 * result.gap:.1f} %"
        print(f"{instance.name}: {result.objective:.6g} s replayed, {gap}", flush=True)


if __name__ == "__main__":
    main()
