"""The parent of local ranks: it forks them, watches over them, and never leaves one behind.

A rank that dies, fails or hangs ends the run. The parent then kills all ranks, and raises one error
that names the rank, its place in the plan and what happened. When a rank dies its peers fail, too;
the error names the first cause, not its consequences.

Whether a rank hangs follows from its last heartbeat, and from whether its process computes. A rank
makes progress when a layer's pass or a collective is done. A rank without progress is not at fault
while it waits for another rank, waits for a core, or computes for not much longer than its longest
pass so far. A rank without progress that does none of these hangs. A rank without heartbeats hangs
unless its process would run if it got a core.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import connection as pipes, get_context
from typing import Any, NoReturn

from hetplan.errors import HetplanError
from hetplan.plans.plan import Plan
from hetplan.runtime.events import PASSES, WAITS
from hetplan.runtime.job import Job, StepReport
from hetplan.runtime.launch.health import PATIENCE, Activity, at_work, runnable

FORK = get_context("fork")


@dataclass
class Rank:
    """The parent's record of a rank."""

    process: Any
    """A multiprocessing.Process."""
    connection: Any
    """The parent's end of the rank's pipe."""
    heard: float
    """Seconds on the monotonic clock, when the rank last sent a message."""
    state: dict[str, Any] = field(default_factory=dict)
    """The last heartbeat, see `Watch.state`; empty before the first."""
    steps: list[StepReport] = field(default_factory=list)
    activity: Activity = field(default_factory=Activity)
    failure: str | None = None
    """The text of the rank's error; None where it has none."""
    lost_peer: bool = False
    """Whether the rank failed because another rank was gone."""
    lost: bool = False
    """Whether the process was killed or ended before it could report an error."""
    done: bool = False
    """Whether the rank has reported that it finished the run."""
    gone: bool = False
    """Whether the process has ended."""

    @property
    def doing(self) -> str:
        """The rank's present activity, as a text for errors."""
        return "at {what} of chunk {chunk}, micro-batch {batch}".format(**self.state)

    @property
    def waits(self) -> bool:
        """Whether the rank waits for another rank."""
        return self.state.get("what") in WAITS or self.state.get("meeting") is not None


class RankError(HetplanError):
    """A rank died, failed or hung. The text names the rank and its place in the plan."""

    device: int | None
    """The rank's device where the rank was lost (killed, ended or hung), so that the training could
    go on without the device. None where the rank failed by an error that would come again."""

    def __init__(self, text: str, device: int | None = None) -> None:
        super().__init__(text)
        self.device = device


def rank_error(plan: Plan, number: int, text: str, *, lost: bool) -> RankError:
    """The error of a rank. number: the rank's. lost: whether the rank was lost; else it failed by
    an error of its own."""
    device = plan.places[number].device if lost else None
    return RankError(f"{plan.rank_text(number)}: {text}", device)


