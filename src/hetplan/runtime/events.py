"""What a rank does, as it does it: for traces, for measured times beside predicted ones, and for
supervision."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

PASSES = ("forward", "backward", "optimizer")
WAITS = ("receive", "prepare", "synchronise", "collective")


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
