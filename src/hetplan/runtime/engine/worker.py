"""The run of one rank: it joins the process group, makes its part of the model, takes the steps,
writes checkpoints and reports. It ends when the process that started it ends."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hetplan.errors import InputError, one_line
from hetplan.plans.plan import Plan
from hetplan.plans.refusals import check_executed
from hetplan.runtime.engine.checkpoint import (
    check_resumable,
    check_writable,
    complete_checkpoints,
    load,
    save,
    written,
)
from hetplan.runtime.engine.failures import error_text, is_lost
from hetplan.runtime.engine.transport import gather_objects, host_total
from hetplan.runtime.events import PASSES, WAITS, Watch
from hetplan.runtime.execution.choice import engine_of
from hetplan.runtime.job import Job, Report, StepReport
from hetplan.runtime.launch.devices import local_device, peak_bytes, settle
from hetplan.runtime.launch.health import PATIENCE, Activity, at_work
from hetplan.runtime.launch.rehearsal import Virtual

OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def check_job(job: Job) -> Any:
    """The objects that the job's ranks share when they are forked from this process; None for an
    engine without such objects.

    Raises InputError and UnsupportedError where plan, model and options do not fit, before a
    process starts.
    """
    check_executed(job.plan)
    check_folder(job)
    return engine_of(job.plan, job.backend).check_job(job)


def check_folder(job: Job) -> None:
    """Raise InputError where the folder of checkpoints cannot be used.

    The folder of a new run must be writable and without checkpoints. A run that is resumed must
    have the options with which the latest checkpoint was written.
    """
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
    """The watch of this rank. In a rehearsal it is one that sleeps for the virtual device."""
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

    stopping: asked after each step; where it is true on any rank, all ranks end. shared: the result
    of `check_job` in the process that forked this rank, or in this process.
    """
    device = local_device(job.device)
    model: Any = engine_of(job.plan, job.backend).part(job, watch, device, shared)
    optimizer = model.optimizer(OPTIMIZERS[job.optimizer], lr=job.learning_rate)
    if job.resume and job.checkpoint is not None:
        load(model, optimizer, job.checkpoint)
    first, last = model.step, model.step + job.steps - 1
    for step in range(first, last + 1):
        if device != "cpu" and step == last:
            # Only this step's passes are timed: a GPU that waits after each pass is slower.
            watch.settle = lambda: settle(device)
        loss = model.train_step()
        with watch.during("optimizer", 0, step):
            optimizer.step()
            optimizer.zero_grad()
        report(step_report(job, watch, step, loss, peak_bytes(device), traced=step == last))
        stop = host_total(float(stopping())) > 0  # the same on all ranks
        is_periodic = job.every is not None and (step + 1) % job.every == 0
        if job.checkpoint is not None and (stop or step == last or is_periodic):
            with watch.during("checkpoint", 0, step):
                save(model, optimizer, job.checkpoint)
        if stop:
            return
    if job.save is not None:
        with watch.during("checkpoint", 0, last):
            trained = model.gather()
            if dist.get_rank() == 0:
                folder = Path(job.save)
                written(partial(write_module, trained, folder), folder)


def write_module(module: Any, folder: Path) -> None:
    """Write a trained module into a folder, by its own `save_pretrained` where it has one."""
    if hasattr(module, "save_pretrained"):
        module.save_pretrained(folder)
    else:
        torch.save(module.state_dict(), folder / "model.pt")


def step_report(
    job: Job, watch: Watch, step: int, loss: float, peak: int, *, traced: bool
) -> StepReport:
    """The report of a step, from its events. A step begins after the preparation, in which all
    ranks meet.

    traced: whether the report has the events. In a rehearsal the optimizer does not count: the rank
    sleeps through the device's update at the end of the iteration.
    """
    events = [e for e in watch.events if not (job.virtual and e.what == "optimizer")]

    def seconds_in(kinds: Collection[str]) -> float:
        return sum(e.end - e.start for e in events if e.what in kinds)

    return StepReport(
        step=step,
        loss=loss,
        begin=next(e.end for e in events if e.what == "prepare"),
        end=events[-1].end,
        forward=seconds_in(["forward"]),
        backward=seconds_in(["backward", "weights"]),
        waits=seconds_in(set(WAITS) - {"prepare"}),
        peak_bytes=peak,
        events=events if traced else [],
    )


