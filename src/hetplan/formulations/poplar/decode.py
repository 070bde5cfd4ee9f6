"""From counts per group of equal devices to a decision that names every device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from hetplan.formulations.poplar.data import PoplarDecision, Share, Step
from hetplan.formulations.poplar.problem import Group, PoplarProblem

MicroBatch = Callable[[int, int], int]


def shares_decision(
    problem: PoplarProblem, loads: Sequence[Mapping[int, int]], micro_batch: MicroBatch
) -> PoplarDecision:
    """ZeRO 0 and 1. loads[k]: {samples: devices of group k}; micro_batch(k, samples) > 0 for
    samples > 0."""
    idle = Share(samples=0, micro_batch=0)
    shares = [idle] * problem.devices
    for k, (group, row) in enumerate(zip(problem.groups, loads, strict=True)):
        members = iter(group.members)
        for samples, times in sorted(row.items(), reverse=True):
            share = Share(samples=samples, micro_batch=micro_batch(k, samples)) if samples else idle
            for _ in range(times):
                shares[next(members)] = share
    return PoplarDecision(devices=shares)


Run = tuple[int, int]  # micro-batch, how many (device, step) pairs take it


def steps_decision(
    problem: PoplarProblem, rows: Sequence[tuple[int, Sequence[Mapping[int, int]]]]
) -> PoplarDecision:
    """ZeRO 2 and 3. rows: (steps, loads), loads[k] = {b: (device, step) pairs of group k}.

    The pairs of a group add up to steps x n_k. They are dealt out in descending order of b, which
    keeps the number of different steps small; steps that stay empty are left out.
    """
    steps: list[Step] = []
    for count, loads in rows:
        queues = [sorted(row.items()) for row in loads]  # the largest last, where pop() is
        left = count
        while left:
            micro_batches = [0] * problem.devices
            equal = left
            dealt = [
                _deal(group, queue) for group, queue in zip(problem.groups, queues, strict=True)
            ]
            equal = min([left, *(times for _, times in dealt)])
            for group, queue, (pieces, _) in zip(problem.groups, queues, dealt, strict=True):
                members = iter(group.members)
                for batch, devices in pieces:
                    for _ in range(devices):
                        micro_batches[next(members)] = batch
                    _take(queue, batch, devices * equal)
            if any(micro_batches):
                steps.append(Step(count=equal, micro_batches=micro_batches))
            left -= equal
    return PoplarDecision(steps=steps)


def _deal(group: Group, queue: list[Run]) -> tuple[list[Run], int]:
    """One step's micro-batches of a group, the largest left, and how often that step can be
    repeated."""
    pieces: list[Run] = []
    open_devices, repeat = group.count, 0
    for batch, pairs in reversed(queue):
        devices = min(open_devices, pairs)
        pieces.append((batch, devices))
        repeat = pairs // devices if repeat == 0 else min(repeat, pairs // devices)
        open_devices -= devices
        if open_devices == 0:
            break
    return pieces, repeat


def _take(queue: list[Run], batch: int, pairs: int) -> None:
    """Remove pairs of this micro-batch; entries keep their order."""
    for i in range(len(queue) - 1, -1, -1):
        if queue[i][0] == batch:
            rest = queue[i][1] - pairs
            if rest:
                queue[i] = (batch, rest)
            else:
                queue.pop(i)
            return


def loads_of(most: int, losses: Counter[int]) -> Counter[int]:
    """{load: devices} from {samples less than the most: devices}."""
    return Counter({most - d: times for d, times in losses.items() if times})
