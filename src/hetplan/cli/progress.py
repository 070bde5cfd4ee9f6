"""Long work on a thread of its own, so that the keyboard can stop it and somebody may watch.

Compiled kernels and solvers hold the thread that they run on: on the main thread Ctrl-C would wait
for them. The first Ctrl-C sets the run's `cancel`, upon which methods return what they have; the
second aborts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from hetplan.cli.output import say
from hetplan.solvers.native import Work
from hetplan.solvers.run import Progress, Run
from hetplan.text import number_text, percent_text, seconds_text

if TYPE_CHECKING:
    from rich.live import Live

    from hetplan.planner.strategy import Candidate

T = TypeVar("T")
# Seconds: nothing is shown before QUIET; without a terminal a line at FIRST, then ever more rarely.
QUIET = 1.0
FIRST = 10.0
TICK = 0.2
# Candidates on a terminal.
SHOWN = 8


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


class Display:
    """What standard error shows of work under way.

    On a terminal the best candidates so far and the state of the run change in place and go away at
    the end. Elsewhere every candidate is a line, once the work has taken ten seconds; work without
    candidates is a line at 10 s, 20 s, 40 s … `add` may be called from another thread.
    """

    def __init__(self, label: str) -> None:
        self.label, self.due = label, FIRST
        self.live: Live | None = None
        self.terminal = sys.stderr.isatty()
        self._candidates: list[Candidate] = []
        self._said = 0
        self._lock = threading.Lock()

    def add(self, candidate: Candidate) -> None:
        """A candidate, replayed; those without a plan are not shown."""
        if candidate.plan is not None and candidate.predicted_seconds is not None:
            with self._lock:
                self._candidates.append(candidate)

    def best(self) -> list[Candidate]:
        """The candidates so far, those that fit first, then by seconds."""
        with self._lock:
            known = list(self._candidates)
        return sorted(known, key=lambda c: (not c.fits_memory, c.predicted_seconds or 0.0))

    def update(self, progress: Progress) -> None:
        """Show the state of things, where it is time to."""
        if self.terminal:
            if progress.seconds >= QUIET:
                self._draw(progress)
            return
        if progress.seconds < FIRST:
            return
        with self._lock:
            new, self._said = self._candidates[self._said :], len(self._candidates)
        for candidate in new:
            say(f"{progress.seconds:.0f} s: {candidate_line(candidate)}")
        if not self._said and progress.seconds >= self.due:
            self.due = max(2 * self.due, progress.seconds)
            say(progress_line(self.label, progress))

    def close(self) -> None:
        """Take away what should not stay."""
        if self.live is not None:
            self.live.stop()

    def _draw(self, progress: Progress) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.text import Text

        if self.live is None:
            self.live = Live(console=Console(file=sys.stderr), transient=True, auto_refresh=False)
            self.live.start()
        lines = [Text(candidate_line(candidate)) for candidate in self.best()[:SHOWN]]
        state = Text(progress_line(self.label, progress), style="dim")
        self.live.update(Group(*lines, state), refresh=True)


def candidate_line(candidate: Candidate) -> str:
    """`amp/auto 347 ms, 0 % from its problem's bound`; whether it fits."""
    text = f"{candidate.name} {seconds_text(candidate.predicted_seconds)}"
    if candidate.gap is not None:
        text += f", {percent_text(candidate.gap)} from its own problem's bound"
    return text if candidate.fits_memory else f"{text}, does not fit"


def watched(
    run: Run,
    work: Callable[[], T],
    *,
    label: str = "",
    quiet: bool = False,
    display: Display | None = None,
) -> T:
    """The value of `work()`, done on another thread while `run` is watched; raises what `work`
    raises.

    display: where to show candidates as well, instead of a display of `label`'s own.
    """
    shown = display or Display(label)
    with stopping(run.cancel):
        thread = Work(work)
        try:
            while not thread.wait(TICK):
                if not quiet:
                    shown.update(Progress(run.elapsed, run.incumbent, run.bound, run.note))
        finally:
            shown.close()
    return thread.value()


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
