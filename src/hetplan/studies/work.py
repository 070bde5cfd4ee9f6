"""One task from beginning to row, in the process that is to do it; and where and with what its
figures are taken."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from hetplan import __version__
from hetplan.errors import HetplanError, one_line
from hetplan.formulations import family
from hetplan.instances.answers import result_document
from hetplan.instances.envelope import parse_instance
from hetplan.solvers.options import Options
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Progress, Run
from hetplan.studies.findings import SIZE_KEY, size_of
from hetplan.studies.rows import Row, text
from hetplan.studies.tasks import Task

Tell = Callable[[Progress], None]
PACKAGES = ("ortools", "highspy", "pyomo", "numpy", "numba", "networkx")


def perform(task: Task, tell: Tell | None = None) -> Row:
    """The task's row. What hetplan itself refuses or finds contradictory is a row, too, with its
    reason."""
    instance = parse_instance(task.document, where=task.name)
    begun, run = now(), Run(Options(**task.options), tell)
    try:
        answer = result_document(solve(instance.family, instance.data, task.method, run))
    except HetplanError as error:
        return failed(task, str(error), seconds=run.elapsed, begun=begun, peak=peak_bytes())
    return {
        **outline(task, begun),
        **{
            name: answer[name]
            for name in ("status", "stop", "objective", "bound", "gap", "message", "solver")
        },
        **{name: answer[name] for name in ("seconds", "build_seconds", "solve_seconds")},
        "peak_bytes": peak_bytes(),
        "decision_json": None if answer["decision"] is None else text(answer["decision"]),
        "details_json": text({**answer["details"], SIZE_KEY: size_of(instance)}),
    }


def failed(
    task: Task,
    reason: str,
    *,
    stop: str = "error",
    seconds: float | None = None,
    bound: float | None = None,
    begun: str | None = None,
    peak: int | None = None,
) -> Row:
    """The row of a task without a result: it crashed, ran out of memory, or had to be killed."""
    return {
        **outline(task, begun or now()),
        "status": "unknown",
        "stop": stop,
        "objective": None,
        "bound": bound,
        "gap": None,
        "seconds": seconds,
        "message": one_line(reason)[:500],
        "peak_bytes": peak,
        "details_json": "{}",
    }


def outline(task: Task, begun: str) -> Row:
    """What is known of a row before its solve."""
    return {
        "key": task.key,
        "set": task.set,
        "instance": task.name,
        "problem": task.problem,
        "method": task.method,
        "exact": family(task.problem).method(task.method).exact,
        "seed": task.options["seed"],
        "best_known": task.best_known,
        "bound_known": task.bound_known,
        "time_limit": task.time_limit,
        "options_json": text(task.options),
        "versions_json": text(versions()),
        "machine_json": text(machine()),
        "begun": begun,
    }


def now() -> str:
    """UTC to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@cache
def machine() -> dict[str, Any]:
    """Processor, cores, system and Python of this machine."""
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


@cache
def versions() -> dict[str, str]:
    """hetplan and what it solves with; absent where not installed."""
    installed = {"hetplan": __version__}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def processor() -> str:
    """The processor's name as its maker gives it, where the system tells."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def peak_bytes() -> int:
    """This process's peak resident memory. On Linux ru_maxrss begins at the parent's; VmHWM does
    not."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    # in KiB on Linux, in bytes on macOS
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
