"""Rehearsals: a plan for a mixed cluster runs on one machine, whose ranks compute little and sleep
until the devices of the plan would be done.

Every pass begins and ends as in the plan's replay, with all times multiplied by a scale. An
iteration ends when the scaled replay ends. Messages and collectives are real and come in the plan's
order. A rank is late where it waits for a message that the replay leaves out, or where this machine
gives it no core in time. Times are measured on the wall clock.

A rehearsal does not train an SPMD program, because not every model has a narrow program that could
stand for its own. It rehearses the program's schedule, with real collectives of a single number.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hetplan.plans.places import Place
from hetplan.plans.plan import Plan
from hetplan.profiling.workload import Workload
from hetplan.replays.replay import replay
from hetplan.replays.simulator.tasks import LABELS, PASSES, Timeline
from hetplan.runtime.events import Watch

MEETING_SECONDS = 0.02  # seconds in which the ranks agree on the time when an iteration begins

Moment = tuple[str, int, int]
"""(what, model chunk, micro-batch) of an event, as in `events.Event`."""


class Rehearsing(Protocol):
    """The methods of an engine that a rehearsal calls.

    A unit is a row of the replay's timeline: the devices that take the same passes together.
    """

    def real_seconds(self, plan: Plan, timeline: Timeline, place: Place) -> float:
        """Processor seconds that a rank's work in an iteration takes on this machine."""

    def moment(self, event: dict[str, Any], unit: int) -> str | None:
        """The `what` of the rank's event that sleeps through this event of the replay; None where
        the event is none of a rank of this unit."""


PASS_LABELS = tuple(LABELS[kind] for kind in PASSES)


def own_pass(event: dict[str, Any], unit: int) -> str | None:
    """The kind of an event that is a pass of this unit, "forward", "backward" or "weights"; None
    for all other events."""
    kind: str = event["kind"]
    is_own = kind in PASS_LABELS and event["unit"] == unit
    return kind if is_own else None


@dataclass(frozen=True)
class Rehearsal:
    """A plan's replay, through which the ranks of a rehearsal sleep."""

    plan: Plan
    engine: Rehearsing
    timeline: Timeline
    """The replay, in seconds of the plan's devices."""
    units: tuple[int, ...]
    """[rank] the rank's unit in the timeline."""
    scale: float
    """Seconds on this machine for one second of the replay."""

    @classmethod
    def of(
        cls,
        plan: Plan,
        workload: Workload,
        engine: Rehearsing,
        scale: float | None = None,
        cores: float = 1,
    ) -> "Rehearsal":
        """The rehearsal of a plan on its engine.

        scale: None: an iteration takes one second, or longer where the ranks' real work needs more
        time. The work of all ranks fits on the `cores` of this machine, and the work of each rank
        fits into the time of its passes.
        """
        replayed = replay(plan, workload)
        unit_of: dict[int, int] = {}  # device in use -> unit
        for unit, devices in enumerate(replayed.devices):
            unit_of |= dict.fromkeys(devices, unit)
        units = tuple(unit_of[place.device] for place in plan.places)
        unscaled = cls(plan, engine, replayed.timeline, units, 1.0)
        if scale is None:
            scale = unscaled.default_scale(cores)
        return replace(unscaled, scale=scale or 1.0)

    def default_scale(self, cores: float) -> float:
        """The scale with which an iteration takes one second, or as long as its real work needs.
        This rehearsal has the scale 1."""
        if self.seconds <= 0:
            return 1.0
        work = [
            (self.busy(place.rank), self.engine.real_seconds(self.plan, self.timeline, place))
            for place in self.plan.places
        ]
        one_second = 1.0 / self.seconds
        all_ranks = sum(real for _, real in work) / cores / self.seconds
        slowest_rank = max((real / passes for passes, real in work if passes), default=0.0)
        return max(one_second, all_ranks, slowest_rank)

    @property
    def seconds(self) -> float:
        """Predicted seconds of an iteration on this machine: the replay's seconds, scaled."""
        return self.scale * self.timeline.seconds

    def busy(self, rank: int) -> float:
        """Predicted seconds of a rank's passes in an iteration on this machine."""
        pass_seconds = self.timeline.spent(*PASSES)
        return self.scale * float(pass_seconds[self.units[rank]])

    def spans(self, rank: int) -> dict[Moment, tuple[float, float]]:
        """Moment -> (begin, end) in seconds of the replay, for each pass and collective that a rank
        sleeps through."""
        spans: dict[Moment, tuple[float, float]] = {}
        for event in self.timeline.events():
            what = self.engine.moment(event, self.units[rank])
            if what is None:
                continue
            moment = what, event["chunk"], event["micro_batch"]
            # A pass is several tasks where it has several parts or collectives of its tensor ranks:
            # it lasts from the first task's begin until the last task's end.
            # The events come in the order of their starts.
            first_begin = spans[moment][0] if moment in spans else event["start"]
            spans[moment] = first_begin, event["end"]
        return spans


@dataclass(kw_only=True)
class Virtual(Watch):
    """A rank's watch in a rehearsal, which sleeps as long as the plan's device would compute."""

    rehearsal: Rehearsal
    spans: Mapping[Moment, tuple[float, float]]
    """The rank's `Rehearsal.spans`, counted from the iteration's beginning."""
    gather: Callable[[float], list[float]]
    """Gives every rank the numbers of all ranks."""
    begun: float = 0.0
    """Seconds on the monotonic clock, when the iteration began."""

    def begins(self, what: str, chunk: int, batch: int) -> None:
        """Record that an event begins. Before a pass, sleep until it begins in the replay."""
        if (what, chunk, batch) in self.spans:
            start, _ = self.spans[what, chunk, batch]
            if self.seconds_until(start) > 0:
                with self.during("receive", chunk, batch):
                    self.sleep_until(start)
        super().begins(what, chunk, batch)

    def ends(self, what: str, chunk: int, batch: int) -> None:
        """Record that an event ends. Before, sleep until a pass ends in the replay, and at the end
        of an iteration until the replay ends."""
        if what == "prepare":
            self.begun = max(self.gather(time.monotonic() + MEETING_SECONDS))
            self.sleep_until(0.0)
        elif what == "synchronise":
            self.sleep_until(self.rehearsal.timeline.seconds)
        elif (what, chunk, batch) in self.spans:
            _, end = self.spans[what, chunk, batch]
            self.sleep_until(end)
        super().ends(what, chunk, batch)
        if what == "prepare":
            # The iteration begins at the same time on all ranks, even on one that wakes up late.
            self.events[-1] = self.events[-1]._replace(end=self.begun)

    def seconds_until(self, replay_seconds: float) -> float:
        """Seconds on this machine until the replay reaches a time; negative where it has passed."""
        return self.begun + self.rehearsal.scale * replay_seconds - time.monotonic()

    def sleep_until(self, replay_seconds: float) -> None:
        """Sleep until the replay reaches a time."""
        time.sleep(max(0.0, self.seconds_until(replay_seconds)))
