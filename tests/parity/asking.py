"""Asking `parity.served` for runs, `parity.forked` among them, and reading the answers."""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hetplan.cli.main import main

TESTS = Path(__file__).parent.parent
PATH = os.pathsep.join((str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")))
ENVIRONMENT = os.environ | {
    "PYTHONPATH": PATH,
    "OMP_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # what runs there forks ranks that use CUDA
}
Answers = dict[str, dict[str, Any]]
# What runs of Hugging Face's models take seconds to import.
HUGGING = ("fakes.hugging", "transformers.models.llama.modeling_llama")


def request(name: str, *arguments: object, program: str = "hetplan", **more: Any) -> dict[str, Any]:
    """One for `parity.served`."""
    return {"name": name, "program": program, "arguments": [str(a) for a in arguments], **more}


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of a command that ends with exit code 2."""
    assert main(list(map(str, arguments))) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured.err
    return captured.err


class Server:
    """A process of `parity.served`, kept for all that is asked."""

    def __init__(self) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the process)
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "parity" / "served.py")],
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        atexit.register(self.process.kill)

    def ask(self, **what: Any) -> None:
        """Wait for an answer; fails with what the server died of."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        if self.process.stdout.readline() != "done\n":
            server.cache_clear()
            self.errors.seek(0)
            raise AssertionError(self.errors.read())


@cache
def server() -> Server:
    """The one of this process."""
    return Server()


def run_forked(
    target: str, folder: Path, *, imports: Sequence[str] = (), **environment: str
) -> None:
    """All ranks of a target; fails with what the first failing rank died of."""
    more: dict[str, Any] = {"environment": environment, "imports": imports}
    asked = request("forked", target, folder, program="forked", **more)
    answer = served([asked], folder, 1)["forked"]
    captured = [f"{file.name}: {file.read_text()}" for file in sorted(folder.glob("failed-*"))]
    assert answer["code"] == 0, "\n".join([*captured, answer["err"][-3000:]])


def served(requests: list[dict[str, Any]], folder: Path, width: int) -> Answers:
    """All of them, so many at a time."""
    files = {name: folder / f"{name}.json" for name in ("requests", "answers")}
    files["requests"].write_text(json.dumps(requests))
    server().ask(**{name: str(file) for name, file in files.items()}, width=width)
    answers: Answers = json.loads(files["answers"].read_text())
    return answers


def losses(answer: dict[str, Any]) -> dict[int, float]:
    """By step, as rank 0 told them."""
    return {
        int(step): float(loss)
        for step, loss in re.findall(r"step (\d+): loss (\S+)", answer["err"])
    }


def latest(folder: Path) -> int:
    """The step of the last complete checkpoint, 0 before the first."""
    return max((int(path.name[5:]) for path in folder.glob("step-*")), default=0)
