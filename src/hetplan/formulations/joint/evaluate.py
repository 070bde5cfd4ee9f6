"""The evaluator of problem `joint`: it judges a decision from the data and the replay.

Sets   i replicas, j stages of a replica, g row groups of a stage; d devices.
Data   see data.py.

Constraints, each checked by the function of its number:
(1) the decision keeps the rules of a plan file (`plan`)
(2) its mode of recomputation is one that the data have
(3) the devices of a stage are of one type
(4) the devices of a tensor group, which is one row group of a stage, are on one node
(5) the tensor degree of a stage is among `tensor_degrees`
(6) the tensor shares of a stage are equal
(7) a stage has at most MOST_CHUNKS chunks
(8) no device holds more than its memory (`replay`)

Objective  the replayed seconds of one iteration.

`describe` gives a plan's stages as a table for people, by its replay; like replicas stand in one
row.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from pydantic import ValidationError

from hetplan.formulations.joint.data import MOST_CHUNKS, JointData, JointDecision
from hetplan.formulations.joint.replay import ChainReplayer, Replay
from hetplan.plans.plan import Plan, Replica, Stage, replica_violations
from hetplan.schema import input_error
from hetplan.solvers.registry import Evaluation
from hetplan.text import (
    Table,
    bytes_text,
    counted,
    devices_text,
    grouped,
    percent_text,
    ranges_text,
    seconds_text,
    share_text,
)


def plan_of(data: JointData, decision: JointDecision) -> Plan:
    """The decision as a plan file. Raises pydantic's ValidationError where it breaks a rule of the
    file."""
    fields = dict(decision)
    return data.plan(fields.pop("replicas"), **fields)


def unchecked_plan(data: JointData, decision: JointDecision) -> Plan:
    """The decision as a plan file that may break the rules of the file."""
    return Plan.model_construct(**data.common_fields, **dict(decision))


def decision_of(plan: Plan) -> JointDecision:
    """The decision that a plan file is made from: the schedule, ZeRO, recomputation and the
    replicas."""
    return JointDecision.model_validate(
        {name: getattr(plan, name) for name in JointDecision.model_fields}
    )


def evaluate(data: JointData, decision: JointDecision) -> Evaluation:
    """The objective of `decision` in seconds, or every violation of (1) to (7); of (8) where those
    hold, since a plan that breaks them cannot be replayed."""
    violations = (
        *broken_rules_of_the_file(data, decision),
        *broken(data, unchecked_plan(data, decision)),
    )
    if violations:
        return Evaluation(None, violations)
    run = ChainReplayer.of(data).replay(plan_of(data, decision))
    violations = tuple(devices_have_memory(run))
    if violations:
        return Evaluation(None, violations)
    return Evaluation(run.seconds)


def broken_rules_of_the_file(data: JointData, decision: JointDecision) -> Iterator[str]:  # (1)
    """A violation for each place at which the decision breaks a rule of a plan file."""
    try:
        plan_of(data, decision)
    except ValidationError as error:
        violations = list(replica_violations(unchecked_plan(data, decision)))
        if not violations:  # the fault is in the data, such as more devices than a file can have
            violations = [str(input_error(error, where="decision"))]
        yield from violations


def broken(data: JointData, plan: Plan) -> Iterator[str]:
    """Every violation of (2) to (7), which a plan file may break. The plan need not have been
    validated."""
    yield from mode_exists(data, plan)
    for i, replica in enumerate(plan.replicas):
        for j, stage in enumerate(replica.stages):
            where = f"replicas[{i}].stages[{j}]"
            yield from devices_are_of_one_type(plan, stage, where)
            yield from tensor_groups_are_on_one_node(plan, stage, where)
            yield from tensor_degree_is_offered(data, stage, where)
            yield from tensor_shares_are_equal(stage, where)
            yield from chunks_are_few(stage, where)


def mode_exists(data: JointData, plan: Plan) -> Iterator[str]:  # (2)
    """A violation where the data lack the plan's mode of recomputation."""
    if plan.recomputation not in data.modes:
        yield f"recomputation {plan.recomputation}, expected one of {', '.join(data.modes)}"