def rank_main(
    job: Job,
    rank: int,
    store: str,
    connection: Connection,
    parents: Sequence[Connection],
    stop: Any,
    shared: Any,
) -> None:
    """Run one rank in a process that the parent has forked. Never returns: the process ends with
    exit code 0, or with 1 after it has sent its error to the parent.

    store: the file by which the ranks meet. connection: the rank's end of its pipe to the parent.
    parents: the parent's ends of pipes, which this process must close. stop: its value says whether
    to end after the step. shared: the result of `check_job`.
    """
    lock = threading.Lock()

    def tell(kind: str, content: object = None) -> None:
        """Send a message to the parent. End this process where the parent is gone."""
        with lock:
            try:
                connection.send((kind, content))
            except BrokenPipeError:
                os._exit(1)

    for parent_end in parents:
        parent_end.close()
    code = 1
    try:
        # The terminal sends signals to all processes of the run; the parent acts upon them.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        torch.set_num_threads(1)
        os.environ["LOCAL_RANK"] = str(rank)  # `local_device` chooses a GPU by it
        watch = watch_of(job, rank)
        every_beat(lambda: tell("beat", watch.state()))
        world = job.plan.world_size
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(minutes=30),  # the parent notices a rank that hangs earlier
        )
        train(job, watch, lambda step: tell("step", step), lambda: stop.value != 0, shared)
        dist.barrier()
        dist.destroy_process_group()
        tell("done")
        code = 0
    except BaseException as error:  # noqa: BLE001 (the parent must learn of any exception)
        tell("failed", (error_text(error), is_lost(error)))
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


def every_beat(act: Callable[[], None]) -> None:
    """Call `act` every `PATIENCE.beat` seconds, in a thread of its own."""

    def beats() -> NoReturn:
        while True:
            act()
            time.sleep(PATIENCE.beat)

    threading.Thread(target=beats, daemon=True).start()


def look_after(watch: Watch, limit: float, plan: Plan) -> None:
    """Begin to watch this rank and the next one, for a run under torchrun, which has no parent that
    does. A thread ends the process, with one line, where this rank hangs in a pass, or where the
    next rank gives no heartbeats.

    limit: seconds without progress, or without heartbeats. The ranks count their heartbeats in a
    store of torch's. The thread has a connection of its own to the store, since a rank that waits
    in the group's store would block a shared one. Silence is counted in this thread's own rounds,
    so that a machine that slept, or a rank without a core, suspects no other rank.
    """
    activity = Activity()
    rank = dist.get_rank()
    next_rank = (rank + 1) % plan.world_size
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    shared_store: Any = dist.HashStore()
    if next_rank != rank:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        shared_store = dist.TCPStore(address, port, wait_for_workers=False)
    store = dist.PrefixStore(f"hetplan {restart}", shared_store)
    rounds = Counter[int]()  # number of the next rank's heartbeats -> rounds with this number

    def look() -> None:
        """Count a heartbeat of this rank, and end the process where the next or this rank hangs."""
        state = watch.state()
        with contextlib.suppress(dist.DistError):  # after the last step the store may end first
            store.add(str(rank), 1)
            beats = store.add(str(next_rank), 0)  # adding 0 reads the number
            rounds[beats] += 1
            silent = rounds[beats] * PATIENCE.beat
            # A rank without any beat has not begun to count. After this rank's last step the next
            # one may have ended already.
            if beats and silent > limit and state["what"] != "end":
                give_up(plan, next_rank, f"no sign of life for {silent:.0f} s")
        activity.note(state["used"])
        quiet = min(state["quiet"], activity.idle())
        waits = state["what"] not in PASSES or state["meeting"] is not None
        if not waits and quiet > limit and not at_work(os.getpid(), threading.get_native_id()):
            at = "at {what} of chunk {chunk}, micro-batch {batch}".format(**state)
            give_up(plan, rank, f"{at} for {quiet:.0f} s")

    every_beat(look)


def give_up(plan: Plan, rank: int, why: str) -> NoReturn:
    """End this process because a rank hangs, with one line that names the rank."""
    text = one_line(f"hetplan: {plan.rank_text(rank)}: hangs; {why}")
    print(text, file=sys.stderr, flush=True)
    os._exit(1)
