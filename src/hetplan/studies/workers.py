"""Tasks on the cores of this machine or on a Dask cluster: a process of its own for each, from its
task to its row.

A server process imports what solvers need once; each task is forked from it, which costs
milliseconds and leaves memory of its own. A task that crashes, runs out of memory or does not stop
in time becomes a row that says so, and none takes another or the study down. A row also says where
and with what its figures were taken.

On a cluster the study's process keeps the rows: workers only solve, and give the same rows as one
machine. A worker that dies has its task done again by another, as often as Dask allows
(`distributed.scheduler.allowed-failures`); after that the task is a row that says so. Each task
runs in a process of its own on the worker, as it would here.
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
from hetplan.errors import HetplanError, InputError, kind_and_text, one_line, optional, require
from hetplan.instances.answers import result_document
from hetplan.instances.library import parse_instance
from hetplan.interpreter import SAFE_PATH, safe_path
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Progress, Run
from hetplan.studies.findings import SIZE_KEY, size_of
from hetplan.studies.rows import Row, Task, text

Tell = Callable[[Progress], None]
PACKAGES = ("ortools", "highspy", "pyomo", "numpy", "numba", "networkx")


def perform(task: Task, tell: Tell | None = None) -> Row:
    """Run a task; returns its row. An error of hetplan's (a refusal, a contradiction) makes a row,
    too, with its reason."""
    instance = parse_instance(task.document, where=task.name)
    begun, run = now(), Run(Options(**task.options), tell)
    try:
        answer = result_document(solve(task.family, instance.data, task.method, run))
    except HetplanError as error:
        return failed(task, str(error), seconds=run.elapsed, begun=begun, peak=peak_bytes())
    copied = (
        "status", "stop", "objective", "bound", "gap", "message", "solver", "seconds",
        "build_seconds", "solve_seconds",
    )  # fmt: skip
    return {
        **outline(task, begun),
        **{name: answer[name] for name in copied},
        "peak_bytes": peak_bytes(),
        "decision_json": None if answer["decision"] is None else text(answer["decision"]),
        "details_json": text({**answer["details"], SIZE_KEY: size_of(instance)}),
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
    """The row of a task without a result: it crashed, ran out of memory, or had to be killed."""
    return {
        **outline(task, begun or now()),
        "status": "unknown",
        "stop": stop,
        "objective": None,
        "bound": bound,
        "gap": None,
        "seconds": seconds,
        "message": one_line(reason)[:500],
        "peak_bytes": peak,
        "details_json": "{}",
    }


def outline(task: Task, begun: str) -> Row:
    """The part of a row that is known before its solve."""
    return {
        "key": task.key,
        "set": task.set,
        "instance": task.name,
        "problem": task.problem,
        "method": task.method,
        "exact": task.family.method(task.method).exact,
        "seed": task.options["seed"],
        "best_known": task.best_known,
        "bound_known": task.bound_known,
        "time_limit": task.options["time_limit"],
        "options_json": text(task.options),
        "versions_json": text(versions()),
        "machine_json": text(machine()),
        "begun": begun,
    }


def now() -> str:
    """UTC to the second."""
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
    """hetplan and what it solves with; absent where not installed."""
    return {
        "hetplan": __version__,
        **{name: metadata.version(name) for name in PACKAGES if find_spec(name)},
    }


def processor() -> str:
    """The processor's name as its maker gives it, where the system tells."""
    known = re.search(
        r"^model name\s*: *(.+)", Path("/proc/cpuinfo").read_text("utf-8", "replace"), re.M
    )
    return known[1].strip() if known else platform.machine()


def peak_bytes() -> int | None:
    """This process's peak resident memory. (The ru_maxrss of a forked process begins at its
    parent's.)"""
    peak = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return int(peak[1]) * 1024 if peak else None


TELL_SECONDS = 0.5
# What the fork server imports once instead of every task anew. None of it starts threads, so that
# forking is safe.
PRELOAD = (
    "highspy",
    "numba",
    "pyomo.environ",
    "ortools.sat.python.cp_model",
    "hetplan.studies.workers",
)
# How many tasks wait at the scheduler per thread of the workers: enough to keep them busy, few to
# drop on Ctrl-C.
AHEAD = 3
# Of the list of this process's children, which `multiprocessing` keeps without one.
CHILDREN = threading.Lock()


@dataclass(frozen=True)
class Patience:
    """The time that a task may run beyond its time limit before it is killed: methods may overrun
    by a last step, and start late under load."""

    seconds: float = 15.0  # at least
    share: float = 0.5  # of the time limit

    def limit(self, time_limit: float | None) -> float:
        """Seconds after which a task is killed."""
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
    """The rows as they come, `jobs` tasks at a time, until `stop` says so; what then still runs is
    dropped.

    memory_bytes: address space of each task's process, None for no limit. preload: what the server
    process imports.
    """
    context, over = multiprocessing.get_context("forkserver"), threading.Event()
    context.set_forkserver_preload(list(preload))
    with safe_path():
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
    """The rows as they come from a pool that is given `ahead` tasks at a time, until `stop` says
    so."""
    waiting, pending = iter(tasks), dict[Future[Row], Task]()
    while not stop():
        for task in islice(waiting, ahead - len(pending)):
            pending[pool.submit(work, task)] = task
        if not pending:
            return
        for future in wait(pending, timeout=0.2, return_when=FIRST_COMPLETED).done:
            task, error = pending.pop(future), future.exception()
            yield future.result() if error is None else failed(task, kind_and_text(error))


