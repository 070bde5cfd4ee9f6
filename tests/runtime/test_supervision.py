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
    what: str, quiet: float, idle: float, *, meeting: float | None = None, longest: float = 0.0
) -> Rank:
    """One that has been at something without progress for `quiet` seconds, and has not computed for
    `idle`."""
    now = time.monotonic()
    state = {
        "what": what,
        "chunk": 0,
        "batch": 3,
        "quiet": quiet,
        "meeting": meeting,
        "longest": longest,
    }
    process = SimpleNamespace(pid=0)
    return Rank(
        process, None, now, state=state | {"spent": 0.0, "used": 0.0}, activity=Activity(now - idle)
    )


def verdict(
    monkeypatch: pytest.MonkeyPatch,
    *ranks: Rank,
    at_work: bool = False,
    starved: bool = False,
    **changes: Any,
) -> str | None:
    """What is said of them."""
    monkeypatch.setattr(launch, "at_work", lambda pid: at_work)
    monkeypatch.setattr(launch, "starved", lambda pid, spent, limit: starved)
    found = find_hung(list(enumerate(ranks)), replace(JOB, **changes))
    return None if found is None else f"rank {found.number}: {found.text}"


WAITING: dict[str, Any] = {"what": "receive", "quiet": 1.0, "idle": 1.0}


# What a rank does in its first pass, while the other waits for it: hung?
FIRST: list[tuple[dict[str, Any], bool]] = [
    ({"what": "forward", "quiet": 9.0, "idle": 9.0}, False),
    ({"what": "forward", "quiet": 10.5, "idle": 10.2}, True),
    ({"what": "optimizer", "quiet": 10.5, "idle": 10.2}, True),
    ({"what": "forward", "quiet": 85.0, "idle": 0.3}, False),  # a slow layer
    ({"what": "forward", "quiet": 95.0, "idle": 0.3}, True),  # a loop without end
    # somebody else's cores, with progress
    ({"what": "forward", "quiet": 1.0, "idle": 50.0}, False),
    # the other one's turn
    ({"what": "forward", "quiet": 60.0, "idle": 60.0, "meeting": 60.0}, False),
    ({"what": "start", "quiet": 60.0, "idle": 60.0}, False),  # weights from far away
    ({"what": "start", "quiet": 300.0, "idle": 0.3}, False),  # large ones
    ({"what": "start", "quiet": 95.0, "idle": 95.0}, True),
    ({"what": "checkpoint", "quiet": 60.0, "idle": 60.0}, False),
]


@pytest.mark.parametrize(("doing", "hung"), FIRST)
def test_of_a_first_pass(
    doing: dict[str, Any], hung: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = verdict(monkeypatch, rank(**WAITING), rank(**doing))
    assert (told is not None) == hung
    if told is not None:
        assert (
            told.startswith("rank 1: ")
            and f"hangs; at {doing['what']} of chunk 0, micro-batch 3 for" in told
        )


def test_what_runs_elsewhere_or_sleeps_for_a_device_is_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asleep = rank("forward", 30.0, 30.0)
    assert verdict(monkeypatch, rank(**WAITING), asleep) is not None
    assert verdict(monkeypatch, rank(**WAITING), asleep, at_work=True) is None
    assert verdict(monkeypatch, rank(**WAITING), asleep, virtual=True) is None
    assert verdict(monkeypatch, rank(**WAITING), asleep, hang_seconds=40.0) is None


def test_a_pass_may_take_ten_times_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    for quiet, hangs in ((45.0, False), (55.0, True)):
        computing = rank("backward", quiet, 0.3, longest=5.0)
        assert (verdict(monkeypatch, rank(**WAITING), computing) is not None) == hangs


def test_who_waits_for_a_gpu_is_not_taken_for_the_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Waiting for another rank's kernel uses a core, and both have been quiet for as long."""
    spins = rank("forward", 10.8, 0.1, longest=0.5)
    hangs = rank("forward", 10.8, 10.2, longest=0.5)
    for device, number in (("cuda", 1), ("cpu", 0)):
        told = verdict(monkeypatch, spins, hangs, device=device)
        assert told is not None and told.startswith(f"rank {number}: ")


def test_all_waiting_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = [rank("receive", 12.0, 11.0), rank("forward", 11.0, 11.0, meeting=11.0)]
    told = verdict(monkeypatch, *stuck)
    assert told is not None and "waits, as all others do; at receive" in told
    ready = rank("prepare", 12.0, 0.3)  # computes, as data are made ready
    assert verdict(monkeypatch, stuck[0], ready) is None


def test_no_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it waits for a core, or begins with much to load, it gets longer; one that has just
    been forked, too."""

    def silent(what: str, seconds: float, **state: Any) -> Rank:
        found = rank(what, 0.0, 0.0)
        found.heard -= seconds
        found.state |= state
        return found

    for what, seconds, options, hangs in (
        ("forward", 9.0, {}, False),
        ("forward", 11.0, {}, True),
        ("forward", 11.0, {"starved": True}, False),
        ("forward", 91.0, {"starved": True}, True),
        ("start", 11.0, {}, True),  # stopped
        ("start", 11.0, {"at_work": True}, False),
    ):
        told = verdict(monkeypatch, silent(what, seconds), **options)
        assert (told is not None) == hangs, (what, seconds, options)
        assert told is None or told == f"rank 0: hangs; no sign of life for {seconds:.0f} s"
    forked = silent("start", 60.0)
    forked.state = {}
    assert verdict(monkeypatch, forked) is None


def test_what_waits_for_a_core_gets_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    computing = rank("backward", 55.0, 0.3, longest=5.0)
    assert verdict(monkeypatch, rank(**WAITING), computing, starved=True) is None


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
