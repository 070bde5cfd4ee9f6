"""Carries out a study's tasks, each in a process of its own, on the cores of this machine or on a
Dask cluster.

A server process imports the solvers once. Each task's process is forked from it, which takes
milliseconds and gives the task memory of its own. A task that crashes, runs out of memory or does
not stop in time gets a row that says so, and does not disturb other tasks. A row also states the
machine and the versions of packages with which its figures were measured.

On a cluster, workers only solve; the study's process writes the rows, which are the same as on one
machine. Where a worker dies, Dask gives its task to another worker, as often as
`distributed.scheduler.allowed-failures` allows; after that the task gets a row that says so. On a
worker, too, each task runs in its own process.
"""

import contextlib
import multiprocessing
import os
import platform
import re
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from importlib import metadata
from importlib.util import find_spec
from itertools import islice
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hetplan import __version__
from hetplan.errors import (
    HetplanError,
    InputError,
    import_optional,
    kind_and_text,
    one_line,
    require,
)
from hetplan.instances.answers import result_document
from hetplan.instances.library import parse_instance
from hetplan.interpreter import SAFE_PATH, safe_path
from hetplan.solvers.registry import solve_loaded
from hetplan.solvers.run import Options, Progress, Run
from hetplan.studies.findings import SIZE_KEY, size_of
from hetplan.studies.rows import METHOD_VERSION, Row, Task, compact_json

Tell = Callable[[Progress], None]
GIB = 2**30  # bytes
LONGEST_REASON = 500  # characters of another program's message that a row or an error repeats
# The packages whose versions a row states. Each has the name of its module.
PACKAGES = ("ortools", "highspy", "pyomo", "numpy", "numba", "networkx")


def perform(task: Task, tell: Tell | None = None) -> Row:
    """Run a task in this process; returns its row.

    A HetplanError, such as a method's refusal of the instance, gives a row with its message. tell:
    called with the run's progress.
    """
    instance = parse_instance(task.document, where=task.name)
    begun = now()
    run = Run(Options(**task.options), tell)
    try:
        result = solve_loaded(task.family, instance.data, task.method, run)
    except HetplanError as error:
        return failed(task, str(error), seconds=run.elapsed, begun=begun, peak=peak_bytes())
    answer = result_document(result)
    copied = (
        "status", "stop", "objective", "bound", "gap", "message", "solver", "seconds",
        "build_seconds", "solve_seconds",
    )  # fmt: skip
    return {
        **outline(task, begun),
        **{name: answer[name] for name in copied},
        "peak_bytes": peak_bytes(),
        "decision_json": None if answer["decision"] is None else compact_json(answer["decision"]),
        "details_json": compact_json({**answer["details"], SIZE_KEY: size_of(instance)}),
    }


def failed(
    task: Task,
    reason: str,
    *,
    stop: str = "error",
    seconds: float | None = None,
    bound: float | None = None,
    begun: str | None = None,
    peak: int | None = None,
) -> Row:
    """The row of a task without a result: it crashed, ran out of memory, or had to be killed.

    stop: the row's reason for the end of the run. bound: the last bound that the run reported.
    begun: UTC time. peak: bytes of resident memory. None: unknown.
    """
    return {
        **outline(task, begun or now()),
        "status": "unknown",
        "stop": stop,
        "objective": None,
        "bound": bound,
        "gap": None,
        "seconds": seconds,
        "message": one_line(reason)[:LONGEST_REASON],
        "peak_bytes": peak,
        "details_json": "{}",
    }


def outline(task: Task, begun: str) -> Row:
    """The columns of a task's row that are known before the run. begun: UTC time."""
    method = task.family.method(task.method)
    return {
        "key": task.key,
        "set": task.source_name,
        "instance": task.name,
        "problem": task.problem,
        "method": task.method,
        "exact": method.exact,
        "seed": task.options["seed"],
        "best_known": task.best_known,
        "bound_known": task.bound_known,
        "time_limit": task.options["time_limit"],
        "options_json": compact_json(task.options),
        "versions_json": compact_json({**versions(), METHOD_VERSION: method.version}),
        "machine_json": compact_json(machine()),
        "begun": begun,
    }


