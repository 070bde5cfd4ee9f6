"""What the first plan after an installation waits for: the same plan with nothing compiled, then
again, side by side.

    python -m evidence.speed first_run [--repeats N] [--strategies NAMES] [--output FILE]

GPT-2 medium on AMP's 16 devices, by `hetplan plan` in processes of its own; each pair of runs has a
fresh folder for numba's kernels (NUMBA_CACHE_DIR). Processor seconds are those of the command and
of the processes that it starts; they hardly grow when other work fills the machine, the clock's do.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence.speed.harness import markdown, save

PLAN = (
    "plan",
    "--model",
    "gpt2-medium",
    "--cluster",
    "amp-mixed",
    "--global-batch",
    "32",
    "--quiet",
)


@dataclass(frozen=True)
class Taken:
    """Seconds of one command by the clock and of the processors, and the load (one minute's mean)
    at its end."""

    clock: float
    processors: float
    load: float


def taken(folder: Path, strategies: str | None) -> Taken:
    """One plan with the kernels in `folder`."""
    chosen = () if strategies is None else ("--strategies", strategies)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "hetplan", *PLAN, *chosen],
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"hetplan plan: exit code {process.returncode}, expected 0")
    return Taken(time.perf_counter() - begun, used.ru_utime + used.ru_stime, os.getloadavg()[0])


def pair(strategies: str | None) -> dict[str, Any]:
    """A first run and the same again."""
    with tempfile.TemporaryDirectory() as folder:
        first, again = taken(Path(folder), strategies), taken(Path(folder), strategies)
    return {
        "first_clock": first.clock, "first_processors": first.processors,
        "again_clock": again.clock,
        "again_processors": again.processors, "load": max(first.load, again.load),
    }  # fmt: skip


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--strategies", help="as for hetplan plan; default those that it takes by itself"
    )
    parser.add_argument("--output")
    given = parser.parse_args(arguments)
    kept = [pair(given.strategies) for _ in range(given.repeats)]
    rows = [
        (
            f"{row['first_clock']:.1f}", f"{row['again_clock']:.1f}",
            f"{row['first_clock'] - row['again_clock']:.1f}",
            f"{row['first_processors']:.1f}", f"{row['again_processors']:.1f}",
            f"{row['first_processors'] - row['again_processors']:.1f}", f"{row['load']:.1f}",
        )
        for row in kept
    ]  # fmt: skip
    header = (
        "first, s", "again, s", "more", "first, processor s", "again, processor s", "more", "load",
    )  # fmt: skip
    title = f"First run: strategies {given.strategies or 'by default'}"
    save(given.output, [markdown(title, header, rows)], kept)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
