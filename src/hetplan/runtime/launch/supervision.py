"""The parent of local ranks: it forks them, watches over them, and never leaves one behind.

A rank that dies, fails, or does nothing any more ends the run: all are killed, and one error names
the rank, its place in the plan and what happened. When a rank dies its peers fail, too; the first
cause is told, not its consequences.

When a rank counts as hung follows from what it last said of itself, and whether its process
computes. Progress is a layer's pass or a collective. A rank that makes none is not at fault while
it waits for another one, waits for a core, or computes for not much longer than it has before; what
does nothing of that hangs. What others delay is no fault of a process: one that gives no sign may
do nothing, or would if it got a core.
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
    """What the parent knows of a rank."""

    process: Any
    """A multiprocessing.Process."""
    connection: Any
    """The parent's end of its pipe."""
    heard: float
    """When it last said something."""
    state: dict[str, Any] = field(default_factory=dict)
    """Its last sign of life, see `Watch.state`."""
    steps: list[StepReport] = field(default_factory=list)
    activity: Activity = field(default_factory=Activity)
    failure: str | None = None
    bereft: bool = False
    """It failed because it lost its peers."""
    lost: bool = False
    """Its process ended without a word."""
    done: bool = False
    gone: bool = False

    @property
    def doing(self) -> str:
        """For people."""
        return "at {what} of chunk {chunk}, micro-batch {batch}".format(**self.state)

    @property
    def waits(self) -> bool:
        """For another rank."""
        return self.state.get("what") in WAITS or self.state.get("meeting") is not None


class RankError(HetplanError):
    """A rank died, failed or hung; names it and its place in the plan.

    device: the rank's, where it was lost (killed, ended or hung), so that the plan could go on
    without it; None where it failed by an error of its own, which would come again.
    """

    def __init__(self, text: str, device: int | None = None) -> None:
        super().__init__(text)
        self.device = device


def rank_error(plan: Plan, number: int, text: str, *, lost: bool) -> RankError:
    """Of a rank by its number. lost: it is, rather than in error itself."""
    return RankError(
        f"{plan.rank_text(number)}: {text}", plan.places[number].device if lost else None
    )


