"""The evaluator of problem `joint`: a decision's rules, its memory and its replayed seconds."""

from collections.abc import Iterator

from pydantic import ValidationError

from hetplan.formulations.joint.data import MOST_CHUNKS, JointData, JointDecision
from hetplan.formulations.joint.plan import Plan
from hetplan.formulations.joint.replay import ChainReplayer
from hetplan.schema import input_error
from hetplan.solvers.registry import Evaluation
from hetplan.text import bytes_text


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