def now() -> str:
    """The UTC time in ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@cache
def machine() -> dict[str, Any]:
    """Processor, cores, system and Python of this machine."""
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


@cache
def versions() -> dict[str, str]:
    """The versions of hetplan and of the installed packages with which it solves."""
    return {
        "hetplan": __version__,
        **{name: metadata.version(name) for name in PACKAGES if find_spec(name)},
    }


def processor() -> str:
    """The name of the processor's model, or its architecture where Linux does not give a name."""
    cpuinfo = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    model = re.search(r"^model name\s*: *(.+)", cpuinfo, re.M)
    return model[1].strip() if model else platform.machine()


def peak_bytes() -> int | None:
    """The peak resident memory of this process; None where Linux does not give it."""
    # getrusage's ru_maxrss will not do: in a forked process it begins at the parent's peak.
    peak = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return int(peak[1]) * 1024 if peak else None


TELL_SECONDS = 0.5  # the least time between two bounds that a task's process sends
LOOK_SECONDS = 0.2  # the longest time until a study notices that it should stop
# The modules that the server process imports once for all tasks. None of them starts threads, so
# that forking is safe.
PRELOAD = (
    "highspy",
    "numba",
    "pyomo.environ",
    "ortools.sat.python.cp_model",
    "hetplan.studies.workers",
)
# The tasks submitted to a Dask scheduler per thread of its workers: enough to keep the workers
# busy, and few to drop on Ctrl-C.
AHEAD = 3
# Guards the list of this process's children that `multiprocessing` keeps and does not lock itself.
CHILDREN = threading.Lock()


@dataclass(frozen=True)
class Patience:
    """The time that a task may run beyond its time limit before it is killed: the larger of two
    times. A method may overrun its limit by a last step, and start late on a busy machine."""

    seconds: float = 15.0
    share: float = 0.5  # a share of the time limit

    def limit(self, time_limit: float | None) -> float:
        """The seconds after which a task is killed; infinite without a time limit."""
        if time_limit is None:
            return float("inf")
        return time_limit + max(self.seconds, self.share * time_limit)


def run_tasks(
    tasks: Iterable[Task],
    jobs: int,
    *,
    memory_bytes: int | None = None,
    patience: Patience = Patience(),
    preload: Sequence[str] = PRELOAD,
    stop: Callable[[], bool],
) -> Iterator[Row]:
    """Run tasks on this machine, `jobs` at a time, and yield each row as its task ends.

    memory_bytes: the most address space of each task's process; None: no limit. preload: modules
    that the server process imports. stop: returns whether to end early, which drops the tasks that
    run.
    """
    context = multiprocessing.get_context("forkserver")
    over = threading.Event()
    context.set_forkserver_preload(list(preload))
    with safe_path():  # a file of the folder where the user is must not stand in for a module
        forkserver.ensure_running()
    work = partial(perform_apart, memory_bytes=memory_bytes, patience=patience, stop=over.is_set)
    with ThreadPoolExecutor(jobs) as pool:
        try:
            yield from rows_of(pool, work, tasks, jobs, stop)
        finally:
            over.set()


def rows_of(
    pool: Executor,
    work: Callable[[Task], Row],
    tasks: Iterable[Task],
    ahead: int,
    stop: Callable[[], bool],
) -> Iterator[Row]:
    """Run tasks on a pool and yield each row as its task ends, until `stop` returns true.

    work: returns a task's row. ahead: the number of tasks that the pool has at a time.
    """
    waiting = iter(tasks)
    pending: dict[Future[Row], Task] = {}
    while not stop():
        for task in islice(waiting, ahead - len(pending)):
            pending[pool.submit(work, task)] = task
        if not pending:
            return
        for future in wait(pending, timeout=LOOK_SECONDS, return_when=FIRST_COMPLETED).done:
            task = pending.pop(future)
            error = future.exception()
            yield future.result() if error is None else failed(task, kind_and_text(error))


