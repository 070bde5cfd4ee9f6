"""When a rank counts as hung: from what it last said of itself, and whether its process computes.

Progress is a layer's pass or a collective. A rank that makes none is not at fault while it waits
for another one, waits for a core, or computes for not much longer than it has before; what does
nothing of that hangs. What others delay is no fault of a process: one that gives no sign may do
nothing, or would if it got a core. Linux tells by /proc; elsewhere nothing counts as starved, and
everything as at work.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetplan.runtime.job import Job, StepReport
from hetplan.runtime.watch import PASSES, WAITS

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
    started, ahead = [], list(children.get(pid, ()))
    while ahead:
        started.append(ahead.pop())
        ahead += children.get(started[-1], ())
    return started


def thread_states(pid: int, but: int | None = None) -> list[str]:
    """R: running or ready to, S: waits, D: waits for a disk, T: stopped."""
    paths = Path(f"/proc/{pid}/task").glob("*/stat")
    return [fields(path)[0] for path in paths if path.parent.name != str(but)]


def cpu_seconds(pid: int) -> float:
    """Seconds of a core used by all threads."""
    stat = fields(Path(f"/proc/{pid}/stat"))
    return (int(stat[11]) + int(stat[12])) / TICKS


def fields(path: Path) -> list[str]:
    """Of a stat file, from the state on; the name before it may hold anything."""
    return path.read_text().rpartition(")")[2].split()


@dataclass
class Rank:
    """What the parent knows of a rank."""

    process: Any
    """A multiprocessing.Process."""
    connection: Any
    """The parent's end of its pipe."""
    heard: float
    state: dict[str, Any] = field(default_factory=dict)
    steps: list[StepReport] = field(default_factory=list)
    activity: Activity = field(default_factory=Activity)
    failure: tuple[str, bool] | None = None  # text, whether it only lost its peers
    lost: bool = False  # its process ended without a word
    done: bool = False
    gone: bool = False

    @property
    def pid(self) -> int:
        """Of its process."""
        return int(self.process.pid)

    def starved(self, since: str, limit: float) -> bool:
        """Whether it has waited for a core since it was last heard ("used") or began what it does
        ("spent")."""
        return starved(self.pid, self.state.get(since, 0.0), limit)

    @property
    def doing(self) -> str:
        """For people."""
        return (
            f"at {self.state['what']} of chunk {self.state['chunk']}, micro-batch "
            f"{self.state['batch']}"
        )


@dataclass(frozen=True)
class Hung:
    """A rank and what is wrong with it. lost: it, rather than what all ranks do together."""

    number: int
    text: str
    lost: bool


def find_hung(alive: list[tuple[int, Rank]], job: Job) -> Hung | None:
    """A rank without a sign of life, or that is at one thing for too long; or all, where they wait
    for each other."""
    for number, rank in alive:
        silent = time.monotonic() - rank.heard
        if is_silent(rank, silent, job.hang_seconds):
            return Hung(number, f"hangs; no sign of life for {silent:.0f} s", lost=True)
    longest, waiting = max((r.state.get("longest", 0.0) for _, r in alive), default=0.0), 0
    for number, rank in alive:
        if rank.state.get("what") in WAITS or rank.state.get("meeting") is not None:
            waiting += waits_too_long(rank, max(job.hang_seconds, PATIENCE.together, 10 * longest))
        elif is_idle(rank, job) or computes_too_long(rank, job):
            return Hung(number, f"hangs; {rank.doing} for {rank.state['quiet']:.0f} s", lost=True)
    if alive and waiting == len(alive):
        number, rank = max(alive, key=lambda item: item[1].state["quiet"])
        return Hung(number, f"waits, as all others do; {rank.doing}", lost=False)
    return None


def is_silent(rank: Rank, silent: float, limit: float) -> bool:
    """Whether a rank gives no sign, though it could get a core and loads no libraries."""
    if silent <= limit or not rank.state:
        return silent > PATIENCE.starting
    delayed = rank.starved("used", limit) or (rank.state["what"] == "start" and at_work(rank.pid))
    return silent > PATIENCE.starting or not delayed


def waits_too_long(rank: Rank, patience: float) -> bool:
    """Whether a rank waits, and does not compute beside (as data are made ready, say)."""
    quiet = max(rank.state["quiet"], rank.state["meeting"] or 0.0)
    if quiet > patience and rank.activity.idle() > patience:
        return not at_work(rank.pid)
    return bool(quiet > max(patience, PATIENCE.starting))


def is_idle(rank: Rank, job: Job) -> bool:
    """Whether a rank has made no progress for too long, and does not compute either: in a pass, or
    as it starts.

    Virtual devices sleep in their passes; a model's weights may come from far away.
    """
    what, limit = rank.state.get("what", "start"), job.hang_seconds
    if what not in (*PASSES, "start") or (job.virtual and what != "start"):
        return False
    patience = limit if what in PASSES else max(limit, PATIENCE.starting)
    quiet = min(rank.state.get("quiet", 0.0), rank.activity.idle())
    return quiet > patience and not at_work(rank.pid)


def computes_too_long(rank: Rank, job: Job) -> bool:
    """Whether a rank has made no progress for far longer than its longest pass, with a core to
    itself."""
    what, limit, own = (
        rank.state.get("what", "start"),
        job.hang_seconds,
        rank.state.get("longest", 0.0),
    )
    quiet: float = rank.state.get("quiet", 0.0)
    patience = max(limit, 10 * own)
    if what == "checkpoint" or not own:  # nothing to compare with
        patience = max(limit, PATIENCE.starting)
    patience += PATIENCE.spinning if job.device == "cuda" else 0.0
    if what == "start" or quiet <= patience:
        return False
    return not (quiet < PATIENCE.starting and rank.starved("spent", limit))
