"""The parent of ranks: when one counts as hung, which of their processes wait for a core, Ctrl-C
wherever the interpreter is, and going on without lost nodes. Runs with real faults are
`test_run_faults`'s."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is an extra of hetplan")

from fakes.rehearsals import plan
from fakes.workloads import small
from hetplan.plans.plan import Plan
from hetplan.runtime.job import Job, NodeLoss, StepReport
from hetplan.runtime.launch import health, local as launch, supervision
from hetplan.runtime.launch.health import PATIENCE, Activity
from hetplan.runtime.launch.local import launch_elastic
from hetplan.runtime.launch.supervision import FORK, Rank, RankError, Supervisor, find_hung
from parity.cases import CASES, Case, R, even

JOB = Job(plan=Case("rules", "two", [R(even([0, 1, 2]), [(2, 2)])]).plan)


def rank(
    what: str,
    quiet: float,
    idle: float,
    meeting: float | None = None,
    longest: float = 0.0,
    silent: float = 0.0,
    used: float = 0.0,
) -> Rank:
    """One that has been at something without progress for `quiet` seconds, has not computed for
    `idle`, has given no sign of life for `silent`, and has used a core for `used` since it
    began."""
    now = time.monotonic()
    state = {"what": what, "chunk": 0, "batch": 3, "quiet": quiet, "meeting": meeting}
    state |= {"longest": longest, "spent": 3.0, "used": 3.0 + used}
    process = SimpleNamespace(pid=0)
    return Rank(process, None, now - silent, state=state, activity=Activity(now - idle))


Asked = tuple[Any, ...]
WAITING: Asked = ("receive", 1.0, 1.0)
ASLEEP: Asked = ("forward", 30.0, 30.0)
SPINS: tuple[Asked, Asked] = (
    ("forward", 10.8, 0.1, None, 0.5),
    ("forward", 10.8, 10.2, None, 0.5),
)
STUCK: tuple[Asked, Asked] = (("receive", 12.0, 11.0), ("forward", 11.0, 11.0, 11.0))
QUIET = (0.0, 0.0, None, 0.0)

# (ranks, what holds of the job and of processes, what is said of them)
VERDICTS: list[tuple[tuple[Asked, ...], dict[str, Any], str | None]] = [
    # a first pass, while the other rank waits for it
    ((WAITING, ("forward", 9.0, 9.0)), {}, None),
    ((WAITING, ("forward", 10.5, 10.2)), {}, "rank 1: hangs; at forward of chunk 0"),
    ((WAITING, ("optimizer", 10.5, 10.2)), {}, "rank 1: hangs; at optimizer of chunk 0"),
    ((WAITING, ("forward", 85.0, 0.3)), {}, None),  # a slow layer
    ((WAITING, ("forward", 95.0, 0.3)), {}, "rank 1: hangs"),  # a loop without end
    ((WAITING, ("forward", 1.0, 50.0)), {}, None),  # somebody else's cores, with progress
    ((WAITING, ("forward", 60.0, 60.0, 60.0)), {}, None),  # the other one's turn
    ((WAITING, ("start", 60.0, 60.0)), {}, None),  # weights from far away
    ((WAITING, ("start", 300.0, 0.3)), {}, None),  # large ones
    ((WAITING, ("start", 95.0, 95.0)), {}, "rank 1: hangs"),
    ((WAITING, ("checkpoint", 60.0, 60.0)), {}, None),
    # what runs elsewhere or sleeps for a device is no fault
    ((WAITING, ASLEEP), {}, "rank 1: hangs"),
    ((WAITING, ASLEEP), {"at_work": True}, None),
    ((WAITING, ASLEEP), {"virtual": True}, None),
    ((WAITING, ASLEEP), {"hang_seconds": 40.0}, None),
    # a pass may take ten times the longest, and longer where it waits for a core
    ((WAITING, ("backward", 45.0, 0.3, None, 5.0)), {}, None),
    ((WAITING, ("backward", 55.0, 0.3, None, 5.0)), {}, "rank 1: hangs"),
    ((WAITING, ("backward", 55.0, 0.3, None, 5.0, 0.0, 4.9)), {"runnable": True}, None),
    ((WAITING, ("backward", 55.0, 0.3, None, 5.0, 0.0, 5.1)), {"runnable": True}, "rank 1: hangs"),
    ((WAITING, ("backward", 91.0, 0.3, None, 5.0)), {"runnable": True}, "rank 1: hangs"),
    # waiting for another rank's kernel uses a core, and both have been quiet for as long
    (SPINS, {"device": "cuda"}, "rank 1: hangs"),
    (SPINS, {"device": "cpu"}, "rank 0: hangs"),
    # all wait for each other; unless one computes, as data are made ready
    (STUCK, {}, "rank 0: waits, as all others do; at receive of chunk 0, micro-batch 3"),
    ((STUCK[0], ("prepare", 12.0, 0.3)), {}, None),
    # no sign of life: longer where it waits for a core, or begins with much to load
    ((("forward", *QUIET, 9.0),), {}, None),
    ((("forward", *QUIET, 11.0),), {}, "rank 0: hangs; no sign of life for 11 s"),
    ((("forward", *QUIET, 11.0),), {"runnable": True}, None),
    ((("forward", *QUIET, 91.0),), {"runnable": True}, "rank 0: hangs; no sign of life for 91 s"),
    ((("start", *QUIET, 11.0),), {}, "rank 0: hangs; no sign of life for 11 s"),  # stopped
    ((("start", *QUIET, 11.0),), {"at_work": True}, None),
]


@pytest.mark.parametrize(("asked", "holds", "expected"), VERDICTS)
def test_which_rank_hangs(
    asked: tuple[Asked, ...],
    holds: dict[str, Any],
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = dict(holds)
    at_work, runnable = changes.pop("at_work", False), changes.pop("runnable", False)
    monkeypatch.setattr(supervision, "at_work", lambda pid: at_work)
    monkeypatch.setattr(supervision, "runnable", lambda pid: runnable)
    hung = find_hung([(n, rank(*one)) for n, one in enumerate(asked)], replace(JOB, **changes))
    text = re.sub(r" \(.*?\)", "", str(hung or ""))
    assert text.startswith(expected) if expected else hung is None


def test_one_that_has_just_been_forked_says_nothing_yet() -> None:
    assert find_hung([(0, Rank(SimpleNamespace(pid=0), None, time.monotonic() - 60))], JOB) is None


def test_signs_of_life_are_no_work() -> None:
    activity = Activity(time.monotonic() - 5.0, (time.monotonic() - 2.0, 1.0))
    activity.note(1.0 + PATIENCE.idle)
    assert activity.idle() >= 5.0
    activity.seen = (time.monotonic() - 2.0, 1.0)
    activity.note(1.0 + 4 * PATIENCE.idle)
    assert activity.idle() < 1.0


class Late:
    """Interrupts its process in its finaliser, where Python drops exceptions."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


