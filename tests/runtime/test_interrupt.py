"""The parent of ranks: Ctrl-C wherever the interpreter is, ranks whose own children live on."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is an extra of hetplan")

from hetplan.runtime.hung import Rank
from hetplan.runtime.job import Job
from hetplan.runtime.launch import FORK, RankError, Supervisor
from parity.cases import CASES


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