class Supervisor:
    """The parent of all ranks."""

    def __init__(
        self, job: Job, tell: Callable[[StepReport], None] | None, made: Any = None
    ) -> None:
        """made: what ranks need not make again (`check_job`)."""
        self.job, self.tell, self.made = job, tell, made
        self.ranks: list[Rank] = []
        self.stop: Any = FORK.RawValue("b", 0)  # one byte that all ranks see
        self.asked: list[int] = []  # by signals

    def start(self, store: str) -> None:
        """Fork one process per rank."""
        from hetplan.runtime.engine.worker import rank_main

        for number in range(self.job.plan.world_size):
            ours, theirs = FORK.Pipe(duplex=False)
            # a rank must not hold the parent's ends: it notices by them when the parent is gone
            parents = [ours, *(rank.connection for rank in self.ranks)]
            process = FORK.Process(
                target=rank_main,
                args=(self.job, number, store, theirs, parents, self.stop, self.made),
            )
            process.start()
            theirs.close()
            self.ranks.append(Rank(process, ours, time.monotonic()))

    def watch(self) -> None:
        """Until all are done; raises RankError, and KeyboardInterrupt where Ctrl-C was pressed."""
        while not all(rank.gone for rank in self.ranks):
            self._listen(0.2)
            if signal.SIGINT in self.asked:
                raise KeyboardInterrupt
            self.stop.value = signal.SIGTERM in self.asked
            self._reap()
            if any(rank.failure for rank in self.ranks):
                self._explain()
            hung = find_hung([(n, r) for n, r in enumerate(self.ranks) if not r.gone], self.job)
            if hung is not None:
                raise hung

    def _listen(self, seconds: float) -> None:
        """Hear what ranks say, for so long at most if they say nothing."""
        numbers = {r.connection: n for n, r in enumerate(self.ranks) if not r.connection.closed}
        for connection in pipes.wait(list(numbers), seconds):
            self._read(numbers[connection])

    def _read(self, number: int) -> bool:
        """Hear one thing that a rank has said; whether there was anything."""
        rank = self.ranks[number]
        try:
            if not rank.connection.poll():
                return False
            kind, what = rank.connection.recv()
        except (EOFError, OSError):
            rank.connection.close()
            return False
        rank.heard = time.monotonic()
        if kind == "beat":
            rank.state = what
            rank.activity.note(what["used"])
        elif kind == "step":
            rank.steps.append(what)
            if rank.state:  # progress, whatever the last sign of life has said
                rank.state |= {"quiet": 0.0, "meeting": None}
            if number == 0 and self.tell is not None:
                self.tell(what)
        elif kind == "failed":
            rank.failure, rank.bereft = what
        else:
            rank.done = True
        return True

    def _reap(self) -> None:
        """Note which processes are gone, and why."""
        for number, rank in enumerate(self.ranks):
            code = rank.process.exitcode
            if rank.gone or code is None:
                continue
            rank.gone = True
            while self._read(number):  # what it said last
                pass
            rank.connection.close()  # a process that it has started may hold the other end open
            if code < 0:
                name = signal.Signals(-code).name
                hint = ", as by the kernel where memory is short" if name == "SIGKILL" else ""
                rank.failure, rank.bereft, rank.lost = f"was killed by {name}{hint}", False, True
            elif not rank.done and rank.failure is None:
                rank.failure, rank.lost = f"ended with exit code {code}", True

    def _explain(self) -> NoReturn:
        """Wait a moment for the cause behind the first sign, then tell it."""
        until = time.monotonic() + PATIENCE.grace
        while time.monotonic() < until and all(r.bereft for r in self.ranks if r.failure):
            self._listen(0.1)
            self._reap()
        _, number, text = min(
            (r.bereft, n, r.failure) for n, r in enumerate(self.ranks) if r.failure
        )
        raise rank_error(self.job.plan, number, text, lost=self.ranks[number].lost)

    def end(self) -> None:
        """Kill and collect whoever is left."""
        for rank in self.ranks:
            rank.process.kill()
            rank.process.join()
            rank.connection.close()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """SIGTERM inside: all ranks end behind their step, with a checkpoint where one is asked
        for. SIGINT: at once.

        Python's own handler of SIGINT raises wherever the interpreter is, and what is raised in a
        finaliser or a callback of a weak reference is lost: the run would go on.
        """

        numbers = (signal.SIGTERM, signal.SIGINT)
        before = [signal.signal(n, lambda number, _: self.asked.append(number)) for n in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)


def find_hung(alive: list[tuple[int, Rank]], job: Job) -> RankError | None:
    """A rank without a sign of life, or that is at one thing for too long; or all, where they wait
    for each other (none of them is lost then)."""
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

    One that has begun may be silent for `limit` seconds; for `PATIENCE.starting` where its process
    could run and only lacks a core, or loads libraries.
    """
    if silent > PATIENCE.starting:
        return True
    if silent <= limit or not rank.state:
        return False
    loads_libraries = rank.state["what"] == "start" and at_work(rank.process.pid)
    return not (loads_libraries or runnable(rank.process.pid))


def waits_too_long(rank: Rank, patience: float) -> bool:
    """Whether a rank has waited for more than `patience` seconds and its process does not compute
    beside (as data are made ready, say)."""
    quiet = max(rank.state["quiet"], rank.state["meeting"] or 0.0)
    if quiet > patience and rank.activity.idle() > patience:
        return not at_work(rank.process.pid)
    return bool(quiet > max(patience, PATIENCE.starting))


def hangs(rank: Rank, job: Job) -> bool:
    """Whether a rank, which waits for no other one, has made no progress for too long.

    A rank that computes, with a core to itself, may take ten times its longest pass; what has no
    such measure (the first pass, a checkpoint) may take `PATIENCE.starting` seconds. A rank that
    lacks a core may take that long in any case. A rank that does not compute hangs after the job's
    `hang_seconds` in a pass, unless virtual devices sleep in it, and after `PATIENCE.starting` as
    it starts, since a model's weights may come from far away.
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
    lacks_core = computed < limit / 2 and runnable(pid)
    return not lacks_core
