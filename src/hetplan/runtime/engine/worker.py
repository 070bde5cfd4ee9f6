"""What one rank does: it joins the group, makes its part of the model, takes the steps, writes
checkpoints, reports, and dies with whoever started it."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hetplan.errors import (
    HetplanError,
    InputError,
    kind_and_text,
    one_line,
)
from hetplan.plans.plan import Plan
from hetplan.plans.refusals import check_executed
from hetplan.runtime.engine.checkpoint import (
    check_resumable,
    check_writable,
    complete_checkpoints,
    load,
    save,
)
from hetplan.runtime.engine.transport import gather_objects, host_total
from hetplan.runtime.events import PASSES, WAITS, Watch
from hetplan.runtime.execution.choice import engine_of
from hetplan.runtime.job import Job, Report, StepReport
from hetplan.runtime.launch.devices import local_device, peak_bytes, settle
from hetplan.runtime.launch.health import PATIENCE, Activity, at_work
from hetplan.runtime.launch.rehearsal import Virtual

OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def check_job(job: Job) -> Any:
    """What the job's ranks share when they are forked from this process, None for nothing.

    Raises InputError for all that can be wrong with plan and model, before a process starts.
    """
    check_executed(job.plan)
    check_folder(job)
    return engine_of(job.plan, job.backend).check_job(job)


def check_folder(job: Job) -> None:
    """Raise InputError where a run from the beginning would mix its checkpoints with another run's,
    and where one that goes on would not be the run that it goes on with."""
    if job.checkpoint is None:
        return
    check_writable(job.checkpoint)
    if job.resume:
        check_resumable(job.checkpoint, optimizer=job.optimizer, seed=job.seed)
    elif checkpoints := complete_checkpoints(job.checkpoint):
        raise InputError(
            "folder holds checkpoints", where=job.checkpoint, got=checkpoints[-1].name,
            expected="an empty one, or --resume to go on from the latest",
        )  # fmt: skip


def watch_of(job: Job, rank: int) -> Watch:
    """What watches this rank: with virtual devices, what sleeps for them, too."""
    if not job.virtual or job.rehearsal is None:
        return Watch()
    spans = job.rehearsal.spans(rank)
    return Virtual(rehearsal=job.rehearsal, spans=spans, gather=gather_objects)


def train(
    job: Job,
    watch: Watch,
    report: Report,
    stopping: Callable[[], bool],
    shared: Any = None,
) -> None:
    """Take all steps on this rank, inside a process group.

    stopping: whether to end behind a step. shared: of `check_job`, by whoever forked this rank.
    """
    device = local_device(job.device)
    model: Any = engine_of(job.plan, job.backend).part(job, watch, device, shared)
    optimizer = model.optimizer(OPTIMIZERS[job.optimizer], lr=job.learning_rate)
    if job.resume and job.checkpoint is not None:
        load(model, optimizer, job.checkpoint)
    first, last = model.step, model.step + job.steps - 1
    for step in range(first, last + 1):
        if device != "cpu" and step == last:  # else a GPU never waits to be looked at
            watch.settle = lambda: settle(device)
        loss = model.train_step()
        with watch.during("optimizer", 0, step):
            optimizer.step()
            optimizer.zero_grad()
        report(step_report(job, watch, step, loss, peak_bytes(device), traced=step == last))
        stop = host_total(float(stopping())) > 0  # where any rank wishes so, on all
        due = stop or step == last or (job.every is not None and (step + 1) % job.every == 0)
        if job.checkpoint is not None and due:
            with watch.during("checkpoint", 0, step):
                save(model, optimizer, job.checkpoint)
        if stop:
            return
    if job.save is not None:
        with watch.during("checkpoint", 0, last):
            trained = model.gather()
            if dist.get_rank() == 0 and hasattr(trained, "save_pretrained"):
                trained.save_pretrained(job.save)
            elif dist.get_rank() == 0:
                torch.save(trained.state_dict(), Path(job.save) / "model.pt")


def step_report(
    job: Job, watch: Watch, step: int, loss: float, peak: int, *, traced: bool
) -> StepReport:
    """A step's times from its events; it begins behind the preparation, where all ranks have met.

    Virtual devices have slept their updates with the gradients.
    """
    events = [e for e in watch.events if not (job.virtual and e.what == "optimizer")]
    forward, backward, waits = (
        sum(e.end - e.start for e in events if e.what in kinds)
        for kinds in (["forward"], ["backward"], set(WAITS) - {"prepare"})
    )
    begin, end = next(e.end for e in events if e.what == "prepare"), events[-1].end
    traced_events = events if traced else []
    return StepReport(step, loss, begin, end, forward, backward, waits, peak, traced_events)


def rank_main(
    job: Job,
    rank: int,
    store: str,
    connection: Connection,
    parents: Sequence[Connection],
    stop: Any,
    shared: Any,
) -> None:
    """Never returns. Exit code 0, or 1 with the reason told.

    parents: ends of pipes that are the parent's alone. stop: its value says whether to end behind
    the step.
    """
    lock = threading.Lock()

    def tell(kind: str, what: object = None) -> None:
        """Send (kind, what) to the parent; the process ends where it no longer listens."""
        with lock:
            try:
                connection.send((kind, what))
            except BrokenPipeError:
                os._exit(1)

    for end in parents:
        end.close()
    code = 1
    try:
        # signals to the whole group are the parent's to act upon
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        torch.set_num_threads(1)
        os.environ["LOCAL_RANK"] = str(rank)
        watch = watch_of(job, rank)
        every_beat(lambda: tell("beat", watch.state()))
        world = job.plan.world_size
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(minutes=30),
        )
        train(job, watch, lambda step: tell("step", step), lambda: stop.value != 0, shared)
        dist.barrier()
        dist.destroy_process_group()
        tell("done")
        code = 0
    except BaseException as error:  # noqa: BLE001 (the last boundary of the process: whatever it is, it is told)
        tell("failed", (error_text(error), is_lost(error)))
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


def every_beat(act: Callable[[], None]) -> None:
    """Do something again and again, in a thread of its own."""

    def beats() -> NoReturn:
        while True:
            act()
            time.sleep(PATIENCE.beat)

    threading.Thread(target=beats, daemon=True).start()


def look_after(watch: Watch, limit: float, plan: Plan) -> None:
    """Where nobody else watches: from now on a thread ends the process, with one line, where a pass
    neither goes on nor computes, or where the next rank is stopped.

    Ranks beat in a store of torch's, by a connection of its own: a rank that waits in the group's
    store would hold up the thread. A beat that stays away is counted in this thread's own looks, so
    that a machine that slept, or a rank without a core, suspects nobody.
    """
    activity, rank, following = Activity(), dist.get_rank(), (dist.get_rank() + 1) % plan.world_size
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    everyones = dist.TCPStore(address, port, wait_for_workers=False) if following != rank else None
    store = dist.PrefixStore(f"hetplan {again}", everyones or dist.HashStore())
    looks = Counter[int]()  # by the number of the following rank's beats

    def look() -> None:
        state = watch.state()
        with contextlib.suppress(dist.DistError):  # behind the last step the store may end first
            store.add(str(rank), 1)
            beats = store.add(str(following), 0)
            looks[beats] += 1
            silent = looks[beats] * PATIENCE.beat
            if beats and silent > limit and state["what"] != "end":
                give_up(plan, following, f"no sign of life for {silent:.0f} s")
        activity.note(state["used"])
        quiet = min(state["quiet"], activity.idle())
        waits = state["what"] not in PASSES or state["meeting"] is not None
        if not waits and quiet > limit and not at_work(os.getpid(), threading.get_native_id()):
            at = "at {what} of chunk {chunk}, micro-batch {batch}".format(**state)
            give_up(plan, rank, f"{at} for {quiet:.0f} s")

    every_beat(look)


def give_up(plan: Plan, rank: int, why: str) -> NoReturn:
    """End this process because a rank hangs."""
    text = one_line(f"hetplan: {plan.rank_text(rank)}: hangs; {why}")
    print(text, file=sys.stderr, flush=True)
    os._exit(1)


# What errors of torch.distributed say where another rank is gone.
PEER_GONE = (
    "connection closed", "connection reset", "broken pipe", "connection refused", "timed out",
    "socket closed", "peer closed", "read error", "aborted", "gloo",
)  # fmt: skip


def is_lost(error: BaseException) -> bool:
    """Whether a rank died because another one did."""
    text = str(error).lower()
    peers = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
    return peers and any(word in text for word in PEER_GONE)


def error_text(error: BaseException) -> str:
    """An error as one line; what the CPU's allocator raises has no type of its own."""
    if isinstance(error, HetplanError):
        return str(error)
    text = one_line(str(error))
    short = isinstance(error, RuntimeError) and "allocate memory" in text
    return (
        f"out of memory: {text[:300]}"
        if short or isinstance(error, (MemoryError, torch.OutOfMemoryError))
        else kind_and_text(error)
    )
