"""`hetplan study run` runs many methods on many instances and keeps a row for every run;
`hetplan study report` reports the findings of the rows."""

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

from hetplan.cli.help_page import described
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
    number,
    offer,
    require_option,
    split_list,
    target,
    usable_folder,
    whole_numbers,
)
from hetplan.cli.output import emit, few_lines, note, stopping
from hetplan.errors import require
from hetplan.files import try_folder, write_text
from hetplan.studies import page
from hetplan.studies.charts import charts, write_pictures
from hetplan.studies.findings import Study, repriced
from hetplan.studies.rows import (
    FOLDER,
    Row,
    Runner,
    Tally,
    Task,
    arrow,
    carry_out,
    kept_rows,
    tasks,
    write_rows,
)
from hetplan.studies.workers import GIB, check_memory_limit, connected, run_on, run_tasks, slurm
from hetplan.text import Table, counted

SMOKE_SECONDS = 15.0  # the most seconds of a run under --smoke
LINE_EVERY = 20  # runs between two lines of progress where stderr is no terminal
LARGEST_SEED = 10**6  # far more seeds than any study runs; every solver takes seeds up to it


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The options that say where the runs take place: on this machine's cores, on a Dask cluster,
    or in Slurm jobs."""

    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            "-j",
            metavar="N",
            help="Runs at a time, default one per core; with --slurm the number of Slurm jobs.",
            min=1,
        ),
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads", metavar="N", help="Threads of each run; default an equal share of cores."
        ),
    ] = None
    memory: Annotated[
        float | None,
        number(
            "--memory-gib",
            least=2**-10,
            most=2**23,
            metavar="GIB",
            help="Address space of each run; default no limit.",
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

    def jobs_and_threads(self) -> tuple[int, int]:
        """(number of runs at a time, threads of each run)."""
        cores = os.cpu_count() or 1
        if self.jobs:
            jobs = self.jobs
        elif self.slurm:
            jobs = 1  # one Slurm job: the cores of this machine say nothing of the cluster's
        else:
            jobs = max(1, cores // (self.threads or 1))
        threads = self.threads if self.threads is not None else max(1, cores // jobs)
        return jobs, threads

    @contextlib.contextmanager
    def runner(self, stop: threading.Event) -> Iterator[Runner]:
        """A context with the function that runs a study's tasks. `stop` ends the runs early."""
        require(
            self.scheduler is None or self.slurm is None,
            "cannot be used together",
            where="--scheduler, --slurm",
        )
        jobs, _ = self.jobs_and_threads()
        limit = None if self.memory is None else int(self.memory * GIB)
        if self.scheduler is None and self.slurm is None:
            if limit is not None:
                check_memory_limit(limit)
            yield lambda work: run_tasks(work, jobs, memory_bytes=limit, stop=stop.is_set)
            return

        if self.scheduler is not None:
            cluster = connected(self.scheduler)
        else:
            cluster = slurm(jobs, slurm_settings(self.slurm or []))
        with cluster as client:
            yield lambda work: run_on(client, work, memory_bytes=limit, stop=stop.is_set)


@described(
    examples=(
        (
            "All methods on the papers' instances, a minute a run",
            "hetplan study run papers --methods all --time-limit 60 -o papers",
        ),
        ("Whether everything works here", "hetplan study run --smoke"),
    ),
)
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
            callback=usable_folder,
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
    stopped before, 3 when methods contradict each other.
    """
    require(
        sets or smoke,
        "no instances named",
        expected="a set such as papers, a problem, instances, files",
    )
    # The folder's name depends on the sets alone, so that a second call continues the study.
    names = "-".join(re.sub(r"[^\w.]+", "-", name).strip("-") for name in sets or ["smoke"])
    folder = output or Path(f"study-{names[:80]}")  # a file system takes 255 bytes
    require(
        os.path.isdir(folder) or not os.path.exists(folder),
        "is a file, expected a folder",
        where=str(folder),
    )
    arrow()  # raises where pyarrow is missing, before any run
    _, threads = workers.jobs_and_threads()
    options = make_options(
        time_limit=min(time_limit, SMOKE_SECONDS) if smoke else time_limit,
        gap=gap,
        threads=threads,
        native=native,
        pyomo_solver=pyomo_solver,
    )
    numbers = whole_numbers([seeds], "--seeds", 0, LARGEST_SEED)
    work = list(tasks(sets or ["smoke"], split_list(methods or ["all"]), numbers, options))
    try_folder(folder / FOLDER)  # before the first run, whose row would be lost
    stop = threading.Event()
    watch = show_nothing if quiet else show_progress
    with stopping(stop), workers.runner(stop) as runner:
        tally = carry_out(work, folder, runner, watch, report_damaged_rows)
    rows = rows_of(folder, work) if tally.done else []
    contradictions = Study(rows).conflicts()
    document = {
        "folder": str(folder),
        "runs": tally.total,
        "done": tally.done,
        "counts": dict(tally.counts),
        "contradictions": contradictions,
    }
    table = summary(f"{folder}: {tally.text()}", rows, work)
    code = emit(document, [table], json=json, ok=tally.done == tally.total)
    note(*(f"error: {line}" for line in contradictions))
    return 3 if contradictions else code


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
    """Show a study's progress on stderr: in one line that changes in place on a terminal, elsewhere
    in a new line every LINE_EVERY runs."""
    over = tally.done == tally.total
    if sys.stderr.isatty():
        # "\r" goes back to the line's beginning, "\x1b[K" erases the line.
        print(f"\r\x1b[K{tally.text()}", end="\n" if over else "", file=sys.stderr, flush=True)
    elif over or tally.done % LINE_EVERY == 0:
        note(tally.text())


def show_nothing(tally: Tally) -> None:
    """Take note of a study's progress without showing it, for --quiet."""


