"""The events of a rank, each with its times. Traces, the table of measured times and the
supervision of ranks are made from them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

PASSES = ("forward", "backward", "weights", "optimizer")
WAITS = ("receive", "prepare", "synchronise", "collective")


class Event(NamedTuple):
    """A stretch of time in which a rank did one thing."""

    what: str
    """One of `PASSES` or `WAITS`, or `checkpoint`."""
    chunk: int
    """Model chunk of the rank's stage."""
    batch: int
    """Number of the micro-batch; number of the step for an event that occurs once in a step."""
    start: float
    """Seconds on the machine's monotonic clock."""
    end: float
    """Seconds on the machine's monotonic clock."""


class Doing(NamedTuple):
    """The present activity of a rank."""

    what: str = "start"
    """See `Event.what`; or `start`, `between` (two events) or `end`."""
    chunk: int = 0
    """See `Event.chunk`."""
    batch: int = 0
    """See `Event.batch`."""
    since: float = 0.0
    """Seconds on the monotonic clock, when the activity began."""
    spent: float = 0.0
    """Processor seconds that the process had used when the activity began."""


@dataclass
class Watch:
    """Records the events of a rank's iteration and its present activity. The thread that sends the
    rank's heartbeats reads the activity.

    A rank makes progress when an event begins or ends, when a layer's pass is done, or when a
    collective is done.
    """

    settle: Callable[[], None] | None = None
    """Waits until the device is idle, so that events on a GPU have their true times; None: the
    device is the CPU, which computes nothing asynchronously."""
    events: list[Event] = field(default_factory=list)
    """Events of the iteration, which begins with its preparation."""
    doing: Doing = field(default_factory=Doing)
    longest: float = 0.0
    """Seconds of the longest event so far that is no wait."""
    moved: float = field(default_factory=time.monotonic)
    """Seconds on the monotonic clock, when the rank last made progress."""
    meeting: float | None = None
    """Seconds on the monotonic clock, when the running collective began; None where none runs."""

    def begins(self, what: str, chunk: int, batch: int) -> None:
        """Record that an event begins."""
        if what == "prepare":
            self.events = []
        self._set_doing(what, chunk, batch)

    def ends(self, what: str, chunk: int, batch: int) -> None:
        """Record that the event which began last has ended."""
        start = self.doing.since
        self._set_doing("between", chunk, batch)
        if what not in WAITS:
            self.longest = max(self.longest, self.moved - start)
        self.events.append(Event(what, chunk, batch, start, self.moved))

    def _set_doing(self, what: str, chunk: int, batch: int) -> None:
        """Begin an activity now, once the device is idle."""
        if self.settle is not None:
            self.settle()
        self.moved = time.monotonic()
        self.doing = Doing(what, chunk, batch, self.moved, time.process_time())

    @contextmanager
    def during(self, what: str, chunk: int, batch: int) -> Iterator[None]:
        """Record an event that lasts as long as the block. Where the block raises, the event does
        not end."""
        self.begins(what, chunk, batch)
        yield
        self.ends(what, chunk, batch)

    def passed(self) -> None:
        """Record that a layer's pass is done."""
        self.moved = time.monotonic()

    @contextmanager
    def meets(self) -> Iterator[None]:
        """Record that the block is a collective, in which the rank waits for other ranks. It may be
        a part of any event."""
        self.meeting = time.monotonic()
        yield
        self.meeting = None
        self.moved = time.monotonic()

    def state(self) -> dict[str, Any]:
        """The heartbeat of a rank: the fields of `Doing`, and four further entries.

        used: processor seconds that the process has used. quiet: seconds since the last progress.
        meeting: seconds since the running collective began; None where none runs. longest: seconds
        of the longest event so far that is no wait.
        """
        now, meeting = time.monotonic(), self.meeting
        state = self.doing._asdict()
        state["used"] = time.process_time()
        state["quiet"] = now - self.moved
        state["meeting"] = None if meeting is None else now - meeting
        state["longest"] = self.longest
        return state
