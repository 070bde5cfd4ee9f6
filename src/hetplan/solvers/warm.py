"""Compiling on several cores: what a first run needs is compiled side by side, once, into numba's cache on disk.

numba compiles one function at a time per process. A *warmer* is a function that runs kernels on a tiny problem;
`prepare` runs the warmers that have not run before in processes of their own, as many as there are cores. It only
saves time: without it, or where a warmer fails, kernels compile when they are first used.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from hetplan import __version__
from hetplan.solvers.registry import load

# A warmer that takes longer than this has gone wrong; the run goes on without it.
PATIENCE_SECONDS = 120.0


def prepare(warmers: Sequence[str], tell: Callable[[str], None] | None = None) -> None:
    """Run those of the warmers ("module:function") that this installation has not run yet, in parallel.

    tell: receives a line when there is something to do. Does nothing on one core or for a single warmer.
    """
    folder = _folder()
    cold = [warmer for warmer in dict.fromkeys(warmers) if not (folder / _mark(warmer)).exists()]
    cores = os.cpu_count() or 1
    if len(cold) < 2 or cores < 2:
        return
    if tell is not None:
        tell("compiling kernels, once for this installation")
    waiting, running = list(cold), dict[str, subprocess.Popen[bytes]]()
    patience = time.monotonic() + PATIENCE_SECONDS
    try:
        while waiting or running:
            while waiting and len(running) < cores:
                warmer = waiting.pop(0)
                running[warmer] = _start(warmer)
            for warmer, process in list(running.items()):
                if process.poll() is not None:
                    del running[warmer]
                    if process.returncode == 0:
                        _leave_mark(folder, warmer)
            if time.monotonic() > patience:
                break
            time.sleep(0.02)
    finally:
        for process in running.values():
            process.kill()
            process.wait()


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
