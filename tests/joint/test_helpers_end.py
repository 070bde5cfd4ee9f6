"""The further processes of a search end with the process that began them, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from markdown_pages import ROOT

# Begins a search without end in two processes, and prints the number of the further one.
SEARCH = """
from random import Random

from hetplan.formulations.joint import workers
from hetplan.formulations.joint.annealing import Parameters
from hetplan.formulations.joint.search import search
from hetplan.solvers.run import Options, Run
from joint.enumeration import random_data


class Telling(workers.Helper):
    def begin(self, task):
        super().begin(task)
        print(self.process.pid, flush=True)


workers.Helper = Telling
data = random_data(Random(31), devices=6, layers=7, batch=12)
search(data, Run(Options(), budget=1e6), parameters=Parameters(workers=2, steps=10**9))
"""


def runs(process: int) -> bool:
    """Whether a process runs; one that has ended but has not been waited for does not."""
    command = ["ps", "-o", "stat=", "-p", str(process)]
    state = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return bool(state) and not state.startswith("Z")


@pytest.mark.engine
@pytest.mark.parametrize(
    "sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda sent: sent.name
)
def test_a_helper_ends_with_the_process_that_began_it(sent: signal.Signals) -> None:
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests")))
    begun = subprocess.Popen(
        [sys.executable, "-c", SEARCH],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    helper = 0
    try:
        assert begun.stdout is not None
        helper = int(begun.stdout.readline())
        assert runs(helper)
        begun.send_signal(sent)
        begun.wait(timeout=120)
        for _ in range(1200):
            if not runs(helper):
                break
            time.sleep(0.1)
        assert not runs(helper)
    finally:
        begun.kill()
        begun.wait()
        if helper and runs(helper):
            os.kill(helper, signal.SIGKILL)
