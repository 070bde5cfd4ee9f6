"""Work on another thread: its value, its error, and a start that cannot hang."""

from __future__ import annotations

import _thread
import subprocess
import sys

import pytest

from hetplan.solvers.native import begin


def test_the_value_and_the_error_come_back() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        begin(lambda: int("x")).result(300)


def test_a_thread_that_dies_before_it_begins_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_thread, "start_new_thread", lambda *_: 0)
    with pytest.raises(MemoryError, match="before it began"):
        begin(lambda: 3, start_seconds=0.05)


LIMITED = """
import resource, sys
from hetplan.solvers.native import begin
size = int(next(l.split()[1] for l in open("/proc/self/status") if l.startswith("VmSize"))) * 1024
held = []
resource.setrlimit(resource.RLIMIT_AS, (size + int(sys.argv[1]), size + int(sys.argv[1])))
try:
    while True:
        held.append(bytearray(1 << 16))
except MemoryError:
    pass
try:
    begin(lambda: [bytearray(1 << 20) for _ in range(1000)]).result(300)
except (MemoryError, RuntimeError):
    sys.exit(7)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
@pytest.mark.parametrize("spare", [0, 1 << 20, 9 << 20, 80 << 20])
def test_without_memory_it_ends_with_an_error(spare: int) -> None:
    """However little is left, the starter hears of it."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(spare)],
        timeout=600,
        check=False,
        stderr=subprocess.PIPE,
    )
    assert done.returncode == 7, done.stderr
