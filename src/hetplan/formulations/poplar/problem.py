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

# Times that differ by less than this part are equal: sums of the same terms in another order.
SAME_TIME = 1e-9


@dataclass(frozen=True)
class Group:
    """Devices that share one curve.

    members: their numbers in the instance, ascending. seconds [mbs + 1]: t(b), t(0) = 0.
    """

    name: str
    members: tuple[int, ...]
    seconds: Floats

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
        return 1 + int(np.argmax(np.arange(1, self.largest + 1) / self.seconds[1:]))

    @cached_property
    def peak(self) -> float:
        """p_k = max_b b / t(b), samples per second; 0 where nothing fits."""
        return self.peak_batch / float(self.seconds[self.peak_batch]) if self.peak_batch else 0.0


@dataclass(frozen=True)
class PoplarProblem:
    """groups: those that hold at least one sample; devices: n of the instance; total: G; comm: C
    seconds."""

    groups: tuple[Group, ...]
    devices: int
    total: int
    comm: float
    zero_stage: int

    @property
    def stepwise(self) -> bool:
        """Whether every step synchronises (ZeRO 2 and 3)."""
        return self.zero_stage >= 2

    @cached_property
    def speed(self) -> float:
        """Samples per second with every device at its peak: no plan is faster."""
        return sum(group.count * group.peak for group in self.groups)


NOTHING_FITS = "no device holds even one sample: every step_seconds is empty"


def compile_problem(data: PoplarData) -> PoplarProblem:
    """`data` as groups, in the order of their first devices; devices that hold nothing are left
    out."""
    curves = [tuple(device.step_seconds) for device in data.devices]
    members = grouped((curve, i) for i, curve in enumerate(curves) if curve)
    groups = tuple(
        Group(data.devices[numbers[0]].name, tuple(numbers), np.array([0.0, *curve]))
        for curve, numbers in members.items()
    )
    return PoplarProblem(
        groups, len(data.devices), data.global_batch, data.comm_seconds, data.zero_stage
    )
