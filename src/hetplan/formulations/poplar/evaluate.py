"""The independent evaluator: feasibility and objective of a decision, from the definitions alone.

ZeRO 0, 1:  T = max_i ( floor(g_i / b_i) t_i(b_i) + t_i(g_i mod b_i) ) + C       (Poplar eq. 1)
ZeRO 2, 3:  T = sum_s ( max_i t_i(b_is) + C )                                (Algorithm 2, line 24)
Beside it   U = sum_i idle_i p_i                                                           (eq. 4)
with idle_i = time to the slowest (eq. 2) and p_i = max_b b / t_i(b) (eq. 3).
"""

from hetplan.formulations.poplar.data import Device, PoplarData, PoplarDecision, Share, Step
from hetplan.solvers.registry import Evaluation

_MAX_REPORTED = 5


def evaluate(data: PoplarData, decision: PoplarDecision) -> Evaluation:
    """T in seconds, or the broken constraints.

    parts: compute_seconds and comm_seconds (they add up to T), idle_seconds (summed over devices)
    and under_utilisation (eq. 4, in samples: what the idle devices could have processed at peak
    speed).
    """
    if data.stepwise and decision.steps is not None:
        return _evaluate_steps(data, decision.steps)
    if not data.stepwise and decision.devices is not None:
        return _evaluate_shares(data, decision.devices)
    has, expected = ("devices", "steps") if data.stepwise else ("steps", "devices")
    return Evaluation(
        None, (f"decision has {has}, expected {expected} for ZeRO {data.zero_stage}",)
    )


def step_seconds(device: Device, batch: int) -> float:
    """t(batch) of one micro-batch; t(0) = 0."""
    return device.step_seconds[batch - 1] if batch else 0.0


def _evaluate_shares(data: PoplarData, shares: list[Share]) -> Evaluation:
    broken = _broken_shares(data, shares)
    if broken:
        return Evaluation(None, tuple(broken[:_MAX_REPORTED]))
    busy = []
    for device, share in zip(data.devices, shares, strict=True):
        full, last = divmod(share.samples, share.micro_batch) if share.samples else (0, 0)
        busy.append(
            full * step_seconds(device, share.micro_batch if full else 0)
            + step_seconds(device, last)
        )
    compute = max(busy)
    idle = [compute - seconds for seconds in busy]
    return _evaluation(data, compute, data.comm_seconds, idle)


def _broken_shares(data: PoplarData, shares: list[Share]) -> list[str]:
    if len(shares) != len(data.devices):
        return [
            f"decision.devices has {len(shares)} entries, expected one per device "
            f"({len(data.devices)})"
        ]
    broken = []
    for i, (device, share) in enumerate(zip(data.devices, shares, strict=True)):
        largest, least = len(device.step_seconds), min(share.samples, 1)
        if not least <= share.micro_batch <= largest:
            broken.append(
                f"decision.devices[{i}].micro_batch is {share.micro_batch}, expected "
                f"{least} to {largest} "
                f"({share.samples} samples on {device.name})"
            )
    total = sum(share.samples for share in shares)
    if total != data.global_batch:
        broken.append(f"samples add up to {total}, expected global_batch ({data.global_batch})")
    return broken


def _evaluate_steps(data: PoplarData, steps: list[Step]) -> Evaluation:
    broken = _broken_steps(data, steps)
    if broken:
        return Evaluation(None, tuple(broken[:_MAX_REPORTED]))
    compute, idle = 0.0, [0.0] * len(data.devices)
    for step in steps:
        busy = [step_seconds(d, b) for d, b in zip(data.devices, step.micro_batches, strict=True)]
        slowest = max(busy)
        compute += step.count * slowest
        for i, seconds in enumerate(busy):
            idle[i] += step.count * (slowest - seconds)
    return _evaluation(data, compute, data.comm_seconds * sum(step.count for step in steps), idle)


def _broken_steps(data: PoplarData, steps: list[Step]) -> list[str]:
    broken, total = [], 0
    for s, step in enumerate(steps):
        if len(step.micro_batches) != len(data.devices):
            broken.append(
                f"decision.steps[{s}].micro_batches has {len(step.micro_batches)} entries, "
                f"expected one per device ({len(data.devices)})"
            )
            continue
        for i, (device, batch) in enumerate(zip(data.devices, step.micro_batches, strict=True)):
            if batch > len(device.step_seconds):
                broken.append(
                    f"decision.steps[{s}].micro_batches[{i}] is {batch}, expected at most "
                    f"{len(device.step_seconds)} on {device.name}"
                )
        if not any(step.micro_batches):
            broken.append(f"decision.steps[{s}] is empty, expected at least one sample in a step")
        total += step.count * sum(step.micro_batches)
    if not broken and total != data.global_batch:
        broken.append(f"samples add up to {total}, expected global_batch ({data.global_batch})")
    return broken


def _evaluation(data: PoplarData, compute: float, comm: float, idle: list[float]) -> Evaluation:
    lost = sum(
        (
            # the most samples per second over all micro-batches (0 for a device that holds none)
            seconds * max((b / step for b, step in enumerate(d.step_seconds, 1)), default=0.0)
            for d, seconds in zip(data.devices, idle, strict=True)
            if seconds
        ),
        0.0,
    )
    parts = {
        "compute_seconds": compute,
        "comm_seconds": comm,
        "idle_seconds": sum(idle),
        "under_utilisation": lost,
    }
    return Evaluation(compute + comm, (), parts)
