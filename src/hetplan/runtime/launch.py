"""Local ranks: forked, watched over, never left behind, and started again without a lost node.

A rank that dies, fails, or does nothing any more ends the run: all are killed, and one error names
the rank, its place in the plan and what happened. When a rank dies its peers fail, too; the first
cause is told, not its consequences.

An elastic run outlives its nodes: where a rank is lost, its node is, and the run goes on from the
last complete checkpoint, under a plan for the nodes that are left; whoever starts it says how to
get one. A rank that fails by an error of its own ends the run as ever: the error would come again.

When a rank counts as hung follows from what it last said of itself, and whether its process
computes. Progress is a layer's pass or a collective. A rank that makes none is not at fault while
it waits for another one, waits for a core, or computes for not much longer than it has before; what
does nothing of that hangs. What others delay is no fault of a process: one that gives no sign may
do nothing, or would if it got a core.

Or one rank of a plan, started by torchrun on every node: `torchrun --no-python --nproc-per-node N …
hetplan run PLAN`. Ranks follow the order of the plan's devices in use; torchrun numbers its
processes node by node, as clusters number their devices. Rank 0 prints the measured times.
"""

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing import connection as pipes, get_context
from pathlib import Path
from typing import Any, NoReturn

from hetplan.errors import HetplanError, InputError, one_line, require
from hetplan.plans.making import check_world
from hetplan.plans.plan import Plan
from hetplan.runtime.devices import on_devices, required_torch
from hetplan.runtime.job import Job, Loss, Measured, StepReport
from hetplan.runtime.watch import PASSES, PATIENCE, WAITS, Activity, at_work, starved

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


def launch(job: Job, tell: Callable[[StepReport], None] | None = None) -> list[list[StepReport]]:
    """Run the job with local ranks; the reports of each rank. tell: receives rank 0's as they come.

    Raises InputError before anything starts where plan and model do not fit, RankError when a rank
    did not end well.
    """
    torch = required_torch("running plans")
    from hetplan.runtime.execution.worker import check_job

    torch.set_num_threads(1)
    # torch asks whether there is a GPU while it traces a model; unless told to ask NVML it uses
    # CUDA for that, and a process that has used CUDA cannot fork ranks that do
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    job = on_devices(job)
    made = check_job(job)
    require(
        not (job.device == "cuda" and torch.cuda.is_initialized()),
        "CUDA was used before the ranks are forked",
        where=job.factory or "this process",
        expected="a model on the CPU or the meta device; the ranks bring it to their GPUs",
    )
    with tempfile.TemporaryDirectory(prefix="hetplan-run-") as folder:
        supervisor = Supervisor(job, tell, made)
        with supervisor.signals():
            try:
                supervisor.start(str(Path(folder) / "store"))
                supervisor.watch()
            finally:
                supervisor.end()
    return [rank.steps for rank in supervisor.ranks]


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
        from hetplan.runtime.execution.worker import rank_main

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
    """Whether a rank gives no sign, though it could get a core and loads no libraries."""
    if silent <= limit or not rank.state:
        return silent > PATIENCE.starting
    pid, what = rank.process.pid, rank.state["what"]
    delayed = starved(pid, rank.state["used"], limit) or (what == "start" and at_work(pid))
    return silent > PATIENCE.starting or not delayed


def waits_too_long(rank: Rank, patience: float) -> bool:
    """Whether a rank waits, and does not compute beside (as data are made ready, say)."""
    quiet = max(rank.state["quiet"], rank.state["meeting"] or 0.0)
    return (
        not at_work(rank.process.pid)
        if quiet > patience and rank.activity.idle() > patience
        else bool(quiet > max(patience, PATIENCE.starting))
    )


def hangs(rank: Rank, job: Job) -> bool:
    """Whether a rank, which waits for no other one, has made no progress for too long.

    It may compute for far longer than its longest pass, with a core to itself. Where it does not
    compute either, in a pass or as it starts, it may take as long as any; but virtual devices sleep
    in their passes, and a model's weights may come from far away.
    """
    state, limit, pid = rank.state, job.hang_seconds, rank.process.pid
    what, quiet = state.get("what", "start"), state.get("quiet", 0.0)
    first, idle = max(limit, PATIENCE.starting), min(quiet, rank.activity.idle())
    if what == "start":
        return idle > first and not at_work(pid)
    if what in PASSES and not job.virtual and idle > limit and not at_work(pid):
        return True
    compared = what != "checkpoint" and state["longest"]  # else there is nothing to compare with
    patience = max(limit, 10 * state["longest"]) if compared else first
    patience += PATIENCE.spinning if job.device == "cuda" else 0.0
    return quiet > patience and (
        quiet >= PATIENCE.starting or not starved(pid, state["spent"], limit)
    )


