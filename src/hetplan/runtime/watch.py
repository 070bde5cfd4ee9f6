"""What a rank does, as it does it: for traces, for measured times beside predicted ones, and for
supervision."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

PASSES = ("forward", "backward", "optimizer")
WAITS = ("receive", "prepare", "synchronise", "collective")


class Watch:
    """Is told what a rank does; does nothing with it."""

    def begins(self, what: str, chunk: int, batch: int) -> None:
        """A pass (forward, backward), a wait for a message (receive), or what all do together,
        begins."""

    def ends(self, what: str, chunk: int, batch: int) -> None:
        """It is done."""

    @contextmanager
    def during(self, what: str, chunk: int, batch: int) -> Iterator[None]:
        """It begins, and ends where nothing is raised."""
        self.begins(what, chunk, batch)
        yield
        self.ends(what, chunk, batch)

    def departs(self, hop: int, batch: int, *, forward: bool) -> None:
        """A message is about to be sent over a hop."""

    def arrives(self, hop: int, batch: int, *, forward: bool) -> None:
        """A message has come over a hop."""

    def stepped(self, batch: int) -> None:
        """The backward pass of a micro-batch is done, with what ranks do together behind it."""

    def passed(self) -> None:
        """A layer's pass is done."""

    def meets(self) -> None:
        """A collective begins, which waits for others, whatever it is a part of."""

    def met(self) -> None:
        """It is done."""


@dataclass(frozen=True)
class Event:
    """One thing done. start, end: seconds of the machine's monotonic clock."""

    what: str
    chunk: int
    batch: int
    start: float
    end: float


@dataclass
class Recorder(Watch):
    """Keeps the events of the iteration, and what is going on now for another thread to ask.

    longest: seconds of the longest pass so far. done: things done so far. spent: seconds of a core
    that the process had used when the present thing began. settle: waits for the device, so that
    times are true. moved: when there was the last progress, the least of which are a layer's pass
    and a collective; meeting: since when a collective waits.
    """

    events: list[Event] = field(default_factory=list)
    longest: float = 0.0
    done: int = 0
    _now: tuple[str, int, int, float] = ("start", 0, 0, 0.0)
    spent: float = 0.0
    settle: Callable[[], None] | None = None
    moved: float = field(default_factory=time.monotonic)
    meeting: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begins(self, what: str, chunk: int, batch: int) -> None:
        """Remember what and since when."""
        if self.settle is not None:
            self.settle()
        self.moved = now = time.monotonic()
        with self._lock:
            self._now, self.spent = (what, chunk, batch, now), time.process_time()

    def ends(self, what: str, chunk: int, batch: int) -> None:
        """Make it an event."""
        if self.settle is not None:
            self.settle()
        self.moved = now = time.monotonic()
        with self._lock:
            begun = self._now[3]
            self._now, self.spent = ("between", chunk, batch, now), time.process_time()
            self.done += 1
            if what not in WAITS:
                self.longest = max(self.longest, now - begun)
        self.events.append(Event(what, chunk, batch, begun, now))

    def state(self) -> tuple[str, int, int, float]:
        """(what, chunk, micro-batch, seconds for which it has been going on)."""
        with self._lock:
            what, chunk, batch, since = self._now
        return what, chunk, batch, time.monotonic() - since if since else 0.0

    def passed(self) -> None:
        """Progress."""
        self.moved = time.monotonic()

    def meets(self) -> None:
        """Remember since when."""
        self.meeting = time.monotonic()

    def met(self) -> None:
        """Progress."""
        self.meeting, self.moved = None, time.monotonic()

    def quiet(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self.moved

    def take(self) -> list[Event]:
        """The events since the last call."""
        taken, self.events = self.events, []
        return taken
