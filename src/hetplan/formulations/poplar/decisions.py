"""Decisions that name every device, from counts per group of equal devices."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from hetplan.formulations.poplar.data import PoplarDecision, Share, Step
from hetplan.formulations.poplar.problem import Group, Ints, PoplarProblem

MicroBatch = Callable[[int, int], int]  # (group, samples of a share) -> its micro-batch


def shares_decision(
    problem: PoplarProblem, loads: Sequence[Mapping[int, int]], micro_batch: MicroBatch
) -> PoplarDecision:
    """The decision of ZeRO 0 and 1.

    loads[k]: {samples: devices of group k}. micro_batch(k, samples): of a share of group k.
    """
    idle = Share(samples=0, micro_batch=0)
    shares = [idle] * problem.devices
    for k, (group, row) in enumerate(zip(problem.groups, loads, strict=True)):
        members = iter(group.members)
        for samples, times in sorted(row.items(), reverse=True):
            share = Share(samples=samples, micro_batch=micro_batch(k, samples)) if samples else idle
            for _ in range(times):
                shares[next(members)] = share
    return PoplarDecision(devices=shares)


def steps_decision(
    problem: PoplarProblem, rows: Sequence[tuple[int, Sequence[Mapping[int, int]]]]
) -> PoplarDecision:
    """The decision of ZeRO 2 and 3. rows: (steps, loads), loads[k] = {b: (device, step) pairs of
    group k}.

    The pairs of a group add up to steps x n_k. In descending order of b they fill one step after
    the other, so that only those differ in which some group's b changes; steps that stay empty are
    left out.
    """
    steps: list[Step] = []
    for count, loads in rows:
        queues = [Queue(group, load) for group, load in zip(problem.groups, loads, strict=True)]
        changes = {0, count}
        for queue in queues:
            changes |= queue.changes()
        for here, after in pairwise(sorted(changes)):
            micro_batches = np.zeros(problem.devices, np.int64)
            for queue in queues:
                micro_batches[list(queue.group.members)] = queue.step(here)
            if micro_batches.any():
                steps.append(Step(count=after - here, micro_batches=micro_batches.tolist()))
    return PoplarDecision(steps=steps)


class Queue:
    """The micro-batches of a group in several steps, the largest first.

    pairs: {b: (device, step) pairs}. Pair p is device p mod n_k in step p div n_k.
    """

    def __init__(self, group: Group, pairs: Mapping[int, int]) -> None:
        self.group = group
        sizes = sorted((b for b, times in pairs.items() if times), reverse=True)
        self.sizes = np.array(sizes)
        self.ends = np.cumsum([pairs[b] for b in sizes])  # the first pair behind those of each size

    def changes(self) -> set[int]:
        """The steps from which on some device's micro-batch is another one than before: those in
        which a size ends, and those behind them."""
        count = self.group.count
        return {*(self.ends // count).tolist(), *(-(-self.ends // count)).tolist()}

    def step(self, number: int) -> Ints:
        """[n_k] the micro-batches of one step."""
        pairs = number * self.group.count + np.arange(self.group.count)
        return np.asarray(self.sizes[np.searchsorted(self.ends, pairs, side="right")])


def loads_of(most: int, losses: Counter[int]) -> Counter[int]:
    """{load: devices} from {samples less than the most: devices}."""
    return Counter({most - d: times for d, times in losses.items() if times})
