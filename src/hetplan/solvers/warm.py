"""Compiling on several cores: what a first run needs is compiled side by side, once, into numba's cache on disk.

numba compiles one function at a time per process. A *warmer* is a function that runs kernels on a tiny problem;
`prepare` runs the warmers that have not run before in processes of their own, as many as there are cores; those
that are needed late it leaves running, and `finish` waits for them. It only saves time: without it, or where a
warmer fails, kernels compile when they are first used.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from hetplan import __version__
from hetplan.solvers.registry import load

# A warmer that takes longer than this has gone wrong; the run goes on without it.
PATIENCE_SECONDS = 120.0


def prepare(
    warmers: Sequence[str], tell: Callable[[str], None] | None = None, *, late: Sequence[str] = ()
) -> None:
    """Run those of the warmers ("module:function") that this installation has not run yet, in parallel.

    tell: receives a line when there is something to do. late: warmers that need not be done when this returns; who
    needs them calls `finish`. Does nothing on one core or for a single warmer.
    """
    folder = _folder()
    cold, later = (
        [w for w in dict.fromkeys(some) if not (folder / _mark(w)).exists()] for some in (warmers, late)
    )
    cores = os.cpu_count() or 1
    if len(cold) + len(later) < 2 or cores < 2:
        return
    if tell is not None:
        tell("compiling kernels, once for this installation")
    crew = _Crew(folder, [*cold, *later], cores)
    crew.work(until=cold)
    if crew.busy:
        _LATE.update(dict.fromkeys(later, crew))
        atexit.register(crew.stop)
        threading.Thread(target=crew.work, name="warmers", daemon=True).start()


def finish(warmers: Sequence[str]) -> None:
    """Wait until none of the warmers runs any more; at once where `prepare` did not leave them running."""
    for warmer in warmers:
        if (crew := _LATE.pop(warmer, None)) is not None:
            crew.wait_for(warmer)


class _Crew:
    """Warmers in processes of their own, at most `cores` at a time, in the order given."""

    def __init__(self, folder: Path, warmers: Sequence[str], cores: int) -> None:
        self._folder, self._cores = folder, cores
        self._waiting, self._running = list(warmers), dict[str, subprocess.Popen[bytes]]()
        self._done = {warmer: threading.Event() for warmer in warmers}
        self._patience = time.monotonic() + PATIENCE_SECONDS

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return bool(self._waiting or self._running)

    def work(self, until: Sequence[str] | None = None) -> None:
        """Until these warmers are done, all of them by default, or patience ends; what is left goes on running."""
        try:
            while self.busy and not (until is not None and all(self._done[w].is_set() for w in until)):
                while self._waiting and len(self._running) < self._cores:
                    warmer = self._waiting.pop(0)
                    self._running[warmer] = _start(warmer)
                for warmer, process in list(self._running.items()):
                    if process.poll() is not None:
                        self._running.pop(warmer, None)
                        if process.returncode == 0:
                            _leave_mark(self._folder, warmer)
                        self._done[warmer].set()
                if time.monotonic() > self._patience:
                    self.stop()
                time.sleep(0.02)
        except BaseException:
            self.stop()
            raise

    def wait_for(self, warmer: str) -> None:
        """Until it is done or given up."""
        self._done[warmer].wait()

    def stop(self) -> None:
        """End what is running, begin nothing more."""
        self._waiting.clear()
        for process in list(self._running.values()):
            process.kill()
            process.wait()
        self._running.clear()
        for event in self._done.values():
            event.set()


# Late warmers under way, and who runs them.
_LATE: dict[str, _Crew] = {}


def _start(warmer: str) -> subprocess.Popen[bytes]:
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, "-m", "hetplan.solvers.warm", warmer], stdin=quiet, stdout=quiet, stderr=quiet
    )


def _folder() -> Path:
    """Where the marks are kept: beside the cached kernels, so that both go together.

    numba keeps kernels in NUMBA_CACHE_DIR, else in `__pycache__` beside the source, else in the user's cache folder.
    """
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(chosen) / "hetplan"
    beside = Path(__file__).parent / "__pycache__"
    if os.access(beside if beside.exists() else beside.parent, os.W_OK):
        return beside
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hetplan"


def _mark(warmer: str) -> str:
    """A name that changes with everything that makes cached kernels stale."""
    spec = find_spec("hetplan")
    root = Path(next(iter(spec.submodule_search_locations or ["."]))) if spec else Path()
    sources = sorted((str(path), path.stat().st_mtime_ns) for path in root.rglob("*.py"))
    numba = find_spec("numba")
    told = (warmer, __version__, sys.version, str(numba.origin if numba else ""), sources)
    return hashlib.sha256(repr(told).encode()).hexdigest()[:32] + ".warm"


def _leave_mark(folder: Path, warmer: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _mark(warmer)).touch()
    except OSError as error:  # a read-only home: the next run compiles nothing, it only looks again
        print(
            f"hetplan: {folder} cannot be written ({error.strerror}); kernels are checked at every run",
            file=sys.stderr,
        )


if __name__ == "__main__":
    load(sys.argv[1])()
