"""What a rank does, as it does it, and whether its process computes: for traces, for measured times
beside predicted ones, and for supervision.

Linux tells by /proc what a process does. Elsewhere nothing counts as starved, and everything as at
work.

A mixed cluster is rehearsed on one machine: ranks compute little, and sleep until their device
would be done.

Every pass begins and ends when it does in the plan's replay, times a scale; an iteration ends when
the replay does. Messages and collectives are real, in the plan's order: a rank that waits for one
which the replay does not know of, or that this machine's cores hold up, is late, and what is
measured is the wall clock.

Of an SPMD program nothing is trained: no program is narrow enough on every model to stand for it,
and what is rehearsed is the schedule, with real collectives of a single number.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hetplan.plans.places import Place
from hetplan.plans.plan import Plan
from hetplan.profiling.simulator.tasks import LABELS, Kind, Timeline
from hetplan.profiling.workload import Workload
from hetplan.runtime.replay import replay

PASSES = ("forward", "backward", "optimizer")
WAITS = ("receive", "prepare", "synchronise", "collective")
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True)
class Patience:
    """How long ranks are waited for, beside the run's own `hang_seconds`; seconds but for idle.

    More is safer on a slow machine, and tells a fault later.
    """

    starting: float = 90.0
    """That the model, a layer's first pass or a checkpoint may take while it computes."""
    together: float = 5.0
    """At least that all may wait for each other: the last one's message may be on its way."""
    spinning: float = 2.0
    """More for ranks on GPUs: what waits for another one's kernel there seems to compute."""
    grace: float = 1.5
    """In which causes are told from consequences."""
    beat: float = 0.5
    """Between a rank's signs of life."""
    idle: float = 0.05
    """Share of a core: less than what computes would use, more than signs of life need."""


PATIENCE = Patience()


class Event(NamedTuple):
    """One thing done. start, end: seconds of the machine's monotonic clock."""

    what: str
    chunk: int
    batch: int
    start: float
    end: float


class Doing(NamedTuple):
    """What is going on. since: on the monotonic clock. spent: seconds of a core that the process
    had used by then."""

    what: str = "start"
    chunk: int = 0
    batch: int = 0
    since: float = 0.0
    spent: float = 0.0


@dataclass
class Watch:
    """Keeps the events of an iteration, and what is going on now for another thread to ask.

    The least progress is a layer's pass or a collective.
    """

    settle: Callable[[], None] | None = None
    """Waits for the device, so that times are true."""
    events: list[Event] = field(default_factory=list)
    """Of the iteration, which begins with its preparation."""
    doing: Doing = field(default_factory=Doing)
    longest: float = 0.0
    """Seconds of the longest pass so far."""
    moved: float = field(default_factory=time.monotonic)
    """When there was the last progress."""
    meeting: float | None = None
    """Since when a collective waits."""

    def begins(self, what: str, chunk: int, batch: int) -> None:
        """A pass (forward, backward), a wait for a message (receive), or what all do together,
        begins."""
        if what == "prepare":
            self.events = []
        self._now(what, chunk, batch)

    def ends(self, what: str, chunk: int, batch: int) -> None:
        """It is done."""
        start = self.doing.since
        self._now("between", chunk, batch)
        if what not in WAITS:
            self.longest = max(self.longest, self.moved - start)
        self.events.append(Event(what, chunk, batch, start, self.moved))

    def _now(self, what: str, chunk: int, batch: int) -> None:
        if self.settle is not None:
            self.settle()
        self.moved = time.monotonic()
        self.doing = Doing(what, chunk, batch, self.moved, time.process_time())

    @contextmanager
    def during(self, what: str, chunk: int, batch: int) -> Iterator[None]:
        """It begins, and ends where nothing is raised."""
        self.begins(what, chunk, batch)
        yield
        self.ends(what, chunk, batch)

    def passed(self) -> None:
        """A layer's pass is done."""
        self.moved = time.monotonic()

    @contextmanager
    def meets(self) -> Iterator[None]:
        """A collective, which waits for others, whatever it is a part of."""
        self.meeting = time.monotonic()
        yield
        self.meeting, self.moved = None, time.monotonic()

    def state(self) -> dict[str, Any]:
        """A sign of life: what is going on, seconds since the last progress and of the collective,
        and seconds of a core used."""
        now, meeting = time.monotonic(), self.meeting
        return self.doing._asdict() | {
            "used": time.process_time(),
            "quiet": now - self.moved,
            "meeting": None if meeting is None else now - meeting,
            "longest": self.longest,
        }


@dataclass
class Activity:
    """When a process has last computed. seen: (moment, seconds of a core that it had used by
    then)."""

    last: float = field(default_factory=time.monotonic)
    seen: tuple[float, float] | None = None

    def note(self, used: float) -> None:
        """What a process has used by now."""
        now = time.monotonic()
        if self.seen is None or used - self.seen[1] > PATIENCE.idle * (now - self.seen[0]):
            self.last = now
        self.seen = (now, used)

    def idle(self) -> float:
        """Seconds for which it has not computed."""
        return time.monotonic() - self.last


def starved(pid: int, spent: float, limit: float) -> bool:
    """Whether a process has a thread that waits for a core, and got less than half of `limit`
    seconds of one.

    spent: seconds of a core that it had used when the wait began.
    """
    try:
        return cpu_seconds(pid) - spent < limit / 2 and any(
            state in ("R", "D") for state in thread_states(pid)
        )
    except (OSError, ValueError, IndexError):  # no /proc, or the process has just ended
        return False


def at_work(pid: int, but: int | None = None) -> bool:
    """Whether a process or one that it started (a compiler, say) has a thread that runs, would if
    it got a core, or waits for a disk. but: a thread that does not count."""
    try:
        own = thread_states(pid, but)
        others = (state for child in descendants(pid) for state in thread_states(child))
        return not own or any(state in ("R", "D") for state in (*own, *others))
    except (OSError, ValueError, IndexError):  # something has just ended: look again
        return True


def descendants(pid: int) -> list[int]:
    """All that a process has started, directly or not."""
    started = [
        int(child)
        for file in Path(f"/proc/{pid}/task").glob("*/children")
        for child in file.read_text().split()
    ]
    return [*started, *(pid for child in started for pid in descendants(child))]


def thread_states(pid: int, but: int | None = None) -> list[str]:
    """R: running or ready to, S: waits, D: waits for a disk, T: stopped."""
    return [
        fields(path)[0]
        for path in Path(f"/proc/{pid}/task").glob("*/stat")
        if path.parent.name != str(but)
    ]


def cpu_seconds(pid: int) -> float:
    """Seconds of a core used by all threads."""
    stat = fields(Path(f"/proc/{pid}/stat"))
    return (int(stat[11]) + int(stat[12])) / TICKS


def fields(path: Path) -> list[str]:
    """Of a stat file, from the state on; the name before it may hold anything."""
    return path.read_text().rpartition(")")[2].split()


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
