"""Whether a rank's process computes, and how long the parent waits for a rank before the rank
counts as hung.

A rank's heartbeats say how much its process has computed. For a process that gives no heartbeat or
seems idle, Linux says in /proc whether it could run. On other systems no process counts as
runnable, and every process counts as at work.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

RUNNABLE = ("R", "D")  # states of threads that run, would run if they got a core, or read a disk


@dataclass(frozen=True)
class Patience:
    """The times after which ranks count as hung, beside the run's `hang_seconds`. Longer times are
    safer on a slow machine, and notice a fault later."""

    starting: float = 90.0
    """Seconds that making the model, a layer's first pass or a checkpoint may take while the
    process computes."""
    together: float = 5.0
    """Seconds for which all ranks may wait at the same time: the message that one of them waits for
    may be on its way."""
    spinning: float = 2.0
    """Further seconds for ranks on GPUs: a rank that waits for another rank's kernel seems to
    compute."""
    grace: float = 1.5
    """Seconds after a first failure, in which the parent waits for another rank to report the
    cause."""
    beat: float = 0.5
    """Seconds between a rank's heartbeats."""
    idle: float = 0.05
    """Share of a core. A process that uses less counts as idle; heartbeats alone use less."""


PATIENCE = Patience()


@dataclass
class Activity:
    """The time when a process last computed, as its heartbeats show."""

    last: float = field(default_factory=time.monotonic)
    """Seconds on the monotonic clock, when the process last computed."""
    seen: tuple[float, float] | None = None
    """(seconds on the monotonic clock, processor seconds used by then) of the last heartbeat."""

    def note(self, used: float) -> None:
        """Note a heartbeat. used: processor seconds that the process has used so far."""
        now = time.monotonic()
        if self.seen is None:
            self.last = now
        else:
            before, used_before = self.seen
            if used - used_before > PATIENCE.idle * (now - before):
                self.last = now
        self.seen = (now, used)

    def idle(self) -> float:
        """Seconds since the process last computed."""
        return time.monotonic() - self.last


def at_work(pid: int, ignored_thread: int | None = None) -> bool:
    """Whether a process, or a process that it started (a compiler, say), has a thread that runs,
    would run if it got a core, or waits for a disk; True where the system does not say.

    ignored_thread: native number of a thread that does not count.
    """
    try:
        states = thread_states(pid, ignored_thread)
        if not states:
            return True
        for child in descendants(pid):
            states += thread_states(child)
    except (OSError, ValueError, IndexError):  # a process or thread has just ended: ask again later
        return True
    return any(state in RUNNABLE for state in states)


def runnable(pid: int) -> bool:
    """Whether a process has a thread that runs, would run if it got a core, or waits for a disk;
    False where the system does not say."""
    try:
        return any(state in RUNNABLE for state in thread_states(pid))
    except (OSError, ValueError, IndexError):  # the process has just ended
        return False


def descendants(pid: int) -> list[int]:
    """Numbers of all processes that a process has started, directly or not."""
    children = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, file.read_text().split()):
            children += [child, *descendants(child)]
    return children


def thread_states(pid: int, ignored_thread: int | None = None) -> list[str]:
    """The state of each thread of a process: R runs or could run, S waits, D waits for a disk, T
    is stopped."""
    states = []
    for file in Path(f"/proc/{pid}/task").glob("*/stat"):
        if file.parent.name != str(ignored_thread):
            # the state follows the name in brackets, and the name may contain brackets
            after_name = file.read_text().rpartition(")")[2]
            states.append(after_name.split()[0])
    return states
