"""The independent evaluator of problem `astra`: eq. 22 and the constraints of eq. 23, from the data
alone. And a decision as a table for people: one line per segment of equal stages."""

import math
from collections import Counter

from hetplan.formulations.astra.data import AstraData, AstraDecision
from hetplan.solvers.registry import Evaluation
from hetplan.text import Table, ranges_text, seconds_text


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
    total = sum(stage.layers for stage in decision.stages)
    group, used = data.data_parallel * data.tensor_parallel, dict[str, list[int]]()
    checks = [
        (
            len(decision.stages) != data.stages,
            f"{len(decision.stages)} stages, expected {data.stages}",
        ),
        (total != data.layers, f"the stages hold {total} layers, expected {data.layers}"),
    ]
    for s, (name, layers) in enumerate((stage.type, stage.layers) for stage in decision.stages):
        most = kinds[name].max_layers if name in kinds else None
        checks += [
            (
                name not in kinds,
                f"stages[{s}].type is {name!r}, expected one of {', '.join(kinds)}",
            ),
            (
                most is not None and layers > most,
                f"stages[{s}] holds {layers} layers, {name} takes at most {most}",
            ),
        ]
        used.setdefault(name, []).append(layers)
    for name, held in ((name, used[name]) for name in used if name in kinds):
        devices, needed = kinds[name].max_devices, len(held) * group
        checks += [
            (
                needed > devices,
                f"{name} has {devices} devices, {len(held)} stages of {group} need {needed}",
            ),
            (
                data.equal_layers_per_type and len(set(held)) > 1,
                f"stages of {name} hold {min(held)} to {max(held)} layers, "
                "expected the same number",
            ),
        ]
    return [text for broken, text in checks if broken]


def describe(data: AstraData, decision: AstraDecision) -> list[Table]:
    """The segments of a feasible decision, in pipeline order of their first stage."""
    kinds = {kind.name: kind for kind in data.device_types}
    group = data.data_parallel * data.tensor_parallel
    segments = Counter((stage.type, stage.layers) for stage in decision.stages)
    slowest = max(x * kinds[name].layer_seconds + kinds[name].p2p_seconds for name, x in segments)
    rows = []
    for (name, layers), count in segments.items():
        kind = kinds[name]
        seconds = layers * kind.layer_seconds + kind.p2p_seconds
        where = [
            s
            for s, stage in enumerate(decision.stages)
            if (stage.type, stage.layers) == (name, layers)
        ]
        bottleneck = (
            "slowest" if seconds >= slowest * (1 - 1e-12) else f"{100 * seconds / slowest:.1f} %"
        )
        rows.append(
            (
                ranges_text(where),
                name,
                str(layers),
                f"{count * group}",
                seconds_text(seconds),
                bottleneck,
            )
        )
    title = (
        f"{data.layers} layers on {data.stages} stages of {group} devices "
        f"(data {data.data_parallel} x tensor {data.tensor_parallel}), "
        f"{data.micro_batches} micro-batches"
    )
    header = ("stages", "type", "layers each", "devices", "per micro-batch", "of the slowest")
    return [Table(title, header, tuple(rows), right=(2, 3, 4))]
