"""Designs: plans as the local search writes them, compact, cheap to change and to compare.

A `Design` says what a plan file says, within the space of problem `joint`: the row groups and the
tensor ranks of a stage have equal shares, and the micro-batches of a replica are equal but for the
last. `space.py` answers what a search asks about a design.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetplan.formulations.joint.data import MOST_CHUNKS, JointDecision
from hetplan.plans.degrees import Degrees
from hetplan.plans.plan import Plan, Recomputation, Schedule, Stage
from hetplan.replays.simulator.pipeline import Schedule as PipelineSchedule

Group = tuple[tuple[int, ...], ...]  # devices [row groups][tensor ranks] of a stage
# All schedules with their numbers of chunks. Interleaved with one chunk is 1F1B that warms up twice
# as long.
SCHEDULES: tuple[tuple[PipelineSchedule, int], ...] = (
    ("gpipe", 1),
    ("1f1b", 1),
    *(("interleaved-1f1b", chunks) for chunks in range(1, MOST_CHUNKS + 1)),
)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One replica: its stages, where it cuts the layers, and what it trains."""

    groups: tuple[Group, ...]  # [S] devices of each stage
    cuts: tuple[int, ...]  # [S C - 1] first layer of every virtual stage but the first
    micro_batch: int  # samples of a micro-batch
    samples: int  # of an iteration

    @property
    def steps(self) -> int:
        """The number of micro-batches of an iteration."""
        return -(-self.samples // self.micro_batch)


@dataclass(frozen=True, slots=True)
class Design:
    """A plan."""

    pipelines: tuple[Pipeline, ...]  # the replicas
    schedule: Schedule = "1f1b"
    chunks: int = 1  # of every stage, more than 1 only when interleaved
    zero: int = 0  # ZeRO level
    recomputation: Recomputation = "none"
    degrees: Degrees | None = None  # further ones, such as context ranks; None: there are none

    @property
    def used(self) -> set[int]:
        """The devices in use."""
        groups = [group for pipeline in self.pipelines for group in pipeline.groups]
        return {device for group in groups for row in group for device in row}


def design_of(plan: Plan | JointDecision) -> Design:
    """The design nearest to a plan: the plan itself, or with equal shares and micro-batches.

    Replicas without samples are left out.
    """
    pipelines = []
    for replica in plan.replicas:
        if not replica.samples:
            continue
        ends = sorted(end for stage in replica.stages for _, end in stage.layers)
        groups = tuple(tuple(map(tuple, stage.devices)) for stage in replica.stages)
        largest = max(batch.samples for batch in replica.micro_batches)
        pipelines.append(Pipeline(groups, tuple(ends[:-1]), largest, replica.samples))
    return Design(
        tuple(pipelines),
        plan.schedule,
        len(plan.replicas[0].stages[0].layers),
        plan.zero,
        plan.recomputation,
        plan.degrees if isinstance(plan, Plan) else None,
    )


def stage_of(group: Group, *layers: tuple[int, int]) -> Stage:
    """A stage with equal shares. layers: [first, end) of each of its chunks."""
    return Stage.model_construct(
        layers=list(layers),
        devices=[list(row) for row in group],
        row_shares=[1.0] * len(group),
        tensor_shares=[1.0] * len(group[0]),
    )


def with_pipelines(design: Design, pipelines: Sequence[Pipeline | None]) -> Design | None:
    """The design with other replicas; None where one of the replicas is None."""
    present = tuple(pipeline for pipeline in pipelines if pipeline is not None)
    if len(present) < len(pipelines):
        return None
    return replace(design, pipelines=present)
