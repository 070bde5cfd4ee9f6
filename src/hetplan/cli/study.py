"""`hetplan study run`: many methods on many instances, every run a row that is kept; `study
report`: its findings."""

import contextlib
import fnmatch
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hetplan.cli.options import (
    GapOption,
    JsonOption,
    NativeOption,
    PluginOption,
    PngOption,
    PyomoOption,
    QuietOption,
    make_options,
    native_value,
    offer,
    require_option,
    split_list,
    target,
    whole_numbers,
)
from hetplan.cli.output import emit, note, stopping
from hetplan.errors import require
from hetplan.files import write_text
from hetplan.studies import page
from hetplan.studies.findings import Study, repriced
from hetplan.studies.page import charts, write_pictures
from hetplan.studies.rows import Runner, Tally, Task, arrow, carry_out, read_rows, tasks, write_rows
from hetplan.studies.workers import connected, run_on, run_tasks, slurm
from hetplan.text import Table, counted

SMOKE_SECONDS = 15.0
GIB = 2**30
LINE_EVERY = 20
LARGEST_SEED = 10**6


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
        typer.Option(
            "--threads", metavar="N", help="Threads of each run; default the cores, shared out."
        ),
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
    plugin: PluginOption = None

    def shares(self) -> tuple[int, int]:
        """Runs at a time, and the threads of each."""
        cores = os.cpu_count() or 1
        jobs = self.jobs or (1 if self.slurm else max(1, cores // (self.threads or 1)))
        return jobs, self.threads if self.threads is not None else max(1, cores // jobs)

    @contextlib.contextmanager
    def runner(self, stop: threading.Event) -> Iterator[Runner]:
        """What does the tasks."""
        require(
            self.scheduler is None or self.slurm is None,
            "cannot be used together",
            where="--scheduler, --slurm",
        )
        jobs, limit = self.shares()[0], None if self.memory is None else int(self.memory * GIB)
        if self.scheduler is None and self.slurm is None:
            yield lambda work: run_tasks(work, jobs, memory_bytes=limit, stop=stop.is_set)
            return

        if self.scheduler is not None:
            cluster = connected(self.scheduler)
        else:
            cluster = slurm(jobs, slurm_settings(self.slurm or []))
        with cluster as client:
            yield lambda work: run_on(client, work, memory_bytes=limit, stop=stop.is_set)


def run(
    workers: Workers,
    sets: Annotated[
        list[str] | None,
        typer.Argument(
            help="Sets of the library (papers, …), problems, instances, patterns, files, folders.",
            autocompletion=offer("sets"),
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Folder of the rows, of earlier ones too; default study-SETS.",
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--methods",
            "-m",
            metavar="NAME[,NAME…]|all|heuristics|exact-methods",
            help="Methods to run; each problem runs those that it has; default all.",
        ),
    ] = None,
    time_limit: Annotated[
        float, typer.Option("--time-limit", "-t", metavar="SECONDS", help="Seconds for each run.")
    ] = 60.0,
    seeds: Annotated[
        str, typer.Option("--seeds", metavar="N[,N…]", help="Seeds; one run for each.")
    ] = "0",
    gap: GapOption = None,
    native: NativeOption = None,
    pyomo_solver: PyomoOption = None,
    smoke: Annotated[
        bool,
        typer.Option("--smoke", help="Try tiny instances, 15 s a run: does everything work?"),
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Run methods on instances; each run is a row in DIR, written as it ends. Started again, it
    goes on.

    Time-outs, crashes and refusals are rows, too. Exit code 0 when every run has its row, 1 when
    stopped before.
    """
    require(
        sets or smoke,
        "no instances named",
        expected="a set such as papers, a problem, instances, files",
    )
    # the same sets find their rows again
    names = "-".join(re.sub(r"[^\w.]+", "-", name).strip("-") for name in sets or ["smoke"])
    folder = output or Path(f"study-{names}"[:86])
    require(
        folder.is_dir() or not folder.exists(), "is a file, expected a folder", where=str(folder)
    )
    arrow()
    options = make_options(
        time_limit=min(time_limit, SMOKE_SECONDS) if smoke else time_limit,
        gap=gap,
        threads=workers.shares()[1],
        native=native,
        pyomo_solver=pyomo_solver,
    )
    numbers = whole_numbers([seeds], "--seeds", 0, LARGEST_SEED)
    work = list(tasks(sets or ["smoke"], split_list(methods or ["all"]), numbers, options))
    stop = threading.Event()
    with stopping(stop), workers.runner(stop) as runner:
        tally = carry_out(work, folder, runner, (lambda tally: None) if quiet else show_progress)
    runs = {"runs": tally.total, "done": tally.done, "counts": dict(tally.counts)}
    return emit(
        {"folder": str(folder), **runs},
        summary(folder, work, tally),
        json=json,
        ok=tally.done == tally.total,
    )


def slurm_settings(texts: Sequence[str]) -> dict[str, Any]:
    """`["cores=2", "memory=8GB"]` as keyword arguments of dask_jobqueue.SLURMCluster."""
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        require_option(
            bool(equals) and name.isidentifier(), "--slurm", text, "NAME=VALUE, such as cores=2"
        )
        settings[name] = native_value(value)
    return settings


def show_progress(tally: Tally) -> None:
    """One line that changes in place on a terminal; a line now and then elsewhere."""
    over = tally.done == tally.total
    if sys.stderr.isatty():
        print(f"\r\x1b[K{tally.text()}", end="\n" if over else "", file=sys.stderr, flush=True)
    elif over or tally.done % LINE_EVERY == 0:
        note(tally.text())


def summary(folder: Path, work: Sequence[Task], tally: Tally) -> Iterator[Table]:
    """Rows of the whole study by problem, method and status."""
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


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a study.")],
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="PATTERN", help="Only instances whose names match."),
    ] = None,
    output: Annotated[
        Path | None, target("--output", "-o", metavar="FILE", help="The findings as a web page.")
    ] = None,
    markdown: Annotated[Path | None, target("--markdown", help="The tables as Markdown.")] = None,
    png: PngOption = None,
    packed: Annotated[
        Path | None,
        typer.Option("--rows", metavar="FILE", help="The rows as one Parquet file, to keep."),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Report a study's findings: on the terminal, as a page, as Markdown, as pictures; its rows in
    one file.

    Exit code 1 where rows contradict each other.
    """
    require(
        folder.is_dir(),
        "is no folder of a study",
        where=str(folder),
        expected="a folder",
    )
    rows = [r for r in read_rows(folder) if fnmatch.fnmatchcase(r["instance"], name or "*")]
    require(rows, "no run matches" if name else "holds no runs yet", where=str(folder), got=name)
    study, title = Study(rows), f"Gap study {folder.resolve().name}"
    if output is not None:
        write_text(output, page.document(title, page.lines(study)))
    if markdown is not None:
        write_text(markdown, page.markdown(study, title))
    if png is not None:
        write_pictures(
            png,
            {
                f"{problem}-{at}": made
                for problem in study.problems
                for at, made in enumerate(charts(study, problem).values())
            },
        )
    if packed is not None:
        write_rows(packed, rows)
    conflicts = [*study.conflicts(), *repriced(rows)]
    tables = (
        Table(
            f"{problem}: {counted(len(study.of(problem)), 'run')}",
            page.HEADER,
            tuple(page.cells(summary) for summary in study.summaries(problem)),
            right=tuple(range(2, len(page.HEADER))),
        )
        for problem in study.problems
    )
    problems = {
        problem: [
            {**asdict(summary), "worst": summary.worst and summary.worst["instance"]}
            for summary in study.summaries(problem)
        ]
        for problem in study.problems
    }
    emit({"folder": str(folder), "problems": problems, "conflicts": conflicts}, tables, json=json)
    note(*conflicts)
    return 1 if conflicts else 0
