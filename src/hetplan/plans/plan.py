"""The plan file, which says what to run on which device. Every rank derives its part from it.

Sets    d devices of the cluster, i replicas of the model, j stages of a replica, k layers in the
        order of the model.

Data    Each replica has its stages (layers, devices, shares) and its micro-batches. The schedule,
        the ZeRO level and recomputation are the same for all replicas.

        A stage's `devices` are [row group][tensor rank]. A row group is a set of devices that
        computes some samples (rows) of every micro-batch: a number in proportion to `row_shares`.
        Within it, each tensor rank has a part of every weight, in proportion to `tensor_shares`.
        `shares.split` turns shares into whole numbers.

        A chunk is a range of consecutive layers of a stage. A stage has one chunk; under the
        interleaved schedule it has several, under the schedules of a V two. Chunk c of every stage
        comes before chunk c + 1 of any stage; on a V the odd chunks go from the last stage to the
        first one. `passes` states the order of an explicit schedule (plans/passes.py).

Rules   (1) Every replica has every layer exactly once, in order.
        (2) No device has two places, and every device exists.
        (3) The samples of all micro-batches of all replicas add up to the global batch.
        (4) Under ZeRO 2 and 3 all replicas have equally many micro-batches, since they synchronise
            after each one. Only under ZeRO 1 to 3 may a micro-batch have 0 samples: the replica
            then only takes part in the synchronisation, with its shards.
        (5) A stage has one chunk, under the schedules of a V two. Under the interleaved and the
            explicit schedule all stages of a replica have equally many chunks. Micro-batches are a
            multiple of the stages under the interleaved schedule, and at least twice as many under
            DualPipeV.
        (6) A stage has one row share per row group and one tensor share per tensor rank. From ZeRO
            1 on, ZeRO shares are positive exactly for the devices in use.
        (7) A plan has a program exactly under the schedule `spmd`. It then has one replica of one
            stage on one row group, and the program's ratios, not the stage's shares, say how
            tensors are divided. Its ZeRO level is 0, it recomputes nothing, and its micro-batches
            have equally many samples: the program is for as many.
        (8) In a plan with `degrees` every stage has one row group per context rank, with equal
            shares. Expert ranks divide the ranks of a stage over all replicas, and shard groups
            divide the context ranks of all replicas.
        (9) `inputs`, the workload that the plan was made for, has the plan's layers and devices,
            its framework and its stack.
        (10) A plan has `passes` exactly under the schedule `explicit`. They keep the rules of
            plans/passes.py.
        (11) Where backward passes are split, no layer is computed again as a whole, and replicas of
            one stage have at most ZeRO 1.
"""

import os
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from hetplan.errors import require
from hetplan.plans.degrees import Degrees
from hetplan.plans.ladder import Ladder
from hetplan.plans.passes import (
    FLAT_SPLIT,
    FOLDED,
    Orders,
    PassText,
    WholeSchedule,
    circle,
    order_faults,
    parsed,
    virtual_stages,
)
from hetplan.plans.places import Place
from hetplan.plans.program import SpmdProgram
from hetplan.plans.templates import ReadyTemplates
from hetplan.profiling.inputs.inputs import Inputs, absolute_from, relative_to
from hetplan.schema import (
    Count,
    Document,
    Line,
    Name,
    NonNegative,
    Positive,
    PositiveCount,
    Range,
    StrictModel,
)
from hetplan.text import grouped

MAX_RANKS = 4096  # as many as a cluster may have devices (`cluster.MAX_DEVICES`)

PassSchedule = Literal[
    WholeSchedule, "zb-h1", "zb-h2", "zbv", "dualpipev", "v-half", "v-min", "explicit"
]
PASS_SCHEDULES: tuple[PassSchedule, ...] = get_args(PassSchedule)
Schedule = Literal[PassSchedule, "spmd"]
Recomputation = Literal["none", "selective", "operators", "full"]
Shares = Annotated[list[Positive], Field(min_length=1, max_length=MAX_RANKS)]


