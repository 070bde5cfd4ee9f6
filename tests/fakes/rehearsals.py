"""Uneven plans of a chain of 14 layers on four devices, and how well the simulator foretells them
on virtual devices.

Stages of different sizes, the slow devices first, GPipe, interleaved stages, unequal micro-batches,
replicas cut differently, tensor groups, ZeRO. Each plan is executed by real processes with real
messages (`runtime.virtual`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hetplan.plans.making import new_plan
from hetplan.plans.plan import Plan
from hetplan.profiling.hardware.cluster import Cluster, ClusterFile, build_cluster
from hetplan.profiling.models.model import Model
from hetplan.profiling.profiles.profile import Profile
from hetplan.profiling.workload import Workload
from hetplan.runtime.execution.choice import engine_of
from hetplan.runtime.job import Job
from hetplan.runtime.launch.local import launch
from hetplan.runtime.launch.rehearsal import Rehearsal
from hetplan.runtime.measured import Measured

Document = dict[str, Any]
FAST, SLOW = "this-cpu", "this-cpu-slowed"
SLOWED = 2.5  # how much longer the slow devices take for everything
SAMPLES = 8
MODEL, SEQUENCE = "gpt2", 64


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
    return [
        s | {"layers": [*s["layers"], *map(list, m)]} for s, m in zip(stages, more, strict=True)
    ]


# 14 layers on two fast devices (0, 1) and two slow ones (2, 3); 8 samples.
PLANS: dict[str, tuple[list[Document], Document]] = {
    "four stages, uneven": (
        [
            replica(
                [stage(0, 5, [0]), stage(5, 10, [1]), stage(10, 12, [2]), stage(12, 14, [3])],
                (8, 1),
            )
        ],
        {},
    ),
    "four stages, even": (
        [
            replica(
                [stage(0, 4, [0]), stage(4, 7, [1]), stage(7, 11, [2]), stage(11, 14, [3])], (8, 1)
            )
        ],
        {},
    ),
    "the slow devices first": (
        [
            replica(
                [stage(0, 2, [2]), stage(2, 4, [3]), stage(4, 9, [0]), stage(9, 14, [1])], (8, 1)
            )
        ],
        {},
    ),
    "four stages, GPipe": (
        [
            replica(
                [stage(0, 5, [0]), stage(5, 10, [1]), stage(10, 12, [2]), stage(12, 14, [3])],
                (4, 2),
            )
        ],
        {"schedule": "gpipe"},
    ),
    "fewer micro-batches than stages": (
        [
            replica(
                [stage(0, 4, [0]), stage(4, 8, [1]), stage(8, 11, [2]), stage(11, 14, [3])], (2, 4)
            )
        ],
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
    return new_plan(workload, replicas, name=name, **options)


@dataclass(frozen=True)
class Rehearsed:
    """One plan: seconds per iteration, predicted by the simulator and measured by the clock on the
    wall."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """measured / predicted - 1."""
        return self.measured / self.predicted - 1.0


def cluster_here() -> Cluster:
    """Two nodes of two virtual devices each, those of the second slower; links as between ordinary
    machines."""
    device = {
        "memory_gib": 64.0,
        "peak_tflops": {"fp32": 1.0},
        "memory_gb_per_s": 20.0,
        "source": "this machine",
    }
    nodes = [
        {
            "count": 1,
            "devices": 2,
            "device": name,
            "intra_node_gbit_per_s": 40,
            "network_gbit_per_s": 10,
        }
        for name in (FAST, SLOW)
    ]
    return build_cluster(
        ClusterFile.model_validate(
            {
                "format": "hetplan-cluster", "version": 1, "name": "rehearsal", "nodes": nodes,
                "devices": {FAST: device, SLOW: device},
            }
        )
    )  # fmt: skip


def slowed(profile: Profile) -> Profile:
    """The profile of one device, with tables of a slower one beside it."""
    tables = []
    for table in profile.tables:
        forward, backward = (
            [SLOWED * s for s in row] for row in (table.forward_seconds, table.backward_seconds)
        )
        slow = {
            "device": SLOW,
            "forward_seconds": forward,
            "backward_seconds": backward,
            "readings": None,
        }
        tables += [table.model_copy(update={"device": FAST}), table.model_copy(update=slow)]
    return Profile(**{**dict(profile), "tables": tables})


def workload_here(model: Model, profile: Profile) -> Workload:
    """What the plans are of, from a profile measured here."""
    return Workload(model, cluster_here(), slowed(profile), SAMPLES)


def rehearse_plan(
    name: str, workload: Workload, *, steps: int, scale: float | None, cores: int
) -> Rehearsed:
    """Execute one plan on virtual devices."""
    made = plan(name, workload)
    rehearsal = Rehearsal.of(made, workload, engine_of(made), scale, cores=cores)
    job = Job(plan=made, steps=steps, rehearsal=rehearsal, virtual=True)
    return Rehearsed(
        name,
        rehearsal.seconds / rehearsal.scale,
        Measured(job, launch(job)).seconds / rehearsal.scale,
    )


def rehearse_all(
    workload: Workload,
    *,
    steps: int = 4,
    scale: float | None = None,
    cores: int = 1,
    tell: Callable[[Rehearsed], None] | None = None,
) -> list[Rehearsed]:
    """All plans; tell: receives each when it is done."""
    rehearsed = []
    for name in PLANS:
        rehearsed.append(rehearse_plan(name, workload, steps=steps, scale=scale, cores=cores))
        if tell is not None:
            tell(rehearsed[-1])
    return rehearsed
