"""Asking `parity.forked` and `parity.served` for runs, and reading their answers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
PATH = os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))
ENVIRONMENT = os.environ | {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}
Answers = dict[str, dict[str, Any]]


def request(name: str, *arguments: object, program: str = "hetplan", **more: Any) -> dict[str, Any]:
    """One for `parity.served`."""
    return {"name": name, "program": program, "arguments": [str(a) for a in arguments], **more}


def run_forked(target: str, folder: Path, **environment: str) -> None:
    """All ranks of a target; fails with what the first failing rank died of."""
    done = subprocess.run(
        [sys.executable, str(TESTS / "parity" / "forked.py"), target, str(folder)],
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    told = [f"{file.name}: {file.read_text()}" for file in sorted(folder.glob("failed-*"))]
    assert done.returncode == 0, "\n".join([*told, done.stderr[-3000:]])


def served(requests: list[dict[str, Any]], folder: Path, width: int) -> Answers:
    """All of them, by one process."""
    (folder / "requests.json").write_text(json.dumps(requests))
    command = [sys.executable, str(TESTS / "parity" / "served.py")]
    command += [str(folder / "requests.json"), str(folder / "answers.json"), str(width)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    answers: Answers = json.loads((folder / "answers.json").read_text())
    return answers


def losses(answer: dict[str, Any]) -> dict[int, float]:
    """By step, as rank 0 told them."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\S+)", answer["err"])}


def latest(folder: Path) -> int:
    """The step of the last complete checkpoint, 0 before the first."""
    return max((int(path.name[5:]) for path in folder.glob("step-*")), default=0)