class PlanDevice(StrictModel):
    """A device that the plan expects of the cluster. Its number is its index in `Plan.devices`."""

    type: Name
    node: Count


class PlanWorkload(StrictModel):
    """The training job that the plan is for, by the names of its parts."""

    model: Name
    cluster: Name
    global_batch: PositiveCount
    """Samples per iteration."""
    sequence: PositiveCount | None = None
    """Tokens per sample; None for images."""
    precision: Literal["fp16", "bf16", "fp32"]
    framework: Name = "hetplan"
    """The framework whose memory was counted."""
    stack: Name = "fused"
    """The software whose seconds were counted."""
    layers: list[Name] = Field(min_length=1, max_length=4096)
    """Names of the layers, in the order of the model."""

    @property
    def narrow(self) -> str:
        """`products in fp8` where the stack computes matrix products in 8 or 4 bits; else empty."""
        return f"products in {self.stack}" if self.stack in ("fp8", "fp4") else ""


class MicroBatches(StrictModel):
    """Consecutive micro-batches of equal size."""

    count: PositiveCount
    samples: Count
    """Samples of each micro-batch; 0 where the replica only takes part in synchronisation (rule
    4)."""


class Stage(StrictModel):
    """One pipeline stage of a replica."""

    layers: list[Range] = Field(min_length=1, max_length=4096)
    """[chunk] the layers [first, last)."""
    devices: list[list[Count]] = Field(min_length=1, max_length=MAX_RANKS)
    """[row group][rank]."""
    row_shares: Shares = Field(default_factory=lambda: [1.0])
    """[row group]."""
    tensor_shares: Shares = Field(default_factory=lambda: [1.0])
    """[tensor rank]."""

    @cached_property
    def cached_hash(self) -> int:
        """The hash, computed once: the caches of stage costs look stages up often."""
        rows = tuple(map(tuple, self.devices))
        return hash((*self.layers, rows, *self.row_shares, *self.tensor_shares))

    def __hash__(self) -> int:
        return self.cached_hash

    @property
    def all_devices(self) -> list[int]:
        """The devices of all row groups, one row group after the other."""
        return [device for group in self.devices for device in group]

    @property
    def parts(self) -> list[float]:
        """The share of the stage's weights on each of `all_devices`."""
        whole = sum(self.tensor_shares)
        return [share / whole for share in self.tensor_shares] * len(self.devices)


class Replica(StrictModel):
    """One copy of the model, which computes its own micro-batches."""

    stages: list[Stage] = Field(min_length=1, max_length=MAX_RANKS)
    """The stages in the order of their layers."""
    micro_batches: list[MicroBatches] = Field(min_length=1, max_length=1_000_000)
    """Groups of equal micro-batches, in the order in which they run."""

    @property
    def samples(self) -> int:
        """Samples per iteration."""
        return sum(batch.count * batch.samples for batch in self.micro_batches)

    @property
    def steps(self) -> int:
        """Micro-batches per iteration."""
        return sum(batch.count for batch in self.micro_batches)

    @property
    def folded(self) -> bool:
        """Whether the model lies on the stages as a V: the second chunk of the last stage follows
        on its first chunk."""
        last = self.stages[-1].layers
        return len(self.stages) > 1 and len(last) > 1 and last[1][0] == last[0][1]


class Prediction(StrictModel):
    """The planner's figures of a plan. A figure that is not known is None."""

    strategy: Name
    """Strategy of the candidate that the plan belongs to."""
    method: Name
    predicted_seconds: NonNegative | None = None
    """Replayed seconds per iteration."""
    closed_form_seconds: NonNegative | None = None
    """Seconds per iteration, by the objective."""
    objective: NonNegative | None = None
    """Objective of the strategy's problem, in its unit."""
    bound: NonNegative | None = None
    """Lower bound of that objective."""
    ladder: Ladder | None = None
    """Of `joint` alone: bounds on the replayed seconds of classes of plans."""


