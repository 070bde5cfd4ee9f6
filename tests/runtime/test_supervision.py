"""The parent of ranks: when one counts as hung, Ctrl-C wherever the interpreter is, and ranks whose
own children live on. The runs are `test_run_faults`'s."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hetplan.runtime import launch
from hetplan.runtime.job import Job
from hetplan.runtime.launch import FORK, Rank, RankError, Supervisor, find_hung
from hetplan.runtime.watch import PATIENCE, Activity
from parity.cases import CASES, Case, R, even

pytest.importorskip("torch", reason="torch is an extra of hetplan")


JOB = Job(plan=Case("rules", "two", [R(even([0, 1, 2]), [(2, 2)])]).plan)


def rank(
    what: str,
    quiet: float,
    idle: float,
    meeting: float | None = None,
    longest: float = 0.0,
    silent: float = 0.0,
) -> Rank:
    """One that has been at something without progress for `quiet` seconds, has not computed for
    `idle`, and has given no sign of life for `silent`."""
    now = time.monotonic()
    state = {"what": what, "chunk": 0, "batch": 3, "quiet": quiet, "meeting": meeting}
    state |= {"longest": longest, "spent": 0.0, "used": 0.0}
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
    ((WAITING, ("backward", 55.0, 0.3, None, 5.0)), {"starved": True}, None),
    # waiting for another rank's kernel uses a core, and both have been quiet for as long
    (SPINS, {"device": "cuda"}, "rank 1: hangs"),
    (SPINS, {"device": "cpu"}, "rank 0: hangs"),
    # all wait for each other; unless one computes, as data are made ready
    (STUCK, {}, "rank 0: waits, as all others do; at receive of chunk 0, micro-batch 3"),
    ((STUCK[0], ("prepare", 12.0, 0.3)), {}, None),
    # no sign of life: longer where it waits for a core, or begins with much to load
    ((("forward", *QUIET, 9.0),), {}, None),
    ((("forward", *QUIET, 11.0),), {}, "rank 0: hangs; no sign of life for 11 s"),
    ((("forward", *QUIET, 11.0),), {"starved": True}, None),
    ((("forward", *QUIET, 91.0),), {"starved": True}, "rank 0: hangs; no sign of life for 91 s"),
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
    at_work, starved = changes.pop("at_work", False), changes.pop("starved", False)
    monkeypatch.setattr(launch, "at_work", lambda pid: at_work)
    monkeypatch.setattr(launch, "starved", lambda pid, spent, limit: starved)
    hung = find_hung([(n, rank(*one)) for n, one in enumerate(asked)], replace(JOB, **changes))
    text = None if hung is None else f"rank {hung.number}: {hung.text}"
    assert text == expected or (text and expected and text.startswith(expected))


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
    supervisor, _held = supervisor_of(time.sleep, 20)
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
