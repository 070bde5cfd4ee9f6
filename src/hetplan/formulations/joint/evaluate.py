"""The evaluator of problem `joint`: it judges a decision from the data and the replay.

Sets   i replicas, j stages of a replica, g row groups of a stage; d devices.
Data   see data.py.

Constraints, each checked by the function of its number:
(1) the decision keeps the rules of a plan file (plans/plan.py)
(2) its mode of recomputation is one that the data have, and the ZeRO level that its level acts as
    is among `zero_levels`
(3) the devices of a stage are of one type
(4) the devices of a tensor group, which is one row group of a stage, are on one node
(5) the tensor degree of a stage is among `tensor_degrees`
(6) the tensor shares of a stage are equal
(7) a stage has at most MOST_CHUNKS chunks
(8) no device needs more than its memory at its peak (replays/chains.py)

Objective  the replayed seconds of one iteration.

`describe` gives a plan's stages as a table, with figures of its replay. Replicas that are alike
share one row.
"""

from collections.abc import Iterator, Sequence

from pydantic import ValidationError

from hetplan.formulations.joint.data import MOST_CHUNKS, JointData, JointDecision
from hetplan.plans.plan import Plan, Stage, replica_violations
from hetplan.plans.words import summary
from hetplan.replays.chains import ChainReplayer, Replay
from hetplan.replays.stages import stage_table
from hetplan.schema import input_error
from hetplan.solvers.registry import Evaluation
from hetplan.text import (
    Table,
    bytes_text,
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
    """The fields of a plan file that a decision of problem `joint` has."""
    return JointDecision.model_validate(
        {name: getattr(plan, name) for name in JointDecision.model_fields}
    )


def evaluate(data: JointData, decision: JointDecision) -> Evaluation:
    """The objective of `decision` in seconds, or its violations.

    All violations of (1) to (7) are listed. (8) is checked only where (1) to (7) hold, since a plan
    that breaks them cannot be replayed.
    """
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
        if not violations:  # the fault is in the data, say more devices than a plan file can have
            violations = [str(input_error(error, where="decision"))]
        yield from violations


def broken(data: JointData, plan: Plan) -> Iterator[str]:
    """Every violation of (2) to (7), which a plan file may break. The plan need not have been
    validated."""
    yield from mode_and_level_exist(data, plan)
    for i, replica in enumerate(plan.replicas):
        for j, stage in enumerate(replica.stages):
            where = f"replicas[{i}].stages[{j}]"
            yield from devices_are_of_one_type(plan, stage, where)
            yield from tensor_groups_are_on_one_node(plan, stage, where)
            yield from tensor_degree_is_offered(data, stage, where)
            yield from tensor_shares_are_equal(stage, where)
            yield from chunks_are_few(stage, where)


def mode_and_level_exist(data: JointData, plan: Plan) -> Iterator[str]:  # (2)
    """A violation where the data lack the plan's mode of recomputation or its ZeRO level."""
    if plan.recomputation not in data.modes:
        yield f"recomputation {plan.recomputation}, expected one of {', '.join(data.modes)}"
    stages = [replica.stages for replica in plan.replicas]
    one_virtual_stage = all(len(each) == len(each[0].layers) == 1 for each in stages)
    level = data.acting_level(plan.zero, one_virtual_stage=one_virtual_stage)
    if level not in data.zero_levels:
        yield f"ZeRO {level}, expected one of {', '.join(map(str, data.zero_levels))}"


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
    """The devices that the cluster has. Numbers of other devices violate (1)."""
    return [device for device in devices if device < len(plan.devices)]


def describe(data: JointData, decision: JointDecision) -> list[Table]:
    """A table of a feasible decision's stages."""
    plan = plan_of(data, decision)
    return [stage_table(plan, ChainReplayer.of(data).replay(plan), summary(plan))]