# Fields of a plan that a file leaves out where they are None.
OPTIONAL = (
    "zero_shares", "prediction", "refused", "passes", "program", "degrees", "templates", "inputs",
)  # fmt: skip


class Plan(Document):
    """A plan file. Validation checks all rules above when a plan is constructed."""

    format: Literal["hetplan-plan"] = "hetplan-plan"
    version: Literal[1] = 1
    name: Name
    origin: Line = ""
    """The method that found the plan, and what the method promises."""
    workload: PlanWorkload
    devices: list[PlanDevice] = Field(min_length=1, max_length=MAX_RANKS)
    """All of the cluster."""
    schedule: Schedule = "1f1b"
    zero: Annotated[int, Field(ge=0, le=3)] = 0
    """ZeRO level."""
    zero_shares: Annotated[list[NonNegative], Field(min_length=1, max_length=MAX_RANKS)] | None = (
        None
    )
    """[device] share of ZeRO's shards; None: equal shares for the devices in use."""
    recomputation: Recomputation = "none"
    prediction: Prediction | None = None
    """None for a plan that the planner did not make."""
    refused: Annotated[Line, Field(min_length=1)] | None = None
    """Why `hetplan run` refuses the plan as it is, and what would help; None where it runs."""
    passes: list[list[list[PassText]]] | None = None
    """[replica][stage] the passes in their order, under `explicit` only (plans/passes.py)."""
    replicas: list[Replica] = Field(min_length=1, max_length=MAX_RANKS)
    program: SpmdProgram | None = None
    """The instructions of every device, under `spmd` only."""
    degrees: Degrees | None = None
    """Context, expert and further degrees."""
    templates: ReadyTemplates | None = None
    """Pipelines of which `plan replan` and `run --elastic` make the next plan."""
    inputs: Inputs | None = None
    """The workload that the plan was made for; None in older files and in plans written by hand."""

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The plan in a file; one whose name ends in `.gz` is unpacked. Paths in its inputs become
        absolute. Raises InputError with the place in the file, what was got and what was expected.
        """
        plan = super().load(path)
        if plan.inputs is None:
            return plan
        inputs = absolute_from(plan.inputs, folder_of(path))
        return plan.model_copy(update={"inputs": inputs})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file as JSON, atomically; gzip where the name ends in .gz. Paths in
        its inputs become relative to the file's folder."""
        if self.inputs is None:
            Document.save(self, path)
            return
        inputs = relative_to(self.inputs, folder_of(path))
        Document.save(self.model_copy(update={"inputs": inputs}), path)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for violation in replica_violations(self):
            raise ValueError(violation)  # the first one
        check_passes(self)
        check_zero_shares(self)
        check_program(self)
        check_degrees(self)
        check_inputs(self)
        return self

    @model_serializer(mode="wrap")
    def _without_what_is_not_given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {
            key: value
            for key, value in handler(self).items()
            if key not in OPTIONAL or value is not None
        }

    def seats(self) -> Iterator[tuple[int, int, int, int, int]]:
        """(device, replica, stage, row group, tensor rank) of every device in use."""
        return (
            (device, i, j, g, t)
            for i, replica in enumerate(self.replicas)
            for j, stage in enumerate(replica.stages)
            for g, group in enumerate(stage.devices)
            for t, device in enumerate(group)
        )

    @property
    def ranks(self) -> dict[int, int]:
        """Device -> process rank: the devices in use, numbered in their own order."""
        return {device: rank for rank, (device, *_) in enumerate(sorted(self.seats()))}

    @property
    def nodes(self) -> dict[int, list[int]]:
        """Node -> its devices in use, in the order of ranks."""
        return grouped((self.devices[device].node, device) for device in self.ranks)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """[rank] the place of each rank."""
        seats = sorted(self.seats())
        return tuple(Place(r, i, j, g, t, device) for r, (device, i, j, g, t) in enumerate(seats))

    def rank_text(self, rank: int) -> str:
        """A rank and its place, for people."""
        p = self.places[rank]
        device = self.devices[p.device]
        return (
            f"rank {rank} (replica {p.replica}, stage {p.stage}, row group {p.group}, "
            f"tensor rank {p.tensor}; device {p.device}, {device.type} on node {device.node})"
        )

    @property
    def further(self) -> Degrees:
        """The further degrees; their defaults, which change nothing, for a plan without any."""
        return self.degrees or Degrees()

    @property
    def in_step(self) -> bool:
        """Whether all ranks take each pass together: every replica is one stage of one chunk."""
        return all(len(r.stages) == 1 and len(r.stages[0].layers) == 1 for r in self.replicas)

    def order(self, seconds: float) -> tuple[float, int]:
        """The key by which plans are sorted: the given seconds of an iteration, to nine digits, and
        of equally fast plans the number of nodes with devices both in use and idle. Seconds that
        differ only by rounding count as equal."""
        whole = Counter(device.node for device in self.devices)
        used = Counter(self.devices[device].node for device in self.ranks)
        partly_used = sum(used[node] < whole[node] for node in used)
        return float(f"{seconds:.9g}"), partly_used

    @property
    def pass_schedule(self) -> PassSchedule:
        """The schedule of a plan of stages; must not be asked of an SPMD plan."""
        assert self.schedule != "spmd", "a plan of stages"
        return self.schedule

    def explicit_orders(self, replica: int) -> Orders | None:
        """[stage] the passes of a replica under an explicit schedule; None under all others."""
        if self.passes is None:
            return None
        return tuple(parsed(texts) for texts in self.passes[replica])

    @property
    def splits_backward(self) -> bool:
        """Whether some backward passes are split into those of inputs and those of weights."""
        if self.passes is None:
            return self.schedule in (*FLAT_SPLIT, *FOLDED)
        return any(
            text.startswith("W") for replica in self.passes for stage in replica for text in stage
        )

    @property
    def world_size(self) -> int:
        """Processes to start: one per device in use."""
        return len(self.ranks)


