"""The parts of a step's seconds by what the GPU of each rank did, for traces without passes.

At any moment of a step a GPU computes (a kernel other than a collective runs, or a copy), only
communicates, or is idle. A collective begins on each rank when the rank comes to it, and moves data
once the last rank has come. So the transfer of the k-th collective of a name takes its shortest
duration over the ranks, and on each rank the rest is waiting for other ranks. No clocks of
different machines are compared. Moments in which a rank only communicates are divided between
transfer and waiting in the ratio of the two over all its collectives.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Kernel(NamedTuple):
    """Work of a GPU: a kernel or a copy."""

    name: str
    communicates: bool  # whether it is a collective or a message between ranks
    begin: float  # seconds
    end: float


@dataclass(frozen=True)
class RankStep:
    """The work of one rank's GPU in one step."""

    rank: int
    begin: float  # seconds, by the rank's own clock
    end: float
    kernels: tuple[Kernel, ...]  # in the order in which they began

    @property
    def seconds(self) -> float:
        """Seconds of the step on this rank."""
        return self.end - self.begin


@dataclass(frozen=True)
class RankParts:
    """The parts of a step's seconds on one rank; their sum is the step."""

    rank: int
    computing: float
    transfers: float  # communicates and does not compute, less `waiting`
    waiting: float  # communicates, does not compute, and other ranks have not come yet
    idle: float

    @property
    def seconds(self) -> float:
        """The step's seconds."""
        return self.computing + self.transfers + self.waiting + self.idle


def rank_parts(steps: Sequence[RankStep]) -> list[RankParts]:
    """The parts of one step for each of its ranks. steps: the step of every rank."""
    shortest = shortest_transfers(steps)
    parts = []
    for step in steps:
        computing = union((k.begin, k.end) for k in step.kernels if not k.communicates)
        busy = union((k.begin, k.end) for k in step.kernels)
        only_communicating = busy - computing
        transfer = waiting = 0.0
        for key, kernel in numbered_collectives(step):
            transfer += shortest[key]
            waiting += kernel.end - kernel.begin - shortest[key]
        both = transfer + waiting
        waits = only_communicating * waiting / both if both else 0.0
        parts.append(
            RankParts(
                rank=step.rank,
                computing=computing,
                transfers=only_communicating - waits,
                waiting=waits,
                idle=max(0.0, step.seconds - busy),
            )
        )
    return parts


def numbered_collectives(step: RankStep) -> Iterable[tuple[tuple[str, int], Kernel]]:
    """((name, its number among those of the name), collective), in the order of their begins."""
    count: dict[str, int] = defaultdict(int)
    for kernel in step.kernels:
        if kernel.communicates:
            yield (kernel.name, count[kernel.name]), kernel
            count[kernel.name] += 1


def shortest_transfers(steps: Sequence[RankStep]) -> dict[tuple[str, int], float]:
    """(name, number) of each collective -> its least seconds over the ranks."""
    shortest: dict[tuple[str, int], float] = {}
    for step in steps:
        for key, kernel in numbered_collectives(step):
            seconds = kernel.end - kernel.begin
            shortest[key] = min(seconds, shortest.get(key, seconds))
    return shortest


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """The total length of the union of intervals (begin, end)."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        if end > until:
            total += end - max(begin, until)
            until = end
    return total