class Supervisor:
    """The parent of all ranks."""

    def __init__(
        self, job: Job, tell: Callable[[StepReport], None] | None, shared: Any = None
    ) -> None:
        """tell: receives each report of rank 0. shared: the objects from `check_job`, which the
        forked ranks use."""
        self.job, self.tell, self.shared = job, tell, shared
        self.ranks: list[Rank] = []
        self.stop: Any = FORK.RawValue("b", 0)  # in shared memory: 1 asks ranks to end
        self.received_signals: list[int] = []

    def start(self, store: str) -> None:
        """Fork one process per rank."""
        from hetplan.runtime.engine.worker import rank_main

        for number in range(self.job.plan.world_size):
            parent_end, rank_end = FORK.Pipe(duplex=False)
            # The rank closes the parent's ends of all pipes. So its own pipe breaks as soon as the
            # parent is gone.
            parent_ends = [parent_end, *(rank.connection for rank in self.ranks)]
            process = FORK.Process(
                target=rank_main,
                args=(self.job, number, store, rank_end, parent_ends, self.stop, self.shared),
            )
            process.start()
            rank_end.close()
            self.ranks.append(Rank(process, parent_end, time.monotonic()))

    def watch(self) -> None:
        """Return when all ranks are done. Raises RankError, and KeyboardInterrupt where Ctrl-C was
        pressed."""
        while not all(rank.gone for rank in self.ranks):
            self._listen(0.2)  # so long may a signal or the end of a process go unnoticed
            if signal.SIGINT in self.received_signals:
                raise KeyboardInterrupt
            self.stop.value = signal.SIGTERM in self.received_signals
            self._reap()
            if any(rank.failure for rank in self.ranks):
                self._explain()
            alive = [(number, rank) for number, rank in enumerate(self.ranks) if not rank.gone]
            hung = find_hung(alive, self.job)
            if hung is not None:
                raise hung

    def _listen(self, seconds: float) -> None:
        """Wait at most `seconds` for messages of ranks, and read one message of each rank that has
        sent any."""
        numbers = {r.connection: n for n, r in enumerate(self.ranks) if not r.connection.closed}
        for connection in pipes.wait(list(numbers), seconds):
            self._read(numbers[connection])

    def _read(self, number: int) -> bool:
        """Read one message of a rank, if there is one. Returns whether there was one."""
        rank = self.ranks[number]
        try:
            if not rank.connection.poll():
                return False
            kind, content = rank.connection.recv()
        except (EOFError, OSError):
            rank.connection.close()
            return False
        rank.heard = time.monotonic()
        if kind == "beat":
            rank.state = content
            rank.activity.note(content["used"])
        elif kind == "step":
            rank.steps.append(content)
            if rank.state:  # a finished step is progress since the last heartbeat
                rank.state |= {"quiet": 0.0, "meeting": None}
            if number == 0 and self.tell is not None:
                self.tell(content)
        elif kind == "failed":
            rank.failure, rank.lost_peer = content
        else:
            rank.done = True
        return True

    def _reap(self) -> None:
        """Record which processes have ended, and why."""
        for number, rank in enumerate(self.ranks):
            code = rank.process.exitcode
            if rank.gone or code is None:
                continue
            rank.gone = True
            while self._read(number):  # the messages that it sent before it ended
                pass
            # A process that the rank has started may keep the other end open.
            rank.connection.close()
            if code < 0:  # the negative number of the signal that ended the process
                name = signal.Signals(-code).name
                hint = ", as by the kernel where memory is short" if name == "SIGKILL" else ""
                rank.failure = f"was killed by {name}{hint}"
                rank.lost_peer, rank.lost = False, True
            elif not rank.done and rank.failure is None:
                rank.failure = f"ended with exit code {code}"
                rank.lost = True

    def _explain(self) -> NoReturn:
        """Raise the error of the lowest rank that failed by itself; of the lowest rank that failed
        where all have only lost a peer.

        While all failed ranks have only lost a peer, wait for `PATIENCE.grace` seconds at most for
        the failure of this peer.
        """
        until = time.monotonic() + PATIENCE.grace
        while time.monotonic() < until and all(r.lost_peer for r in self.ranks if r.failure):
            self._listen(0.1)
            self._reap()
        # False comes before True: ranks that failed by themselves before those that lost a peer
        _, number, text = min(
            (r.lost_peer, n, r.failure) for n, r in enumerate(self.ranks) if r.failure
        )
        raise rank_error(self.job.plan, number, text, lost=self.ranks[number].lost)

    def end(self) -> None:
        """Kill all ranks that still run, and wait for their processes to end."""
        for rank in self.ranks:
            rank.process.kill()
            rank.process.join()
            rank.connection.close()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """A context in which `watch` acts upon signals. After SIGTERM all ranks end after their
        step, with a checkpoint where the job has a folder for them; after SIGINT at once.

        Python's own handler of SIGINT raises KeyboardInterrupt wherever the interpreter is. An
        exception in a finaliser or in a callback of a weak reference is lost, and the run would go
        on.
        """

        def receive(number: int, frame: object) -> None:
            self.received_signals.append(number)

        earlier_handlers = {
            number: signal.signal(number, receive) for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield
        finally:
            for number, handler in earlier_handlers.items():
                signal.signal(number, handler)


def find_hung(alive: list[tuple[int, Rank]], job: Job) -> RankError | None:
    """The error for a rank that hangs; None where no rank does.

    A rank hangs that has given no heartbeat for too long, or has made no progress for too long.
    Where all ranks wait for each other for too long, the error names the one that has waited
    longest, and no rank counts as lost. alive: (number, rank) of each rank whose process runs.
    """
    for number, rank in alive:
        silent = time.monotonic() - rank.heard
        if is_silent(rank, silent, job.hang_seconds):
            text = f"hangs; no sign of life for {silent:.0f} s"
            return rank_error(job.plan, number, text, lost=True)
    for number, rank in alive:
        if not rank.waits and hangs(rank, job):
            text = f"hangs; {rank.doing} for {rank.state['quiet']:.0f} s"
            return rank_error(job.plan, number, text, lost=True)
    longest = max((rank.state.get("longest", 0.0) for _, rank in alive), default=0.0)
    patience = max(job.hang_seconds, PATIENCE.together, 10 * longest)
    if alive and all(rank.waits and waits_too_long(rank, patience) for _, rank in alive):
        number, rank = max(alive, key=lambda item: item[1].state["quiet"])
        return rank_error(job.plan, number, f"waits, as all others do; {rank.doing}", lost=False)
    return None


def is_silent(rank: Rank, silent: float, limit: float) -> bool:
    """Whether a rank that has given no heartbeat for `silent` seconds counts as hung.

    A rank may be silent for `limit` seconds; before its first heartbeat, while it loads libraries,
    and where its process only lacks a core, for `PATIENCE.starting` seconds.
    """
    if silent > PATIENCE.starting:
        return True
    if silent <= limit or not rank.state:
        return False
    loads_libraries = rank.state["what"] == "start" and at_work(rank.process.pid)
    return not (loads_libraries or runnable(rank.process.pid))


def waits_too_long(rank: Rank, patience: float) -> bool:
    """Whether a rank has waited for more than `patience` seconds, and its process computes nothing
    meanwhile (the next data, say)."""
    quiet = max(rank.state["quiet"], rank.state["meeting"] or 0.0)
    if quiet > patience and rank.activity.idle() > patience:
        return not at_work(rank.process.pid)
    return bool(quiet > max(patience, PATIENCE.starting))


def hangs(rank: Rank, job: Job) -> bool:
    """Whether a rank, which waits for no other rank, has made no progress for too long.

    A rank that computes on a core of its own may take ten times the seconds of its longest pass.
    For the first pass and for a checkpoint, which have no such measure, it may take
    `PATIENCE.starting` seconds, as may a rank that lacks a core. A rank that does not compute hangs
    after the job's `hang_seconds` in a pass, unless the device is virtual: then it sleeps in its
    passes. At its start it hangs after `PATIENCE.starting` seconds without computing, since the
    model's weights may have to be downloaded.
    """
    state, limit, pid = rank.state, job.hang_seconds, rank.process.pid
    what, quiet = state.get("what", "start"), state.get("quiet", 0.0)
    idle = min(quiet, rank.activity.idle())
    longest_start = max(limit, PATIENCE.starting)
    if what == "start":
        return idle > longest_start and not at_work(pid)
    if what in PASSES and not job.virtual and idle > limit and not at_work(pid):
        return True
    if state["longest"] > 0 and what != "checkpoint":
        patience = max(limit, 10 * state["longest"])
    else:
        patience = longest_start
    if job.device == "cuda":
        patience += PATIENCE.spinning
    if quiet <= patience:
        return False
    if quiet >= PATIENCE.starting:
        return True
    computed = state["used"] - state["spent"]
    # It has been without progress for more than `limit` seconds. On a core of its own it would have
    # computed for most of them.
    lacks_core = computed < limit / 2 and runnable(pid)
    return not lacks_core