def replica_violations(plan: Plan) -> Iterator[str]:
    """Every violation of rules (1) to (5), and of (6) by the shares of stages, one line each. The
    plan need not have been validated."""
    yield from names_are_distinct(plan)
    yield from devices_have_one_place(plan)
    for i, replica in enumerate(plan.replicas):
        where = f"replicas[{i}]"
        for j, stage in enumerate(replica.stages):
            yield from shares_go_with_devices(stage, f"{where}.stages[{j}]")
        yield from chunks_go_with_schedule(plan, replica, where)
        yield from stages_hold_every_layer(plan, replica, where)
    yield from micro_batches_go_with_zero(plan)
    yield from global_batch_is_complete(plan)


def names_are_distinct(plan: Plan) -> Iterator[str]:
    """A violation for each layer with the name of an earlier one, since layers and their parameters
    are identified by name."""
    first: dict[str, int] = {}
    for k, name in enumerate(plan.workload.layers):
        if name in first:
            yield f"workload.layers[{k}] is {name!r}, as workload.layers[{first[name]}] is"
        else:
            first[name] = k


def devices_have_one_place(plan: Plan) -> Iterator[str]:  # (2)
    """A violation for each place with a device that does not exist or has an earlier place."""
    last_device = len(plan.devices) - 1
    first_place: dict[int, str] = {}
    for device, i, j, g, t in plan.seats():
        place = f"replicas[{i}].stages[{j}].devices[{g}][{t}]"
        if device > last_device:
            yield f"{place} is {device}, expected a device of 0..{last_device}"
        elif device in first_place:
            yield f"{place} is device {device}, which {first_place[device]} uses already"
        else:
            first_place[device] = place


