"""`hetplan study report`: a study's findings, or a paper's experiments and their predictions."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetplan.cli import completion
from hetplan.cli.options import JsonOption, QuietOption, target
from hetplan.cli.output import emit, note
from hetplan.errors import InputError
from hetplan.files import write_bytes, write_text
from hetplan.formulations import FAMILIES, family
from hetplan.solvers.registry import load
from hetplan.text import Table

if TYPE_CHECKING:
    from hetplan.studies.findings import Study


def report(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="DIR|PROBLEM",
            help="The folder of a study, or a problem whose paper has experiments to report.",
            autocompletion=completion.problems,
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="PATTERN", help="Only experiments or instances whose names match."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        target(
            "--output",
            "-o",
            metavar="FILE",
            help="Of a study, a web page; of a paper, the JSON document.",
        ),
    ] = None,
    markdown: Annotated[
        Path | None,
        target("--markdown", help="A study's tables as Markdown."),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option("--png", metavar="DIR", help="A study's pictures as PNG files in a folder."),
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option("--rows", metavar="FILE", help="A study's rows as one Parquet file, to keep."),
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Report a study's findings, or predict a paper's experiments beside what it measured."""
    if os.path.isdir(subject):
        return report_study(Path(subject), name, output, markdown, png, rows, json=json)
    for option, value in (("--markdown", markdown), ("--png", png), ("--rows", rows)):
        if value is not None:
            raise InputError("is for the folder of a study", where=option, got=subject)
    return report_paper(subject, name, output, json=json, quiet=quiet)


def report_paper(
    problem: str, name: str | None, output: Path | None, *, json: bool, quiet: bool
) -> int:
    """A paper's experiments with its methods, its baselines and the optimum."""
    chosen = family(problem)
    if chosen.report is None:
        having = " or ".join(other for other in FAMILIES if family(other).report is not None)
        raise InputError("problem has no report", got=problem, expected=having)
    tables, report = load(chosen.report)(name, None if quiet else note)
    if not report["rows"]:
        raise InputError("no experiment matches", where="--name", got=name)
    document = {
        "problem": problem,
        "predicted": True,
        **report,
        "notes": [line for table in tables for line in table.notes],
    }
    emit(document, tables, json=json, output=output)
    return 0


def report_study(
    folder: Path,
    name: str | None,
    output: Path | None,
    markdown: Path | None,
    png: Path | None,
    packed: Path | None,
    *,
    json: bool,
) -> int:
    """A study's findings: on the terminal, as a page, as Markdown, as pictures; its rows in one
    file.

    Exit code 1 where rows contradict each other.
    """
    import fnmatch

    from hetplan.studies import page
    from hetplan.studies.findings import Study
    from hetplan.studies.rows import read_rows, write_rows

    rows = [
        row
        for row in read_rows(folder)
        if name is None or fnmatch.fnmatchcase(row["instance"], name)
    ]
    if not rows:
        raise InputError(
            "no run matches" if name else "holds no runs yet", where=str(folder), got=name
        )
    study, title = Study(rows), f"Gap study {folder.resolve().name}"
    if output is not None:
        write_text(output, page.html(study, title))
    if markdown is not None:
        write_text(markdown, page.markdown(study, title))
    if png is not None:
        write_pictures(study, png)
    if packed is not None:
        write_rows(packed, rows)
    conflicts = study.conflicts()
    tables = (
        Table(
            f"{problem}: {len(study.of(problem))} runs",
            page.HEADER,
            tuple(page.cells(summary) for summary in study.summaries(problem)),
            right=tuple(range(2, len(page.HEADER))),
        )
        for problem in study.problems
    )
    document = {"folder": str(folder), "problems": figures(study), "conflicts": conflicts}
    emit(document, tables, json=json)
    for line in conflicts:
        note(line)
    return 1 if conflicts else 0


def figures(study: Study) -> dict[str, list[dict[str, Any]]]:
    """The summaries as JSON types."""
    return {
        problem: [
            {
                **asdict(summary),
                "worst": None if summary.worst is None else summary.worst["instance"],
            }
            for summary in study.summaries(problem)
        ]
        for problem in study.problems
    }


def write_pictures(study: Study, folder: Path) -> None:
    """One PNG file per chart, named after problem and number."""
    from hetplan.studies.charts import as_png, charts

    if folder.exists() and not folder.is_dir():
        raise InputError("is a file, expected a folder", where=str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    for problem in study.problems:
        for at, made in enumerate(charts(study, problem).values()):
            write_bytes(folder / f"{problem}-{at}.png", as_png(made))
