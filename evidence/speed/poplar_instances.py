"""Writes the packaged `poplar` instances and their optima.

    python -m evidence.speed poplar_instances [folder]

The paper's clusters, models, stages and proportions with predicted curves, and two small ones whose
curves are not monotone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from evidence.papers.poplar import paper_workload
from evidence.speed.packaging import LIBRARY, given_folder, write_proven
from hetplan.formulations.poplar.data import Device, PoplarData
from hetplan.formulations.poplar.pose import Posed, pose
from hetplan.instances.library import Instance
from hetplan.profiling.profiles.predict import PREDICTOR
from hetplan.replays.model_states import STAGES

FOLDER = LIBRARY / "poplar"


CLUSTERS = ("poplar-a", "poplar-b", "poplar-c")
MODELS = ("llama-0.5b", "llama-1.1b", "bert-1.1b")
# A800 to V100S, Figure 5; 4:4 is cluster C itself.
RATIOS = ((4, 1), (4, 2), (4, 3), (3, 4), (2, 4), (1, 4))


@dataclass(frozen=True)
class Experiment:
    """One combination of the paper's evaluation; name as in the library, which holds those that are
    possible."""

    name: str
    origin: str
    posed: Posed


def experiments() -> Iterator[Experiment]:
    """Every combination, those included that do not fit (posed.unfit says why)."""
    for cluster, model in product(CLUSTERS, MODELS):
        yield from stages(cluster, model, "Figures 3 and 4", f"{cluster}-{model}")
    for counts in RATIOS:
        name = f"poplar-c-{counts[0]}to{counts[1]}-llama-0.5b"
        yield from stages("poplar-c", "llama-0.5b", "Figure 5", name, counts)


def stages(
    cluster: str, model: str, figure: str, name: str, counts: tuple[int, ...] = ()
) -> Iterator[Experiment]:
    """A combination under each ZeRO stage."""
    workload = paper_workload(cluster, model, counts)
    on = " + ".join(f"{n} x {kind}" for kind, n in workload.cluster.counts().items())
    for stage in STAGES:
        posed = pose(workload, stage)
        origin = (
            f"Poplar (AAAI 2025), {figure}: {model} on {on}, 2^21 tokens per iteration. Times are "
            f"hetplan's prediction (predictor {PREDICTOR}), not the paper's measurements; the "
            f"sequence length ({workload.model.sequence}) and the network between the nodes "
            f"(cluster {cluster}) are assumed."
        )
        if posed.once_seconds:
            origin += f" An iteration takes {posed.once_seconds:.6g} s more: ZeRO 2's all-gather."
        yield Experiment(f"{name}-zero{stage}", origin, posed)


def tiled(tile: int, seconds: float, largest: int, ragged: float) -> list[float]:
    """A curve in steps of `tile` samples; an incomplete tile costs `ragged` more (a slower
    kernel)."""
    return [-(-b // tile) * seconds + (ragged if b % tile else 0.0) for b in range(1, largest + 1)]


def instances() -> Iterator[Instance]:
    """All of them."""
    for experiment in experiments():
        if experiment.posed.unfit is not None:  # a best-known record needs a decision
            print(f"{experiment.name}: not packaged, infeasible: {experiment.posed.unfit}")
            continue
        yield Instance(
            problem="poplar",
            name=experiment.name,
            origin=experiment.origin,
            data=experiment.posed.data,
        )
    fast, slow = tiled(4, 0.11, 24, 0.05), tiled(8, 0.37, 16, 0.21)
    for stage in (0, 3):
        data = PoplarData(
            zero_stage=stage,
            global_batch=67,
            comm_seconds=0.08,
            devices=[Device(name="fast", step_seconds=fast)] * 3
            + [Device(name="slow", step_seconds=slow)] * 2,
        )
        origin = (
            "hetplan: curves with tile effects, slower where a tile is incomplete (not monotone)"
        )
        yield Instance(problem="poplar", name=f"tiles-5-zero{stage}", origin=origin, data=data)


def main(folder: Path) -> None:
    """Write every instance and its record; a missing proof is an error."""
    write_proven(instances(), folder)


if __name__ == "__main__":
    main(given_folder(FOLDER))
