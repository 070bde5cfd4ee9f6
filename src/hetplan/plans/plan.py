"""The plan file: what to run on which device, for every family; every rank derives its part from
it.

Sets    d devices of the cluster, i replicas, j stages of a replica, k layers in the order of the
model.
Holds   for each replica its stages (layers, devices, shares) and its micro-batches; for all of them
        the schedule, the ZeRO level and recomputation.
A stage's `devices` are [row group][tensor rank]: each row group takes a part of every micro-batch's
samples in proportion to `row_shares`, each tensor rank a part of every weight in proportion to
`tensor_shares`;
`split` says which. Stages hold one range of layers, or under the interleaved schedule one per model
chunk, where chunk c of all stages comes before chunk c + 1 of any.
Rules   (1) every replica holds every layer exactly once, in order
        (2) no device is in two places, none is unknown
        (3) the micro-batches of all replicas add up to the global batch
        (4) ZeRO 2 and 3: all replicas take every accumulation step together. ZeRO 1 to 3: a
            micro-batch of 0 samples only takes part in the synchronisation, with the replica's
            shards
        (5) one chunk per stage; interleaved: equally many on each, and whole rounds of
        micro-batches
        (6) one share per row group and per tensor rank; ZeRO shares go with the devices, from ZeRO
        1 on
        (7) the schedule `spmd` comes with a program, and only it: one replica of one stage on one
            row group; how tensors divide is then said by the program's ratios, not by the stage's
            shares
        (8) with `degrees` every stage has as many row groups as context ranks, with equal shares,
            and expert ranks divide the ranks of a stage
        (9) `inputs`, the workload that the plan was made for, have the plan's layers and devices,
            its framework and its stack
"""

import os
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from hetplan.errors import require
from hetplan.plans.degrees import Degrees
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

MAX_RANKS = 4096

PassSchedule = Literal["gpipe", "1f1b", "interleaved-1f1b"]
Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "spmd"]
Recomputation = Literal["none", "selective", "operators", "full"]
Shares = Annotated[list[Positive], Field(min_length=1, max_length=MAX_RANKS)]


class PlanDevice(StrictModel):
    """A device of the cluster, as the plan expects it; its number is its place in `devices`."""

    type: Name
    node: Count


class PlanWorkload(StrictModel):
    """The training job. layers: names in order. sequence: tokens per sample, null for images.
    framework, stack: whose memory and whose seconds were counted."""

    model: Name
    cluster: Name
    global_batch: PositiveCount
    sequence: PositiveCount | None = None
    precision: Literal["fp16", "bf16", "fp32"]
    framework: Name = "hetplan"
    stack: Name = "fused"
    layers: list[Name] = Field(min_length=1, max_length=4096)

    @property
    def narrow(self) -> str:
        """`products in fp8`, where the stack has them; else empty."""
        return f"products in {self.stack}" if self.stack in ("fp8", "fp4") else ""


class MicroBatches(StrictModel):
    """`count` equal micro-batches of `samples` (0: takes part without samples, ZeRO 1 to 3)."""

    count: PositiveCount
    samples: Count


class Stage(StrictModel):
    """One pipeline stage of a replica; see the module for `devices` and the shares."""

    layers: list[Range] = Field(min_length=1, max_length=4096)
    devices: list[list[Count]] = Field(min_length=1, max_length=MAX_RANKS)
    row_shares: Shares = Field(default_factory=lambda: [1.0])
    tensor_shares: Shares = Field(default_factory=lambda: [1.0])

    @cached_property
    def digest(self) -> int:
        """The hash, kept: costs of stages are remembered, and asked for often."""
        rows = tuple(map(tuple, self.devices))
        return hash((*self.layers, rows, *self.row_shares, *self.tensor_shares))

    def __hash__(self) -> int:
        return self.digest

    @property
    def all_devices(self) -> list[int]:
        """Devices of all row groups."""
        return [device for group in self.devices for device in group]

    @property
    def parts(self) -> list[float]:
        """Shares of the stage's weights on each of `all_devices`."""
        whole = sum(self.tensor_shares)
        return [share / whole for share in self.tensor_shares] * len(self.devices)


class Replica(StrictModel):
    """One copy of the model: its stages in order, and its micro-batches in order."""

    stages: list[Stage] = Field(min_length=1, max_length=MAX_RANKS)
    micro_batches: list[MicroBatches] = Field(min_length=1, max_length=1_000_000)

    @property
    def samples(self) -> int:
        """Samples per iteration."""
        return sum(batch.count * batch.samples for batch in self.micro_batches)

    @property
    def steps(self) -> int:
        """Micro-batches per iteration."""
        return sum(batch.count for batch in self.micro_batches)


