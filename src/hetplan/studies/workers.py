"""Tasks on the cores of this machine: a process of its own for each, so that none takes another or
the study down.

A server process imports what solvers need once; each task is forked from it, which costs
milliseconds and leaves memory of its own. A task that crashes, runs out of memory or does not stop
in time becomes a row that says so.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from hetplan.errors import one_line
from hetplan.solvers.run import Progress
from hetplan.studies.rows import Row
from hetplan.studies.tasks import Task
from hetplan.studies.work import failed, now, perform

TELL_SECONDS = 0.5
# What the fork server imports once instead of every task anew. None of it starts threads, so that
# forking is safe.
PRELOAD = [
    "highspy",
    "numba",
    "pyomo.environ",
    "ortools.sat.python.cp_model",
    "hetplan.studies.work",
]


@dataclass(frozen=True)
class Patience:
    """How long a task may run beyond its time limit before it is killed: methods may overrun by a
    last step, and start late under load."""

    seconds: float = 15.0  # at least
    share: float = 0.5  # of the time limit

    def limit(self, time_limit: float | None) -> float:
        """Seconds after which a task is killed."""
        if time_limit is None:
            return float("inf")
        return time_limit + max(self.seconds, self.share * time_limit)


PATIENCE = Patience()


@dataclass
class Running:
    """A task in its process."""

    task: Task
    process: Any
    pipe: Connection
    begun: str = field(default_factory=now)
    started: float = field(default_factory=time.monotonic)
    bound: float | None = None  # the best that it has reported
    row: Row | None = None

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self.started

    def failed(self, reason: str, stop: str = "error") -> Row:
        """The row of a task that did not come to an end of its own."""
        return failed(
            self.task,
            reason,
            stop=stop,
            seconds=self.seconds,
            bound=self.bound,
            begun=self.begun,
        )


def run_tasks(
    tasks: Iterable[Task],
    jobs: int,
    *,
    memory_bytes: int | None = None,
    patience: Patience = PATIENCE,
    stop: Callable[[], bool],
) -> Iterator[Row]:
    """The rows as they come, `jobs` tasks at a time, until `stop` says so; what then still runs is
    dropped.

    memory_bytes: address space of each task's process, None for no limit.
    """
    context = server()
    waiting = iter(tasks)
    running: list[Running] = []
    try:
        while True:
            while len(running) < jobs and not stop():
                task = next(waiting, None)
                if task is None:
                    break
                running.append(start(context, task, memory_bytes))
            if not running or stop():
                return
            wait([r.pipe for r in running] + [r.process.sentinel for r in running], timeout=0.2)
            for one in list(running):
                row = settled(one, patience)
                if row is not None:
                    running.remove(one)
                    yield row
    finally:
        for one in running:
            end(one)


def server() -> Any:
    """Where processes come from: a fork server where the system has one, fresh processes
    elsewhere."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def start(context: Any, task: Task, memory_bytes: int | None) -> Running:
    """The task in a new process."""
    ours, theirs = context.Pipe()
    process = context.Process(target=child, args=(task, theirs, memory_bytes), daemon=True)
    process.start()
    theirs.close()
    return Running(task, process, ours)


def settled(one: Running, patience: Patience) -> Row | None:
    """The row of a task that has ended or had to be; None while it runs."""
    dead = not one.process.is_alive()  # asked first: what it sent before is read below
    with contextlib.suppress(EOFError, OSError):  # it died: its exit code tells how
        while one.pipe.poll():
            kind, value = one.pipe.recv()
            if kind == "bound":
                one.bound = value
            else:
                one.row = value
    row = one.row
    if row is None and dead:
        row = one.failed(death(one.process.exitcode))
    elif row is None and one.seconds > patience.limit(one.task.time_limit):
        late = one.seconds - (one.task.time_limit or 0)
        row = one.failed(f"killed: still running {late:.0f} s after its time limit", "limit")
    if row is not None:
        end(one)
    return row


def death(code: int | None) -> str:
    """What an exit code means."""
    if code is not None and code < 0:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        hint = ", out of memory perhaps" if -code == signal.SIGKILL else ""
        return f"its process was ended by {name}{hint}"
    return f"its process ended with exit code {code}"


def end(one: Running) -> None:
    """Close the pipe and make sure that the process is gone."""
    one.pipe.close()
    if one.process.is_alive():
        one.process.join(0.5 if one.row is not None else 0.0)
    if one.process.is_alive():
        one.process.kill()
    one.process.join()


def child(task: Task, pipe: Connection, memory_bytes: int | None) -> None:
    """In the task's process: solve, send bounds now and then and the row at the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the study's own process decides
    threading.Thread(target=follow, args=(pipe,), daemon=True).start()
    if memory_bytes is not None:
        limit_memory(memory_bytes)
    lock, last = threading.Lock(), [0.0]

    def tell(progress: Progress) -> None:
        if progress.bound is not None and time.monotonic() - last[0] > TELL_SECONDS:
            last[0] = time.monotonic()
            with lock:
                pipe.send(("bound", progress.bound))

    try:
        row = perform(task, tell)
    except MemoryError:
        row = failed(task, "out of memory")
    except Exception as error:  # noqa: BLE001 - a bug in one method is a row, and the study goes on
        row = failed(task, f"{type(error).__name__}: {one_line(str(error))}")
    with lock:
        pipe.send(("row", row))


def follow(pipe: Connection) -> None:
    """End this process when the study's is gone: the study never writes, so that reading ends with
    it alone."""
    with contextlib.suppress(OSError, EOFError):
        wait([pipe])
        pipe.recv()
    os._exit(1)


def limit_memory(size: int) -> None:
    """Allocations beyond fail, where the system can limit them."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
