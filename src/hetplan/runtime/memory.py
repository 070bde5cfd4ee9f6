"""Peak memory of every device of a plan: model states, activations kept at once, and what
recomputation needs beside."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetplan.formulations.poplar.zero import States
from hetplan.profiling.simulator.tasks import Ints, Timeline
from hetplan.runtime.costs import Costs, Floats
from hetplan.runtime.plan import Plan, Replica, Stage

Owner = tuple[int, int]  # replica, stage


def memory(
    plan: Plan, costs: Costs, divided: Floats | None, owners: Sequence[Owner], timeline: Timeline
) -> tuple[float, ...]:
    """[D] peak bytes: states, the activations kept at once, and what recomputation needs beside.

    divided [D]: each device's share of the states under ZeRO without pipelines, else None.
    """
    peak = [0.0] * len(plan.devices)
    for unit, (i, j) in enumerate(owners):
        stage, batches = plan.replicas[i].stages[j], plan.replicas[i].micro_batches
        samples = max(batch.samples for batch in batches)
        largest = samples * max(stage.row_shares) / sum(stage.row_shares)
        working = max(
            costs.working_bytes(layers, len(stage.tensor_shares)) for layers in stage.layers
        )
        kept = float(timeline.peak_bytes[unit]) + largest * working
        for device in stage.all_devices:
            peak[device] = state_bytes(plan, stage, device, costs, divided) + kept
    return tuple(peak)


def state_bytes(
    plan: Plan, stage: Stage, device: int, costs: Costs, divided: Floats | None
) -> float:
    """Weights, gradients and optimizer states on a device."""
    workload = costs.workload
    if divided is not None:
        return States.of(workload).resident(plan.zero, float(divided[device]))
    held = stage_params(plan, stage, costs)
    updated = updated_part(plan, stage, device, divided)
    optimizer = (workload.state_bytes_per_param_byte - 2) * held * updated
    return 2 * held * tensor_part(stage, device) + optimizer


def saved_bytes(stage: Stage, chunk: int, sizes: Ints, costs: Costs) -> list[float]:
    """[sizes] bytes that the fullest device of the stage keeps of one micro-batch."""
    largest_share = max(stage.row_shares) / sum(stage.row_shares)
    each = costs.saved_bytes(stage.layers[chunk], len(stage.tensor_shares))
    return [float(np.ceil(n * largest_share)) * each for n in sizes]


def updated_part(plan: Plan, stage: Stage, device: int, divided: Floats | None) -> float:
    """The share of the stage's states that the device updates."""
    if divided is not None:
        return float(divided[device])
    tensor = tensor_part(stage, device)
    if plan.zero == 0:
        return tensor
    return tensor / sum(len(counterpart(r, stage).devices) for r in plan.replicas)


def counterpart(replica: Replica, stage: Stage) -> Stage:
    """The replica's stage that begins where `stage` does, or the nearest before."""
    first = stage.layers[0][0]
    return [other for other in replica.stages if other.layers[0][0] <= first][-1]


def tensor_part(stage: Stage, device: int) -> float:
    """The share of every weight that a device of the stage holds."""
    rank = next(group.index(device) for group in stage.devices if device in group)
    return stage.tensor_shares[rank] / sum(stage.tensor_shares)


def stage_params(plan: Plan, stage: Stage, costs: Costs) -> float:
    """Bytes of weights of a stage, copies of tied ones included."""
    layers = costs.workload.profile.layers
    inside = [l for first, last in stage.layers for l in range(first, last)]
    return sum(layers[l].param_bytes + copied_bytes(plan, l, costs) for l in inside)


def owners_of(plan: Plan, layer: int) -> list[Owner]:
    """The stage of every replica that holds the layer."""
    return [
        (i, j)
        for i, replica in enumerate(plan.replicas)
        for j, stage in enumerate(replica.stages)
        if any(first <= layer < last for first, last in stage.layers)
    ]


def copied_bytes(plan: Plan, layer: int, costs: Costs) -> float:
    """Tied weights that the layer's stage holds as a copy: those of a layer elsewhere (the first
    one's)."""
    tied = costs.workload.profile.layers[layer].tied_param_bytes
    if not tied:  # of most layers; looking for owners takes a look at every stage of every replica
        return 0.0
    return 0.0 if owners_of(plan, layer) == owners_of(plan, 0) else tied


def single_stage(plan: Plan) -> bool:
    """Whether every replica is one stage on one device: data parallelism."""
    return all(
        len(replica.stages) == 1 and len(replica.stages[0].all_devices) == 1
        for replica in plan.replicas
    )
