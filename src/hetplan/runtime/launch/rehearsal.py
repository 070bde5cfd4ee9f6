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

import numpy as np

from hetplan.plans.places import Place
from hetplan.plans.plan import Plan
from hetplan.profiling.workload import Workload
from hetplan.replays.simulator.tasks import LABELS, Kind, Timeline
from hetplan.runtime.events import PASSES, Watch
from hetplan.runtime.replay import replay

LAYER_SECONDS = 0.0015  # processor seconds of a narrow layer's pass
PASS_SECONDS = 0.004  # further processor seconds of a pass, for its messages
COLLECTIVE_SECONDS = 0.002  # processor seconds of a collective of a single number
MEETING_SECONDS = 0.02  # in which ranks agree on when an iteration begins

Moment = tuple[str, int, int]
"""(what, model chunk, micro-batch) of an event."""


@dataclass(frozen=True)
class Rehearsal:
    """A plan's replay, to be slept through by ranks on this machine."""

    plan: Plan
    timeline: Timeline
    """The replay, in the seconds of the plan's devices."""
    units: tuple[int, ...]
    """[rank] its unit in the timeline."""
    scale: float
    """Seconds here for one second of the replay."""

    @classmethod
    def of(
        cls, plan: Plan, workload: Workload, scale: float | None = None, cores: float = 1
    ) -> "Rehearsal":
        """The rehearsal of a plan.

        scale: default such that an iteration takes one second, or longer where the ranks' real
        work needs it: all of it fits on the `cores` of this machine, and that of each rank fits
        into the time of its passes.
        """
        replayed = replay(plan, workload)
        unit_of = dict[int, int]()  # of each device in use
        for unit, devices in enumerate(replayed.devices):
            unit_of |= dict.fromkeys(devices, unit)
        units = tuple(unit_of[place.device] for place in plan.places)
        unscaled = cls(plan, replayed.timeline, units, 1.0)
        if scale is None:
            scale = unscaled.default_scale(cores)
        return replace(unscaled, scale=scale or 1.0)

    def default_scale(self, cores: float) -> float:
        """The scale for which an iteration takes one second, or as long as its real work needs. Of
        a rehearsal with scale 1."""
        if self.seconds <= 0:
            return 1.0
        work = [(self.busy(place.rank), self.real_seconds(place)) for place in self.plan.places]
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

    def real_seconds(self, place: Place) -> float:
        """Processor seconds that an iteration of a rank needs here, on narrow layers."""
        if self.plan.program is not None:
            collectives = np.count_nonzero(self.timeline.tasks.kind == Kind.COLLECTIVE)
            return COLLECTIVE_SECONDS * int(collectives)
        replica = self.plan.replicas[place.replica]
        chunks = replica.stages[place.stage].layers
        layers = sum(last - first for first, last in chunks)
        seconds_of_a_direction = len(chunks) * PASS_SECONDS + layers * LAYER_SECONDS
        return 2 * replica.steps * seconds_of_a_direction

    def spans(self, rank: int) -> dict[Moment, tuple[float, float]]:
        """When a rank's passes begin and end in the replay; of a program, when its collectives do,
        which are those of all devices."""
        spans: dict[Moment, tuple[float, float]] = {}
        for event in self.timeline.events():
            what, start = event["kind"], event["start"]
            if self.plan.program is not None and what == LABELS[Kind.COLLECTIVE]:
                what = "collective"
            elif what not in PASSES[:2] or event["unit"] != self.units[rank]:
                continue
            moment = what, event["chunk"], event["micro_batch"]
            # a pass in parts, or with its tensor ranks' collectives, is several tasks
            begin, _ = spans.get(moment, (start, 0.0))
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
