"""The independent evaluator: constraints (1), (2) and the slowest device's seconds."""

from experts.data import ExpertsData, ExpertsDecision
from hetplan.solvers.registry import Evaluation


def evaluate(data: ExpertsData, decision: ExpertsDecision) -> Evaluation:
    """The slowest device's seconds, or what the decision violates."""
    if len(decision.device_of) != len(data.expert_flops):
        return Evaluation(
            None, (f"{len(decision.device_of)} experts placed, expected {len(data.expert_flops)}",)
        )
    wrong = [j for j in decision.device_of if j >= len(data.devices)]
    if wrong:
        return Evaluation(
            None, (f"device {wrong[0]} does not exist, there are {len(data.devices)}",)
        )
    held = [decision.device_of.count(j) for j in range(len(data.devices))]
    full = [
        f"{d.name} holds {n} experts, has room for {d.room}"
        for d, n in zip(data.devices, held, strict=True)
        if n > d.room
    ]
    if full:
        return Evaluation(None, tuple(full))
    work = [0.0] * len(data.devices)
    for flops, j in zip(data.expert_flops, decision.device_of, strict=True):
        work[j] += flops
    seconds = [
        flops / device.flops_per_second for flops, device in zip(work, data.devices, strict=True)
    ]
    return Evaluation(max(seconds), parts={"mean over devices": sum(seconds) / len(seconds)})