def devices_are_of_one_type(plan: Plan, stage: Stage, where: str) -> Iterator[str]:  # (3)
    """A violation where a stage has devices of several types."""
    types = {plan.devices[device].type for device in existing(plan, stage.all_devices)}
    if len(types) > 1:
        yield f"{where}: devices of several types, expected one"


def tensor_groups_are_on_one_node(plan: Plan, stage: Stage, where: str) -> Iterator[str]:  # (4)
    """A violation for each row group with devices on several nodes."""
    for g, group in enumerate(stage.devices):
        nodes = {plan.devices[device].node for device in existing(plan, group)}
        if len(nodes) > 1:
            yield f"{where}.devices[{g}]: a tensor group on several nodes, expected one"


def tensor_degree_is_offered(data: JointData, stage: Stage, where: str) -> Iterator[str]:  # (5)
    """A violation where the data lack the stage's tensor degree."""
    degree = len(stage.tensor_shares)
    if degree not in data.tensor_degrees:
        yield f"{where}: tensor degree {degree}, expected one of {data.tensor_degrees}"


def tensor_shares_are_equal(stage: Stage, where: str) -> Iterator[str]:  # (6)
    """A violation where the tensor ranks of a stage have unequal shares."""
    if len(set(stage.tensor_shares)) > 1:
        yield f"{where}: unequal tensor shares, expected equal ones"


def chunks_are_few(stage: Stage, where: str) -> Iterator[str]:  # (7)
    """A violation where a stage has more than MOST_CHUNKS chunks."""
    if len(stage.layers) > MOST_CHUNKS:
        yield f"{where}: {len(stage.layers)} chunks, expected at most {MOST_CHUNKS}"


def devices_have_memory(run: Replay) -> Iterator[str]:  # (8)
    """A violation for each device whose peak exceeds its memory."""
    for device, (peak, limit) in enumerate(zip(run.peak_bytes, run.limit_bytes, strict=True)):
        if peak > limit:
            yield (
                f"device {device} holds {bytes_text(peak)}, expected at most {bytes_text(limit)}"
            )


def existing(plan: Plan, devices: Sequence[int]) -> list[int]:
    """Those of the devices that the cluster has; the others are left to (1)."""
    return [device for device in devices if device < len(plan.devices)]


LISTED = 40  # rows of the table of stages


def describe(data: JointData, decision: JointDecision) -> list[Table]:
    """A table of a feasible decision's stages."""
    plan = plan_of(data, decision)
    return [stage_table(plan, ChainReplayer.of(data).replay(plan), summary(plan))]


def summary(plan: Plan) -> str:
    """`2 pipelines of 4 stages, 16 micro-batches of 2 each, 1f1b, ZeRO 1, full recomputation`."""
    depths = sorted({len(replica.stages) for replica in plan.replicas})
    stages = "one stage" if depths == [1] else f"{' or '.join(map(str, depths))} stages"
    parts = [f"{counted(len(plan.replicas), 'pipeline')} of {stages}"]
    if len({batches_text(replica) for replica in plan.replicas}) == 1:
        parts.append(batches_in_words(plan.replicas[0]))
    chunks = len(plan.replicas[0].stages[0].layers)
    parts.append(f"{plan.schedule} in {chunks} chunks" if chunks > 1 else plan.schedule)
    parts.append(f"ZeRO {plan.zero}")
    if plan.recomputation != "none":
        parts.append(f"{plan.recomputation} recomputation")
    if plan.degrees is not None and plan.degrees.text:
        parts.append(plan.degrees.text)
    return ", ".join(parts)


def degrees_table(plan: Plan) -> Table:
    """A table of the first replica's stages, for a plan that cannot be replayed."""
    places = [(device.node, device.type) for device in plan.devices]
    rows = []
    for j, stage in enumerate(plan.replicas[0].stages):
        layers = chain.from_iterable(range(first, last) for first, last in stage.layers)
        rows.append((str(j), ranges_text(layers), devices_text(places, stage.all_devices)))
    notes = () if plan.refused is None else (plan.refused,)
    title = f"{plan.name}, {plan.origin or 'plan'}: {summary(plan)}"
    return Table(title, ("stage", "layers", "devices of replica 0"), tuple(rows), notes=notes)


