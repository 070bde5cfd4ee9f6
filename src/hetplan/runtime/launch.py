"""Local ranks: forked, watched over, never left behind, and started again without a lost node.

A rank that dies, fails, or does nothing any more ends the run: all are killed, and one error names
the rank, its place in the plan and what happened. When a rank dies its peers fail, too; the first
cause is told, not its consequences.

An elastic run outlives its nodes: where a rank is lost, its node is, and the run goes on from the
last complete checkpoint, under a plan for the nodes that are left; whoever starts it says how to
get one. A rank that fails by an error of its own ends the run as ever: the error would come again.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from hetplan.errors import HetplanError, InputError, UnsupportedError
from hetplan.runtime.devices import on_devices
from hetplan.runtime.hung import PATIENCE, Rank, find_hung
from hetplan.runtime.job import Job, Loss, StepReport
from hetplan.runtime.measured import Measured
from hetplan.runtime.virtual import Shared

FORK = multiprocessing.get_context("fork")


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
        self.stop: Any = FORK.RawValue("b", 0)  # one byte that all ranks see
        self.interrupted = False

    def start(self, store: str) -> None:
        """Fork one process per rank."""
        from hetplan.runtime.execution.rank import rank_main

        virtual = self.job.rehearsal if self.job.virtual else None
        shared = Shared(virtual, self.job.plan.world_size) if virtual is not None else None
        for number in range(self.job.plan.world_size):
            ours, theirs = FORK.Pipe(duplex=False)
            # a rank must not hold the parent's ends: it notices by them when the parent is gone
            parents = [ours, *(rank.connection for rank in self.ranks)]
            arguments = (self.job, number, store, theirs, parents, shared, self.stop)
            process = FORK.Process(target=rank_main, args=arguments)
            process.start()
            theirs.close()
            self.ranks.append(Rank(process, ours, time.monotonic()))

    def watch(self) -> None:
        """Until all are done; raises RankError, and KeyboardInterrupt where Ctrl-C was pressed."""
        while not all(rank.gone for rank in self.ranks):
            self._listen(0.2)
            if self.interrupted:
                raise KeyboardInterrupt
            self._reap()
            if any(self._bad(rank) for rank in self.ranks):
                self._explain()
            self._look_for_hung()

    def _bad(self, rank: Rank) -> bool:
        return rank.failure is not None or (rank.gone and not rank.done)

    def _listen(self, seconds: float) -> None:
        """Hear what ranks say, for so long at most if they say nothing."""
        numbers = {r.connection: n for n, r in enumerate(self.ranks) if not r.connection.closed}
        for connection in multiprocessing.connection.wait(list(numbers), seconds):
            self._read(numbers[connection])

    def _read(self, number: int) -> bool:
        """Hear one thing that a rank has said; whether there was anything."""
        rank = self.ranks[number]
        try:
            if rank.connection.closed or not rank.connection.poll():
                return False
            kind, what = rank.connection.recv()
        except (EOFError, OSError):
            rank.connection.close()
            return False
        rank.heard = time.monotonic()
        self._hear(rank, number, kind, what)
        return True

    def _hear(self, rank: Rank, number: int, kind: str, what: dict[str, Any]) -> None:
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
                rank.failure, rank.lost = (f"was killed by {name}{hint}", False), True
            elif not rank.done and rank.failure is None:
                rank.failure, rank.lost = (f"ended with exit code {code}", False), True

    def _explain(self) -> NoReturn:
        """Wait a moment for the cause behind the first sign, then tell it."""
        until = time.monotonic() + PATIENCE.grace
        while time.monotonic() < until and not any(
            r.failure and not r.failure[1] for r in self.ranks
        ):
            self._listen(0.1)
            self._reap()
        failed = [(n, r.failure) for n, r in enumerate(self.ranks) if r.failure is not None]
        number, (text, _) = min(failed, key=lambda item: item[1][1])
        raise self._error(number, text, lost=self.ranks[number].lost)

    def _look_for_hung(self) -> None:
        hung = find_hung(
            [(n, rank) for n, rank in enumerate(self.ranks) if not rank.gone], self.job
        )
        if hung is not None:
            raise self._error(hung.number, hung.text, lost=hung.lost)

    def _error(self, number: int, text: str, *, lost: bool) -> RankError:
        plan = self.job.plan
        return RankError(
            f"{plan.rank_text(number)}: {text}", plan.places[number].device if lost else None
        )

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

        def asked(number: int, frame: FrameType | None) -> None:
            self.stop.value = 1

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


# (job of the plan that ran, numbers of all nodes lost so far) -> one of another plan, or None where
# nothing fits
Again = Callable[[Job, tuple[int, ...]], Job | None]


def launch_elastic(
    job: Job,
    again: Again,
    tell: Callable[[StepReport], None] | None = None,
    lost: Callable[[Loss], None] | None = None,
) -> Measured:
    """`launch`, and once more for every lost node; what the last plan measured, with the whole
    curve.

    tell: receives rank 0's steps; lost: what was lost. Raises InputError without a folder for
    checkpoints, RankError where no node or no plan is left.
    """
    if job.checkpoint is None:
        raise InputError("an elastic run needs a folder for checkpoints")
    end = job.steps + ((latest(job) or 0) if job.resume else 0)
    losses: list[Loss] = []
    curve: dict[int, float] = {}

    def hear(report: StepReport) -> None:
        curve[report.step] = report.loss
        if tell is not None:
            tell(report)

    while True:
        try:
            return Measured(job, launch(job, hear), tuple(losses), curve)
        except RankError as error:
            begun = time.monotonic()
            node = lost_node(job, error, [loss.node for loss in losses])
            if node is None:
                raise
            following = again(job, (*(loss.node for loss in losses), node))
            step = latest(job)
            if following is None or step == end:
                raise
            job = replace(following, steps=end - (step or 0), resume=step is not None)
            losses.append(
                Loss(str(error), node, step or 0, job.plan.name, time.monotonic() - begun)
            )
            if lost is not None:
                lost(losses[-1])


def lost_node(job: Job, error: RankError, before: Sequence[int]) -> int | None:
    """The node of a lost rank, if others of the plan's are left."""
    if error.device is None:
        return None
    node = job.plan.devices[error.device].node
    left = {device.node for device in job.plan.devices} - {node, *before}
    return node if left else None


def latest(job: Job) -> int | None:
    """The step of the last complete checkpoint, None before the first."""
    from hetplan.runtime.execution.checkpoint import complete

    assert job.checkpoint is not None
    folders = complete(job.checkpoint)
    return int(folders[-1].name.removeprefix("step-")) if folders else None
