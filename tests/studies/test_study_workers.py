"""Processes: what dies, hangs or eats memory is a row; a study that is killed loses nothing."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetplan.solvers.run import Options
from hetplan.studies.rows import Row, Task, keys, read_rows, tasks
from hetplan.studies.workers import Patience, death, run_tasks

pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra `study`)")

MARK = "HETPLAN_STUDY_TEST"
STUDY = """
import sys
from pathlib import Path
from hetplan.solvers.run import Options
from hetplan.studies import workers
from hetplan.studies.rows import carry_out, tasks
options = Options(threads=1, time_limit=600)
work = list(tasks(["tiny-mixed"], ["megatron", "random"], range(15), options))
light = ["hetplan.studies.workers"]
run = lambda left: workers.run_tasks(left, 2, preload=light, stop=lambda: False)
tally = carry_out(work, Path(sys.argv[1]), run)
print(tally.done, tally.total, tally.known)
"""


# The processes of tasks are forked from one that has loaded only what these tasks need.
LIGHT = ["hetplan.studies.workers"]


def one_task(
    method: str = "megatron", instance: str = "tiny-mixed", **options: object
) -> list[Task]:
    """One task."""
    return list(tasks([instance], [method], [0], Options(threads=1, **options)))  # type: ignore[arg-type]


def rows_of(work: list[Task], **settings: object) -> list[Row]:
    """The rows of a run on two processes."""
    return list(run_tasks(work, 2, preload=LIGHT, stop=lambda: False, **settings))  # type: ignore[arg-type]


def test_rows_come_back() -> None:
    work = list(
        tasks(["tiny-mixed"], ["megatron", "random"], [0, 1, 2], Options(threads=1, time_limit=600))
    )
    rows = rows_of(work)
    assert sorted(row["key"] for row in rows) == sorted(task.key for task in work)
    assert all(row["status"] == "feasible" and row["objective"] > 0 for row in rows)


def test_too_little_memory_is_a_row() -> None:
    [row] = rows_of(one_task("exact", time_limit=2), memory_bytes=64 * 2**20)
    assert (row["status"], row["objective"]) == ("unknown", None)
    assert row["message"]


def test_a_process_that_dies_is_a_row_and_others_go_on() -> None:
    work = one_task("milp", "random-amp-medium-5", time_limit=60) + one_task()
    stream: Iterator[Row] = run_tasks(work, 2, preload=LIGHT, stop=lambda: False)
    assert next(stream)["method"] == "megatron"
    [victim] = multiprocessing.active_children()
    victim.kill()
    [row] = stream
    assert (row["method"], row["status"]) == ("milp", "unknown")
    assert "SIGKILL" in row["message"]


def test_what_does_not_stop_is_killed() -> None:
    work = one_task("milp", "random-amp-medium-5", time_limit=60.0)
    [row] = rows_of(work, patience=Patience(-1e9, -0.99))  # after less than its time limit
    assert (row["status"], row["stop"]) == ("unknown", "limit")
    assert row["message"].startswith("killed: still running")


def test_a_wish_to_stop_ends_all() -> None:
    work = one_task("milp", "random-amp-medium-5", time_limit=60.0) * 3
    asked = iter([False] * 4)
    assert list(run_tasks(work, 2, preload=LIGHT, stop=lambda: next(asked, True))) == []


def test_how_deaths_read() -> None:
    assert death(-9) == "its process was ended by SIGKILL, out of memory perhaps"
    assert death(-11) == "its process was ended by SIGSEGV"
    assert death(3) == "its process ended with exit code 3"


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.wide
@pytest.mark.parametrize("most", [2, 10])
def test_however_often_killed_nothing_is_lost_or_done_twice(most: int, tmp_path: Path) -> None:
    marker = f"{MARK}={os.getpid()}-{random.random()}"
    environment = {**os.environ, MARK: marker.partition("=")[2]}
    rng, done = random.Random(7), 0
    for _ in range(most):
        process = subprocess.Popen([sys.executable, "-c", STUDY, str(tmp_path)], env=environment)
        wanted = done + rng.randint(1, 2)
        while len(keys(tmp_path)) < wanted:
            assert process.poll() is None, "it ended before it was killed"
            time.sleep(rng.uniform(0.005, 0.05))
        process.kill()
        process.wait()
        now = len(keys(tmp_path))
        assert done < now < 30
        done = now
    last = subprocess.run(
        [sys.executable, "-c", STUDY, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert last.stdout.split() == ["30", "30", str(done)]
    rows = read_rows(tmp_path)
    assert len(rows) == len({(row["method"], row["seed"]) for row in rows}) == 30
    limit = time.monotonic() + 600
    while (left := marked(marker)) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not left


def marked(marker: str) -> list[Path]:
    """Processes with the marker in their environment."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if marker.encode() in file.read_bytes():
                found.append(file)
    return found
