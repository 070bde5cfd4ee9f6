"""Ctrl-C ends a run wherever the interpreter is at that moment."""

from __future__ import annotations

import os
import signal
import time

import pytest

pytest.importorskip("torch", reason="torch is an extra of hetplan")

from hetplan.runtime.hung import Rank
from hetplan.runtime.job import Job
from hetplan.runtime.launch import Supervisor
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
