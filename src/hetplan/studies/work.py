"""One task from beginning to row, in the process that is to do it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from hetplan.errors import HetplanError, one_line
from hetplan.instances.answers import result_document
from hetplan.instances.envelope import parse_instance
from hetplan.solvers.options import Options
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Progress, Run
from hetplan.studies.machine import machine, peak_bytes, versions
from hetplan.studies.rows import Row, text
from hetplan.studies.sizes import KEY, size_of
from hetplan.studies.tasks import Task

Tell = Callable[[Progress], None]


def perform(task: Task, tell: Tell | None = None) -> Row:
    """The task's row. What hetplan itself refuses or finds contradictory is a row, too, with its
    reason."""
    instance = parse_instance(task.document, where=task.name)
    begun, run = now(), Run(Options(**task.options), tell)
    try:
        found = result_document(solve(instance.family, instance.data, task.method, run))
    except HetplanError as error:
        return failed(task, str(error), seconds=run.elapsed, begun=begun, peak=peak_bytes())
    return {
        **outline(task, begun),
        **{
            name: found[name]
            for name in ("status", "stop", "objective", "bound", "gap", "message", "solver")
        },
        **{name: found[name] for name in ("seconds", "build_seconds", "solve_seconds")},
        "peak_bytes": peak_bytes(),
        "decision_json": None if found["decision"] is None else text(found["decision"]),
        "details_json": text({**found["details"], KEY: size_of(instance)}),
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
    from hetplan.formulations import family

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


def as_task(value: dict[str, Any]) -> Task:
    """Back from `Task.as_dict`."""
    return Task(**value)