def report_damaged_rows(faults: Sequence[str]) -> None:
    """Show on stderr which rows of a study are damaged, so that their runs are made again."""
    note(*few_lines([f"{fault}; its run is made again" for fault in faults]))


def rows_of(folder: Path, work: Sequence[Task]) -> list[Row]:
    """The rows of a study's tasks. The folder may have rows of other methods and options, too."""
    keys = {task.key for task in work}
    return [row for row in kept_rows(folder).rows if row["key"] in keys]


def summary(title: str, rows: Sequence[Row], work: Sequence[Task]) -> Table:
    """The table of a study's tasks: the number of rows of each problem and method by status."""
    counts = Counter((row["problem"], row["method"], row["status"]) for row in rows)
    statuses = sorted({status for _, _, status in counts})
    lines = []
    for problem, method in dict.fromkeys((task.problem, task.method) for task in work):
        numbers = [str(counts[problem, method, status] or "-") for status in statuses]
        lines.append((problem, method, *numbers))
    header = ("problem", "method", *statuses)
    number_columns = tuple(range(2, len(header)))
    return Table(title, header, tuple(lines), right=number_columns)


@described(
    examples=(("The findings as one web page", "hetplan study report my-study -o report.html"),),
)
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
        target("--rows", help="The rows as one Parquet file, to keep."),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Report a study's findings: on the terminal, as a page, as Markdown, as pictures; its rows in
    one file.

    Exit code 3 where rows contradict each other, 1 where a decision or a bound does not hold.
    """
    require(
        os.path.isdir(folder),
        "is no folder of a study",
        where=str(folder),
        expected="a folder",
    )
    pattern = name or "*"
    kept = kept_rows(folder)
    note(*few_lines([f"left out: {fault}" for fault in kept.faults]))
    rows = [row for row in kept.rows if fnmatch.fnmatchcase(row["instance"], pattern)]
    require(rows or name is None, "no run matches", where=str(folder), got=name)
    require(rows, "holds no runs yet", where=str(folder))
    study = Study(rows)
    title = f"Gap study {folder.resolve().name}"
    if output is not None:
        write_text(output, page.document(title, page.page_lines(study)))
    if markdown is not None:
        write_text(markdown, page.markdown(study, title))
    if png is not None:
        pictures = {}
        for problem in study.problems:
            for number, picture in enumerate(charts(study, problem).values()):
                pictures[f"{problem}-{number}"] = picture
        write_pictures(png, pictures)
    if packed is not None:
        write_rows(packed, rows)
    contradictions = study.conflicts()
    conflicts = [*contradictions, *repriced(rows)]
    tables = (
        Table(
            f"{problem}: {counted(len(study.of(problem)), 'run')}",
            page.HEADER,
            tuple(page.cells(summary) for summary in study.summaries(problem)),
            right=tuple(range(2, len(page.HEADER))),
        )
        for problem in study.problems
    )
    problems = {problem: summary_entries(study, problem) for problem in study.problems}
    document = {
        "folder": str(folder),
        "problems": problems,
        "conflicts": conflicts,
        "contradicted": [row["key"] for row in rows if study.contradicted(row)],
    }
    if kept.faults:
        document["damaged"] = kept.faults
    emit(document, tables, json=json)
    note(*conflicts)
    if contradictions:
        return 3
    return 1 if conflicts else 0


def summary_entries(study: Study, problem: str) -> list[dict[str, Any]]:
    """The summaries of a problem's methods as JSON types, where the worst run is given by its
    instance's name."""
    entries = []
    for summary in study.summaries(problem):
        worst_instance = None if summary.worst is None else summary.worst["instance"]
        entries.append({**asdict(summary), "worst": worst_instance})
    return entries
