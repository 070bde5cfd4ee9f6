"""Writes the packaged `poplar` instances and their optima: python benchmarks/poplar_instances.py
[folder].

The paper's clusters, models, stages and proportions with predicted curves, and two small ones whose
curves are not monotone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from harness import add_to_library

from hetplan.formulations import family
from hetplan.formulations.poplar.data import Device, PoplarData
from hetplan.formulations.poplar.report import experiments
from hetplan.instances.library import Instance
from hetplan.solvers.registry import solve

LIBRARY = Path(__file__).parents[1] / "src" / "hetplan" / "instances" / "library" / "poplar"


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
    for instance in instances():
        result = solve(family("poplar"), instance.data, "exact")
        if result.status != "optimal":
            raise SystemExit(f"{instance.name}: {result.status}, expected a proven optimum")
        add_to_library(folder, instance, result)
        print(f"{instance.name}: {result.objective:.6g} s in {result.seconds * 1e3:.1f} ms")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else LIBRARY)
