"""Many runs by one process: hetplan and torch are imported once, and every run is a fork of its own
session.

`parity.asking` starts it and writes lines: `{"requests", "answers", "width"}`, two files and how
many run at a time. requests holds a list of `{"name", "program", "arguments", "environment",
"imports", "folder", "signal"}`, answers gets by name `{"code", "out", "err", "left"}`; then "done"
is written back. program: "hetplan", or "forked" (`parity.forked`); arguments: of several commands
with "&&" between them. imports: what this process imports first, for this run and for all later
ones. folder: to run in. signal: sent to the run behind its first step. An answer comes when no
process of the session is left, not even a zombie; left: whether some had to be killed for it, after
`LIMIT` seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import random
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

# As `runtime/launch/torchrun.serve` has it: torch reads it when it is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch

POLL, LIMIT = 0.05, 600.0  # seconds
PR_SET_PDEATHSIG = 1
PROGRAMS = {
    "hetplan": "hetplan.cli.main",
    "forked": "parity.forked",
}
Request = dict[str, Any]


NEEDED = (
    "torch.distributed.checkpoint",
    "hetplan.cli.main",
    "hetplan.cli.run",
    "hetplan.planner.library",
    "hetplan.runtime.launch.local",
    "hetplan.runtime.engine.models",
    "hetplan.runtime.engine.worker",
    "hetplan.runtime.spmd.distributed",
    "hetplan.runtime.stock",
    "parity.cases",
    "parity.faulty",
)


def warm() -> None:
    """Import what all runs need, before they are forked."""
    for name in NEEDED:
        importlib.import_module(name)
    importlib.import_module("parity.forked").used_once()


def begin(request: Request, out: Path, err: Path) -> int:
    """Fork a run; its process id, which is its session's and its group's, too."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # not to outlive the server
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for path, number in ((out, 1), (err, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        os.environ.update(request.get("environment", {}))
        os.chdir(request.get("folder", "."))
        # a process of its own would not have what this one would draw next
        random.seed()
        np.random.seed()  # noqa: NPY002
        torch.seed()
        program = importlib.import_module(PROGRAMS[request["program"]]).main
        for whole, command in groupby(request["arguments"], lambda argument: argument != "&&"):
            code = program(list(command)) if whole else code
            if code:
                break
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # noqa: BLE001 (what a run dies of is told by the test)
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


@dataclass
class Running:
    """A run, from its fork until nothing of it is left."""

    request: Request
    group: int
    out: Path
    err: Path
    until: float
    code: int | None = None
    signalled: bool = False
    left: bool = False

    @classmethod
    def start(cls, request: Request, folder: Path) -> Running:
        """Fork it."""
        out, err = folder / f"{request['name']}.out", folder / f"{request['name']}.err"
        out.touch()
        err.touch()
        return cls(request, begin(request, out, err), out, err, time.monotonic() + LIMIT)

    def look(self) -> dict[str, Any] | None:
        """The answer, once nothing is left of it."""
        if self.code is None:
            pid, status = os.waitpid(self.group, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        sent = self.request.get("signal")
        if sent and not self.signalled and "step 0" in self.err.read_text():
            os.kill(self.group, sent)
            self.signalled = True
        if time.monotonic() > self.until:
            self.left = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.group, signal.SIGKILL)
        if self.code is None or alive(self.group):
            return None
        return {
            "code": self.code,
            "out": self.out.read_text(),
            "err": self.err.read_text(),
            "left": self.left,
        }


def alive(group: int) -> bool:
    """Whether any process of a group is there, zombies included."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    """List by list, until nobody asks any more."""
    warm()
    for line in sys.stdin:
        asked = json.loads(line)
        serve(Path(asked["requests"]), Path(asked["answers"]), asked["width"])
        print("done", flush=True)


def serve(requests: Path, answers: Path, width: int) -> None:
    """Some at a time."""
    asked: list[Request] = json.loads(requests.read_text())
    waiting, running, answered = asked[::-1], dict[str, Running](), dict[str, Any]()
    with TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < width:
                request = waiting.pop()
                for name in request.get("imports", ()):
                    importlib.import_module(name)
                running[request["name"]] = Running.start(request, Path(folder))
            for name, answer in [(name, one.look()) for name, one in running.items()]:
                if answer is not None:
                    answered[name] = answer
                    del running[name]
            time.sleep(POLL)
    answers.write_text(json.dumps(answered))


if __name__ == "__main__":
    main()
