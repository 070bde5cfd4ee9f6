"""`hetplan study run`: many methods on many instances, every run a row that is kept."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetplan.cli import completion
from hetplan.cli.options import (
    GapOption,
    GroupWithDefault,
    JsonOption,
    NativeOptions,
    QuietOption,
    make_options,
    native_value,
    require,
    split_list,
)
from hetplan.cli.output import emit, note
from hetplan.cli.progress import stopping
from hetplan.errors import InputError
from hetplan.text import Table

if TYPE_CHECKING:
    from hetplan.studies.rows import Runner, Tally, Task

SMOKE_SECONDS = 5.0
GIB = 2**30
LINE_EVERY = 20


class StudyGroup(GroupWithDefault):
    """`hetplan study papers` is `hetplan study run papers`."""

    default = "run"


@dataclass(frozen=True, kw_only=True)
class Workers:
    """What carries out the runs: this machine's cores, a Dask cluster, or Slurm jobs."""

    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            "-j",
            metavar="N",
            help="Runs at a time, default one per core; of --slurm: its jobs.",
            min=1,
        ),
    ] = None
    threads: Annotated[
        int | None,
        typer.Option("--threads", metavar="N", help="Of each run; default the cores shared out."),
    ] = None
    memory: Annotated[
        float | None,
        typer.Option(
            "--memory-gib", metavar="GIB", help="Address space of each run; default no limit."
        ),
    ] = None
    scheduler: Annotated[
        str | None,
        typer.Option(
            "--scheduler", metavar="ADDRESS", help="A Dask scheduler, such as tcp://host:8786."
        ),
    ] = None
    slurm: Annotated[
        list[str] | None,
        typer.Option(
            "--slurm",
            metavar="NAME=VALUE",
            help="Start Slurm jobs with these settings of dask-jobqueue.",
        ),
    ] = None

    def shares(self) -> tuple[int, int]:
        """Runs at a time, and the threads of each."""
        cores = os.cpu_count() or 1
        jobs = self.jobs or (1 if self.slurm else max(1, cores // (self.threads or 1)))
        return jobs, self.threads if self.threads is not None else max(1, cores // jobs)

    @contextlib.contextmanager
    def runner(self, stop: threading.Event) -> Iterator[Runner]:
        """What does the tasks."""
        if self.scheduler is not None and self.slurm is not None:
            raise InputError("cannot be used together", where="--scheduler, --slurm")
        jobs, limit = self.shares()[0], None if self.memory is None else int(self.memory * GIB)
        if self.scheduler is None and self.slurm is None:
            from hetplan.studies.workers import run_tasks

            yield lambda work: run_tasks(work, jobs, memory_bytes=limit, stop=stop.is_set)
            return
        from hetplan.studies import distributed

        cluster = (
            distributed.connected(self.scheduler)
            if self.scheduler is not None
            else distributed.slurm(jobs, slurm_settings(self.slurm or []))
        )
        with cluster as client:
            yield lambda work: distributed.run_on(
                client, work, memory_bytes=limit, stop=stop.is_set
            )


def run(
    workers: Workers,
    native: NativeOptions,
    sets: Annotated[
        list[str] | None,
        typer.Argument(
            help="Sets of the library (papers, …), problems, instances, patterns, files, folders.",
            autocompletion=completion.sets,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Where the rows go and are looked for; default study-SETS.",
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--methods",
            "-m",
            metavar="NAME[,NAME…]|all|heuristics|exact-methods",
            help="Of each problem, those it has; default all.",
        ),
    ] = None,
    time_limit: Annotated[
        float, typer.Option("--time-limit", "-t", metavar="SECONDS", help="For each run.")
    ] = 60.0,
    seeds: Annotated[
        str, typer.Option("--seeds", metavar="N[,N…]", help="One run for each.")
    ] = "0",
    gap: GapOption = None,
    smoke: Annotated[
        bool,
        typer.Option("--smoke", help="Tiny instances, 5 s for each run: whether everything works."),
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Run methods on instances; each run is a row in DIR, written as it ends. Started again, it
    goes on.

    Time-outs, crashes and refusals are rows, too. Exit code 0 when every run has its row, 1 when
    stopped before.
    """
    from hetplan.studies.rows import arrow, carry_out, tasks

    if not sets and not smoke:
        expected = "a set such as papers, a problem, instances, files"
        raise InputError("no instances named", expected=expected)
    folder = output or Path(folder_name(sets or ["smoke"]))
    if folder.exists() and not folder.is_dir():
        raise InputError("is a file, expected a folder", where=str(folder))
    arrow()
    options = make_options(
        time_limit=min(time_limit, SMOKE_SECONDS) if smoke else time_limit,
        gap=gap,
        threads=workers.shares()[1],
        **vars(native),
    )
    work = list(tasks(sets or ["smoke"], split_list(methods or ["all"]), seed_list(seeds), options))
    stop = threading.Event()
    with stopping(stop), workers.runner(stop) as runner, display(quiet) as show:
        tally = carry_out(work, folder, runner, show)
    document = {
        "folder": str(folder),
        "runs": tally.total,
        "done": tally.done,
        "counts": dict(tally.counts),
    }
    emit(document, summary(folder, work, tally), json=json)
    return 0 if tally.done == tally.total else 1


def seed_list(text: str) -> list[int]:
    """`"0,1,2"` as numbers, each once; raises InputError."""
    parts = split_list([text])
    usable = bool(parts) and all(part.isdecimal() and len(part) < 19 for part in parts)
    require(usable, "--seeds", text, "whole numbers from 0: 0,1,2")
    return list(dict.fromkeys(int(part) for part in parts))


def folder_name(sets: Sequence[str]) -> str:
    """The folder of a study of these sets: the same sets find their rows again."""
    return "study-" + "-".join(re.sub(r"[^\w.]+", "-", name).strip("-") for name in sets)[:80]


def slurm_settings(texts: Sequence[str]) -> dict[str, Any]:
    """`["cores=2", "memory=8GB"]` as keyword arguments of dask_jobqueue.SLURMCluster."""
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        usable = bool(equals) and name.isidentifier()
        require(usable, "--slurm", text, "NAME=VALUE, such as cores=2")
        settings[name] = native_value(value)
    return settings


@contextlib.contextmanager
def display(quiet: bool) -> Iterator[Callable[[Tally], None]]:
    """A progress bar on a terminal; a line now and then elsewhere."""
    if quiet:
        yield lambda tally: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
            number = bar.add_task("", total=None)

            def update(tally: Tally) -> None:
                counts = ", ".join(f"{n} {status}" for status, n in sorted(tally.counts.items()))
                bar.update(number, total=tally.total, completed=tally.done, description=counts)

            yield update
    else:

        def line(tally: Tally) -> None:
            if tally.done % LINE_EVERY == 0 or tally.done == tally.total:
                note(tally.text())

        yield line


def summary(folder: Path, work: Sequence[Task], tally: Tally) -> Iterator[Table]:
    """Rows of the whole study by problem, method and status."""
    from hetplan.studies.rows import read_rows

    wanted = {task.key for task in work}
    rows = [row for row in read_rows(folder) if row["key"] in wanted] if tally.done else []
    counts = Counter((row["problem"], row["method"], row["status"]) for row in rows)
    statuses = sorted({status for _, _, status in counts})
    cells = tuple(
        (problem, method, *(str(counts[problem, method, status] or "-") for status in statuses))
        for problem, method in dict.fromkeys((task.problem, task.method) for task in work)
    )
    header = ("problem", "method", *statuses)
    yield Table(f"{folder}: {tally.text()}", header, cells, right=tuple(range(2, len(header))))
