"""The space of designs of one instance: which devices there are, how long layers take on them, and
which designs keep the rules of the problem."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import accumulate, pairwise

from hetplan.formulations.joint.canonical import Renaming
from hetplan.formulations.joint.cuts import even_cuts
from hetplan.formulations.joint.data import JointData
from hetplan.formulations.joint.design import (
    Design,
    Group,
    Pipeline,
    stage_of,
    with_pipelines,
)
from hetplan.plans.plan import MicroBatches, Plan, Recomputation, Replica, Schedule
from hetplan.replays.chains import ChainReplayer

StageShape = tuple[str, int, int]  # of a stage: device type, row groups, tensor ranks
KEPT_STAGES = 20_000  # stages that are remembered, and even cuts


class Space:
    """An instance, as a search sees it."""

    def __init__(self, data: JointData) -> None:
        self.data, self.replayer = data, ChainReplayer.of(data)
        self.kind = [kind for kind, _ in data.devices]  # [D] device type
        self.node = [node for _, node in data.devices]  # [D]
        self.layers, self.batch = len(data.layers), data.global_batch
        self.degrees, self.modes = sorted(data.tensor_degrees), data.modes
        self.renaming = Renaming(data)
        self._common_fields = data.common_fields
        self.sums = cache(self._sums)
        self.stage = lru_cache(KEPT_STAGES)(stage_of)
        self._kept_even_cuts = lru_cache(KEPT_STAGES)(self._even_cuts)

    def _sums(self, kind: str, tensor: int, rows: int, mode: Recomputation) -> list[float]:
        """[L + 1] forward and backward seconds of the layers up to each one.

        rows: samples of a row group's micro-batch.
        """
        forward, backward, *_ = self.replayer.costs(mode).layer_seconds(kind, tensor, rows)
        return list(accumulate((forward + backward).tolist(), initial=0.0))

    def plan(self, design: Design) -> Plan:
        """The plan file. Raises pydantic's ValidationError where the design breaks its rules."""
        return Plan.model_validate(dict(self.sketch(design)))

    def sketch(self, design: Design) -> Plan:
        """`plan` of a design that keeps the rules; they are not checked."""
        replicas = []
        for pipeline in design.pipelines:
            runs, count = [*pairwise((0, *pipeline.cuts, self.layers))], len(pipeline.groups)
            stages = [self.stage(group, *runs[s::count]) for s, group in enumerate(pipeline.groups)]
            full, rest = divmod(pipeline.samples, pipeline.micro_batch)
            batches = [
                MicroBatches.model_construct(count=number, samples=size)
                for number, size in ((full, pipeline.micro_batch), (1, rest))
                if number and size
            ]
            replicas.append(Replica.model_construct(stages=stages, micro_batches=batches))
        return Plan.model_construct(
            **self._common_fields,
            replicas=replicas,
            schedule=design.schedule,
            zero=design.zero,
            recomputation=design.recomputation,
            degrees=design.degrees,
        )

    def shapes(self, groups: Sequence[Group]) -> list[StageShape]:
        """Device type, row groups and tensor ranks of every stage."""
        return [(self.kind[group[0][0]], len(group), len(group[0])) for group in groups]

    def legal(self, group: Group) -> bool:
        """Whether these devices may make a stage: of one type, its rows equally wide, of a tensor
        degree that the data have, and each in one node."""
        kinds = {self.kind[device] for row in group for device in row}
        widths = {len(row) for row in group}
        rows_in_nodes = all(len({self.node[device] for device in row}) == 1 for row in group)
        return rows_in_nodes and len(kinds) == len(widths) == 1 and widths <= {*self.degrees}

    def lower_bound(self, design: Design) -> float:
        """Seconds that no replay of the design is below, by computing alone.

        A stage waits for the first micro-batch to pass the stages before it, does all its passes,
        and the last gradient passes the stages before it again. (`ahead` has both ways together.)
        """
        longest = 0.0
        for pipeline in design.pipelines:
            ends, count = (0, *pipeline.cuts, self.layers), len(pipeline.groups)
            micro_batch = min(pipeline.micro_batch, pipeline.samples)
            full_micro_batches = pipeline.samples // micro_batch
            ahead = 0.0
            for s, (kind, rows, tensor) in enumerate(self.shapes(pipeline.groups)):
                fullest_row = -(-micro_batch // rows)
                sums = self.sums(kind, tensor, fullest_row, design.recomputation)
                chunks = range(s, len(ends) - 1, count)
                seconds = sum(sums[ends[v + 1]] - sums[ends[v]] for v in chunks)
                longest = max(longest, ahead + full_micro_batches * seconds)
                ahead += sums[ends[s + 1]] - sums[ends[s]]
        return longest

    def with_even_cuts(
        self, pipeline: Pipeline, chunks: int, mode: Recomputation
    ) -> Pipeline | None:
        """The replica with cuts that make its slowest virtual stage as fast as can be; None where
        there are too few layers."""
        shapes = tuple(self.shapes(pipeline.groups))
        if len(shapes) * chunks > self.layers:
            return None
        cuts = self._kept_even_cuts(shapes, pipeline.micro_batch, chunks, mode)
        return replace(pipeline, cuts=cuts)

    def _even_cuts(
        self, shapes: tuple[StageShape, ...], micro_batch: int, chunks: int, mode: Recomputation
    ) -> tuple[int, ...]:
        """Even cuts for stages of these shapes."""
        sums = [
            self.sums(kind, tensor, -(-micro_batch // rows), mode) for kind, rows, tensor in shapes
        ]
        return even_cuts(sums * chunks)

    def with_schedule(self, design: Design, schedule: Schedule, chunks: int) -> Design | None:
        """The design under another schedule; with new cuts where the number of chunks changes."""
        pipelines: list[Pipeline | None] = list(design.pipelines)
        if chunks != design.chunks:
            pipelines = [
                self.with_even_cuts(pipeline, chunks, design.recomputation)
                for pipeline in design.pipelines
            ]
        return with_pipelines(replace(design, schedule=schedule, chunks=chunks), pipelines)

    def repaired(self, design: Design) -> Design | None:
        """The nearest design that keeps the rules of a plan file, in canonical form; None where
        micro-batches of no size do.

        Interleaving needs whole rounds of micro-batches, as many as there are stages; from ZeRO 2
        on, all replicas have equally many.
        """
        several_stages = any(len(pipeline.groups) > 1 for pipeline in design.pipelines)
        design = replace(design, zero=effective_zero(design, several_stages))
        if design.schedule == "interleaved-1f1b" and not several_stages:
            design = as_plain_1f1b(design)
        steps_of_all = design.pipelines[0].steps if design.zero > 1 else None
        pipelines = []
        for pipeline in design.pipelines:
            rounds = len(pipeline.groups) if design.schedule == "interleaved-1f1b" else 1
            micro_batch = suitable_micro_batch(pipeline, rounds, steps_of_all)
            if micro_batch is None:
                return None
            pipelines.append(replace(pipeline, micro_batch=micro_batch))
        return self.renaming.canonical(replace(design, pipelines=tuple(pipelines)))


def effective_zero(design: Design, several_stages: bool) -> int:
    """The lowest ZeRO level that does what the design's level does.

    Between stages the levels 2 and 3 do as level 1 does. With further degrees level 3 is one of its
    own.
    """
    if design.degrees is not None:
        return 1 if design.zero == 2 else design.zero
    return 1 if design.zero > 1 and several_stages else design.zero


def as_plain_1f1b(design: Design) -> Design:
    """An interleaved design of single stages under 1F1B, without chunks: it runs the same."""
    pipelines = tuple(replace(pipeline, cuts=()) for pipeline in design.pipelines)
    return replace(design, pipelines=pipelines, schedule="1f1b", chunks=1)


def suitable_micro_batch(pipeline: Pipeline, rounds: int, steps: int | None) -> int | None:
    """The samples of a micro-batch nearest to the replica's with which the number of micro-batches
    is a multiple of `rounds`, and `steps` unless that is None; None where no size does."""

    def suits(size: int) -> bool:
        number = -(-pipeline.samples // size)
        return number % rounds == 0 and (steps is None or number == steps)

    if pipeline.micro_batch <= pipeline.samples and suits(pipeline.micro_batch):
        return pipeline.micro_batch
    sizes = [size for size in range(1, pipeline.samples + 1) if suits(size)]
    return min(sizes, key=lambda size: abs(size - pipeline.micro_batch), default=None)
