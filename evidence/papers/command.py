"""`python -m evidence.papers PAPER`: a paper's tables and figures on the terminal, as a document, a
web page and pictures."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from evidence.papers import PAPERS, exhibits as exhibits_of
from hetplan.cli.options import JsonOption, PngOption, QuietOption, target
from hetplan.cli.output import emit, note
from hetplan.errors import check_name, require
from hetplan.files import write_text
from hetplan.studies import page
from hetplan.studies.charts import write_pictures


def report(
    paper: Annotated[
        str,
        typer.Argument(metavar="PAPER", help=", ".join(PAPERS)),
    ],
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="PATTERN", help="Only exhibits named so: 'Figure 1*'."),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="All rows: many minutes for some papers.")
    ] = False,
    output: Annotated[
        Path | None, target("--output", "-o", metavar="FILE", help="The JSON document.")
    ] = None,
    html: Annotated[
        Path | None, target("--html", help="A web page with tables and charts.")
    ] = None,
    png: PngOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Set a paper's tables and figures beside hetplan's, with what its text says and why ours
    differ.

    Ours is predicted, the paper's is measured. Each report takes two minutes at most; --full takes
    longer.
    """
    check_name("unknown paper", paper, PAPERS)
    exhibits, notes = exhibits_of(
        paper, name, full=full, tell=(lambda line: None) if quiet else note
    )
    require(exhibits, "no exhibit matches", where="--name", got=name)
    pictures = {e.name: made for e in exhibits if html or png if (made := e.chart())}
    tables = [e.table(() if at else notes) for at, e in enumerate(exhibits)]
    if html is not None:
        write_text(html, page.page_of_tables(f"{paper}: the paper and hetplan", tables, pictures))
    if png is not None:
        write_pictures(png, pictures)
    return emit(
        {"paper": paper, "notes": notes, "exhibits": [asdict(e) for e in exhibits]},
        tables,
        json=json,
        output=output,
    )
