"""Events: what a rank does and when, for traces, for measured times beside predicted ones, and for
supervision."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

PASSES = ("forward", "backward", "optimizer")
WAITS = ("receive", "prepare", "synchronise", "collective")


class Event(NamedTuple):
    """One thing that a rank has done."""

    what: str
    """One of `PASSES` or `WAITS`, or `checkpoint`."""
    chunk: int
    """Model chunk of the rank's stage."""
    batch: int
    """Number of the micro-batch; of the step, for what happens once in a step."""
    start: float
    """Seconds on the machine's monotonic clock."""
    end: float
    """Seconds on the machine's monotonic clock."""


class Doing(NamedTuple):
    """What a rank does now."""

    what: str = "start"
    """As in `Event`, or `start`, `between` (two events) or `end`."""
    chunk: int = 0
    batch: int = 0
    since: float = 0.0
    """Seconds on the monotonic clock, when it began."""
    spent: float = 0.0
    """Processor seconds that the process had used by then."""


@dataclass
class Watch:
    """Records the events of an iteration, and what the rank does now, which another thread may ask.

    A rank makes progress when an event begins or ends, when a layer's pass is done, or when a
    collective is done.
    """

    settle: Callable[[], None] | None = None
    """Waits for the device, so that times are true; None: nothing runs asynchronously."""
    events: list[Event] = field(default_factory=list)
    """Events of the iteration, which begins with its preparation."""
    doing: Doing = field(default_factory=Doing)
    longest: float = 0.0
    """Seconds of the longest event so far that is no wait."""
    moved: float = field(default_factory=time.monotonic)
    """Seconds on the monotonic clock, the last progress."""
    meeting: float | None = None
    """Seconds on the monotonic clock, since when a collective waits; None: there is none."""

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
        if self.settle is not None:
            self.settle()
        self.moved = time.monotonic()
        self.doing = Doing(what, chunk, batch, self.moved, time.process_time())

    @contextmanager
    def during(self, what: str, chunk: int, batch: int) -> Iterator[None]:
        """Record an event that begins here and ends with the block, unless the block raises."""
        self.begins(what, chunk, batch)
        yield
        self.ends(what, chunk, batch)

    def passed(self) -> None:
        """Record that a layer's pass is done."""
        self.moved = time.monotonic()

    @contextmanager
    def meets(self) -> Iterator[None]:
        """Record that the block is a collective, which waits for other ranks, whatever event it is
        a part of."""
        self.meeting = time.monotonic()
        yield
        self.meeting = None
        self.moved = time.monotonic()

    def state(self) -> dict[str, Any]:
        """What a rank tells its supervisor: the fields of `Doing`; `used`: processor seconds of the
        process; `quiet`: seconds since the last progress; `meeting`: seconds that a collective
        waits, None where there is none; and `longest`."""
        now, meeting = time.monotonic(), self.meeting
        state = self.doing._asdict()
        state["used"] = time.process_time()
        state["quiet"] = now - self.moved
        state["meeting"] = None if meeting is None else now - meeting
        state["longest"] = self.longest
        return state