# (job of the plan that ran, numbers of all nodes lost so far) -> one of another plan, or None where
# nothing fits
Again = Callable[[Job, tuple[int, ...]], Job | None]


def launch_elastic(
    job: Job,
    again: Again,
    tell: Callable[[StepReport], None],
    lost: Callable[[Loss], None] | None = None,
) -> Measured:
    """`launch`, and once more for every lost node; what the last plan measured, with the whole
    curve.

    The job has a folder for checkpoints. tell: receives rank 0's steps; lost: what was lost. Raises
    RankError where no node or no plan is left.
    """
    end = job.steps + ((latest(job) or 0) if job.resume else 0)
    losses: list[Loss] = []
    curve: dict[int, float] = {}

    def hear(report: StepReport) -> None:
        curve[report.step] = report.loss
        tell(report)

    while True:
        try:
            return Measured(job, launch(job, hear), tuple(losses), curve)
        except RankError as error:
            if error.device is None:
                raise
            begun, devices = time.monotonic(), job.plan.devices
            gone = (*(loss.node for loss in losses), devices[error.device].node)
            if {device.node for device in devices} <= set(gone):
                raise
            following = again(job, gone)
            step = latest(job)
            if following is None or step == end:
                raise
            job = replace(following, steps=end - (step or 0), resume=step is not None)
            losses.append(
                Loss(str(error), gone[-1], step or 0, job.plan.name, time.monotonic() - begun)
            )
            if lost is not None:
                lost(losses[-1])


def latest(job: Job) -> int | None:
    """The step of the last complete checkpoint, None before the first."""
    from hetplan.runtime.execution.checkpoint import complete

    assert job.checkpoint is not None
    return max((int(path.name[5:]) for path in complete(job.checkpoint)), default=None)


VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_rank() -> bool:
    """Whether torchrun, or whatever sets its variables, started this process."""
    return all(name in os.environ for name in VARIABLES)


def serve(job: Job) -> Measured | None:
    """Train as one rank of many; what rank 0 measured, None for the others.

    An error is one line with the rank's place, and ends the process: a peer's death aborts it where
    gloo's threads outlive the interpreter.
    """
    try:
        check_world(job.plan, int(os.environ["WORLD_SIZE"]))
        return serve_rank(on_devices(job, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    except HetplanError as error:
        place = "" if isinstance(error, RankError) else f"rank {os.environ['RANK']}: "
        print(one_line(f"hetplan: {place}{error}"), file=sys.stderr, flush=True)
        os._exit(error.exit_code)


def serve_rank(job: Job) -> Measured | None:
    """Join the group and train. Raises InputError where the port is taken, RankError for an
    error of this rank's."""
    torch = required_torch("running plans")
    from torch import distributed as dist

    from hetplan.runtime.execution.worker import (
        check_job,
        error_text,
        is_lost,
        look_after,
        train,
        watch_of,
    )

    made = check_job(job)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, torch.get_num_threads() // local_ranks))
    try:
        dist.init_process_group("gloo")
    except dist.DistNetworkError as error:
        raise InputError(
            f"cannot meet at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: "
            f"{one_line(str(error))[:200]}"
        ) from None
    reports: list[StepReport] = []
    watch, place = watch_of(job, dist.get_rank()), job.plan.rank_text(dist.get_rank())
    asked: list[int] = []  # by SIGTERM, which torchrun hands on: all then end behind their step
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    try:
        look_after(watch, job.hang_seconds, job.plan)
        train(job, watch, reports.append, lambda: bool(asked), made)
        watch.begins("end", 0, 0)
    except HetplanError:
        raise
    except Exception as error:
        text = f"lost a peer: {error_text(error)}" if is_lost(error) else error_text(error)
        raise RankError(f"{place}: {text}") from error
    everyone: list[Any] | None = [None] * job.plan.world_size if dist.get_rank() == 0 else None
    dist.gather_object(reports, everyone)
    dist.destroy_process_group()
    return None if everyone is None else Measured(job, everyone)
