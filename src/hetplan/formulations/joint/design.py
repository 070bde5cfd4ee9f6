"""Designs: the form of plans in the searches, compact and cheap to change and to compare.

A `Design` stands for a plan file of problem `joint`. Each stage has row groups, among which the
samples of a micro-batch are divided; a row group is a tensor group. The row groups and the tensor
ranks of a stage have equal shares. The micro-batches of a replica are equal but for the last one.
`Space` (space.py) has the seconds and the rules of designs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetplan.formulations.joint.data import MOST_CHUNKS, JointDecision
from hetplan.plans.degrees import Degrees
from hetplan.plans.passes import FLAT_SPLIT, FOLDED, WholeSchedule
from hetplan.plans.plan import PassSchedule, Plan, Recomputation, Schedule, Stage

Group = tuple[tuple[int, ...], ...]  # devices [row groups][tensor ranks] of a stage
# All (schedule, number of chunks) of the problem. The interleaved schedule with one chunk is 1F1B
# with a warm-up of twice the length.
SCHEDULES: tuple[tuple[WholeSchedule, int], ...] = (
    ("gpipe", 1),
    ("1f1b", 1),
    *(("interleaved-1f1b", chunks) for chunks in range(1, MOST_CHUNKS + 1)),
)
# Those of split backward passes, which the search for a schedule adds (schedule/choose.py).
SPLIT_SCHEDULES: tuple[tuple[PassSchedule, int], ...] = (
    *((schedule, 1) for schedule in FLAT_SPLIT),
    *((schedule, 2) for schedule in FOLDED),
)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One replica: its stages, the layers of each, its samples and micro-batches."""

    groups: tuple[Group, ...]  # [S] devices of each stage
    # [S C - 1] first layer of every virtual stage but the first; C chunks of each stage. Empty
    # where the cuts are still to be chosen.
    cuts: tuple[int, ...]
    micro_batch: int  # samples of every micro-batch but the last
    samples: int  # samples of an iteration

    @property
    def steps(self) -> int:
        """The number of micro-batches of an iteration."""
        return -(-self.samples // self.micro_batch)


@dataclass(frozen=True, slots=True)
class Design:
    """A plan in compact form."""

    pipelines: tuple[Pipeline, ...]  # the replicas
    schedule: Schedule = "1f1b"
    chunks: int = 1  # of every stage; more than 1 only when interleaved, 2 on a V
    zero: int = 0  # ZeRO level
    recomputation: Recomputation = "none"  # mode of recomputation
    degrees: Degrees | None = None  # further degrees, such as context ranks; None: there are none

    @property
    def folded(self) -> bool:
        """Whether the chunks lie on the stages as a V."""
        return self.schedule in FOLDED

    @property
    def splits_backward(self) -> bool:
        """Whether backward passes are split into those of inputs and those of weights."""
        return self.folded or self.schedule in FLAT_SPLIT

    @property
    def used(self) -> set[int]:
        """The devices in use."""
        groups = [group for pipeline in self.pipelines for group in pipeline.groups]
        return {device for group in groups for row in group for device in row}


def design_of(plan: Plan | JointDecision) -> Design:
    """The design nearest to a plan: unequal shares and micro-batches become equal.

    Replicas without samples are left out. The number of chunks is that of the first replica. Where
    another replica has another number, its cuts keep it.
    """
    pipelines = []
    for replica in plan.replicas:
        if not replica.samples:
            continue
        groups = tuple(tuple(map(tuple, stage.devices)) for stage in replica.stages)
        ends = sorted(end for stage in replica.stages for _, end in stage.layers)
        cuts = tuple(ends[:-1])  # the last end is the number of layers
        micro_batch = max(batch.samples for batch in replica.micro_batches)
        pipelines.append(Pipeline(groups, cuts, micro_batch, replica.samples))
    return Design(
        pipelines=tuple(pipelines),
        schedule=plan.schedule,
        chunks=len(plan.replicas[0].stages[0].layers),
        zero=plan.zero,
        recomputation=plan.recomputation,
        degrees=plan.degrees if isinstance(plan, Plan) else None,
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
