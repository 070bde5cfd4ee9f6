"""Whether a rank's process computes, and how long it is waited for: for supervision.

Linux tells by /proc what a process does. Elsewhere nothing counts as starved, and everything as at
work.
"""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

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
