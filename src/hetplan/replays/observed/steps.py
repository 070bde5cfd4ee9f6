"""One step of a pipeline as it ran: the passes of every worker, in their order."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from hetplan.errors import InputError

PassKind = Literal["forward", "backward", "weights"]


class Pass(NamedTuple):
    """One pass of a micro-batch, as it ran."""

    kind: PassKind
    virtual_stage: int
    micro_batch: int
    begin: float  # seconds since some moment that all workers share
    end: float

    @property
    def seconds(self) -> float:
        """Seconds from the begin of the pass to its end."""
        return self.end - self.begin


@dataclass(frozen=True)
class Worker:
    """The devices of one stage of a replica, which compute together."""

    replica: int
    stage: int
    passes: tuple[Pass, ...]  # in the order in which they began

    @property
    def name(self) -> str:
        """The worker in words: `stage 2 of replica 0`."""
        return f"stage {self.stage} of replica {self.replica}"


@dataclass(frozen=True)
class Step:
    """One step of all workers."""

    number: int
    workers: tuple[Worker, ...]
    end: float  # when the last worker was done with gradients and update, in the passes' seconds

    @cached_property
    def begin(self) -> float:
        """When the first pass began."""
        return min(worker.passes[0].begin for worker in self.workers)

    @cached_property
    def passes_end(self) -> float:
        """When the last pass of all workers ended."""
        return max(one.end for worker in self.workers for one in worker.passes)

    @property
    def seconds(self) -> float:
        """Seconds of the step, from the first pass on."""
        return self.end - self.begin

    @property
    def virtual_stages(self) -> int:
        """The number of virtual stages."""
        numbers = (one.virtual_stage for worker in self.workers for one in worker.passes)
        return 1 + max(numbers)


def make_step(
    number: int, passes: Iterable[tuple[int, int, Pass]], end: float | None, where: str
) -> Step:
    """A step from its passes in any order.

    A pass that several devices of a worker recorded counts from the first begin to the last end.

    passes: (replica, stage, pass). end: see `Step`; None: when the last pass ended. where: the
    source, for errors. Raises InputError for a step without passes, and for a pass that ends before
    it begins.
    """
    by_worker: dict[tuple[int, int], dict[tuple[PassKind, int, int], Pass]] = {}
    for replica, stage, one in passes:
        if not one.begin <= one.end:
            raise InputError(
                f"a {one.kind} pass of micro-batch {one.micro_batch} ends before it begins",
                where=where,
                got=one.seconds,
            )
        of_worker = by_worker.setdefault((replica, stage), {})
        key = (one.kind, one.virtual_stage, one.micro_batch)
        known = of_worker.get(key, one)
        of_worker[key] = one._replace(
            begin=min(known.begin, one.begin), end=max(known.end, one.end)
        )
    if not by_worker:
        raise InputError("no forward or backward passes", where=where)
    workers = [
        Worker(replica, stage, tuple(sorted(by_key.values(), key=lambda one: one.begin)))
        for (replica, stage), by_key in sorted(by_worker.items())
    ]
    step = Step(number, tuple(workers), 0.0)
    return replace(step, end=step.passes_end if end is None else max(end, step.passes_end))
