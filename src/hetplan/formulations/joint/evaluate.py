"""The evaluator of problem `joint`: a decision's rules, its memory and its replayed seconds.

`describe` gives a plan's stages as a table for people, by its replay; like replicas stand in one
row.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from pydantic import ValidationError

from hetplan.formulations.joint.data import MOST_CHUNKS, JointData, JointDecision
from hetplan.formulations.joint.replay import ChainReplayer, Replay
from hetplan.plans.plan import Plan, Replica
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


def decision_of(plan: Plan) -> JointDecision:
    """What a plan decides."""
    return JointDecision.model_validate(
        {name: getattr(plan, name) for name in JointDecision.model_fields}
    )


def evaluate(data: JointData, decision: JointDecision) -> Evaluation:
    """Replayed seconds of one iteration; violations one line each."""
    try:
        plan = plan_of(data, decision)
    except ValidationError as error:
        return Evaluation(None, (str(input_error(error, where="decision")),))
    violations = tuple(broken(data, plan))
    if violations:
        return Evaluation(None, violations)
    run = ChainReplayer.of(data).replay(plan)
    over = tuple(
        f"device {device} holds {bytes_text(held)}, expected at most {bytes_text(limit)}"
        for device, (held, limit) in enumerate(zip(run.peak_bytes, run.limit_bytes, strict=True))
        if held > limit
    )
    return Evaluation(None, over) if over else Evaluation(run.seconds)


def broken(data: JointData, plan: Plan) -> Iterator[str]:
    """The rules of the problem that a plan file may break."""
    if plan.recomputation not in data.modes:
        yield f"recomputation {plan.recomputation}, expected one of {', '.join(data.modes)}"
    for i, replica in enumerate(plan.replicas):
        for j, stage in enumerate(replica.stages):
            here, tensor = f"replicas[{i}].stages[{j}]", len(stage.tensor_shares)
            if len({plan.devices[device].type for device in stage.all_devices}) > 1:
                yield f"{here}: devices of several types, expected one"
            if any(len({plan.devices[d].node for d in group}) > 1 for group in stage.devices):
                yield f"{here}: a tensor group on several nodes, expected one"
            if tensor not in data.tensor_degrees:
                yield f"{here}: tensor degree {tensor}, expected one of {data.tensor_degrees}"
            if len(set(stage.tensor_shares)) > 1:
                yield f"{here}: unequal tensor shares, expected equal ones"
            if len(stage.layers) > MOST_CHUNKS:
                yield f"{here}: {len(stage.layers)} chunks, expected at most {MOST_CHUNKS}"


LISTED = 40  # rows


def describe(data: JointData, decision: JointDecision) -> list[Table]:
    """The stages of a feasible decision."""
    plan = plan_of(data, decision)
    return [stage_table(plan, ChainReplayer.of(data).replay(plan), summary(plan))]


def summary(plan: Plan) -> str:
    """`2 pipelines of 4 stages, 16 micro-batches of 2 each, 1f1b, ZeRO 1, full recomputation`."""
    depths = sorted({len(replica.stages) for replica in plan.replicas})
    chunks = len(plan.replicas[0].stages[0].layers)
    steps = {batches_text(replica) for replica in plan.replicas}
    stages = f"{' or '.join(map(str, depths))} stages" if depths != [1] else "one stage"
    batches = (
        "micro-batch"
        if steps == {f"1 of {plan.replicas[0].micro_batches[0].samples}"}
        else ("micro-batches")
    )
    parts = [
        f"{counted(len(plan.replicas), 'pipeline')} of {stages}",
        ", ".join(steps).replace(" of ", f" {batches} of ", 1) if len(steps) == 1 else "",
        plan.schedule + (f" in {chunks} chunks" if chunks > 1 else ""),
        f"ZeRO {plan.zero}",
        "" if plan.recomputation == "none" else f"{plan.recomputation} recomputation",
        "" if plan.degrees is None else plan.degrees.text,
    ]
    return ", ".join(filter(None, parts))


def degrees_table(plan: Plan) -> Table:
    """One row per stage of the first of like replicas, for a plan that no replay takes."""
    places = [(device.node, device.type) for device in plan.devices]
    rows = [
        (
            str(j),
            ranges_text(layer for layers in stage.layers for layer in range(*layers)),
            devices_text(places, stage.all_devices),
        )
        for j, stage in enumerate(plan.replicas[0].stages)
    ]
    notes = () if plan.refused is None else (plan.refused,)
    title = f"{plan.name}, {plan.origin or 'plan'}: {summary(plan)}"
    return Table(title, ("stage", "layers", "devices of replica 0"), tuple(rows), notes=notes)


def batches_text(replica: Replica) -> str:
    """`31 of 2 + 1 of 1`."""
    return " + ".join(f"{batch.count} of {batch.samples}" for batch in replica.micro_batches)


def stage_table(plan: Plan, run: Replay, title: str, notes: Sequence[str] = ()) -> Table:
    """One row per stage of each kind of replica; of a program that all devices run together, one
    per device. Times are of the slowest replica, memory of the device nearest to its limit."""
    places = [(device.node, device.type) for device in plan.devices]
    rows = [[unit] for unit in range(len(run.owners))] if run.by_device else alike(plan, run)

    def layers(units: list[int]) -> str:
        replica, stage = run.owners[units[0]]
        ranges = plan.replicas[replica].stages[stage].layers
        return ", ".join(f"{first}-{last - 1}" for first, last in ranges)

    def tensor(units: list[int]) -> str:
        replica, stage = run.owners[units[0]]
        return str(len(plan.replicas[replica].stages[stage].tensor_shares))

    def share(units: list[int]) -> str:
        """Of the samples or columns that a program's device takes."""
        assert plan.program is not None
        return percent_text(plan.program.ratios[0][units[0]])

    def devices(units: list[int]) -> list[int]:
        return list(chain.from_iterable(run.devices[unit] for unit in units))

    def memory(units: list[int]) -> str:
        peak, limit = run.peak_bytes, run.limit_bytes
        fullest = max(devices(units), key=lambda d: peak[d] / max(limit[d], 1.0))
        return share_text(peak[fullest], limit[fullest])

    if len(rows) > LISTED:
        notes = [*notes, f"{len(rows) - LISTED} more rows; --json lists all"]
    unlike = len({run.owners[units[0]][0] for units in rows}) > 1
    columns: dict[str, Callable[[list[int]], str]] = {
        **({"pipelines": lambda units: f"x{len(units)}"} if unlike else {}),
        "stage": lambda units: str(run.owners[units[0]][1]),
        "layers": layers,
        "devices": lambda units: devices_text(places, devices(units)),
        **({"share": share} if plan.program else {"tensor": tensor}),
        **(
            {"batches": lambda u: batches_text(plan.replicas[run.owners[u[0]][0]])}
            if len({batches_text(replica) for replica in plan.replicas}) > 1
            else {}
        ),
        "computes": lambda units: seconds_text(max(float(run.timeline.busy[u]) for u in units)),
        "idle": lambda units: percent_text(
            min(float(run.timeline.idle[u]) for u in units) / run.seconds
        ),
        "memory": memory,
    }
    return Table.of(
        title,
        rows[:LISTED],
        columns,
        notes,
        right=[i for i, name in enumerate(columns) if name != "devices"],
    )


def alike(plan: Plan, run: Replay) -> list[list[int]]:
    """Units by rows of the table: the same stage of replicas that differ in their devices' numbers
    alone."""

    def kind(replica: Replica) -> str:
        types = [
            [[plan.devices[d].type for d in group] for group in stage.devices]
            for stage in replica.stages
        ]
        return str((types, [stage.layers for stage in replica.stages], replica.micro_batches))

    kinds = grouped((kind(replica), i) for i, replica in enumerate(plan.replicas))
    unit = {owner: u for u, owner in enumerate(run.owners)}
    return [
        [unit[i, j] for i in replicas]
        for replicas in kinds.values()
        for j in range(len(plan.replicas[replicas[0]].stages))
    ]