def perform_apart(
    task: Task, memory_bytes: int | None, patience: Patience, stop: Callable[[], bool]
) -> Row:
    """Run a task in its own process; returns its row, whatever becomes of the process.

    stop: returns whether the study ends early. The process is then killed, and its row is one that
    the study drops.
    """
    context = multiprocessing.get_context("forkserver")
    begun = now()
    started = time.monotonic()
    limit, bound = task.options["time_limit"], None
    our_end, child_end = context.Pipe()
    process = context.Process(target=child, args=(task, child_end, memory_bytes), daemon=True)
    with CHILDREN:
        process.start()
    child_end.close()
    message, stop_reason = "stopped from the keyboard", "interrupted"  # where `stop` ends the loop
    try:
        while not stop():
            seconds = time.monotonic() - started
            if our_end.poll(LOOK_SECONDS):
                kind, value = our_end.recv()
                if kind == "row":
                    return dict(value)
                bound = value
            elif seconds > patience.limit(limit):  # never without a limit
                late = f"{seconds - limit:.0f} s after its time limit"
                message = f"killed: still running {late}"
                stop_reason = "limit"
                break
    except (EOFError, OSError):  # the process died: its exit code says how
        with CHILDREN:
            process.join()
        message, stop_reason = death(process.exitcode), "error"
    finally:
        our_end.close()
        process.kill()  # also after its row: nothing else of it is needed
        with CHILDREN:
            process.join()
    seconds = time.monotonic() - started
    return failed(task, message, stop=stop_reason, seconds=seconds, bound=bound, begun=begun)


def death(code: int | None) -> str:
    """A sentence about the end of a task's process, from its exit code."""
    if code is not None and code < 0:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        hint = ", out of memory perhaps" if -code == signal.SIGKILL else ""
        return f"its process was ended by {name}{hint}"
    return f"its process ended with exit code {code}"


def child(task: Task, pipe: Connection, memory_bytes: int | None) -> None:
    """The work of a task's process: run the task, send ("bound", bound) through the pipe from time
    to time, and ("row", row) at the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the study's process handles Ctrl-C
    threading.Thread(target=follow, args=(pipe,), daemon=True).start()
    lock = threading.Lock()  # for the pipe
    last_sent = 0.0

    def tell(progress: Progress) -> None:
        nonlocal last_sent
        if progress.bound is not None and time.monotonic() - last_sent > TELL_SECONDS:
            last_sent = time.monotonic()
            with lock:
                pipe.send(("bound", progress.bound))

    try:
        if memory_bytes is not None:
            # An allocation beyond the limit fails with a MemoryError.
            check_memory_limit(memory_bytes)
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        row = perform(task, tell)
    except MemoryError:
        row = failed(task, "out of memory")
    except Exception as error:  # noqa: BLE001 - a bug in one method is a row, and the study goes on
        row = failed(task, kind_and_text(error))
    with lock:
        pipe.send(("row", row))


def check_memory_limit(memory_bytes: int) -> None:
    """Raise InputError for a limit that a process of this machine may not set itself: it is beyond
    the limit under which the process runs."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    require(
        most == resource.RLIM_INFINITY or memory_bytes <= most,
        "is beyond the limit of this process (ulimit -v)",
        where="--memory-gib",
        got=f"{memory_bytes / GIB:g}",
        expected=f"at most {most / GIB:g}",
    )


def follow(pipe: Connection) -> None:
    """End this process when the study's process is gone. The study's process never writes to the
    pipe, so that reading from it only ends when that process closes it."""
    with contextlib.suppress(OSError, EOFError):
        pipe.recv()
    os._exit(1)  # `sys.exit` would end this thread alone


