"""The instance as arrays, equal devices grouped (the evaluator does not use this module).

Devices with the same curve are interchangeable, so every search below counts devices per group and
costs the same for 8 devices as for 16 384.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.poplar.data import PoplarData
from hetplan.text import grouped

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Times whose relative difference is less are equal: they are sums of the same terms in another
# order.
SAME_TIME = 1e-9
# Bounds are lowered, and limits raised, by this share, because their sums and products have another
# order than the evaluator's.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Group:
    """Devices that share one curve."""

    name: str
    members: tuple[int, ...]  # their numbers in the instance, ascending
    seconds: Floats  # [mbs + 1] t(b), seconds of a micro-batch of b samples; t(0) = 0

    @property
    def count(self) -> int:
        """n_k, the number of devices."""
        return len(self.members)

    @property
    def largest(self) -> int:
        """mbs_k, the largest micro-batch (0: not even one sample fits)."""
        return len(self.seconds) - 1

    @cached_property
    def peak_batch(self) -> int:
        """The micro-batch of the highest speed (the smallest of several), 0 where nothing fits."""
        if self.largest == 0:
            return 0
        speeds = np.arange(1, self.largest + 1) / self.seconds[1:]
        return 1 + int(np.argmax(speeds))

    @cached_property
    def peak(self) -> float:
        """p_k = max_b b / t(b), samples per second; 0 where nothing fits."""
        if not self.peak_batch:
            return 0.0
        return self.peak_batch / float(self.seconds[self.peak_batch])


@dataclass(frozen=True)
class PoplarProblem:
    """The instance as arrays."""

    groups: tuple[Group, ...]  # groups of the devices on which at least one sample fits
    devices: int  # n of the instance
    total: int  # G samples of an iteration
    comm: float  # C seconds of one synchronisation
    zero_stage: int

    @property
    def stepwise(self) -> bool:
        """Whether every step synchronises (ZeRO 2 and 3)."""
        return self.zero_stage >= 2

    @cached_property
    def speed(self) -> float:
        """Samples per second with every device at its peak: no plan is faster."""
        return sum(group.count * group.peak for group in self.groups)

    def computing_seconds(self, objective: float) -> float:
        """The seconds of the slowest device in a plan of ZeRO 0 or 1 that takes `objective`
        seconds, rounded up.

        The allowance for rounding is a share of the objective and not of the difference, because C
        may be many times as long as the rest.
        """
        return objective * (1 + ROUNDING) - self.comm


NOTHING_FITS = "no device holds even one sample: every step_seconds is empty"


def compile_problem(data: PoplarData) -> PoplarProblem:
    """The instance as groups, in the order of their first devices. Devices on which no sample fits
    are left out."""
    curves = [tuple(device.step_seconds) for device in data.devices]
    members = grouped((curve, i) for i, curve in enumerate(curves) if curve)
    groups = tuple(
        Group(data.devices[numbers[0]].name, tuple(numbers), np.array([0.0, *curve]))
        for curve, numbers in members.items()
    )
    return PoplarProblem(
        groups=groups,
        devices=len(data.devices),
        total=data.global_batch,
        comm=data.comm_seconds,
        zero_stage=data.zero_stage,
    )


def peak_speed_bound(problem: PoplarProblem) -> float:
    """Seconds that every plan takes at least: all devices work at their peak speeds all the time,
    and synchronise once, or in ZeRO 2 and 3 after each of the fewest possible steps."""
    steps = 1
    if problem.stepwise:
        fullest_step = sum(group.count * group.largest for group in problem.groups)
        steps = -(-problem.total // fullest_step)
    return (problem.total / problem.speed + steps * problem.comm) * (1 - ROUNDING)
