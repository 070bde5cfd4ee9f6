"""Uneven plans rehearsed on virtual devices: `python rehearsals.py FILE [NAMES…]` writes what was measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fakes.workloads import small
from hetplan.profiling.workload import Workload
from hetplan.runtime.job import Job
from hetplan.runtime.launch import launch
from hetplan.runtime.measured import Measured
from hetplan.runtime.plan import Plan, parse_plan
from hetplan.runtime.virtual import Rehearsal

Document = dict[str, Any]


def stage(first: int, last: int, *devices: list[int], **shares: list[float]) -> Document:
    """Layers [first, last) on row groups of devices."""
    return {
        "layers": [[first, last]],
        "devices": [list(d) for d in devices],
        "row_shares": [1.0] * len(devices),
        "tensor_shares": [1.0] * len(devices[0]),
        **shares,
    }


def replica(stages: list[Document], *batches: tuple[int, int]) -> Document:
    """Stages, and (count, samples) of micro-batches."""
    return {"stages": stages, "micro_batches": [{"count": c, "samples": s} for c, s in batches]}


def chunks(stages: list[Document], *more: list[tuple[int, int]]) -> list[Document]:
    """Stages with further chunks."""
    return [s | {"layers": [*s["layers"], *map(list, m)]} for s, m in zip(stages, more, strict=True)]


# gpt2's 14 layers on two V100 (0, 1) and two T4 (2, 3); 8 samples.
PLANS: dict[str, tuple[list[Document], Document]] = {
    "four stages, uneven": (
        [replica([stage(0, 5, [0]), stage(5, 10, [1]), stage(10, 12, [2]), stage(12, 14, [3])], (8, 1))],
        {},
    ),
    "four stages, even": (
        [replica([stage(0, 4, [0]), stage(4, 7, [1]), stage(7, 11, [2]), stage(11, 14, [3])], (8, 1))],
        {},
    ),
    "the slow devices first": (
        [replica([stage(0, 2, [2]), stage(2, 4, [3]), stage(4, 9, [0]), stage(9, 14, [1])], (8, 1))],
        {},
    ),
    "four stages, GPipe": (
        [replica([stage(0, 5, [0]), stage(5, 10, [1]), stage(10, 12, [2]), stage(12, 14, [3])], (4, 2))],
        {"schedule": "gpipe"},
    ),
    "fewer micro-batches than stages": (
        [replica([stage(0, 4, [0]), stage(4, 8, [1]), stage(8, 11, [2]), stage(11, 14, [3])], (2, 4))],
        {},
    ),
    "unequal micro-batches": (
        [replica([stage(0, 7, [0]), stage(7, 12, [1]), stage(12, 14, [2])], (1, 4), (4, 1))],
        {},
    ),
    "replicas of two stages": (
        [
            replica([stage(0, 9, [0]), stage(9, 14, [2])], (4, 1)),
            replica([stage(0, 9, [1]), stage(9, 14, [3])], (2, 2)),
        ],
        {},
    ),
    "replicas with different cuts": (
        [
            replica([stage(0, 6, [0]), stage(6, 14, [1])], (3, 2)),
            replica([stage(0, 8, [2]), stage(8, 14, [3])], (2, 1)),
        ],
        {},
    ),
    "tensor groups": ([replica([stage(0, 10, [0, 1]), stage(10, 14, [2, 3])], (4, 2))], {}),
    "two row groups, then two tensor ranks": (
        [replica([stage(0, 9, [0], [1], row_shares=[1.0, 1.0]), stage(9, 14, [2, 3])], (4, 2))],
        {},
    ),
    "data parallel, shares by speed": (
        [replica([stage(0, 14, [d])], (n, 1)) for d, n in enumerate((3, 3, 1, 1))],
        {},
    ),
    "data parallel, ZeRO 1": (
        [replica([stage(0, 14, [d])], (1, n)) for d, n in enumerate((3, 3, 1, 1))],
        {"zero": 1},
    ),
    "data parallel, ZeRO 2": (
        [
            replica([stage(0, 14, [d])], (1, a), (1, b))
            for d, (a, b) in enumerate(((2, 1), (1, 2), (1, 0), (1, 0)))
        ],
        {"zero": 2},
    ),
    "interleaved": (
        [replica(chunks([stage(0, 4, [0]), stage(4, 8, [1])], [(8, 11)], [(11, 14)]), (8, 1))],
        {"schedule": "interleaved-1f1b"},
    ),
}


def plan(name: str, workload: Workload) -> Plan:
    """One of them."""
    replicas, options = PLANS[name]
    document = {
        "format": "hetplan-plan", "version": 1, "name": name,
        "workload": {
            "model": workload.model.name, "cluster": workload.cluster.name, "global_batch": workload.global_batch,
            "sequence": workload.sequence, "precision": workload.precision,
            "layers": [layer.name for layer in workload.profile.layers],
        },
        "devices": [{"type": d.type, "node": d.node} for d in workload.cluster.devices],
        "replicas": replicas, **options,
    }  # fmt: skip
    return parse_plan(document, where=name)


def rehearse(name: str, workload: Workload, steps: int, scale: float) -> Document:
    """Predicted and measured seconds of one plan."""
    made = plan(name, workload)
    rehearsal = Rehearsal.of(made, workload, scale)
    job = Job(plan=made, steps=steps, rehearsal=rehearsal, virtual=True)
    return Measured(job, launch(job)).document()


def main(file: Path, names: list[str]) -> None:
    """All of them, or those named."""
    workload = small()
    found = {name: rehearse(name, workload, steps=4, scale=8.0) for name in names or PLANS}
    file.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
