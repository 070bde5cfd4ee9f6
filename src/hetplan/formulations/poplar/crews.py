"""Tables of seconds for the constraint programme (`cp`): shares, and crews of devices.

A crew is a set of devices that work side by side, each on one load: on its whole share of an
iteration (ZeRO 0, 1) or on one micro-batch (ZeRO 2, 3). The crew's table has R(y), the least time
in which its devices take y samples together. For one device this is the time of the load; for two
crews together it is min_a max(R_1(a), R_2(y - a)).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.poplar.data import PoplarData

Floats = NDArray[np.float64]
Check = Callable[[], object]  # raises `Stopped` once the run should stop

# Share by which sums of seconds may differ where they are added in another order.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Group:
    """Equal devices."""

    devices: list[int]  # numbers in the instance
    seconds: Floats  # [mbs + 1] t(b), with t(0) = 0

    @property
    def most(self) -> int:
        """mbs, the largest micro-batch of one device."""
        return len(self.seconds) - 1

    @property
    def peak(self) -> float:
        """The most samples per second of one device."""
        return float((np.arange(1, self.most + 1) / self.seconds[1:]).max())


def groups_of(data: PoplarData) -> list[Group]:
    """The devices that hold a sample, equal ones together."""
    alike: dict[tuple[float, ...], list[int]] = {}
    for i, device in enumerate(data.devices):
        if device.step_seconds:
            alike.setdefault(tuple(device.step_seconds), []).append(i)
    return [Group(devices, np.array([0.0, *seconds])) for seconds, devices in alike.items()]


def share_seconds(seconds: Floats, most: int, check: Check) -> Floats:
    """[most + 1] h(g): the least seconds of a share of g samples. seconds: [mbs + 1] t."""
    best = np.full(most + 1, np.inf)
    best[0] = 0.0
    for b in range(1, min(len(seconds) - 1, most) + 1):
        check()
        shares = np.arange(b, most + 1)
        best[b:] = np.minimum(best[b:], shares // b * seconds[b] + seconds[shares % b])
    return best


def micro_batch(seconds: Floats, share: int) -> int:
    """The largest micro-batch that takes the least time for a share. seconds: [mbs + 1] t."""
    if share == 0:
        return 0
    batches = np.arange(1, min(len(seconds) - 1, share) + 1)
    needed = share // batches * seconds[batches] + seconds[share % batches]
    return int(batches[needed <= needed.min() * (1 + ROUNDING)].max())


@dataclass(frozen=True)
class Crew:
    """Devices that work side by side."""

    seconds: Floats  # [most + 1] R(y)
    halves: "tuple[Crew, Crew] | None" = None  # None: one device

    @property
    def most(self) -> int:
        """The most samples of the table."""
        return len(self.seconds) - 1

    def loads(self, samples: int) -> list[int]:
        """The load of each device where the crew takes `samples` in the least time."""
        if self.halves is None:
            return [samples]
        one, other = self.halves
        least = max(0, samples - other.most)
        most = min(samples, one.most)
        firsts = np.arange(least, most + 1)  # samples of `one`
        both = np.maximum(one.seconds[firsts], other.seconds[samples - firsts])
        first = int(firsts[both.argmin()])
        return one.loads(first) + other.loads(samples - first)


def together(one: Crew, other: Crew, most: int, check: Check) -> Crew:
    """Both crews as one, for up to `most` samples."""
    size = min(most, one.most + other.most) + 1
    best = np.full(size, np.inf)
    for first, seconds in enumerate(one.seconds[:size].tolist()):
        check()
        rest = other.seconds[: size - first]
        reached = best[first : first + len(rest)]
        np.minimum(reached, np.maximum(seconds, rest), out=reached)
    return Crew(best, (one, other))


def crew_of(seconds: Floats, count: int, most: int, check: Check) -> Crew:
    """`count` equal devices, for up to `most` samples. seconds: seconds of one device's loads."""
    crews = {1: Crew(seconds)}

    def crew(size: int) -> Crew:
        if size not in crews:
            crews[size] = together(crew(size // 2), crew(size - size // 2), most, check)
        return crews[size]

    return crew(count)


def all_together(crews: list[Crew], most: int, check: Check) -> Crew:
    """All crews as one, for up to `most` samples."""
    if len(crews) == 1:
        return crews[0]
    middle = len(crews) // 2
    one = all_together(crews[:middle], most, check)
    return together(one, all_together(crews[middle:], most, check), most, check)


@dataclass(frozen=True)
class Capacity:
    """The samples that the devices can take in the time of one share each."""

    groups: list[Group]
    h: list[Floats]  # [groups] seconds of the shares of one device

    def of_one(self, k: int, seconds: float) -> int:
        """The largest share that a device of group k takes within that time."""
        return int(np.flatnonzero(self.h[k] <= seconds)[-1])

    def of_all(self, seconds: float) -> int:
        """The samples that all devices take within that time."""
        counts = [len(group.devices) for group in self.groups]
        return sum(count * self.of_one(k, seconds) for k, count in enumerate(counts))

    def least_time(self, samples: int) -> float:
        """The least time within which the devices can take that many samples or more."""
        times = np.unique(np.concatenate(self.h))
        low, high = 0, len(times) - 1  # the longest time suffices: one device takes all samples
        while low < high:
            middle = (low + high) // 2
            if self.of_all(times[middle]) >= samples:
                high = middle
            else:
                low = middle + 1
        return float(times[low])

    def time_of_a_plan(self, samples: int, lower: float) -> float:
        """The time of the plan that fills one device after the other up to `lower` seconds; the
        last one takes what is left."""
        upper, left = lower, samples
        for k, group in enumerate(self.groups):
            full = self.of_one(k, lower)
            taken = min(left, len(group.devices) * full)
            if full > 0:
                upper = max(upper, float(self.h[k][taken % full]))
            left -= taken
        return upper