class Prediction(StrictModel):
    """The planner's figures of the plan: seconds per iteration, replayed and by the objective of
    the strategy's problem (`closed_form_seconds`).

    objective, bound: of the strategy's own problem. What is not known is null.
    """

    strategy: Name
    method: Name
    predicted_seconds: NonNegative | None = None
    closed_form_seconds: NonNegative | None = None
    objective: NonNegative | None = None
    bound: NonNegative | None = None


# Left out of the file where they are None.
OPTIONAL = ("zero_shares", "prediction", "refused", "program", "degrees", "templates", "inputs")


class Plan(Document):
    """A plan file. origin: which method found it and what it promises. Validated completely when
    made.

    zero_shares [devices]: how ZeRO's shards divide over the devices; None (left out of the file):
    equally over those in use. prediction: None (left out) for a plan that the planner did not make.
    refused: why `hetplan run` does not run it as it stands, and what would help (left out where it
    does). program: under the schedule `spmd`, what every device runs (left out otherwise).
    degrees: context, expert and further degrees (left out where there are none).
    templates: what `plan replan` and `run --elastic` make the next plan of (left out elsewhere).
    inputs: the workload that it was made for, None (left out) in older files and in plans made by
    hand.
    """

    format: Literal["hetplan-plan"] = "hetplan-plan"
    version: Literal[1] = 1
    name: Name
    origin: Line = ""
    workload: PlanWorkload
    devices: list[PlanDevice] = Field(min_length=1, max_length=MAX_RANKS)
    schedule: Schedule = "1f1b"
    zero: Annotated[int, Field(ge=0, le=3)] = 0
    zero_shares: Annotated[list[NonNegative], Field(min_length=1, max_length=MAX_RANKS)] | None = (
        None
    )
    recomputation: Recomputation = "none"
    prediction: Prediction | None = None
    refused: Annotated[Line, Field(min_length=1)] | None = None
    replicas: list[Replica] = Field(min_length=1, max_length=MAX_RANKS)
    program: SpmdProgram | None = None
    degrees: Degrees | None = None
    templates: ReadyTemplates | None = None
    inputs: Inputs | None = None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """From a file (`.gz`: unpacked); raises InputError naming file, place, got and expected."""
        plan = super().load(path)
        if plan.inputs is None:
            return plan
        inputs = absolute_from(plan.inputs, folder_of(path))
        return plan.model_copy(update={"inputs": inputs})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON, atomically (gzip where the name ends in .gz). The paths of the files that
        the plan was made from become relative to the file's folder."""
        if self.inputs is None:
            Document.save(self, path)
            return
        inputs = relative_to(self.inputs, folder_of(path))
        Document.save(self.model_copy(update={"inputs": inputs}), path)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for violation in replica_violations(self):
            raise ValueError(violation)
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
        """[ranks] where each rank stands."""
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
        """The degrees, where there are none those that change nothing."""
        return self.degrees or Degrees()

    @property
    def in_step(self) -> bool:
        """Whether all ranks take each pass together: replicas of one stage and one chunk."""
        return all(len(r.stages) == 1 and len(r.stages[0].layers) == 1 for r in self.replicas)

    def order(self, seconds: float) -> tuple[float, int]:
        """The key that orders plans: seconds of an iteration, to nine digits; of equals, the number
        of nodes of which only some devices are in use."""
        whole = Counter(device.node for device in self.devices)
        used = Counter(self.devices[device].node for device in self.ranks)
        return float(f"{seconds:.9g}"), sum(used[node] < whole[node] for node in used)

    @property
    def pass_schedule(self) -> PassSchedule:
        """The order of passes of a plan of stages; programs have an order of their own."""
        assert self.schedule != "spmd", "a plan of stages"
        return self.schedule

    @property
    def world_size(self) -> int:
        """Processes to start: one per device in use."""
        return len(self.ranks)


def replica_violations(plan: Plan) -> Iterator[str]:
    """Every violation of the rules on replicas, one line each: (1) to (5), and (6) for the shares
    of stages. The plan need not have been validated."""
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
    """A violation for each layer with the name of an earlier one: layers and their parameters are
    told apart by their names."""
    first: dict[str, int] = {}
    for k, name in enumerate(plan.workload.layers):
        if name in first:
            yield f"workload.layers[{k}] is {name!r}, as workload.layers[{first[name]}] is"
        else:
            first[name] = k


