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

    loads: for each group, samples of a share -> number of devices with such a share. micro_batch:
    (group, samples of a share) -> its micro-batch.
    """
    idle = Share(samples=0, micro_batch=0)
    shares = [idle] * problem.devices
    for k, (group, row) in enumerate(zip(problem.groups, loads, strict=True)):
        members = iter(group.members)
        for samples, devices in sorted(row.items(), reverse=True):
            share = idle
            if samples:
                share = Share(samples=samples, micro_batch=micro_batch(k, samples))
            for _ in range(devices):
                shares[next(members)] = share
    return PoplarDecision(devices=shares)


def steps_decision(
    problem: PoplarProblem, rows: Sequence[tuple[int, Sequence[Mapping[int, int]]]]
) -> PoplarDecision:
    """The decision of ZeRO 2 and 3.

    rows: (number of steps, loads). loads: for each group, micro-batch b -> number of
    (device, step) pairs that take it. The pairs of group k add up to the number of steps times n_k.

    The pairs of a group fill one step after the other, those of the largest b first. So most
    neighbouring steps are equal. Steps without samples are left out.
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
    """The micro-batches of a group of n_k devices in several steps, the largest first.

    pairs: micro-batch b -> number of (device, step) pairs that take it. Pair p is device p mod n_k
    in step p div n_k.
    """

    def __init__(self, group: Group, pairs: Mapping[int, int]) -> None:
        self.group = group
        sizes = sorted((b for b, count in pairs.items() if count), reverse=True)
        self.sizes = np.array(sizes)  # the micro-batches, descending
        self.ends = np.cumsum([pairs[b] for b in sizes])  # the first pair behind those of each size

    def changes(self) -> set[int]:
        """The steps that may differ from the step before: those in which the pairs of a size end,
        and those that follow them."""
        count = self.group.count
        return {*(self.ends // count).tolist(), *(-(-self.ends // count)).tolist()}

    def step(self, number: int) -> Ints:
        """[n_k] the micro-batches of step `number`."""
        pairs = number * self.group.count + np.arange(self.group.count)
        return np.asarray(self.sizes[np.searchsorted(self.ends, pairs, side="right")])


def loads_of(most: int, losses: Counter[int]) -> Counter[int]:
    """load -> number of devices with it.

    most: the greatest load of a device. losses: samples d that a device gives up of it -> number of
    such devices.
    """
    return Counter({most - d: devices for d, devices in losses.items() if devices})