def shares_go_with_devices(stage: Stage, where: str) -> Iterator[str]:  # (6)
    """A violation where the number of row shares differs from that of row groups, and for each row
    group whose number of devices differs from that of tensor shares."""
    rows, ranks = len(stage.devices), len(stage.tensor_shares)
    if len(stage.row_shares) != rows:
        yield (
            f"{where}.row_shares has {len(stage.row_shares)} entries, "
            f"expected one per row group ({rows})"
        )
    for g, group in enumerate(stage.devices):
        if len(group) != ranks:
            yield (
                f"{where}.devices[{g}] has {len(group)} devices, "
                f"expected one per tensor share ({ranks})"
            )


def chunks_go_with_schedule(plan: Plan, replica: Replica, where: str) -> Iterator[str]:  # (5)
    """A violation for each stage with another number of chunks than the schedule allows, and where
    the micro-batches are too few for the schedule, or no multiple of the stages."""
    chunks, stages = len(replica.stages[0].layers), len(replica.stages)
    several = plan.schedule in ("interleaved-1f1b", "explicit")
    allowed = 2 if plan.schedule in FOLDED else 1
    for j, stage in enumerate(replica.stages):
        ranges = len(stage.layers)
        if several and ranges != chunks:
            yield (
                f"{where}.stages[{j}].layers has {ranges} ranges, "
                f"expected as many as stages[0] ({chunks})"
            )
        if not several and ranges != allowed:
            yield (
                f"{where}.stages[{j}].layers has {ranges} ranges, "
                f"expected {allowed} under {plan.schedule}"
            )
    if plan.schedule == "interleaved-1f1b" and replica.steps % stages != 0:
        yield (
            f"{where}.micro_batches are {replica.steps}, "
            f"expected a multiple of the stages ({stages}) under {plan.schedule}"
        )
    if plan.schedule == "dualpipev" and replica.steps < 2 * stages:
        yield (
            f"{where}.micro_batches are {replica.steps}, "
            f"expected at least two for each stage ({2 * stages}) under {plan.schedule}"
        )


def stages_hold_every_layer(plan: Plan, replica: Replica, where: str) -> Iterator[str]:  # (1)
    """A violation for each range of layers that does not begin where the one before it ends, for
    each empty range, and where the last one does not end at the last layer.

    Ranges follow each other along the virtual stages. Stages with unequal numbers of chunks have
    no such order; they are a violation of (5) alone.
    """
    chunks, stages = len(replica.stages[0].layers), len(replica.stages)
    if any(len(stage.layers) != chunks for stage in replica.stages):
        return
    begin, count = 0, len(plan.workload.layers)
    folded = plan.schedule in FOLDED or (plan.schedule == "explicit" and replica.folded)
    for j, c in virtual_stages(stages, chunks, folded=folded):
        first, last = replica.stages[j].layers[c]
        if first != begin:
            yield f"{where}.stages[{j}].layers[{c}] begins at layer {first}, expected {begin}"
        if first >= last:
            yield (
                f"{where}.stages[{j}].layers[{c}] is [{first}, {last}), expected one layer at least"
            )
        begin = last
    if begin != count:
        yield f"{where}.stages end at layer {begin}, expected {count}"


def micro_batches_go_with_zero(plan: Plan) -> Iterator[str]:  # (4)
    """A violation for each micro-batch without samples under ZeRO 0, and for each replica with
    another number of micro-batches than the first one under ZeRO 2 and 3."""
    steps = plan.replicas[0].steps
    for i, replica in enumerate(plan.replicas):
        for b, batch in enumerate(replica.micro_batches):
            if batch.samples == 0 and plan.zero == 0:
                yield (
                    f"replicas[{i}].micro_batches[{b}].samples is 0, "
                    "expected at least 1 under ZeRO 0"
                )
        if plan.zero >= 2 and replica.steps != steps:
            yield (
                f"replicas[{i}].micro_batches are {replica.steps}, expected as many as those of "
                f"replicas[0] ({steps}) under ZeRO {plan.zero}"
            )


