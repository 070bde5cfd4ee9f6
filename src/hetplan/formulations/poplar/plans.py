"""Plans: from counts per group of equal devices to a decision that names every device, and what is
known of a problem before any search.

Bound   G / (sum of peak speeds) and C for each step that is needed at least (one for ZeRO 0 and 1):
        no device is ever faster than its peak p_k = max_b b / t_k(b).
Plan    ZeRO 0, 1: shares by peak speed, rounded either way. ZeRO 2, 3: one group alone, its best
        micro-batches, then single samples.
Source: hetplan, for Poplar eq. 1 (AAAI 2025).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from hetplan.formulations.poplar.data import PoplarDecision, Share, Step
from hetplan.formulations.poplar.problem import Group, PoplarProblem
from hetplan.formulations.poplar.shares import fastest
from hetplan.solvers.general import Known

# Bounds are computed in another order than the evaluator's sums.
ROUNDING = 1e-12

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


def known_before(problem: PoplarProblem) -> Known[PoplarDecision]:
    """Bound and plan of a problem in which something fits."""
    decision, seconds = (
        steps_of_one_group(problem) if problem.stepwise else shares_by_speed(problem)
    )
    return Known(bound=fluid_seconds(problem), decision=decision, objective=seconds)


def fluid_seconds(problem: PoplarProblem) -> float:
    """What every plan takes at least, seconds."""
    fullest = sum(group.count * group.largest for group in problem.groups)
    steps = -(-problem.total // fullest) if problem.stepwise else 1
    return (problem.total / problem.speed + steps * problem.comm) * (1 - ROUNDING)


def shares_by_speed(problem: PoplarProblem) -> tuple[PoplarDecision, float]:
    """ZeRO 0, 1: every device's share of G by its peak speed, rounded down or up; and its
    seconds."""
    ideal = problem.total / problem.speed
    rows = [Counter({int(ideal * group.peak): group.count}) for group in problem.groups]
    missing = problem.total - sum(l * n for row in rows for l, n in row.items())
    for group, row in zip(problem.groups, rows, strict=True):
        (share,) = row
        moved = max(
            -group.count, min(group.count, missing)
        )  # below 0 only where a product rounds up to a whole
        if moved:
            row[share + (1 if moved > 0 else -1)] = abs(moved)
            row[share] -= abs(moved)
            missing -= moved
    rows = [+row for row in rows]
    seconds = max(
        fastest(g, l)[0] for g, row in zip(problem.groups, rows, strict=True) for l in row
    )
    decision = shares_decision(problem, rows, lambda k, l: fastest(problem.groups[k], l)[1])
    return decision, seconds + problem.comm


def alone(problem: PoplarProblem, group: Group) -> tuple[float, int, int, int]:
    """(seconds, micro-batch, steps with it on every device, samples left) when only `group` works,
    for ZeRO 2 and 3."""
    batch = min(group.peak_batch, problem.total)
    full, rest = divmod(problem.total, batch * group.count)
    step, single = (float(group.seconds[b]) + problem.comm for b in (batch, 1))
    return full * step + -(-rest // group.count) * single, batch, full, rest


def steps_of_one_group(problem: PoplarProblem) -> tuple[PoplarDecision, float]:
    """ZeRO 2, 3: the group that is fastest on its own; and its seconds."""
    seconds, k = min((alone(problem, group)[0], k) for k, group in enumerate(problem.groups))
    _, batch, full, rest = alone(problem, problem.groups[k])
    count = problem.groups[k].count
    singles = -(-rest // count)
    plan = [
        (full, Counter({batch: full * count})),
        (singles, Counter({1: rest, 0: singles * count - rest})),
    ]
    rows = [
        (
            steps,
            [
                +row if at == k else Counter({0: steps * g.count})
                for at, g in enumerate(problem.groups)
            ],
        )
        for steps, row in plan
        if steps
    ]
    return steps_decision(problem, rows), seconds
