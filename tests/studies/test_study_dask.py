"""The same study on a Dask cluster: a real scheduler, real workers, one of them killed in the
middle."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetplan.cli.study import slurm_settings
from hetplan.errors import InputError
from hetplan.formulations import JOINED, add_plugins, family
from hetplan.solvers.run import Options
from hetplan.studies import workers as cluster
from hetplan.studies.rows import COLUMNS, Tally, Task, carry_out, read_rows, tasks
from hetplan.studies.workers import run_tasks, with_safe_path

pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra `study`)")
pytest.importorskip("distributed", reason="dask.distributed is not installed (extra `dask`)")

# What may differ between two runs of the same task.
VARYING = {
    "seconds",
    "build_seconds",
    "solve_seconds",
    "peak_bytes",
    "begun",
    "details_json",
    "key",
}


@pytest.fixture
def own_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A plugin in the working directory, with hetplan's `random` under another name."""
    method = 'Method("own", "hetplan.formulations.amp.baselines:random", False, "")'
    text = f"from hetplan.solvers.registry import Method\nMETHODS = {{'amp': [{method}]}}\n"
    (tmp_path / "own_plugin.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    add_plugins(["own_plugin"])
    yield
    JOINED.clear()
    assert "own" not in [method.name for method in family("amp").methods]


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[str]:
    """Address of a scheduler that runs for the test."""
    file = tmp_path / "scheduler.json"
    common = [sys.executable, "-m", "dask"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    settings = [
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--no-dashboard",
        "--scheduler-file",
        str(file),
    ]
    process = subprocess.Popen([*common, "scheduler", *settings], **quiet)  # type: ignore[call-overload]
    limit = time.monotonic() + 600
    while not file.exists() and time.monotonic() < limit:
        time.sleep(0.1)
    import json

    yield json.loads(file.read_text())["address"]
    process.kill()
    process.wait()


@pytest.fixture
def workers(scheduler: str, tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two workers of one thread each: one alone, and one with a nanny, as Dask starts them by
    default."""
    settings = ["--nthreads", "1", "--no-dashboard", "--local-directory", str(tmp_path / "dask")]
    command = [sys.executable, "-m", "dask", "worker", scheduler, *settings]
    quiet = subprocess.DEVNULL
    found = [
        subprocess.Popen(
            [*command, nanny], stdout=quiet, stderr=quiet, start_new_session=True, cwd=tmp_path
        )
        for nanny in ("--no-nanny", "--nanny")
    ]
    yield found
    for process in found:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def work() -> list[Task]:
    """Ten short tasks."""
    return list(
        tasks(["tiny-mixed"], ["megatron", "own"], range(5), Options(threads=1, time_limit=600))
    )


@pytest.mark.wide
@pytest.mark.usefixtures("own_method")
def test_same_rows_though_a_worker_is_killed(
    scheduler: str, workers: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    killed: list[int] = []

    def watch(tally: Tally) -> None:
        if sum(tally.counts.values()) == 3 and not killed:
            killed.append(workers[0].pid)
            os.kill(workers[0].pid, signal.SIGKILL)

    with cluster.connected(scheduler) as client:
        client.wait_for_workers(2, timeout=600)
        there = carry_out(
            work(),
            tmp_path / "there",
            lambda left: cluster.run_on(client, left, stop=lambda: False),
            watch,
        )
    assert killed and there.done == 10 and there.counts == {"feasible": 10}
    carry_out(work(), tmp_path / "here", lambda left: run_tasks(left, 1, stop=lambda: False))
    same = sorted(set(COLUMNS) - VARYING)
    ours, theirs = (
        [{name: row[name] for name in same} for row in read_rows(tmp_path / folder)]
        for folder in ("here", "there")
    )
    assert ours == theirs


# Slurm's commands on this machine: a job is a process group, its number the group's.
SBATCH = """#!/bin/sh
if grep -q -- "#SBATCH -p nowhere" "$1"; then
  echo "sbatch: error: invalid partition specified: nowhere" >&2; exit 1
fi
grep "^#SBATCH" "$1" >> "$FAKE_SLURM/directives"
cp "$1" "$FAKE_SLURM/script.$$"
setsid sh -c 'echo $$ >> "$FAKE_SLURM/jobs"; exec sh "$0"' "$FAKE_SLURM/script.$$" \\
  > "$FAKE_SLURM/out.$$" 2>&1 &
echo "Submitted batch job $!"
"""
SCANCEL = """#!/bin/sh
kill -9 -- "-$1"
"""


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with what was submitted; `sbatch` and `scancel` on the PATH."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, text in (("sbatch", SBATCH), ("scancel", SCANCEL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("FAKE_SLURM", str(folder))
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    yield folder
    for group in jobs_of(folder):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def jobs_of(folder: Path) -> list[int]:
    """The process groups of the jobs submitted so far."""
    file = folder / "jobs"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def settings_of(folder: Path, **more: str) -> dict[str, object]:
    """As `--slurm cores=1 …` gives them."""
    given = {"cores": "1", "memory": "2GB", "queue": "here", "local_directory": str(folder), **more}
    host = {"scheduler_options": {"host": "127.0.0.1", "dashboard_address": None}}
    return {**slurm_settings([f"{name}={value}" for name, value in given.items()]), **host}


@pytest.mark.wide
def test_slurm_jobs_do_the_work_though_the_only_one_is_killed(
    fake_slurm: Path, tmp_path: Path
) -> None:
    pytest.importorskip("dask_jobqueue", reason="dask-jobqueue is not installed (extra `slurm`)")
    import dask

    killed: list[int] = []

    def watch(tally: Tally) -> None:
        if sum(tally.counts.values()) == 3 and not killed:
            killed.extend(jobs_of(fake_slurm))
            os.killpg(killed[0], signal.SIGKILL)

    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "500ms"}),
        cluster.slurm(1, settings_of(tmp_path), renew_every="200ms") as client,
    ):
        tally = carry_out(
            work(),
            tmp_path / "there",
            lambda left: cluster.run_on(client, left, stop=lambda: False),
            watch,
        )
    assert tally.done == 10 and len(killed) == 1
    assert {row["status"] for row in read_rows(tmp_path / "there")} == {"feasible"}
    submitted = (fake_slurm / "directives").read_text()
    assert submitted.count("#SBATCH -p here") == len(jobs_of(fake_slurm)) >= 2
    limit = time.monotonic() + 600
    while (
        alive := [group for group in jobs_of(fake_slurm) if runs(group)]
    ) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not alive, "jobs end with the study"


def runs(group: int) -> bool:
    """Whether a process of the group is there."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("there", "more", "says"),
    [
        (True, {"queue": "nowhere"}, r"--slurm: cannot be submitted: .*invalid partition"),
        (True, {"color": "red"}, r"--slurm: not usable: .*color"),
        (False, {}, "no command sbatch"),
    ],
)
def test_what_slurm_refuses_is_told(
    fake_slurm: Path, tmp_path: Path, there: bool, more: dict[str, str], says: str
) -> None:
    pytest.importorskip("dask_jobqueue", reason="dask-jobqueue is not installed (extra `slurm`)")
    if not there:
        (fake_slurm / "sbatch").unlink()
    with pytest.raises(InputError, match=says), cluster.slurm(2, settings_of(tmp_path, **more)):
        raise AssertionError("connected to nobody")


def test_nobody_there() -> None:
    with (
        pytest.raises(InputError, match="--scheduler: cannot be reached"),
        cluster.connected("tcp://127.0.0.1:9", timeout=1),
    ):
        raise AssertionError("connected to nobody")


def test_workers_import_nothing_from_the_folder_where_they_start() -> None:
    first, dask = "export PYTHONSAFEPATH=1", pytest.importorskip("dask")
    assert with_safe_path({"cores": 1}) == {"cores": 1, "job_script_prologue": [first]}
    given = {"job_script_prologue": ["module load a"]}
    assert with_safe_path(given) == {"job_script_prologue": [first, "module load a"]}
    with dask.config.set({"jobqueue.slurm.job-script-prologue": ["module load b"]}):
        assert with_safe_path({})["job_script_prologue"] == [first, "module load b"]