def global_batch_is_complete(plan: Plan) -> Iterator[str]:  # (3)
    """A violation where the samples of all replicas do not add up to the global batch."""
    total, expected = sum(r.samples for r in plan.replicas), plan.workload.global_batch
    if total != expected:
        yield (
            f"replicas take {total} samples per iteration, "
            f"expected workload.global_batch ({expected})"
        )


def check_passes(plan: Plan) -> None:
    """Raise InputError for the first fault of explicit passes, and of a schedule with split
    backward passes: rules (10) and (11)."""
    presence = "missing" if plan.passes is None else "given"
    require(
        (plan.schedule == "explicit") == (plan.passes is not None),
        f"passes are {presence} under {plan.schedule}, "
        "expected given under the schedule explicit, and only there",
    )
    for fault in faults_of_passes(plan):
        require(False, fault)
    if not plan.splits_backward:
        return
    require(
        plan.recomputation in ("none", "selective"),
        f"recomputation is {plan.recomputation}, expected none or selective under "
        f"{plan.schedule}, whose backward passes are split",
    )
    require(
        plan.zero < 2 or not plan.in_step,
        f"zero is {plan.zero}, expected 0 or 1 under {plan.schedule} with replicas of one stage",
    )


def faults_of_passes(plan: Plan) -> Iterator[str]:
    """Every violation of rule (10) by passes that are given, one line each."""
    if plan.passes is None:
        return
    if len(plan.passes) != len(plan.replicas):
        yield (
            f"passes has {len(plan.passes)} entries, "
            f"expected one per replica ({len(plan.replicas)})"
        )
        return
    for i, (replica, texts) in enumerate(zip(plan.replicas, plan.passes, strict=True)):
        if len(texts) != len(replica.stages):
            yield (
                f"passes[{i}] has {len(texts)} entries, "
                f"expected one per stage ({len(replica.stages)})"
            )
            continue
        chunks = len(replica.stages[0].layers)
        orders = tuple(parsed(of_stage) for of_stage in texts)
        faulty = False
        for j, order in enumerate(orders):
            for fault in order_faults(order, chunks, replica.steps, f"passes[{i}][{j}]"):
                faulty = True
                yield fault
        waiting = None if faulty else circle(orders, chunks, folded=replica.folded)
        if waiting is not None:
            yield f"passes[{i}] wait for each other in a circle: {waiting}"


def check_zero_shares(plan: Plan) -> None:
    """Raise InputError unless ZeRO shares are given only from ZeRO 1 on, and positive exactly for
    the devices in use: rule (6)."""
    if plan.zero_shares is None:
        return
    require(plan.zero > 0, "zero_shares is given, expected null under ZeRO 0, which has no shards")
    require(
        len(plan.zero_shares) == len(plan.devices),
        f"zero_shares has {len(plan.zero_shares)} entries, expected one per device "
        f"({len(plan.devices)})",
    )
    used = plan.ranks
    for device, share in enumerate(plan.zero_shares):
        expected = "more than 0, being in use" if device in used else "0, not being in use"
        require(
            (share > 0) == (device in used),
            f"zero_shares[{device}] is {share}, expected {expected}",
        )


