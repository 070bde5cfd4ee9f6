"""The same study on a Dask cluster: a real scheduler, real workers, one of them killed in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetplan.errors import InputError
from hetplan.solvers.options import Options
from hetplan.studies import distributed as cluster
from hetplan.studies.rows import COLUMNS, read_rows
from hetplan.studies.study import Tally, carry_out
from hetplan.studies.tasks import Task, tasks
from hetplan.studies.workers import run_tasks

pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra `study`)")
pytest.importorskip("distributed", reason="dask.distributed is not installed (extra `dask`)")

# What may differ between two runs of the same task.
VARYING = {"seconds", "build_seconds", "solve_seconds", "peak_bytes", "begun", "details_json", "key"}


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[str]:
    """Address of a scheduler that runs for the test."""
    file = tmp_path / "scheduler.json"
    common = [sys.executable, "-m", "dask"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    settings = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file)]
    process = subprocess.Popen([*common, "scheduler", *settings], **quiet)  # type: ignore[call-overload]
    limit = time.monotonic() + 60
    while not file.exists() and time.monotonic() < limit:
        time.sleep(0.1)
    import json

    yield json.loads(file.read_text())["address"]
    process.kill()
    process.wait()


@pytest.fixture
def workers(scheduler: str, tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two workers of one thread each."""
    settings = [
        "--nthreads",
        "1",
        "--no-nanny",
        "--no-dashboard",
        "--local-directory",
        str(tmp_path / "dask"),
    ]
    command = [sys.executable, "-m", "dask", "worker", scheduler, *settings]
    quiet = subprocess.DEVNULL
    found = [subprocess.Popen(command, stdout=quiet, stderr=quiet) for _ in range(2)]
    yield found
    for process in found:
        process.kill()
        process.wait()


def work() -> list[Task]:
    """Ten short tasks."""
    return list(tasks(["tiny-mixed"], ["megatron", "random"], range(5), Options(threads=1, time_limit=60)))


def test_same_rows_though_a_worker_is_killed(
    scheduler: str, workers: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    killed: list[int] = []

    def watch(tally: Tally) -> None:
        if sum(tally.counts.values()) == 3 and not killed:
            killed.append(workers[0].pid)
            os.kill(workers[0].pid, signal.SIGKILL)

    with cluster.connected(scheduler) as client:
        client.wait_for_workers(2, timeout=120)
        there = carry_out(
            work(), tmp_path / "there", lambda left: cluster.run_on(client, left, stop=lambda: False), watch
        )
    assert killed and there.done == 10
    carry_out(work(), tmp_path / "here", lambda left: run_tasks(left, 2, stop=lambda: False))
    same = sorted(set(COLUMNS) - VARYING)
    ours, theirs = (
        [{name: row[name] for name in same} for row in read_rows(tmp_path / folder)]
        for folder in ("here", "there")
    )
    assert ours == theirs


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "CONNECT_SECONDS", 1)
    with (
        pytest.raises(InputError, match="--scheduler: cannot be reached"),
        cluster.connected("tcp://127.0.0.1:9"),
    ):
        raise AssertionError("connected to nobody")
