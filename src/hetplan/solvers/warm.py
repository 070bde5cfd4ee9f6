"""Compiling on several cores: what a first run needs is compiled side by side, once, into numba's
cache on disk.

numba compiles one function at a time per process. A *warmer* is a function that runs kernels on a
tiny problem;
`prepare` runs the warmers that have not run before in processes of its own, one for each core,
which take one warmer after another (loading numba takes a process as long as a middling kernel);
those that are needed late it leaves running, and `finish` waits for them. It only saves time:
without it, or where a warmer fails, kernels compile when they are first used.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from hetplan import __version__
from hetplan.solvers.registry import load

# Warmers that take longer than this, all together, have gone wrong; the run goes on without them.
PATIENCE_SECONDS = 120.0
# The collector of cyclic garbage would look through everything that a compiler keeps, again and
# again.
OBJECTS_BETWEEN_COLLECTIONS = 200_000


def prepare(
    warmers: Sequence[str], tell: Callable[[str], None] | None = None, *, late: Sequence[str] = ()
) -> None:
    """Run those of the warmers ("module:function") that this installation has not run yet, in
    parallel.

    tell: receives a line when there is something to do. late: warmers that need not be done when
    this returns; who needs them calls `finish`. Does nothing on one core or for a single warmer.
    """
    folder = _folder()
    cold, later = (
        [w for w in dict.fromkeys(some) if not (folder / _mark(w)).exists()]
        for some in (warmers, late)
    )
    cores = os.cpu_count() or 1
    if len(cold) + len(later) < 2 or cores < 2:
        return
    if tell is not None:
        tell("compiling kernels, once for this installation")
    crew = _Crew(folder, [*cold, *later], cores)
    atexit.register(crew.stop)
    _LATE.update(dict.fromkeys(later, crew))
    crew.wait_for(cold)


def finish(warmers: Sequence[str]) -> None:
    """Wait until none of the warmers runs any more; at once where `prepare` did not leave them
    running."""
    for warmer in warmers:
        if (crew := _LATE.pop(warmer, None)) is not None:
            crew.wait_for([warmer])


class _Crew:
    """Processes that run warmers, one for each core, each the next of those that are left, in the
    order given."""

    def __init__(self, folder: Path, warmers: Sequence[str], cores: int) -> None:
        self._folder, self._waiting = folder, deque(warmers)
        self._done = {warmer: threading.Event() for warmer in warmers}
        self._running = set[subprocess.Popen[bytes]]()
        self._stopped, self._lock = False, threading.Lock()
        self._until = time.monotonic() + PATIENCE_SECONDS
        self._at_work = min(cores, len(warmers))
        for _ in range(self._at_work):
            threading.Thread(target=self._work, name="warmers", daemon=True).start()

    def wait_for(self, warmers: Sequence[str]) -> None:
        """Until they are done or given up, or patience ends, and with it all work."""
        try:
            if not all(
                self._done[w].wait(max(0.0, self._until - time.monotonic())) for w in warmers
            ):
                self.stop()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End what is running, begin nothing more."""
        with self._lock:
            self._stopped = True
            self._waiting.clear()
            for process in self._running:
                process.kill()
        for event in self._done.values():
            event.set()

    def _work(self) -> None:
        """One process and the next as long as any warmers are left: a warmer that fails ends its
        process."""
        try:
            while (process := self._begin()) is not None:
                with process:
                    done = True
                    while done and (warmer := self._next()) is not None:
                        if done := _ask(process, warmer):
                            _leave_mark(self._folder, warmer)
                        self._done[warmer].set()
                with self._lock:
                    self._running.discard(process)
        finally:
            with self._lock:
                self._at_work -= 1
                last = self._at_work == 0
            if last:
                self.stop()

    def _begin(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._stopped or not self._waiting:
                return None
            process = _start()
            self._running.add(process)
            return process

    def _next(self) -> str | None:
        with self._lock:
            return self._waiting.popleft() if self._waiting else None


# Late warmers under way, and who runs them.
_LATE: dict[str, _Crew] = {}


def _start() -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-m", "hetplan.solvers.warm"],
        stdin=pipe,
        stdout=pipe,
        stderr=subprocess.DEVNULL,
        bufsize=0,
    )


def _ask(process: subprocess.Popen[bytes], warmer: str) -> bool:
    """Have the process run a warmer; False where that ended it."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(f"{warmer}\n".encode())
    except BrokenPipeError:
        return False
    return process.stdout.readline().decode() == f"{warmer}\n"


def _serve() -> None:
    """Run the warmers named on standard input, one a line, and answer with the name of each when it
    is done."""
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what warmers print
    for line in sys.stdin:
        load(line.strip())()
        answers.write(line)
        answers.flush()


def _folder() -> Path:
    """Where the marks are kept: beside the cached kernels, so that both go together.

    numba keeps kernels in NUMBA_CACHE_DIR, else in `__pycache__` beside the source, else in the
    user's cache folder.
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
    _serve()
