"""The parent of ranks: Ctrl-C wherever the interpreter is, ranks whose own children live on."""

from __future__ import annotations

import os
import selectors
import signal
import time

import pytest

pytest.importorskip("torch", reason="torch is an extra of hetplan")

from hetplan.runtime.hung import Rank
from hetplan.runtime.job import Job
from hetplan.runtime.launch import RankError, Supervisor
from parity.cases import CASES


class Late:
    """Interrupts its process in its finaliser, where Python drops exceptions."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


def rank_that_ends_by_itself(seconds: float) -> Rank:
    """A lost Ctrl-C is another error after so many seconds."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        time.sleep(seconds)
        os._exit(1)
    os.close(theirs)
    return Rank(pid, ours, time.monotonic())


def test_ctrl_c_in_a_finaliser_is_not_lost() -> None:
    supervisor = Supervisor(Job(plan=CASES[0].plan), None)
    supervisor.ranks.append(rank_that_ends_by_itself(3))
    try:
        with supervisor.signals():
            Late()
            with pytest.raises(KeyboardInterrupt):
                supervisor.watch()
    finally:
        supervisor.end()


def test_a_rank_is_gone_though_its_pipe_is_held_open() -> None:
    """As by a child of its own, a loader of data say."""
    supervisor = Supervisor(Job(plan=CASES[0].plan), None)
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    os.set_blocking(ours, False)
    supervisor.ranks.append(Rank(pid, ours, time.monotonic()))
    supervisor.selector.register(ours, selectors.EVENT_READ, 0)
    try:
        with pytest.raises(RankError, match="ended with exit code 7"):
            supervisor.watch()
    finally:
        supervisor.end()
        os.close(theirs)
