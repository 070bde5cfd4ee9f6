"""Long work on a thread of its own, so that the keyboard can stop it and somebody may watch.

Compiled kernels and solvers hold the thread that they run on: on the main thread Ctrl-C would wait
for them.
The first Ctrl-C sets the run's `cancel`, upon which methods return what they have; the second
aborts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Protocol, TypeVar

from hetplan.cli.streams import say
from hetplan.solvers.run import Progress, Run
from hetplan.solvers.threads import Work
from hetplan.text import number_text, percent_text

if TYPE_CHECKING:
    from rich.status import Status

T = TypeVar("T")
# Seconds: nothing is shown before QUIET; without a terminal a line at FIRST, then ever more rarely.
QUIET = 1.0
FIRST = 10.0
TICK = 0.2


class Display(Protocol):
    """Where progress goes."""

    def update(self, progress: Progress) -> None:
        """Show the state of things."""

    def close(self) -> None:
        """Take away what should not stay."""


def progress_line(label: str, progress: Progress) -> str:
    """`exact: 12 s, incumbent 1.234, bound 1.2, gap 2.8 %, phase`."""
    parts = [f"{label}: {progress.seconds:.0f} s"]
    if progress.incumbent is not None:
        parts.append(f"incumbent {number_text(progress.incumbent)}")
    if progress.bound is not None:
        parts.append(f"bound {number_text(progress.bound)}")
    if progress.gap is not None:
        parts.append(f"gap {percent_text(progress.gap)}")
    if progress.note:
        parts.append(progress.note)
    return ", ".join(parts)


class Silence:
    """Shows nothing."""

    def update(self, progress: Progress) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Lines:
    """A plain line now and then, for logs: at 10 s, 20 s, 40 s …"""

    def __init__(self, label: str) -> None:
        self.label, self.due = label, FIRST

    def update(self, progress: Progress) -> None:
        """A line, when one is due."""
        if progress.seconds >= self.due:
            self.due = max(2 * self.due, progress.seconds)
            say(progress_line(self.label, progress))

    def close(self) -> None:
        """Lines stay."""


class Live:
    """One line on a terminal that changes in place and goes away at the end."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.status: Status | None = None

    def update(self, progress: Progress) -> None:
        """The line, once the work has taken a second."""
        if progress.seconds < QUIET:
            return
        from rich.console import Console
        from rich.text import Text

        line = Text(progress_line(self.label, progress))
        if self.status is None:
            self.status = Console(file=sys.stderr).status(line)
            self.status.start()
        self.status.update(line)

    def close(self) -> None:
        """Remove the line."""
        if self.status is not None:
            self.status.stop()


def display(label: str, quiet: bool) -> Display:
    """The display that suits where stderr goes."""
    if quiet:
        return Silence()
    return Live(label) if sys.stderr.isatty() else Lines(label)


def watched(
    run: Run, work: Callable[[], T], *, label: str, quiet: bool = False, on: Display | None = None
) -> T:
    """The value of `work()`, done on another thread while `run` is watched; raises what `work`
    raises.

    on: the display, instead of the one that suits where stderr goes.
    """
    shown = display(label, quiet) if on is None or quiet else on
    with stop_on_interrupt(run):
        thread = Work(work)
        try:
            while not thread.wait(TICK):
                shown.update(Progress(run.elapsed, run.incumbent, run.bound, run.note))
        finally:
            shown.close()
    return thread.value()


def stop_on_interrupt(run: Run) -> contextlib.AbstractContextManager[None]:
    """While inside, SIGINT sets `run.cancel`; a second one ends the process with 130."""
    return stopping(run.cancel)


@contextlib.contextmanager
def stopping(wish: threading.Event) -> Iterator[None]:
    """While inside, SIGINT sets `wish`; a second one ends the process with 130."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def handler(number: int, frame: FrameType | None) -> None:
        if wish.is_set():
            # The work may sit in native code for long: there is no gentle way to end its thread.
            os.write(2, b"\nhetplan: error: aborted\n")
            os._exit(130)
        wish.set()
        os.write(2, b"\nhetplan: stopping with what is found so far (once more to abort)\n")

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