def perform_apart(
    task: Task, memory_bytes: int | None, patience: Patience, stop: Callable[[], bool]
) -> Row:
    """The task's row, whatever becomes of its process; once `stop` says so, one that nobody
    wants."""
    context, begun, started = multiprocessing.get_context("forkserver"), now(), time.monotonic()
    limit, bound = task.options["time_limit"], None
    ours, theirs = context.Pipe()
    process = context.Process(target=child, args=(task, theirs, memory_bytes), daemon=True)
    with CHILDREN:
        process.start()
    theirs.close()
    reason, why = "stopped from the keyboard", "interrupted"
    try:
        while not stop():
            seconds = time.monotonic() - started
            if ours.poll(0.2):
                kind, value = ours.recv()
                if kind == "row":
                    return dict(value)
                bound = value
            elif seconds > patience.limit(limit):
                late = f"{seconds - limit:.0f} s after its time limit"
                reason, why = f"killed: still running {late}", "limit"
                break
    except (EOFError, OSError):  # it died: its exit code tells how
        with CHILDREN:
            process.join()
        reason, why = death(process.exitcode), "error"
    finally:
        ours.close()
        process.kill()
        with CHILDREN:
            process.join()
    seconds = time.monotonic() - started
    return failed(task, reason, stop=why, seconds=seconds, bound=bound, begun=begun)


def death(code: int | None) -> str:
    """The meaning of an exit code."""
    if code is not None and code < 0:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        hint = ", out of memory perhaps" if -code == signal.SIGKILL else ""
        return f"its process was ended by {name}{hint}"
    return f"its process ended with exit code {code}"


def child(task: Task, pipe: Connection, memory_bytes: int | None) -> None:
    """In the task's process: solve, send bounds now and then and the row at the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the study's own process decides
    threading.Thread(target=follow, args=(pipe,), daemon=True).start()
    if memory_bytes is not None:
        # allocations beyond fail
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
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
        row = failed(task, kind_and_text(error))
    with lock:
        pipe.send(("row", row))


def follow(pipe: Connection) -> None:
    """End this process when the study's is gone: the study never writes, so that reading ends with
    it alone."""
    with contextlib.suppress(OSError, EOFError):
        pipe.recv()
    os._exit(1)


def perform_there(task: Task, memory_bytes: int | None) -> Row:
    """On a worker: one task in its own process."""
    # A nanny's worker is daemonic, and Python lets such a process have no children, lest they
    # outlive it. A task does not: it ends when the pipe to the worker closes.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    return next(run_tasks([task], 1, memory_bytes=memory_bytes, stop=lambda: False))


def dask() -> Any:
    """dask.distributed; raises InputError where it is not installed."""
    return optional("distributed", "needs Dask", "dask", where="--scheduler")


@contextlib.contextmanager
def connected(scheduler: str, timeout: float = 20.0) -> Iterator[Any]:
    """A client of the scheduler at that address; raises InputError where nobody answers within
    `timeout` seconds."""
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
    """A client of a cluster of `jobs` Slurm jobs, started here and ended with the study.

    A job that ends early, by its time limit or its node's death, is submitted again; that is looked
    for so often. Raises
    InputError where the settings are not dask-jobqueue's, or where Slurm refuses the jobs.
    """
    distributed = dask()
    queue = optional("dask_jobqueue.slurm", "needs dask-jobqueue", "slurm", where="--slurm")
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
    """Settings of dask-jobqueue under which workers, which it starts by `python -m`, import nothing
    from the folder where they start."""
    from dask import config

    given = options.get("job_script_prologue")
    lines = config.get("jobqueue.slurm.job-script-prologue", []) if given is None else given
    return {**options, "job_script_prologue": [f"export {SAFE_PATH}=1", *(lines or [])]}


def submit(cluster: Any, jobs: int) -> None:
    """Submit the jobs, as `scale` does, which would leave a refusal to the log; raises InputError,
    cluster closed."""
    for _ in range(jobs):
        cluster.worker_spec.update(cluster.new_worker_spec())
    try:
        cluster.sync(cluster._correct_state)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(AssertionError):  # closing expects every job to have begun
            cluster.close()
        refusal = one_line(str(error))[:500]
        raise InputError(f"cannot be submitted: {refusal}", where="--slurm") from None


def run_on(
    client: Any, tasks: Iterable[Task], *, memory_bytes: int | None = None, stop: Callable[[], bool]
) -> Iterator[Row]:
    """The rows as they come from the cluster behind `client`."""
    pool, threads = client.get_executor(pure=False), sum(client.nthreads().values())
    work = partial(perform_there, memory_bytes=memory_bytes)
    try:
        yield from rows_of(pool, work, tasks, AHEAD * max(1, threads), stop)
    finally:
        pool.shutdown(wait=False)