def supervisor_of(target: Any, *arguments: Any) -> tuple[Supervisor, Any]:
    """One rank that does something else, and its end of the pipe, held open as by a child of its
    own."""
    supervisor = Supervisor(Job(plan=CASES[0].plan), None)
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=target, args=arguments)
    process.start()
    supervisor.ranks.append(Rank(process, ours, time.monotonic()))
    return supervisor, theirs


def test_ctrl_c_in_a_finaliser_is_not_lost() -> None:
    supervisor, _held = supervisor_of(time.sleep, 600)
    try:
        with supervisor.signals():
            Late()
            with pytest.raises(KeyboardInterrupt):
                supervisor.watch()
    finally:
        supervisor.end()


def test_a_rank_is_gone_though_its_pipe_is_held_open() -> None:
    """As by a child of its own, a loader of data say."""
    supervisor, _held = supervisor_of(os._exit, 7)
    try:
        with pytest.raises(RankError, match="ended with exit code 7"):
            supervisor.watch()
    finally:
        supervisor.end()


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells")


def child(code: str) -> Iterator[int]:
    """A process that runs some Python, once it does; it ends with all that it has begun."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"print(flush=True)\n{code}"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process.pid
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # and what it has begun
    process.wait()


def wait_until(holds: Callable[[], bool]) -> None:
    """Until the system tells so; fails where it never does."""
    for _ in range(60_000):
        if holds():
            return
        time.sleep(0.01)
    pytest.fail("what is waited for never happens")


@pytest.fixture
def sleeper() -> Iterator[int]:
    yield from child("import time\ntime.sleep(1000)")


@pytest.fixture
def spinner() -> Iterator[int]:
    yield from child("while True: pass")


@on_linux
def test_what_sleeps_or_is_stopped_or_gone_cannot_run(sleeper: int, spinner: int) -> None:
    wait_until(lambda: not health.runnable(sleeper))
    assert health.runnable(spinner)
    os.kill(spinner, signal.SIGSTOP)
    wait_until(lambda: health.thread_states(spinner) == ["T"])
    assert not health.runnable(spinner)
    os.kill(spinner, signal.SIGKILL)
    os.waitpid(spinner, 0)
    assert not health.runnable(spinner)


@pytest.fixture
def employer() -> Iterator[int]:
    """Sleeps, and has a process that computes."""
    spin = "subprocess.Popen([sys.executable, '-c', 'while True: pass'])"
    yield from child(f"import subprocess, sys, time\n{spin}\ntime.sleep(1000)")


@on_linux
def test_what_computes_or_has_others_compute_is_at_work(
    sleeper: int, spinner: int, employer: int
) -> None:
    wait_until(lambda: not health.at_work(sleeper))
    assert health.at_work(spinner)
    wait_until(
        lambda: bool(health.descendants(employer)) and health.thread_states(employer) == ["S"]
    )
    (worker,) = health.descendants(employer)
    assert health.at_work(employer)
    os.kill(worker, signal.SIGSTOP)
    wait_until(lambda: not health.at_work(employer))
    os.kill(worker, signal.SIGKILL)


Tell = Callable[[StepReport], None]


def report(step: int) -> StepReport:
    """Of one rank."""
    return StepReport(step, float(step), 0.0, 1.0, 0.4, 0.4, 0.0, 1)


def save_step(folder: Path, step: int) -> None:
    """As far as anybody looks."""
    (folder / f"step-{step}").mkdir(exist_ok=True)
    (folder / f"step-{step}" / "hetplan.json").write_text("{}")


class Cluster:
    """Runs that save every second step, and die at given ones: `dies` [(step, device or None)] of
    each run."""

    def __init__(self, folder: Path, dies: list[tuple[int, int | None]]) -> None:
        self.folder, self.dies, self.jobs = folder, dies, list[Job]()

    def launch(self, job: Job, tell: Tell) -> list[list[StepReport]]:
        """As `launch`."""
        first = launch.latest(job) or 0 if job.resume else 0
        step, device = (
            self.dies[len(self.jobs)] if len(self.jobs) < len(self.dies) else (1000, None)
        )
        self.jobs.append(job)
        for s in range(first, first + job.steps):
            if s == step:
                raise RankError(f"rank of device {device}: gone", device)
            tell(report(s))
            if (s + 1) % 2 == 0:
                save_step(self.folder, s + 1)
        return [[report(s) for s in range(first, first + job.steps)]]


def three_nodes() -> Plan:
    """Devices 0 and 1 on nodes of their own, 2 and 3 on a third."""
    made = plan("four stages, even", small())
    devices = [
        d.model_copy(update={"node": n}) for d, n in zip(made.devices, (0, 1, 2, 2), strict=True)
    ]
    return made.model_copy(update={"devices": devices})


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(plan=three_nodes(), steps=9, checkpoint=str(tmp_path), every=2)


def survive(
    job: Job, dies: list[tuple[int, int | None]], monkeypatch: pytest.MonkeyPatch, fits: bool = True
) -> tuple[Cluster, list[tuple[int, ...]], dict[int, float], list[NodeLoss]]:
    """The runs, what was asked of the planner, the losses and what was told."""
    assert job.checkpoint is not None
    cluster, asked, heard = (
        Cluster(Path(job.checkpoint), dies),
        list[tuple[int, ...]](),
        list[NodeLoss](),
    )
    monkeypatch.setattr(launch, "launch", cluster.launch)

    def again(ran: Job, lost: tuple[int, ...]) -> Job | None:
        asked.append(lost)
        return (
            replace(ran, plan=ran.plan.model_copy(update={"name": f"without {lost}"}))
            if fits
            else None
        )

    measured = launch_elastic(job, again, lambda report: None, heard.append)
    assert list(measured.lost) == heard
    return cluster, asked, measured.losses, heard


@pytest.mark.parametrize(
    ("begin", "dies", "asked", "jobs", "told"),
    [
        (
            0, [(1, 3), (5, 0)], [(2,), (2, 0)], [(False, 9), (False, 9), (True, 5)],
            [(2, 0, "without (2,)"), (0, 4, "without (2, 0)")],
        ),
        (20, [(23, 1)], [(1,)], [(True, 9), (True, 7)], [(1, 22, "without (1,)")]),
    ],
)  # fmt: skip
def test_nodes_lost_one_after_the_other(
    begin: int, dies: list[tuple[int, int | None]], asked: object, jobs: object, told: object,
    job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    """Before the first checkpoint the run begins anew, behind it with what was saved (that of an
    earlier run included); no step is left out."""
    if begin:
        save_step(tmp_path, begin)
    cluster, planned, losses, heard = survive(replace(job, resume=begin > 0), dies, monkeypatch)
    assert planned == asked
    assert [(j.resume, j.steps) for j in cluster.jobs] == jobs
    assert [(loss.node, loss.step, loss.plan) for loss in heard] == told
    assert losses == {step: float(step) for step in range(begin, begin + 9)}


@pytest.mark.parametrize(
    ("dies", "fits"),
    [
        ([(3, None)], True),  # an error of its own would come again
        ([(3, 0)], False),  # nothing fits on the others
        ([(3, 0), (3, 1), (3, 2)], True),  # no node is left
    ],
)
def test_what_ends_a_run_all_the_same(
    job: Job, dies: list[tuple[int, int | None]], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RankError, match=f"rank of device {dies[-1][1]}: gone"):
        survive(job, dies, monkeypatch, fits)
