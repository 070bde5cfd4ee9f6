"""`forked.py` in a process of its own, for the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent


def run_forked(target: str, folder: Path) -> None:
    """All ranks of a target; fails with what the first failing rank died of."""
    path = os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, str(TESTS / "parity" / "forked.py"), target, str(folder)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    told = [f"{file.name}: {file.read_text()}" for file in sorted(folder.glob("failed-*"))]
    assert done.returncode == 0, "\n".join([*told, done.stderr[-3000:]])
