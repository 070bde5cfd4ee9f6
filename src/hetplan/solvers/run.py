"""One run in progress: its options, its clock, its progress reports and the wish to stop it."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hetplan.solvers.options import Options
from hetplan.solvers.result import relative_gap


@dataclass(frozen=True)
class Progress:
    """A snapshot for whoever watches: seconds since the start, best objective and proven bound so
    far."""

    seconds: float
    incumbent: float | None
    bound: float | None
    note: str = ""

    @property
    def gap(self) -> float | None:
        """Relative gap of incumbent and bound; None when either is unknown."""
        return relative_gap(self.incumbent, self.bound)


Watcher = Callable[[Progress], None]
# Takes a `solvers.model.Model`.
Tap = Callable[[Any], None]


class Stopped(Exception):
    """Out of something that cannot be finished in time (`Run.check`); whoever began it says what is
    known instead."""


@dataclass
class Run:
    """Handed to every method. Methods call `report` now and then and stop when `should_stop` or
    `check` says so.

    cancel: set from outside (Ctrl-C, a planner that has seen enough); methods then return what they
    have. watch: called with each report, from the method's thread.
    tap: takes each discrete model that a general solver would be given; the solver is then not
    asked.
    """

    options: Options = field(default_factory=Options)
    watch: Watcher | None = None
    cancel: threading.Event = field(default_factory=threading.Event)
    started: float = field(default_factory=time.perf_counter)
    incumbent: float | None = None
    bound: float | None = None
    note: str = ""
    tap: Tap | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self.started

    @property
    def remaining(self) -> float:
        """Seconds left of the time limit, never below 0; infinite without a limit."""
        if self.options.time_limit is None:
            return float("inf")
        return max(0.0, self.options.time_limit - self.elapsed)

    @property
    def cancelled(self) -> bool:
        """Whether the user asked to stop."""
        return self.cancel.is_set()

    @property
    def should_stop(self) -> bool:
        """Whether to return now: cancelled, or out of time."""
        return self.cancelled or self.remaining <= 0.0

    def check(self) -> None:
        """Raise `Stopped` where it is time to return: for work that leaves nothing of use behind,
        as building a model.

        Costs less than a microsecond; builders call it with every row and every variable that they
        add.
        """
        if self.should_stop:
            raise Stopped

    def report(
        self, *, incumbent: float | None = None, bound: float | None = None, note: str | None = None
    ) -> None:
        """Tell the watcher about a better incumbent, a better bound or another phase (worse ones
        are ignored)."""
        if incumbent is not None and (self.incumbent is None or incumbent < self.incumbent):
            self.incumbent = incumbent
        if bound is not None and (self.bound is None or bound > self.bound):
            self.bound = bound
        if note is not None:
            self.note = note
        if self.watch is not None:
            self.watch(Progress(self.elapsed, self.incumbent, self.bound, self.note))

    def part(self, *, time_limit: float | None = None, quiet: bool = True) -> "Run":
        """A run inside this one: the same wish to stop, at most `time_limit` seconds and what is
        left here."""
        left = self.remaining
        limit = left if time_limit is None else min(left, time_limit)
        options = replace(
            self.options, time_limit=None if limit == float("inf") else max(limit, 1e-3)
        )
        return Run(options, None if quiet else self.watch, self.cancel, tap=self.tap)

    def share(self, count: float) -> "Run":
        """A run inside this one with a `count`-th of the time that is left, whose progress this one
        shows as its own."""

        def show(progress: Progress) -> None:
            self.incumbent, self.bound = progress.incumbent, progress.bound
            self.report(note=progress.note)

        return replace(self.part(time_limit=self.remaining / count), watch=show)
