"""Whether a process that gives no sign does nothing, or would if it got a core: what others delay
is no fault of it.

Linux tells by /proc; elsewhere nothing counts as starved, and everything as at work.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
IDLE = 0.05  # of a core: less than what computes would use, more than signs of life need


@dataclass
class Activity:
    """When a process has last computed. seen: (moment, seconds of a core that it had used by
    then)."""

    last: float = field(default_factory=time.monotonic)
    seen: tuple[float, float] | None = None

    def note(self, used: float) -> None:
        """What a process has used by now."""
        now = time.monotonic()
        if self.seen is None or used - self.seen[1] > IDLE * (now - self.seen[0]):
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
        used = cpu_seconds(pid)
        return used - spent < limit / 2 and any(state in ("R", "D") for state in thread_states(pid))
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
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            children.setdefault(int(fields(path)[1]), []).append(int(path.parent.name))
        except (OSError, ValueError, IndexError):  # ended meanwhile
            continue
    found, ahead = [], list(children.get(pid, ()))
    while ahead:
        found.append(ahead.pop())
        ahead += children.get(found[-1], ())
    return found


def thread_states(pid: int, but: int | None = None) -> list[str]:
    """R: running or ready to, S: waits, D: waits for a disk, T: stopped."""
    paths = Path(f"/proc/{pid}/task").glob("*/stat")
    return [fields(path)[0] for path in paths if path.parent.name != str(but)]


def cpu_seconds(pid: int) -> float:
    """Seconds of a core used by all threads."""
    told = fields(Path(f"/proc/{pid}/stat"))
    return (int(told[11]) + int(told[12])) / TICKS


def fields(path: Path) -> list[str]:
    """Of a stat file, from the state on; the name before it may hold anything."""
    return path.read_text().rpartition(")")[2].split()
