"""What every device of a plan holds at its peak.

Model states follow from the plan's ZeRO level and each device's share of them, activations from the
micro-batches that the schedule keeps at once; `replays.memory` puts them together.
"""

from collections.abc import Iterator
from dataclasses import replace

from hetplan.plans.plan import Plan, Stage
from hetplan.replays.arrays import Floats
from hetplan.replays.costs import Costs
from hetplan.replays.memory import UNUSED, Held, held_on
from hetplan.replays.zero import ZeroCosts


def memory(zero: ZeroCosts, kept: Floats) -> tuple[Held[float], ...]:
    """[D] what devices hold at their peak. kept: bytes that every stage of the first replica, then
    of the second, … keeps at once."""
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
) -> Iterator[tuple[int, Held[float]]]:
    """(device, what it holds) of a stage. samples: of its largest micro-batch. kept: bytes of the
    micro-batches that it keeps at once. staged: whether it is a stage of a pipeline."""
    costs, data = zero.costs, zero.costs.data
    offloaded = costs.degrees.offloaded if costs.degrees else 0.0
    rows = samples * costs.context * max(stage.row_shares) / sum(stage.row_shares)
    held = costs.stage_bytes(tuple(stage.layers), len(stage.tensor_shares), zero.copied_in(stage))
    alike: dict[tuple[float, float], Held[float]] = {}
    for device, part, share in zip(stage.all_devices, stage.parts, zero.shares(stage), strict=True):
        if (part, share) not in alike:
            states = data.framework.held_bytes(
                part * held.weights,
                part * held.largest,
                data.element_bytes,
                zero.level,
                share,
                staged=staged,
            )
            whole = held_on(data.framework, states, held.passes, kept, rows, data.reserved_bytes)
            alike[part, share] = replace(whole, optimizer=whole.optimizer * (1 - offloaded))
        yield device, alike[part, share]


def limits(plan: Plan, costs: Costs) -> tuple[float, ...]:
    """[D] bytes that each device may hold."""
    return tuple(costs.data.types[device.type].memory_bytes for device in plan.devices)
