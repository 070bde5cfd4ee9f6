"""Writes the packaged `amp` instances of AMP §4.3 and their optima.

    python -m evidence.speed amp_instances [folder]

The paper's three experiments with hetplan's predicted profile: GPT-2 (L = 24, H = 1024) on 4
g4dn.12xlarge and on 3 p3.8xlarge + 1 g4dn.12xlarge, global batch 32, and the modified TransGAN
generator on 4 p3.8xlarge, global batch 64.
AMP ignores memory; each experiment is therefore packaged without and with the memory constraint.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from evidence.speed.packaging import LIBRARY, given_folder, write_proven
from hetplan.formulations.amp.pose import pose
from hetplan.instances.library import Instance
from hetplan.profiling.hardware.cluster import example_cluster
from hetplan.profiling.models.model import load_model
from hetplan.profiling.profiles.predict import PREDICTOR
from hetplan.profiling.workload import make_workload

FOLDER = LIBRARY / "amp"

EXPERIMENTS = (
    ("amp-homogeneous", "gpt2-amp", "g4dn-4", 32, "Homogeneous"),
    ("amp-mixed-cluster", "gpt2-amp", "amp-mixed", 32, "Heterogeneous cluster"),
    ("amp-mixed-model", "transgan-amp", "p3-4", 64, "Heterogeneous model"),
)


def instances() -> Iterator[Instance]:
    """Every experiment, without and with the memory constraint."""
    for name, model, cluster, batch, title in EXPERIMENTS:
        workload = make_workload(load_model(model), example_cluster(cluster), global_batch=batch)
        for memory in (False, True):
            yield Instance(
                problem="amp",
                name=f"{name}-memory" if memory else name,
                origin=f"AMP (NeurIPS 2022) §4.3, {title}: {model} on {cluster}, hetplan's "
                f"predicted profile (predictor {PREDICTOR})",
                data=pose(workload, memory=memory),
            )


def main(folder: Path) -> None:
    """Write every instance and its record; a missing proof is an error."""
    write_proven(instances(), folder)


if __name__ == "__main__":
    main(given_folder(FOLDER))