def batches_text(replica: Replica) -> str:
    """`31 of 2 + 1 of 1`: count and samples of a replica's micro-batches."""
    return " + ".join(f"{batch.count} of {batch.samples}" for batch in replica.micro_batches)


def batches_in_words(replica: Replica) -> str:
    """`31 micro-batches of 2 + 1 of 1`."""
    count, _, rest = batches_text(replica).partition(" of ")
    noun = "micro-batch" if replica.steps == 1 else "micro-batches"
    return f"{count} {noun} of {rest}"


def stage_table(plan: Plan, run: Replay, title: str, notes: Sequence[str] = ()) -> Table:
    """A table with one row per stage of each group of like replicas; of a program that all devices
    run together, one row per device. Times are of the slowest replica, memory is of the device
    nearest to its limit."""
    places = [(device.node, device.type) for device in plan.devices]
    # each row is a list of units of the replay, see `Replay.owners`
    rows = [[unit] for unit in range(len(run.owners))] if run.by_device else alike(plan, run)

    def replica(units: list[int]) -> Replica:
        i, _ = run.owners[units[0]]
        return plan.replicas[i]

    def stage(units: list[int]) -> Stage:
        i, j = run.owners[units[0]]
        return plan.replicas[i].stages[j]

    def devices(units: list[int]) -> list[int]:
        return list(chain.from_iterable(run.devices[unit] for unit in units))

    def share(units: list[int]) -> str:
        """A device's part of the samples or columns that a program divides."""
        assert plan.program is not None
        return percent_text(plan.program.ratios[0][units[0]])

    def computes(units: list[int]) -> str:
        return seconds_text(max(float(run.timeline.busy[unit]) for unit in units))

    def idle(units: list[int]) -> str:
        least = min(float(run.timeline.idle[unit]) for unit in units)
        return percent_text(least / run.seconds)

    def memory(units: list[int]) -> str:
        peak, limit = run.peak_bytes, run.limit_bytes
        fullest = max(devices(units), key=lambda d: peak[d] / max(limit[d], 1.0))
        return share_text(peak[fullest], limit[fullest])

    columns: dict[str, Callable[[list[int]], str]] = {}
    if len({run.owners[units[0]][0] for units in rows}) > 1:
        columns["pipelines"] = lambda units: f"x{len(units)}"
    columns["stage"] = lambda units: str(run.owners[units[0]][1])
    columns["layers"] = lambda units: layers_text(stage(units))
    columns["devices"] = lambda units: devices_text(places, devices(units))
    if plan.program:
        columns["share"] = share
    else:
        columns["tensor"] = lambda units: str(len(stage(units).tensor_shares))
    if len({batches_text(each) for each in plan.replicas}) > 1:
        columns["batches"] = lambda units: batches_text(replica(units))
    columns |= {"computes": computes, "idle": idle, "memory": memory}
    if len(rows) > LISTED:
        notes = [*notes, f"{len(rows) - LISTED} more rows; --json lists all"]
    right = [i for i, name in enumerate(columns) if name != "devices"]
    return Table.of(title, rows[:LISTED], columns, notes, right=right)


def layers_text(stage: Stage) -> str:
    """`0-3, 8-11`: the first and the last layer of each chunk."""
    return ", ".join(f"{first}-{last - 1}" for first, last in stage.layers)


def alike(plan: Plan, run: Replay) -> list[list[int]]:
    """The rows of `stage_table`, each the units of one stage in all replicas that differ in the
    numbers of their devices alone."""

    def likeness(replica: Replica) -> str:
        types = [
            [[plan.devices[d].type for d in group] for group in stage.devices]
            for stage in replica.stages
        ]
        return str((types, [stage.layers for stage in replica.stages], replica.micro_batches))

    like_replicas = grouped((likeness(replica), i) for i, replica in enumerate(plan.replicas))
    unit = {owner: u for u, owner in enumerate(run.owners)}
    rows = []
    for members in like_replicas.values():
        for j in range(len(plan.replicas[members[0]].stages)):
            rows.append([unit[i, j] for i in members])
    return rows
