"""A mixed cluster is rehearsed on one machine: ranks compute little, and sleep until their device
would be done.

Every pass begins and ends when it does in the plan's replay, times a scale; an iteration ends when
the replay does. Messages and collectives are real, in the plan's order: a rank that waits for one
which the replay does not know of, or that this machine's cores hold up, is late, and what is
measured is the wall clock.

Of an SPMD program nothing is trained: no program is narrow enough on every model to stand for it,
and what is rehearsed is the schedule, with real collectives of a single number.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from hetplan.formulations.joint.plan import Place, Plan
from hetplan.profiling.simulator.tasks import LABELS, Kind, Timeline
from hetplan.profiling.workload import Workload
from hetplan.runtime.events import PASSES, Watch
from hetplan.runtime.replay import replay

# Seconds of a core that a narrow layer's pass takes, a pass with its messages beside, and a
# collective of a single number.
LAYER_SECONDS, PASS_SECONDS, COLLECTIVE_SECONDS = 0.0015, 0.004, 0.002
MEETING_SECONDS = 0.02  # that ranks need to agree on when an iteration begins
Moment = tuple[str, int, int]  # what, chunk, micro-batch


@dataclass(frozen=True)
class Rehearsal:
    """A plan's replay on its devices. units [ranks]: of the timeline; scale: seconds here per
    second there."""

    plan: Plan
    timeline: Timeline
    units: tuple[int, ...]
    scale: float

    @classmethod
    def of(
        cls, plan: Plan, workload: Workload, scale: float | None = None, cores: float = 1
    ) -> "Rehearsal":
        """Of any plan. scale: default such that an iteration takes a second, or as long as the real
        work needs: all of it on the cores, and that of the busiest rank in the time of its
        passes."""
        replayed = replay(plan, workload)
        unit = {d: u for u, devices in enumerate(replayed.devices) for d in devices}
        made = cls(plan, replayed.timeline, tuple(unit[place.device] for place in plan.places), 1.0)
        if scale is None and made.seconds > 0:
            work = [(made.busy(place.rank), made.real_seconds(place)) for place in plan.places]
            passes, real = max(work)
            needed = sum(real for _, real in work) / cores / made.seconds
            scale = max(1.0 / made.seconds, needed, real / passes if passes else 0.0)
        return replace(made, scale=scale or 1.0)

    @property
    def seconds(self) -> float:
        """Predicted seconds of an iteration here: the simulator's, scaled."""
        return self.scale * self.timeline.seconds

    def busy(self, rank: int) -> float:
        """Seconds of a rank's passes here."""
        return self.scale * float(
            self.timeline.spent(Kind.FORWARD, Kind.BACKWARD)[self.units[rank]]
        )

    def real_seconds(self, place: Place) -> float:
        """Of a core, for an iteration of a rank on narrow layers."""
        if self.plan.program is not None:
            return COLLECTIVE_SECONDS * int(
                np.count_nonzero(self.timeline.tasks.kind == Kind.COLLECTIVE)
            )
        replica = self.plan.replicas[place.replica]
        ranges = replica.stages[place.stage].layers
        layers = sum(last - first for first, last in ranges)
        return 2 * replica.steps * (len(ranges) * PASS_SECONDS + layers * LAYER_SECONDS)

    def spans(self, rank: int) -> dict[Moment, tuple[float, float]]:
        """When a rank's passes begin and end there, and what all devices of a program do
        together."""
        spans: dict[Moment, tuple[float, float]] = {}
        for event in self.timeline.events():
            what, start = event["kind"], event["start"]
            if self.plan.program is not None and what == LABELS[Kind.COLLECTIVE]:
                what = "collective"
            elif what not in PASSES[:2] or event["unit"] != self.units[rank]:
                continue
            moment = what, event["chunk"], event["micro_batch"]
            # a pass with what tensor ranks do together, or in parts, is several tasks
            spans[moment] = spans.get(moment, (start, 0.0))[0], event["end"]
        return spans


@dataclass(kw_only=True)
class Virtual(Watch):
    """A rank's watch in a rehearsal. spans: of its passes, from the iteration's beginning; told:
    what each rank tells all others."""

    rehearsal: Rehearsal
    spans: Mapping[Moment, tuple[float, float]]
    told: Callable[[float], list[float]]
    begun: float = 0.0

    def begins(self, what: str, chunk: int, batch: int) -> None:
        """A pass begins when its input would be there."""
        if (what, chunk, batch) in self.spans:
            start = self.spans[what, chunk, batch][0]
            if self.left(start) > 0:
                with self.during("receive", chunk, batch):
                    time.sleep(max(0.0, self.left(start)))
        super().begins(what, chunk, batch)

    def ends(self, what: str, chunk: int, batch: int) -> None:
        """A pass ends when the device would be done, an iteration when all of them would be."""
        if what == "prepare":
            self.begun = max(self.told(time.monotonic() + MEETING_SECONDS))
            time.sleep(max(0.0, self.left(0.0)))
        elif what == "synchronise":
            time.sleep(max(0.0, self.left(self.rehearsal.timeline.seconds)))
        elif (what, chunk, batch) in self.spans:
            time.sleep(max(0.0, self.left(self.spans[what, chunk, batch][1])))
        super().ends(what, chunk, batch)
        if what == "prepare":  # a rank that this machine wakes late began then, too
            self.events[-1] = self.events[-1]._replace(end=self.begun)

    def left(self, moment: float) -> float:
        """Seconds here until a moment there."""
        return self.begun + self.rehearsal.scale * moment - time.monotonic()
