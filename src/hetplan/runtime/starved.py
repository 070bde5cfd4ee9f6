"""Whether a process that gives no sign does nothing, or would if it got a core: what others delay is no fault of it.

Linux tells by /proc; elsewhere nothing counts as starved.
"""

from __future__ import annotations

import os
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def starved(pid: int, spent: float, limit: float) -> bool:
    """Whether a process has a thread that waits for a core, and got less than half of `limit` seconds of one.

    spent: seconds of a core that it had used when the wait began.
    """
    try:
        used = cpu_seconds(pid)
        return used - spent < limit / 2 and any(state in ("R", "D") for state in thread_states(pid))
    except (OSError, ValueError, IndexError):  # no /proc, or the process has just ended
        return False


def thread_states(pid: int) -> list[str]:
    """R: running or ready to, S: waits, D: waits for a disk, T: stopped."""
    return [fields(path)[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]


def cpu_seconds(pid: int) -> float:
    """Seconds of a core used by all threads."""
    told = fields(Path(f"/proc/{pid}/stat"))
    return (int(told[11]) + int(told[12])) / TICKS


def fields(path: Path) -> list[str]:
    """Of a stat file, from the state on; the name before it may hold anything."""
    return path.read_text().rpartition(")")[2].split()
