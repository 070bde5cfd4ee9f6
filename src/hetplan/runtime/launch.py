"""Local ranks: forked, watched over, and never left behind.

A rank that dies, fails, or does nothing any more ends the run: all are killed, and one error names
the rank, its place in the plan and what happened. When a rank dies its peers fail, too; the first
cause is told, not its consequences.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import selectors
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from hetplan.errors import HetplanError, InputError, UnsupportedError
from hetplan.runtime.devices import on_devices
from hetplan.runtime.hung import Rank, find_hung
from hetplan.runtime.job import Job, StepReport
from hetplan.runtime.virtual import Shared

GRACE = 1.5  # seconds in which causes are told from consequences


class RankError(HetplanError):
    """A rank died, failed or hung; names it and its place in the plan.

    device: the rank's, where it was lost (killed, ended or hung), so that the plan could go on
    without it; None where it failed by an error of its own, which would come again.
    """

    def __init__(self, text: str, device: int | None = None) -> None:
        super().__init__(text)
        self.device = device


def launch(job: Job, tell: Callable[[StepReport], None] | None = None) -> list[list[StepReport]]:
    """Run the job with local ranks; the reports of each rank. tell: receives rank 0's as they come.

    Raises InputError before anything starts where plan and model do not fit, RankError when a rank
    did not end well.
    """
    try:
        import torch
    except ImportError:
        raise UnsupportedError(
            "running plans needs torch: pip install 'hetplan[runtime]'"
        ) from None
    from hetplan.runtime.execution.worker import check_job

    torch.set_num_threads(1)
    job = on_devices(job)
    check_job(job)
    check_unused(job)
    with tempfile.TemporaryDirectory(prefix="hetplan-run-") as folder:
        supervisor = Supervisor(job, tell)
        with supervisor.signals():
            try:
                supervisor.start(str(Path(folder) / "store"))
                supervisor.watch()
            finally:
                supervisor.end()
    return [rank.steps for rank in supervisor.ranks]


def check_unused(job: Job) -> None:
    """Raise InputError where whoever makes the model has used the GPUs already: forked ranks could
    not any more."""
    import torch

    if job.device == "cuda" and torch.cuda.is_initialized():
        raise InputError(
            "CUDA was used before the ranks are forked", where=job.factory or "this process",
            expected="a model on the CPU or the meta device; the ranks bring it to their GPUs",
        )  # fmt: skip


class Supervisor:
    """The parent of all ranks."""

    def __init__(self, job: Job, tell: Callable[[StepReport], None] | None) -> None:
        self.job, self.tell = job, tell
        self.ranks: list[Rank] = []
        self.stop = mmap.mmap(-1, 1)  # one byte that all ranks see
        self.interrupted = False
        self.selector = selectors.DefaultSelector()

    def start(self, store: str) -> None:
        """Fork one process per rank."""
        virtual = self.job.rehearsal if self.job.virtual else None
        shared = Shared(virtual, self.job.plan.world_size) if virtual is not None else None
        sys.stdout.flush()
        sys.stderr.flush()
        for number in range(self.job.plan.world_size):
            ours, theirs = os.pipe()
            pid = os.fork()
            if pid == 0:
                self._child(number, store, ours, theirs, shared)
            os.close(theirs)
            os.set_blocking(ours, False)
            self.ranks.append(Rank(pid, ours, time.monotonic()))
            self.selector.register(ours, selectors.EVENT_READ, number)

    def _child(
        self, number: int, store: str, ours: int, theirs: int, shared: Shared | None
    ) -> NoReturn:
        from hetplan.runtime.execution.rank import rank_main

        for pipe in [ours, *(rank.pipe for rank in self.ranks)]:
            os.close(pipe)
        rank_main(self.job, number, store, theirs, shared, lambda: self.stop[0] != 0)
        os._exit(1)

    def watch(self) -> None:
        """Until all are done; raises RankError, and KeyboardInterrupt where Ctrl-C was pressed."""
        while not all(rank.gone for rank in self.ranks):
            for key, _ in self.selector.select(timeout=0.2):
                self._read(key.data)
            if self.interrupted:
                raise KeyboardInterrupt
            self._reap()
            if any(self._bad(rank) for rank in self.ranks):
                self._explain()
            self._look_for_hung()

    def _bad(self, rank: Rank) -> bool:
        return rank.failure is not None or (rank.gone and not rank.done)

    def _read(self, number: int) -> bool:
        """Hear what a rank has said; whether there was anything."""
        rank = self.ranks[number]
        try:
            data = os.read(rank.pipe, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._deaf(rank)
            return False
        rank.heard = time.monotonic()
        *lines, rank.buffer = (rank.buffer + data).split(b"\n")
        for line in lines:
            self._hear(number, json.loads(line))
        return True

    def _deaf(self, rank: Rank) -> None:
        with contextlib.suppress(KeyError):
            self.selector.unregister(rank.pipe)

    def _hear(self, number: int, what: dict[str, Any]) -> None:
        rank, kind = self.ranks[number], what.pop("kind")
        if kind == "beat":
            rank.state = what
            rank.activity.note(what["used"])
        elif kind == "step":
            report = StepReport(**what)
            rank.steps.append(report)
            if number == 0 and self.tell is not None:
                self.tell(report)
        elif kind == "failed":
            rank.failure = rank.failure or (what["text"], what["lost"])
        else:
            rank.done = True

    def _reap(self) -> None:
        """Note which processes are gone, and why."""
        for number, rank in enumerate(self.ranks):
            if rank.gone:
                continue
            pid, status = os.waitpid(rank.pid, os.WNOHANG)
            if pid == 0:
                continue
            rank.gone = True
            while self._read(number):  # what it said last
                pass
            self._deaf(rank)  # a process that it has started may hold the pipe open
            if os.WIFSIGNALED(status):
                name = signal.Signals(os.WTERMSIG(status)).name
                hint = ", as by the kernel where memory is short" if name == "SIGKILL" else ""
                rank.failure, rank.lost = (f"was killed by {name}{hint}", False), True
            elif not rank.done and rank.failure is None:
                code = os.waitstatus_to_exitcode(status)
                rank.failure, rank.lost = (f"ended with exit code {code}", False), True

    def _explain(self) -> NoReturn:
        """Wait a moment for the cause behind the first sign, then tell it."""
        until = time.monotonic() + GRACE
        while time.monotonic() < until and not any(
            r.failure and not r.failure[1] for r in self.ranks
        ):
            for key, _ in self.selector.select(timeout=0.1):
                self._read(key.data)
            self._reap()
        failed = [(n, r.failure) for n, r in enumerate(self.ranks) if r.failure is not None]
        number, (text, _) = min(failed, key=lambda item: item[1][1])
        raise self._error(number, text, lost=self.ranks[number].lost)

    def _look_for_hung(self) -> None:
        found = find_hung(
            [(n, rank) for n, rank in enumerate(self.ranks) if not rank.gone], self.job
        )
        if found is not None:
            raise self._error(found.number, found.text, lost=found.lost)

    def _error(self, number: int, text: str, *, lost: bool) -> RankError:
        plan = self.job.plan
        return RankError(
            f"{plan.told(number)}: {text}", plan.places[number].device if lost else None
        )

    def end(self) -> None:
        """Kill and collect whoever is left."""
        for rank in self.ranks:
            if not rank.gone:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)
                os.waitpid(rank.pid, 0)
            os.close(rank.pipe)
        self.selector.close()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """SIGTERM inside: all ranks end behind their step, with a checkpoint where one is asked
        for. SIGINT: at once.

        Python's own handler of SIGINT raises wherever the interpreter is, and what is raised in a
        finaliser or a callback of a weak reference is lost: the run would go on.
        """

        def asked(number: int, frame: FrameType | None) -> None:
            self.stop[0] = 1

        def interrupted(number: int, frame: FrameType | None) -> None:
            self.interrupted = True

        before = {
            number: signal.signal(number, handler)
            for number, handler in ((signal.SIGTERM, asked), (signal.SIGINT, interrupted))
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