def devices_have_one_place(plan: Plan) -> Iterator[str]:  # (2)
    """A violation for each place with a device that does not exist or has an earlier place."""
    last = len(plan.devices) - 1
    first_place: dict[int, str] = {}
    for device, i, j, g, t in plan.seats():
        place = f"replicas[{i}].stages[{j}].devices[{g}][{t}]"
        if device > last:
            yield f"{place} is {device}, expected a device of 0..{last}"
        elif device in first_place:
            yield f"{place} is device {device}, which {first_place[device]} uses already"
        else:
            first_place[device] = place


def shares_go_with_devices(stage: Stage, where: str) -> Iterator[str]:  # (6)
    """A violation where a stage has not one share per row group, and for each row group that has
    not one device per tensor share."""
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
    """A violation for each stage of several chunks under a schedule for one; under the interleaved
    schedule for each stage of more or fewer chunks than the first, and where the replica's
    micro-batches are no whole rounds."""
    chunks, stages = len(replica.stages[0].layers), len(replica.stages)
    interleaved = plan.schedule == "interleaved-1f1b"
    for j, stage in enumerate(replica.stages):
        ranges = len(stage.layers)
        if interleaved and ranges != chunks:
            yield (
                f"{where}.stages[{j}].layers has {ranges} ranges, "
                f"expected as many as stages[0] ({chunks})"
            )
        if not interleaved and ranges != 1:
            yield (
                f"{where}.stages[{j}].layers has {ranges} ranges, expected 1 under {plan.schedule}"
            )
    if interleaved and replica.steps % stages != 0:
        yield (
            f"{where}.micro_batches are {replica.steps}, "
            f"expected a multiple of the stages ({stages}) under {plan.schedule}"
        )


def stages_hold_every_layer(plan: Plan, replica: Replica, where: str) -> Iterator[str]:  # (1)
    """A violation for each range of layers that does not begin where the one before it ends, for
    each empty range, and where the last one does not end at the last layer.

    Ranges follow each other chunk by chunk, and stage by stage in a chunk. They have no such order
    where stages have unequal numbers of chunks, which is left to (5).
    """
    chunks = len(replica.stages[0].layers)
    if any(len(stage.layers) != chunks for stage in replica.stages):
        return
    begin, count = 0, len(plan.workload.layers)
    for c in range(chunks):
        for j, stage in enumerate(replica.stages):
            first, last = stage.layers[c]
            if first != begin:
                yield f"{where}.stages[{j}].layers[{c}] begins at layer {first}, expected {begin}"
            if first >= last:
                yield (
                    f"{where}.stages[{j}].layers[{c}] is [{first}, {last}), "
                    "expected one layer at least"
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
    """A violation where the replicas do not take the global batch together."""
    total, expected = sum(r.samples for r in plan.replicas), plan.workload.global_batch
    if total != expected:
        yield (
            f"replicas take {total} samples per iteration, "
            f"expected workload.global_batch ({expected})"
        )


def check_zero_shares(plan: Plan) -> None:
    """(6) shares of ZeRO's shards go with the devices."""
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
    """(7) one replica of one stage, with a program whose ratios go with its devices."""
    had = "missing" if plan.program is None else "given"
    require(
        (plan.schedule == "spmd") == (plan.program is not None),
        f"program is {had} under {plan.schedule}, "
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
    """(8) context ranks are the row groups; experts are spread over ranks of a stage."""
    if plan.degrees is None:
        return
    context = plan.degrees.context
    experts = plan.degrees.expert * plan.degrees.expert_tensor
    for i, replica in enumerate(plan.replicas):
        for j, stage in enumerate(replica.stages):
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
            shared = context * len(plan.replicas)
            require(
                shared % plan.degrees.shard_groups == 0,
                f"degrees.shard_groups is {plan.degrees.shard_groups}, "
                f"expected a divisor of context ranks x replicas ({shared})",
            )


def check_inputs(plan: Plan) -> None:
    """(9) inputs are of the plan's layers, devices, framework and stack."""
    if plan.inputs is None:
        return
    layers = len(plan.workload.layers)
    for name, count in (
        ("model", len(plan.inputs.model.layers)),
        ("profile", len(plan.inputs.profile.layers)),
    ):
        require(
            count == layers,
            f"inputs.{name}.layers has {count} entries, expected one per layer ({layers})",
        )
    for name, of_inputs, of_plan in (
        ("framework", plan.inputs.framework.name, plan.workload.framework),
        ("stack", plan.inputs.stack.name, plan.workload.stack),
    ):
        require(
            of_inputs == of_plan,
            f"inputs.{name}.name is {of_inputs!r}, expected workload.{name} ({of_plan!r})",
        )
    places = plan.inputs.cluster.places()
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
    """The folder of a file, absolute."""
    return os.path.dirname(os.path.abspath(path))


load_plan, parse_plan, save_plan = Plan.load, Plan.parsed, Plan.save
