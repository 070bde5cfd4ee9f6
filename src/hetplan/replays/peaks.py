"""The bytes that every device of a plan of stages holds at its peak, and may hold.

The bytes of model states follow from the plan's ZeRO level and from each device's share of them.
The bytes of activations follow from the micro-batches that the schedule keeps at the same time.
`replays.memory` adds them up.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Generic, NamedTuple

from hetplan.plans.plan import Plan, Stage
from hetplan.profiling.frameworks import Size
from hetplan.replays.arrays import Floats
from hetplan.replays.costs import Costs, StageBytes
from hetplan.replays.data import ReplayData
from hetplan.replays.memory import UNUSED, PeakBytes, held_on
from hetplan.replays.zero import ZeroCosts


def memory(zero: ZeroCosts, kept: Floats) -> tuple[PeakBytes[float], ...]:
    """[D] the bytes that each device holds at its peak, by component.

    kept: the most bytes of micro-batches that each stage keeps at the same time, for the stages of
    the first replica, then of the second one, and so on.
    """
    plan, kept_by_stage = zero.plan, iter(kept.tolist())
    held = [UNUSED] * len(plan.devices)
    for replica in plan.replicas:
        samples = max(batch.samples for batch in replica.micro_batches)
        staged = len(replica.stages) > 1
        for stage in replica.stages:
            kept_here = next(kept_by_stage)
            for device, on_device in stage_memory(zero, stage, samples, kept_here, staged=staged):
                held[device] = on_device
    return tuple(held)


def stage_memory(
    zero: ZeroCosts, stage: Stage, samples: int, kept: float, *, staged: bool
) -> Iterator[tuple[int, PeakBytes[float]]]:
    """(device, bytes that it holds at its peak) for each device of a stage.

    samples: samples of the replica's largest micro-batch. kept: see `memory`, of this stage.
    staged: whether the replica has several stages.
    """
    costs, data = zero.costs, zero.costs.data
    offloaded = costs.degrees.offloaded if costs.degrees else 0.0
    # Every device counts the rows of the stage's largest row group, the most that any of them has.
    # With context ranks, each sample is `context` rows (`Costs.context`).
    rows = samples * costs.context * max(stage.row_shares) / sum(stage.row_shares)
    stage_bytes = costs.stage_bytes(
        tuple(stage.layers), len(stage.tensor_shares), zero.copied_in(stage)
    )
    # devices with the same part of the weights and the same share of the states hold the same
    computed: dict[tuple[float, float], PeakBytes[float]] = {}
    for device, part, share in zip(stage.all_devices, stage.parts, zero.shares(stage), strict=True):
        if (part, share) not in computed:
            held = held_on_device(
                data, stage_bytes, kept, rows, Shards(part, zero.level, share), staged=staged
            )
            on_device = replace(held, optimizer=held.optimizer * (1 - offloaded))
            computed[part, share] = on_device
        yield device, computed[part, share]


class Shards(NamedTuple, Generic[Size]):
    """The shares of its stage's model states that a device holds."""

    part: float  # its part of the weights of its tensor group
    level: int  # ZeRO level
    share: Size  # its share of the states of its part


def held_on_device(
    data: ReplayData,
    stage_bytes: StageBytes[Size],
    kept: Size,
    rows: Size,
    shards: Shards[Size],
    *,
    staged: bool,
) -> PeakBytes[Size]:
    """The bytes on a device of a stage at its peak, without offloading; arrays where `stage_bytes`
    stands for several stages.

    kept, staged: see `stage_memory`. rows: the device's rows of the largest micro-batch, which are
    samples, or parts of samples where context ranks divide them.
    """
    states = data.framework.held_bytes(
        shards.part * stage_bytes.weights,
        shards.part * stage_bytes.largest,
        data.element_bytes,
        shards.level,
        shards.share,
        staged=staged,
        frozen=shards.part * stage_bytes.frozen,
        largest_frozen=shards.part * stage_bytes.largest_frozen,
    )
    return held_on(
        data.framework,
        states,
        stage_bytes.passes,
        kept,
        rows,
        data.reserved_bytes,
        stage_bytes.unused_on(shards.part),
        shards.part * stage_bytes.casts,
    )


def limits(plan: Plan, costs: Costs) -> tuple[float, ...]:
    """[D] bytes that training can use on each device."""
    return tuple(costs.data.types[device.type].memory_bytes for device in plan.devices)
