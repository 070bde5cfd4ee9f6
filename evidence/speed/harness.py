"""What every benchmark needs: a fresh process per measurement, its time and peak memory, tables,
the machine.

Each measurement runs in a new process of its own, after one warm-up that compiles the kernels, so
that peak memory is that of the one run and nothing is warm that would not be.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from typing import Any

from hetplan import __version__
from hetplan.files import to_json, write_text
from hetplan.studies.workers import peak_bytes, processor


@dataclass(frozen=True)
class Measured:
    """A call's value, its seconds by the wall clock, and the process's peak resident bytes."""

    value: Any
    seconds: float
    peak_bytes: int


def measured(
    function: Callable[..., Any], *arguments: Any, warm_up: Sequence[Any] | None = None
) -> Measured:
    """`function(*arguments)` in a fresh process; `warm_up`: arguments of a first call that is not
    timed.

    The function must be importable (top level of a module), its arguments and value picklable.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_timed, function, arguments, warm_up).result()


def _timed(
    function: Callable[..., Any], arguments: Sequence[Any], warm_up: Sequence[Any] | None
) -> Measured:
    if warm_up is not None:
        function(*warm_up)
    begun = time.perf_counter()
    value = function(*arguments)
    seconds = time.perf_counter() - begun
    return Measured(value, seconds, peak_resident_bytes())


def peak_resident_bytes() -> int:
    """Peak resident bytes of this process; raises RuntimeError where the system does not tell."""
    peak = peak_bytes()
    if peak is None:
        raise RuntimeError("this system does not tell a process's peak memory")
    return peak


def best_of(function: Callable[[], Any], repeats: int = 7) -> float:
    """Median seconds of `repeats` calls in this process, for calls of milliseconds."""
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        function()
        times.append(time.perf_counter() - begun)
    return sorted(times)[len(times) // 2]


def machine() -> dict[str, Any]:
    """Where and with what the figures were taken."""
    return {
        "date": date.today().isoformat(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "hetplan": __version__,
    }


def markdown(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; numbers as they come, None as a dash."""
    lines = [f"**{title}**", "", "| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += [
        "| " + " | ".join("–" if cell is None else str(cell) for cell in row) + " |" for row in rows
    ]
    return "\n".join(lines) + "\n"


def save(path: str | None, tables: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Print the tables with the machine; write them (`.md`) or every row (`.json`) when a path is
    given."""

    where = machine()
    text = (
        "\n".join(tables)
        + "\n"
        + ", ".join(f"{key} {value}" for key, value in where.items())
        + "\n"
    )
    print(text)
    if path is not None:
        json_wanted = path.endswith(".json")
        write_text(
            path,
            to_json({"machine": where, "rows": json.loads(json.dumps(list(rows)))})
            if json_wanted
            else text,
        )
