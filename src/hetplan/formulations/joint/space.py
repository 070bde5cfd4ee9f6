"""The space of designs of one instance: its devices, the seconds of layers on them, and the rules
that a design must keep. The local search and the exact method ask it about designs."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import accumulate, pairwise

from hetplan.formulations.joint.canonical import Renaming
from hetplan.formulations.joint.cuts import even_cuts
from hetplan.formulations.joint.data import JointData
from hetplan.formulations.joint.design import (
    SCHEDULES,
    Design,
    Group,
    Pipeline,
    stage_of,
    with_pipelines,
)
from hetplan.plans.passes import virtual_stages
from hetplan.plans.plan import MicroBatches, Plan, Recomputation, Replica, Schedule
from hetplan.replays.chains import ChainReplayer

StageShape = tuple[str, int, int]  # (device type, number of row groups, number of tensor ranks)
# Seconds that the replay of a design counts: in any case, for a stage, and for a pass of a
# micro-batch through a chunk. On the workloads a to d of evidence/speed/joint.py a search counts
# 1 to 2 times the seconds that it takes on an idle core.
BASE_SECONDS = 1.2e-3
STAGE_SECONDS = 2e-4
PASS_SECONDS = 2e-6
CACHE_SIZE = 20_000  # entries in each of a space's caches, of stages and of even cuts


class Space:
    """The designs of an instance with D devices and L layers: their seconds, plans and rules."""

    def __init__(
        self, data: JointData, schedules: Sequence[tuple[Schedule, int]] = SCHEDULES
    ) -> None:
        """schedules: (schedule, number of chunks) that a design may have."""
        self.data, self.schedules = data, schedules
        self.replayer = ChainReplayer.of(data)
        self.device_types = [kind for kind, _ in data.devices]  # [D] device type
        self.node = [node for _, node in data.devices]  # [D] number of the node
        self.layers = len(data.layers)  # L
        self.batch = data.global_batch  # samples of an iteration
        self.tensor_degrees = sorted(data.tensor_degrees)
        self.modes = data.modes  # modes of recomputation
        self.zero_levels = data.zero_levels  # ZeRO levels
        self.renaming = Renaming(data)  # gives designs their canonical form
        self._common_fields = data.common_fields
        self.prefix_seconds = cache(self._prefix_seconds)  # without a limit: few arguments occur
        self.stage = lru_cache(CACHE_SIZE)(stage_of)
        self._cached_even_cuts = lru_cache(CACHE_SIZE)(self._even_cuts)

    def _prefix_seconds(
        self, device_type: str, tensor: int, samples: int, mode: Recomputation
    ) -> list[float]:
        """[L + 1] seconds of the forward and backward pass of layers 0 to l - 1.

        tensor: tensor-parallel degree. samples: samples of a micro-batch in one row group. mode:
        mode of recomputation.
        """
        forward, backward, *_ = self.replayer.costs(mode).layer_seconds(
            device_type, tensor, samples
        )
        return list(accumulate((forward + backward).tolist(), initial=0.0))

    def plan(self, design: Design) -> Plan:
        """The design as a plan file. Raises pydantic's ValidationError where it breaks a rule of
        plan files."""
        return Plan.model_validate(dict(self.sketch(design)))

    def sketch(self, design: Design) -> Plan:
        """The design as a plan file without a check of the rules, which is quicker than `plan`."""
        replicas = [self._replica(design, pipeline) for pipeline in design.pipelines]
        return Plan.model_construct(
            **self._common_fields,
            replicas=replicas,
            schedule=design.schedule,
            zero=design.zero,
            recomputation=design.recomputation,
            degrees=design.degrees,
        )

    def _replica(self, design: Design, pipeline: Pipeline) -> Replica:
        """A replica of the design as in a plan file, without a check of the rules."""
        chunks_of_stages = self._chunks_of_stages(design, pipeline)
        stages = [
            self.stage(group, *chunks)
            for group, chunks in zip(pipeline.groups, chunks_of_stages, strict=True)
        ]
        full, rest = divmod(pipeline.samples, pipeline.micro_batch)
        batches = []
        if full:
            batches.append(MicroBatches.model_construct(count=full, samples=pipeline.micro_batch))
        if rest:
            batches.append(MicroBatches.model_construct(count=1, samples=rest))
        return Replica.model_construct(stages=stages, micro_batches=batches)

    def _chunks_of_stages(self, design: Design, pipeline: Pipeline) -> list[list[tuple[int, int]]]:
        """[S][C] layers [first, end) of each chunk of each stage of a replica."""
        layers = [*pairwise((0, *pipeline.cuts, self.layers))]  # of the virtual stages
        stages = len(pipeline.groups)
        # the design's number of chunks may be that of another replica (`design_of`)
        placed = virtual_stages(stages, len(layers) // stages, folded=design.folded)
        chunks: list[list[tuple[int, int]]] = [[] for _ in range(stages)]
        for (stage, _), of_virtual in zip(placed, layers, strict=True):
            chunks[stage].append(of_virtual)
        return chunks

    def shapes(self, groups: Sequence[Group]) -> list[StageShape]:
        """The shape of every stage. groups: the devices of each stage."""
        return [(self.device_types[group[0][0]], len(group), len(group[0])) for group in groups]

    def can_be_stage(self, group: Group) -> bool:
        """Whether a stage can have these devices: all are of one type, the row groups have equally
        many tensor ranks, the instance has this tensor degree, and each row group is on one
        node."""
        device_types = {self.device_types[device] for row in group for device in row}
        degrees = {len(row) for row in group}
        if len(device_types) != 1 or len(degrees) != 1:
            return False
        if not degrees <= {*self.tensor_degrees}:
            return False
        return all(len({self.node[device] for device in row}) == 1 for row in group)

    def replay_seconds(self, design: Design) -> float:
        """The seconds that a replay of the design counts."""
        stages = sum(len(pipeline.groups) for pipeline in design.pipelines)
        passes = sum(len(pipeline.groups) * pipeline.steps for pipeline in design.pipelines)
        by_stages, by_passes = STAGE_SECONDS * stages, PASS_SECONDS * passes * design.chunks
        return BASE_SECONDS + by_stages + by_passes

    def lower_bound(self, design: Design) -> float:
        """A lower bound on the design's replayed seconds, by its computation alone.

        A stage waits until the first micro-batch has passed through the stages before it. It does
        all its passes. Then the last backward pass goes through the stages before it. Where
        backward passes are split, the passes alone are counted: those of weights may come last.
        """
        longest = 0.0
        for pipeline in design.pipelines:
            chunks_of_stages = self._chunks_of_stages(design, pipeline)
            micro_batch = min(pipeline.micro_batch, pipeline.samples)
            full_micro_batches = pipeline.samples // micro_batch
            before = 0.0  # seconds of a micro-batch's two passes through the stages before
            shapes = self.shapes(pipeline.groups)
            for (device_type, row_groups, tensor), chunks in zip(
                shapes, chunks_of_stages, strict=True
            ):
                samples = -(-micro_batch // row_groups)  # on the row group with the most samples
                until = self.prefix_seconds(device_type, tensor, samples, design.recomputation)
                chunk_seconds = [until[end] - until[first] for first, end in chunks]
                longest = max(longest, before + full_micro_batches * sum(chunk_seconds))
                if not design.splits_backward:
                    before += chunk_seconds[0]
        return longest

    def with_even_cuts(
        self, pipeline: Pipeline, chunks: int, mode: Recomputation, *, folded: bool = False
    ) -> Pipeline | None:
        """The replica with the cuts that make its slowest virtual stage fastest; None where it has
        more virtual stages than there are layers. mode: mode of recomputation. folded: whether the
        chunks lie on the stages as a V."""
        shapes = tuple(self.shapes(pipeline.groups))
        if len(shapes) * chunks > self.layers:
            return None
        placed = virtual_stages(len(shapes), chunks, folded=folded)
        of_virtual = tuple(shapes[stage] for stage, _ in placed)
        cuts = self._cached_even_cuts(of_virtual, pipeline.micro_batch, mode)
        return replace(pipeline, cuts=cuts)

    def _even_cuts(
        self, shapes: tuple[StageShape, ...], micro_batch: int, mode: Recomputation
    ) -> tuple[int, ...]:
        """The cuts of `with_even_cuts` for virtual stages of these shapes."""
        prefix_seconds = []
        for device_type, row_groups, tensor in shapes:
            samples = -(-micro_batch // row_groups)  # on the row group with the most samples
            prefix_seconds.append(self.prefix_seconds(device_type, tensor, samples, mode))
        return even_cuts(prefix_seconds)

    def with_schedule(self, design: Design, schedule: Schedule, chunks: int) -> Design | None:
        """The design under another schedule, with even cuts where its number of chunks or their
        places change; None where there are too few layers for them."""
        changed = replace(design, schedule=schedule, chunks=chunks)
        pipelines: list[Pipeline | None] = list(design.pipelines)
        if (chunks, changed.folded) != (design.chunks, design.folded):
            pipelines = [
                self.with_even_cuts(pipeline, chunks, design.recomputation, folded=changed.folded)
                for pipeline in design.pipelines
            ]
        return with_pipelines(changed, pipelines)

    def repaired(self, design: Design) -> Design | None:
        """A near design that keeps the rules of plan files, in canonical form; None where no
        micro-batch size keeps them, and where no allowed ZeRO level is possible.

        With an interleaved schedule, a replica's number of micro-batches is a multiple of its
        number of stages; under DualPipeV it is twice that number at least. Under ZeRO 2 and 3 all
        replicas have the same number of micro-batches. Split backward passes recompute no layer.
        """
        several_stages = any(len(pipeline.groups) > 1 for pipeline in design.pipelines)
        zero = self._allowed_zero(design, several_stages)
        if zero is None:
            return None
        design = replace(design, zero=zero)
        waits_for_others = design.schedule == "interleaved-1f1b" or design.splits_backward
        if waits_for_others and not several_stages:
            design = as_plain_1f1b(design)
        if design.splits_backward and design.recomputation not in ("none", "selective"):
            return None
        common_steps = design.pipelines[0].steps if design.zero > 1 else None
        interleaved = design.schedule == "interleaved-1f1b"
        pipelines = []
        for pipeline in design.pipelines:
            stages = len(pipeline.groups)
            micro_batch = suitable_micro_batch(
                pipeline,
                divisor=stages if interleaved else 1,
                least=2 * stages if design.schedule == "dualpipev" else 1,
                steps=common_steps,
            )
            if micro_batch is None:
                return None
            pipelines.append(replace(pipeline, micro_batch=micro_batch))
        return self.renaming.canonical(replace(design, pipelines=tuple(pipelines)))

    def _allowed_zero(self, design: Design, several_stages: bool) -> int | None:
        """The ZeRO level of `zero_levels` that is nearest to what the design's level acts as; None
        where all of them act as other levels. With further degrees level 2 acts as level 1."""

        if design.degrees is None:
            wanted = self.data.acting_level(design.zero, one_virtual_stage=not several_stages)
            possible = self.data.own_levels(one_virtual_stage=not several_stages)
        else:
            wanted = 1 if design.zero == 2 else design.zero
            possible = [zero for zero in self.zero_levels if zero != 2]
        return min(possible, key=lambda zero: abs(zero - wanted), default=None)


def as_plain_1f1b(design: Design) -> Design:
    """A design whose replicas have one stage each, under 1F1B without chunks. Its replay is the
    same, since a stage that waits for no other one gains nothing by chunks or split passes."""
    pipelines = tuple(replace(pipeline, cuts=()) for pipeline in design.pipelines)
    return replace(design, pipelines=pipelines, schedule="1f1b", chunks=1)


def suitable_micro_batch(
    pipeline: Pipeline, *, divisor: int, least: int, steps: int | None
) -> int | None:
    """The suitable micro-batch size, in samples, that is nearest to the replica's; None where no
    size is suitable.

    divisor: the number of micro-batches is a multiple of it. least: their least number. steps: the
    number of micro-batches that is required; None where any is allowed.
    """

    def suits(size: int) -> bool:
        number = -(-pipeline.samples // size)
        return number % divisor == 0 and number >= least and steps in (None, number)

    if pipeline.micro_batch <= pipeline.samples and suits(pipeline.micro_batch):
        return pipeline.micro_batch
    sizes = [size for size in range(1, pipeline.samples + 1) if suits(size)]
    return min(sizes, key=lambda size: abs(size - pipeline.micro_batch), default=None)