def perform_there(task: Task, memory_bytes: int | None) -> Row:
    """Run a task in its own process on a worker of a Dask cluster; returns its row."""
    # Dask's nanny starts workers as daemons, and Python forbids a daemon to start children, since
    # the children could outlive the daemon. A task's process does not outlive its worker: it ends
    # when the pipe to the worker closes.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    return next(run_tasks([task], 1, memory_bytes=memory_bytes, stop=lambda: False))


def dask() -> Any:
    """The module dask.distributed. Raises InputError where it is not installed."""
    return import_optional("distributed", "needs Dask", "dask", where="--scheduler")


@contextlib.contextmanager
def connected(scheduler: str, timeout: float = 20.0) -> Iterator[Any]:
    """A context with a client of the Dask scheduler at an address. Raises InputError where the
    scheduler does not answer within `timeout` seconds."""
    distributed = dask()
    try:
        client = distributed.Client(scheduler, timeout=timeout, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise InputError(
            f"cannot be reached: {one_line(str(error))[:160]}", where="--scheduler", got=scheduler
        ) from None
    try:
        yield client
    finally:
        client.close()


@contextlib.contextmanager
def slurm(jobs: int, options: dict[str, Any], renew_every: str = "5s") -> Iterator[Any]:
    """A context with a client of a Dask cluster of `jobs` Slurm jobs, which end with the context.

    A job that ends early, by its time limit or with its node, is submitted again. options: settings
    of dask-jobqueue's SLURMCluster. renew_every: time between two looks for jobs that ended, such
    as `5s`. Raises InputError where dask-jobqueue refuses the settings, or Slurm the jobs.
    """
    distributed = dask()
    queue = import_optional("dask_jobqueue.slurm", "needs dask-jobqueue", "slurm", where="--slurm")
    require(
        shutil.which("sbatch") is not None,
        "no command sbatch on this machine",
        where="--slurm",
        expected="a node of a Slurm cluster",
    )
    try:
        cluster = queue.SLURMCluster(**with_safe_path(options))
    except (TypeError, ValueError) as error:
        raise InputError(f"not usable: {one_line(str(error))[:300]}", where="--slurm") from None
    submit(cluster, jobs)
    try:
        cluster.adapt(minimum_jobs=jobs, maximum_jobs=jobs, interval=renew_every)
        with distributed.Client(cluster, set_as_default=False) as client:
            yield client
    finally:
        cluster.close()


def with_safe_path(options: dict[str, Any]) -> dict[str, Any]:
    """The settings of dask-jobqueue, with a prologue under which workers import nothing from the
    folder where they start. dask-jobqueue starts workers by `python -m`."""
    from dask import config

    lines = options.get("job_script_prologue")
    if lines is None:
        lines = config.get("jobqueue.slurm.job-script-prologue", [])
    return {**options, "job_script_prologue": [f"export {SAFE_PATH}=1", *(lines or [])]}


def submit(cluster: Any, jobs: int) -> None:
    """Submit the jobs of a cluster. Where Slurm refuses one, close the cluster and raise
    InputError.

    The cluster's own method `scale` would only log a refusal.
    """
    for _ in range(jobs):
        cluster.worker_spec.update(cluster.new_worker_spec())
    try:
        cluster.sync(cluster._correct_state)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(AssertionError):  # closing expects every job to have begun
            cluster.close()
        refusal = one_line(str(error))[:LONGEST_REASON]
        raise InputError(f"cannot be submitted: {refusal}", where="--slurm") from None


def run_on(
    client: Any, tasks: Iterable[Task], *, memory_bytes: int | None = None, stop: Callable[[], bool]
) -> Iterator[Row]:
    """Run tasks on the Dask cluster of a client and yield each row as its task ends.

    memory_bytes, stop: see `run_tasks`.
    """
    pool = client.get_executor(pure=False)
    threads = sum(client.nthreads().values())  # 0 as long as no worker has begun
    work = partial(perform_there, memory_bytes=memory_bytes)
    try:
        yield from rows_of(pool, work, tasks, AHEAD * max(1, threads), stop)
    finally:
        pool.shutdown(wait=False)  # a study that stops early drops the tasks that run
