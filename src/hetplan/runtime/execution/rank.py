"""A forked rank's life: it joins the group, works, reports over a pipe, and dies with whoever
started it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from hetplan.errors import HetplanError, kind_and_text, one_line
from hetplan.runtime.execution.worker import recorder, train
from hetplan.runtime.hung import PATIENCE, Activity, at_work
from hetplan.runtime.job import Job, StepReport
from hetplan.runtime.virtual import Shared
from hetplan.runtime.watch import PASSES, Recorder

LOST = (
    "connection closed",
    "connection reset",
    "broken pipe",
    "connection refused",
    "timed out",
    "socket closed",
    "peer closed",
    "read error",
    "aborted",
    "gloo",
)


@dataclass
class Channel:
    """The rank's end of its pipe."""

    connection: Connection
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, kind: str, **what: Any) -> None:
        """Send (kind, what); the process ends where nobody listens any more."""
        with self.lock:
            try:
                self.connection.send((kind, what))
            except BrokenPipeError:
                os._exit(1)


def rank_main(
    job: Job,
    rank: int,
    store: str,
    connection: Connection,
    parents: Sequence[Connection],
    shared: Shared | None,
    stop: Any,
) -> None:
    """Never returns. Exit code 0, or 1 with the reason told.

    parents: ends of pipes that are the parent's alone. stop: its value says whether to end behind
    the step.
    """
    for end in parents:
        end.close()
    channel = Channel(connection)
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who started us decides
        signal.signal(
            signal.SIGTERM, signal.SIG_IGN
        )  # sent to the whole group, it is the parent's to act upon
        torch.set_num_threads(1)
        os.environ["LOCAL_RANK"] = str(rank)
        watch = recorder(job, rank, shared)
        beat(channel, watch)
        run(job, rank, store, watch, channel, lambda: stop.value != 0)
        channel.tell("done")
        code = 0
    except HetplanError as error:
        channel.tell("failed", text=str(error), lost=False)
    except (MemoryError, torch.OutOfMemoryError) as error:
        channel.tell("failed", text=f"out of memory: {one_line(str(error))[:200]}", lost=False)
    except BaseException as error:  # noqa: BLE001 (the last boundary of the process: whatever it is, it is told)
        channel.tell("failed", text=error_text(error), lost=is_lost(error))
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


def run(
    job: Job, rank: int, store: str, watch: Recorder, channel: Channel, stop: Callable[[], bool]
) -> None:
    """Join, train, leave."""
    world = job.plan.world_size
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=30),
    )

    def report(step: StepReport) -> None:
        channel.tell("step", **step.document())

    train(job, watch, report, stop)
    dist.barrier()
    dist.destroy_process_group()


def beat(channel: Channel, watch: Recorder) -> None:
    """Signs of life from a thread of its own."""
    over = threading.Event()

    def beats() -> None:
        pause = 0.0
        while not over.wait(pause):
            pause, (what, chunk, batch, seconds), meeting = (
                PATIENCE.beat,
                watch.state(),
                watch.meeting,
            )
            channel.tell(
                "beat",
                what=what,
                chunk=chunk,
                batch=batch,
                seconds=seconds,
                quiet=watch.quiet(),
                meeting=None if meeting is None else time.monotonic() - meeting,
                longest=watch.longest,
                done=watch.done,
                spent=watch.spent,
                used=time.process_time(),
            )

    threading.Thread(target=beats, daemon=True).start()


@contextlib.contextmanager
def look_after(watch: Recorder, limit: float, place: str) -> Iterator[None]:
    """Nobody else watches: a thread ends the process, with one line, where a pass neither goes on
    nor computes."""
    over, activity = threading.Event(), Activity()

    def looks() -> None:
        thread = threading.get_native_id()
        while not over.wait(PATIENCE.beat):
            activity.note(time.process_time())
            (what, chunk, batch, _), quiet = watch.state(), min(watch.quiet(), activity.idle())
            if (
                what not in PASSES
                or watch.meeting is not None
                or quiet <= limit
                or at_work(os.getpid(), thread)
            ):
                continue
            where = f"at {what} of chunk {chunk}, micro-batch {batch}"
            print(
                f"hetplan: {place}: hangs; {where} for {quiet:.0f} s", file=sys.stderr, flush=True
            )
            os._exit(1)

    threading.Thread(target=looks, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def is_lost(error: BaseException) -> bool:
    """Whether a rank died because another one did."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in LOST)


def error_text(error: BaseException) -> str:
    """An error as one line; what the CPU's allocator raises has no type of its own."""
    text = one_line(str(error))[:300]
    if isinstance(error, RuntimeError) and "allocate memory" in text:
        return f"out of memory: {text}"
    return kind_and_text(error)
