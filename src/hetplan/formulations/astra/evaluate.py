"""The independent evaluator of problem `astra`: eq. 22 and the constraints of eq. 23, from the data
alone."""

import math

from hetplan.formulations.astra.data import AstraData, AstraDecision
from hetplan.solvers.registry import Evaluation


def evaluate(data: AstraData, decision: AstraDecision) -> Evaluation:
    """Objective in seconds, or every constraint that `decision` breaks. Source: Astra, eq.
    22-23."""
    violations = _violations(data, decision)
    if violations:
        return Evaluation(None, tuple(violations))
    kinds = {kind.name: kind for kind in data.device_types}
    times = [
        stage.layers * kinds[stage.type].layer_seconds + kinds[stage.type].p2p_seconds
        for stage in decision.stages
    ]
    filling, slowest = math.fsum(times), max(times)
    steady = (data.micro_batches - 1) * slowest
    return Evaluation(
        filling + steady,
        parts={"sum over stages": filling, "slowest stage": slowest, "steady phase": steady},
    )


def _violations(data: AstraData, decision: AstraDecision) -> list[str]:
    """Each broken constraint as one line; empty when the decision is feasible."""
    kinds = {kind.name: kind for kind in data.device_types}
    problems: list[str] = []
    if len(decision.stages) != data.stages:
        problems.append(f"{len(decision.stages)} stages, expected {data.stages}")
    total = sum(stage.layers for stage in decision.stages)
    if total != data.layers:
        problems.append(f"the stages hold {total} layers, expected {data.layers}")
    used: dict[str, list[int]] = {}
    for s, stage in enumerate(decision.stages):
        if stage.type not in kinds:
            problems.append(
                f"stages[{s}].type is {stage.type!r}, expected one of {', '.join(kinds)}"
            )
            continue
        most = kinds[stage.type].max_layers
        if most is not None and stage.layers > most:
            problems.append(
                f"stages[{s}] holds {stage.layers} layers, {stage.type} takes at most {most}"
            )
        used.setdefault(stage.type, []).append(stage.layers)
    group = data.data_parallel * data.tensor_parallel
    for name, layers in used.items():
        if len(layers) * group > kinds[name].max_devices:
            problems.append(
                f"{name} has {kinds[name].max_devices} devices, {len(layers)} stages of "
                f"{group} need "
                f"{len(layers) * group}"
            )
        if data.equal_layers_per_type and len(set(layers)) > 1:
            problems.append(
                f"stages of {name} hold {min(layers)} to {max(layers)} layers, expected "
                "the same number"
            )
    return problems
