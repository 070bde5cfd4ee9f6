"""The independent evaluator of problem `astra`: it judges a decision from the data alone.

Sets   s in 0..P-1 stages, each of a device type and with n_s layers; i in 0..M-1 device types.
Data   N layers, K micro-batches, D data-parallel and T tensor-parallel degree; per type
       max_devices, max_layers, c layer_seconds, h p2p_seconds; see data.py.

Constraints, each checked by the function of its number ((1) to (4) as in data.py):
(1) sum_s n_s = N
(2) (stages on type i) D T <= max_devices_i
(3) n_s <= max_layers of its type
(4) with equal_layers_per_type, all stages of a type hold the same number of layers
(5) there are P stages
(6) every stage's type is one of the instance's

Objective, in seconds  sum_s (n_s c + h) + (K-1) max_s (n_s c + h),  c and h of the stage's type.
Source Astra, Section 3.4, eq. 22-23; (3) is hetplan's.

`describe` shows a decision as a table with one row for each segment: the stages of one type with
equally many layers.
"""

import math
from collections.abc import Iterator

from hetplan.formulations.astra.data import AstraData, AstraDecision, AstraStage, DeviceType
from hetplan.solvers.registry import Evaluation
from hetplan.text import Table, grouped, ranges_text, seconds_text

# Relative. Stages whose times differ by less than this count as equally slow.
ROUNDING = 1e-12


def evaluate(data: AstraData, decision: AstraDecision) -> Evaluation:
    """The objective of `decision` in seconds with its parts, or every violation."""
    violations = (
        *layers_are_all_placed(data, decision),
        *types_have_devices(data, decision),
        *stages_have_memory(data, decision),
        *types_have_equal_stages(data, decision),
        *pipeline_has_its_depth(data, decision),
        *types_exist(data, decision),
    )
    if violations:
        return Evaluation(None, violations)
    kinds = types_by_name(data)
    seconds = [stage_seconds(kinds[stage.type], stage.layers) for stage in decision.stages]
    filling = math.fsum(seconds)
    slowest = max(seconds)
    steady = (data.micro_batches - 1) * slowest
    parts = {"sum over stages": filling, "slowest stage": slowest, "steady phase": steady}
    return Evaluation(filling + steady, parts=parts)


def layers_are_all_placed(data: AstraData, decision: AstraDecision) -> Iterator[str]:  # (1)
    """A violation where the stages together hold another number of layers than N."""
    total = sum(stage.layers for stage in decision.stages)
    if total != data.layers:
        yield f"the stages hold {total} layers, expected {data.layers}"


def types_have_devices(data: AstraData, decision: AstraDecision) -> Iterator[str]:  # (2)
    """A violation for each type whose stages need more devices than the type has."""
    per_stage = stage_devices(data)
    for kind, stages in stages_by_type(data, decision):
        needed = len(stages) * per_stage
        if needed > kind.max_devices:
            yield (
                f"{kind.name} has {kind.max_devices} devices, "
                f"{len(stages)} stages of {per_stage} need {needed}"
            )


def stages_have_memory(data: AstraData, decision: AstraDecision) -> Iterator[str]:  # (3)
    """A violation for each stage with more layers than its type can hold in memory."""
    kinds = types_by_name(data)
    for s, stage in enumerate(decision.stages):
        if stage.type not in kinds:  # a violation of (6)
            continue
        most = kinds[stage.type].max_layers
        if most is not None and stage.layers > most:
            yield f"stages[{s}] holds {stage.layers} layers, {stage.type} takes at most {most}"


def types_have_equal_stages(data: AstraData, decision: AstraDecision) -> Iterator[str]:  # (4)
    """A violation for each type whose stages hold different numbers of layers, where the instance
    demands equal numbers."""
    if not data.equal_layers_per_type:
        return
    for kind, stages in stages_by_type(data, decision):
        fewest = min(stage.layers for stage in stages)
        most = max(stage.layers for stage in stages)
        if fewest < most:
            yield f"stages of {kind.name} hold {fewest} to {most} layers, expected the same number"


def pipeline_has_its_depth(data: AstraData, decision: AstraDecision) -> Iterator[str]:  # (5)
    """A violation where the number of stages is not P."""
    if len(decision.stages) != data.stages:
        yield f"{len(decision.stages)} stages, expected {data.stages}"


def types_exist(data: AstraData, decision: AstraDecision) -> Iterator[str]:  # (6)
    """A violation for each stage on a type that the instance does not have."""
    kinds = types_by_name(data)
    for s, stage in enumerate(decision.stages):
        if stage.type not in kinds:
            yield f"stages[{s}].type is {stage.type!r}, expected one of {', '.join(kinds)}"


def types_by_name(data: AstraData) -> dict[str, DeviceType]:
    """Every device type of the instance by its name."""
    return {kind.name: kind for kind in data.device_types}


def stages_by_type(
    data: AstraData, decision: AstraDecision
) -> Iterator[tuple[DeviceType, list[AstraStage]]]:
    """(type, its stages) for each device type that has stages. Leaves out types that the instance
    does not have, which violate (6)."""
    kinds = types_by_name(data)
    stages_on = grouped((stage.type, stage) for stage in decision.stages)
    for name, stages in stages_on.items():
        if name in kinds:
            yield kinds[name], stages


def stage_devices(data: AstraData) -> int:
    """D T: devices of a stage."""
    return data.data_parallel * data.tensor_parallel


def stage_seconds(kind: DeviceType, layers: int) -> float:
    """n c + h: seconds of one micro-batch on a stage of `layers` layers, with its transfer."""
    return layers * kind.layer_seconds + kind.p2p_seconds


def describe(data: AstraData, decision: AstraDecision) -> list[Table]:
    """A table of a feasible decision's segments, in the order of their first stages."""
    kinds = types_by_name(data)
    per_stage = stage_devices(data)
    segments = grouped(((stage.type, stage.layers), s) for s, stage in enumerate(decision.stages))
    slowest = max(stage_seconds(kinds[name], layers) for name, layers in segments)
    rows = []
    for (name, layers), stages in segments.items():
        seconds = stage_seconds(kinds[name], layers)
        if seconds >= slowest * (1 - ROUNDING):
            of_the_slowest = "slowest"
        else:
            of_the_slowest = f"{100 * seconds / slowest:.1f} %"
        devices = str(len(stages) * per_stage)
        numbers = ranges_text(stages)
        rows.append((numbers, name, str(layers), devices, seconds_text(seconds), of_the_slowest))
    title = (
        f"{data.layers} layers on {data.stages} stages of {per_stage} devices "
        f"(data {data.data_parallel} x tensor {data.tensor_parallel}), "
        f"{data.micro_batches} micro-batches"
    )
    header = ("stages", "type", "layers each", "devices", "per micro-batch", "of the slowest")
    return [Table(title, header, tuple(rows), right=(2, 3, 4))]
