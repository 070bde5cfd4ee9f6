"""A process that waits for a core is told from one that hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from hetplan.runtime.watch import at_work, cpu_seconds, descendants, starved, thread_states

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells")


def child(code: str) -> Iterator[int]:
    """A process that runs some Python, once it does."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"print(flush=True)\n{code}"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process.pid
    process.kill()
    process.wait()


def wait_until(holds: Callable[[], bool]) -> None:
    """Until the system tells so; fails where it never does."""
    for _ in range(2000):
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


def test_what_sleeps_or_is_stopped_is_not_starved(sleeper: int, spinner: int) -> None:
    wait_until(lambda: "R" not in thread_states(sleeper))
    assert not starved(sleeper, 0.0, 1e9)
    os.kill(spinner, signal.SIGSTOP)
    wait_until(lambda: thread_states(spinner) == ["T"])
    assert not starved(spinner, 0.0, 1e9)


def test_what_would_run_is_starved_until_it_has_run_enough(spinner: int) -> None:
    used = cpu_seconds(spinner)
    assert starved(spinner, used, 1e9)
    wait_until(lambda: cpu_seconds(spinner) >= used + 0.05)
    assert not starved(spinner, used, 0.1)


def test_what_is_gone_is_not_starved(sleeper: int) -> None:
    os.kill(sleeper, signal.SIGKILL)
    os.waitpid(sleeper, 0)
    assert not starved(sleeper, 0.0, 1e9)


@pytest.fixture
def employer() -> Iterator[int]:
    """Sleeps, and has a process that computes."""
    code = "'import time\\nend = time.monotonic() + 30\\nwhile time.monotonic() < end: pass'"
    spin = f"subprocess.Popen([sys.executable, '-c', {code}])"
    yield from child(f"import subprocess, sys, time\n{spin}\ntime.sleep(1000)")


def test_what_computes_or_has_others_compute_is_at_work(
    sleeper: int, spinner: int, employer: int
) -> None:
    wait_until(lambda: not at_work(sleeper))
    assert at_work(spinner)
    wait_until(lambda: bool(descendants(employer)) and thread_states(employer) == ["S"])
    (worker,) = descendants(employer)
    assert at_work(employer)
    os.kill(worker, signal.SIGSTOP)
    wait_until(lambda: not at_work(employer))
    os.kill(worker, signal.SIGKILL)
