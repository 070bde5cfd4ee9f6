"""Rehearsals: a plan for a mixed cluster runs on one machine, whose ranks compute little and sleep
until their device would be done.

Every pass begins and ends when it does in the plan's replay, times a scale; an iteration ends when
the replay does. Messages and collectives are real and come in the plan's order. A rank that waits
for one which the replay does not know of, or that this machine's cores hold up, is late. Times are
measured on the wall clock.

An SPMD program is not trained in a rehearsal: no program is narrow enough on every model to stand
for it. Its schedule is rehearsed, with real collectives of a single number.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hetplan.plans.places import Place
from hetplan.plans.plan import Plan
from hetplan.profiling.workload import Workload
from hetplan.replays.replay import replay
from hetplan.replays.simulator.tasks import Kind, Timeline
from hetplan.runtime.events import PASSES, Watch

MEETING_SECONDS = 0.02  # in which ranks agree on when an iteration begins

Moment = tuple[str, int, int]
"""(what, model chunk, micro-batch) of an event."""


class Rehearsing(Protocol):
    """What a rehearsal asks of the engine that executes its plan."""

    def real_seconds(self, plan: Plan, timeline: Timeline, place: Place) -> float:
        """Processor seconds that an iteration of a rank needs here."""

    def moment(self, event: dict[str, Any], unit: int) -> str | None:
        """What an event of the replay is for a rank of this unit, which sleeps through it; None for
        an event that the rank has no part in."""


def own_pass(event: dict[str, Any], unit: int) -> str | None:
    """The direction of an event that is a pass of this unit; None for all other events."""
    kind: str = event["kind"]
    return kind if kind in PASSES[:2] and event["unit"] == unit else None


@dataclass(frozen=True)
class Rehearsal:
    """A plan's replay, to be slept through by ranks on this machine."""

    plan: Plan
    engine: Rehearsing
    timeline: Timeline
    """The replay, in the seconds of the plan's devices."""
    units: tuple[int, ...]
    """[rank] its unit in the timeline."""
    scale: float
    """Seconds here for one second of the replay."""

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

        scale: default such that an iteration takes one second, or longer where the ranks' real
        work needs it: all of it fits on the `cores` of this machine, and that of each rank fits
        into the time of its passes.
        """
        replayed = replay(plan, workload)
        unit_of = dict[int, int]()  # of each device in use
        for unit, devices in enumerate(replayed.devices):
            unit_of |= dict.fromkeys(devices, unit)
        units = tuple(unit_of[place.device] for place in plan.places)
        unscaled = cls(plan, engine, replayed.timeline, units, 1.0)
        if scale is None:
            scale = unscaled.default_scale(cores)
        return replace(unscaled, scale=scale or 1.0)

    def default_scale(self, cores: float) -> float:
        """The scale for which an iteration takes one second, or as long as its real work needs. Of
        a rehearsal with scale 1."""
        if self.seconds <= 0:
            return 1.0
        work = [
            (self.busy(place.rank), self.engine.real_seconds(self.plan, self.timeline, place))
            for place in self.plan.places
        ]
        one_second = 1.0 / self.seconds
        all_ranks = sum(real for _, real in work) / cores / self.seconds
        busiest_passes, busiest_real = max(work)
        busiest_rank = busiest_real / busiest_passes if busiest_passes else 0.0
        return max(one_second, all_ranks, busiest_rank)

    @property
    def seconds(self) -> float:
        """Predicted seconds of an iteration here: the replay's, scaled."""
        return self.scale * self.timeline.seconds

    def busy(self, rank: int) -> float:
        """Predicted seconds of a rank's passes here."""
        pass_seconds = self.timeline.spent(Kind.FORWARD, Kind.BACKWARD)
        return self.scale * float(pass_seconds[self.units[rank]])

    def spans(self, rank: int) -> dict[Moment, tuple[float, float]]:
        """When the passes and collectives that a rank sleeps through begin and end in the
        replay."""
        spans: dict[Moment, tuple[float, float]] = {}
        for event in self.timeline.events():
            what = self.engine.moment(event, self.units[rank])
            if what is None:
                continue
            moment = what, event["chunk"], event["micro_batch"]
            # a pass in parts, or with its tensor ranks' collectives, is several tasks
            begin, _ = spans.get(moment, (event["start"], 0.0))
            spans[moment] = begin, event["end"]
        return spans


@dataclass(kw_only=True)
class Virtual(Watch):
    """A rank's watch in a rehearsal, which sleeps for the rank's device."""

    rehearsal: Rehearsal
    spans: Mapping[Moment, tuple[float, float]]
    """Seconds from the iteration's beginning, when the rank's passes begin and end in the
    replay."""
    gather: Callable[[float], list[float]]
    """Gives every rank the numbers of all ranks."""
    begun: float = 0.0
    """Seconds on the monotonic clock, when the iteration began."""

    def begins(self, what: str, chunk: int, batch: int) -> None:
        """Record that an event begins; a pass, once its input would be there."""
        if (what, chunk, batch) in self.spans:
            start, _ = self.spans[what, chunk, batch]
            if self.seconds_until(start) > 0:
                with self.during("receive", chunk, batch):
                    self.sleep_until(start)
        super().begins(what, chunk, batch)

    def ends(self, what: str, chunk: int, batch: int) -> None:
        """Record that an event ends: a pass, once the device would be done; an iteration, once all
        devices would be."""
        if what == "prepare":
            self.begun = max(self.gather(time.monotonic() + MEETING_SECONDS))
            self.sleep_until(0.0)
        elif what == "synchronise":
            self.sleep_until(self.rehearsal.timeline.seconds)
        elif (what, chunk, batch) in self.spans:
            _, end = self.spans[what, chunk, batch]
            self.sleep_until(end)
        super().ends(what, chunk, batch)
        if what == "prepare":  # a rank that this machine wakes late began then, too
            self.events[-1] = self.events[-1]._replace(end=self.begun)

    def seconds_until(self, moment: float) -> float:
        """Seconds here until a moment of the replay, negative where it is past."""
        return self.begun + self.rehearsal.scale * moment - time.monotonic()

    def sleep_until(self, moment: float) -> None:
        """Sleep until a moment of the replay."""
        time.sleep(max(0.0, self.seconds_until(moment)))
