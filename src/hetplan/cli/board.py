"""The ranking while it grows: what `hetplan plan` shows on standard error until it is done.

On a terminal a table of the best candidates so far changes in place and goes away at the end;
elsewhere every candidate is a line.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from hetplan.cli.progress import FIRST, QUIET, progress_line
from hetplan.cli.streams import say
from hetplan.solvers.run import Progress
from hetplan.text import percent_text, seconds_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

    from hetplan.planner.candidate import Candidate

SHOWN = 8


class Board:
    """A display (`cli.progress.Display`) of candidates; `found` may be called from another
    thread."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.live: Live | None = None
        self.terminal = sys.stderr.isatty()
        self._candidates: list[Candidate] = []
        self._told = 0
        self._lock = threading.Lock()

    def found(self, candidate: Candidate) -> None:
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
        """Show what there is: on a terminal once the work has taken a second, elsewhere after
        ten."""
        if self.terminal:
            if progress.seconds >= QUIET:
                self._draw(progress)
            return
        if progress.seconds < FIRST:
            return
        with self._lock:
            new, self._told = self._candidates[self._told :], len(self._candidates)
        for candidate in new:
            say(f"{progress.seconds:.0f} s: {line(candidate)}")

    def close(self) -> None:
        """Remove the table."""
        if self.live is not None:
            self.live.stop()

    def _draw(self, progress: Progress) -> None:
        from rich.console import Console
        from rich.live import Live

        if self.live is None:
            self.live = Live(console=Console(file=sys.stderr), transient=True, auto_refresh=False)
            self.live.start()
        self.live.update(self._table(progress), refresh=True)

    def _table(self, progress: Progress) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        lines = [Text(line(candidate)) for candidate in self.best()[:SHOWN]]
        return Group(*lines, Text(progress_line(self.label, progress), style="dim"))


def line(candidate: Candidate) -> str:
    """`amp/auto 347 ms, 0 % from its problem's bound`; whether it fits."""
    text = f"{candidate.name} {seconds_text(candidate.predicted_seconds)}"
    if candidate.gap is not None:
        text += f", {percent_text(candidate.gap)} from its own problem's bound"
    return text if candidate.fits_memory else f"{text}, does not fit"