def check_program(plan: Plan) -> None:
    """Raise InputError unless a plan has a program exactly under `spmd`, and is then one replica of
    one stage on one row group, without ZeRO and recomputation, with equal micro-batches and a ratio
    for each of its devices: rule (7)."""
    presence = "missing" if plan.program is None else "given"
    require(
        (plan.schedule == "spmd") == (plan.program is not None),
        f"program is {presence} under {plan.schedule}, "
        "expected given under the schedule spmd, and only there",
    )
    if plan.program is None:
        return
    require(
        len(plan.replicas) == len(plan.replicas[0].stages) == 1,
        f"replicas are {len(plan.replicas)}, expected one of one stage under spmd",
    )
    require(
        plan.zero == 0 and plan.recomputation == "none",
        f"zero is {plan.zero}, expected 0, and no recomputation, under spmd",
    )
    first, *others = plan.replicas[0].micro_batches
    for b, batch in enumerate(others, start=1):
        require(
            batch.samples == first.samples,
            f"replicas[0].micro_batches[{b}].samples is {batch.samples}, "
            f"expected those of micro_batches[0] ({first.samples}) under spmd",
        )
    groups = plan.replicas[0].stages[0].devices
    require(
        len(groups) == 1,
        f"replicas[0].stages[0].devices has {len(groups)} row groups, expected 1 under spmd",
    )
    for k, row in enumerate(plan.program.ratios):
        require(
            len(row) == len(groups[0]),
            f"program.ratios[{k}] has {len(row)} entries, expected one per device of the "
            f"stage ({len(groups[0])})",
        )


def check_degrees(plan: Plan) -> None:
    """Raise InputError unless the further degrees suit the row groups and the ranks of every stage:
    rule (8)."""
    if plan.degrees is None:
        return
    context = plan.degrees.context
    experts = plan.degrees.expert * plan.degrees.expert_tensor
    for i, replica in enumerate(plan.replicas):
        for j, stage in enumerate(replica.stages):
            # exactly equal, as the file has them: shares of equal row groups are the same number
            require(
                len(stage.devices) == context and len(set(stage.row_shares)) == 1,
                f"replicas[{i}].stages[{j}].devices has {len(stage.devices)} row groups, "
                f"expected one per context rank ({context}) with equal shares",
            )
            ranks = len(stage.all_devices) * len(plan.replicas)
            require(
                ranks % experts == 0,
                f"degrees.expert x degrees.expert_tensor is {experts}, "
                f"expected a divisor of the ranks of replicas[{i}].stages[{j}] ({ranks})",
            )
            sharing_ranks = context * len(plan.replicas)
            require(
                sharing_ranks % plan.degrees.shard_groups == 0,
                f"degrees.shard_groups is {plan.degrees.shard_groups}, "
                f"expected a divisor of context ranks x replicas ({sharing_ranks})",
            )


def check_inputs(plan: Plan) -> None:
    """Raise InputError unless the inputs have the plan's layers, devices, framework and stack: rule
    (9)."""
    if plan.inputs is None:
        return
    layers = len(plan.workload.layers)
    counts = {
        "model": len(plan.inputs.model.layers),
        "profile": len(plan.inputs.profile.layers),
    }
    for name, count in counts.items():
        require(
            count == layers,
            f"inputs.{name}.layers has {count} entries, expected one per layer ({layers})",
        )
    names = {
        "framework": (plan.inputs.framework.name, plan.workload.framework),
        "stack": (plan.inputs.stack.name, plan.workload.stack),
    }
    for name, (in_inputs, in_workload) in names.items():
        require(
            in_inputs == in_workload,
            f"inputs.{name}.name is {in_inputs!r}, expected workload.{name} ({in_workload!r})",
        )
    places = plan.inputs.cluster.places()  # (type, node) of each device
    require(
        len(places) == len(plan.devices),
        f"inputs.cluster.nodes have {len(places)} devices, "
        f"expected as many as devices ({len(plan.devices)})",
    )
    for d, (device, (kind, node)) in enumerate(zip(plan.devices, places, strict=True)):
        require(
            (device.type, device.node) == (kind, node),
            f"devices[{d}] is {device.type} on node {device.node}, "
            f"expected {kind} on node {node}, as in inputs.cluster",
        )


def folder_of(path: str | os.PathLike[str]) -> str:
    """The absolute path of a file's folder."""
    return os.path.dirname(os.path.abspath(path))


load_plan, parse_plan, save_plan = Plan.load, Plan.parsed, Plan.save
