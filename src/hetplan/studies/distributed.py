"""Tasks on a Dask cluster: the same rows as on one machine, from workers anywhere.

The study's process keeps the rows: workers only solve. A worker that dies has its task done again
by another, as often as Dask allows (`distributed.scheduler.allowed-failures`); after that the task
is a row that says so. Each task runs in a process of its own on the worker, as it would here.
"""

import contextlib
import multiprocessing
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hetplan.errors import InputError, one_line, require
from hetplan.studies.rows import Row, Task
from hetplan.studies.workers import failed, run_tasks

# How many tasks wait at the scheduler per thread of the workers: enough to keep them busy, few to
# drop on Ctrl-C.
AHEAD = 3


def perform_there(task: Task, memory_bytes: int | None) -> Row:
    """On a worker: one task in its own process."""
    # A nanny's worker is daemonic, and Python lets such a process have no children, lest they
    # outlive it. A task does not: it ends when the pipe to the worker closes.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    return next(run_tasks([task], 1, memory_bytes=memory_bytes, stop=lambda: False))


def dask() -> Any:
    """dask.distributed; raises InputError where it is not installed."""
    try:
        import distributed
    except ImportError:
        raise InputError(
            "needs Dask", where="--scheduler", expected="pip install 'hetplan[dask]'"
        ) from None
    return distributed


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
    try:
        from dask_jobqueue.slurm import SLURMCluster
    except ImportError:
        raise InputError(
            "needs dask-jobqueue", where="--slurm", expected="pip install 'hetplan[slurm]'"
        ) from None
    require(
        shutil.which("sbatch") is not None,
        "no command sbatch on this machine",
        where="--slurm",
        expected="a node of a Slurm cluster",
    )
    try:
        cluster = SLURMCluster(**options)
    except (TypeError, ValueError) as error:
        raise InputError(f"not usable: {one_line(str(error))[:300]}", where="--slurm") from None
    submit(cluster, jobs)
    try:
        cluster.adapt(minimum_jobs=jobs, maximum_jobs=jobs, interval=renew_every)
        with distributed.Client(cluster, set_as_default=False) as client:
            yield client
    finally:
        cluster.close()


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
    distributed = dask()
    waiting = iter(tasks)
    known: dict[str, Task] = {}
    pending = distributed.as_completed(loop=client.loop)

    def submit(count: int) -> None:
        for _ in range(count):
            task = next(waiting, None)
            if task is None:
                return
            known[task.key] = task
            pending.add(client.submit(perform_there, task, memory_bytes, key=task.key, pure=False))

    submit(AHEAD * max(1, sum(client.nthreads().values())))
    for future in pending:
        if stop():
            client.cancel(list(pending.futures))
            return
        task = known.pop(future.key)
        error = future.exception()
        yield (
            future.result()
            if error is None
            else failed(task, f"{type(error).__name__}: {one_line(str(error))}")
        )
        future.release()
        submit(1)
