"""`hetplan instances`: the packaged library, and checking of instance files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetplan.cli import completion, sources
from hetplan.cli.options import JsonOption
from hetplan.cli.output import check_target, note, print_json, print_tables
from hetplan.errors import InputError
from hetplan.text import Table, number_text, percent_text

if TYPE_CHECKING:
    from hetplan.instances.library import Entry
    from hetplan.instances.update import Change, Finding

app = typer.Typer(
    help="List, show, generate, validate and update instances.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command("list")
def show_list(
    problem: Annotated[
        str | None,
        typer.Option("--problem", help="Only this problem.", autocompletion=completion.problems),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="PATTERN", help="Like 'amp-*'.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """List the packaged instances with the best objective and bound known of each."""
    from hetplan.formulations import family
    from hetplan.instances.library import library

    if problem is not None:
        family(problem, where="--problem")
    rows = [summary(entry) for entry in library(problem, name)]
    if json:
        print_json({"instances": rows})
    else:
        header = ("problem", "name", "objective", "bound", "gap", "status", "proved by")
        cells = tuple(
            (
                row["problem"],
                row["name"],
                number_text(row["objective"], 8),
                number_text(row["bound"], 8),
                percent_text(row["gap"]),
                row["status"] or "-",
                row["proved_by"] or "-",
            )
            for row in rows
        )
        print_tables([Table("", header, cells, right=(2, 3, 4))])
    return 0


def summary(entry: Entry) -> dict[str, Any]:
    """One row of the list; what is not known is None."""
    best = entry.best_known()
    row: dict[str, Any] = {"problem": entry.problem, "name": entry.name}
    for key in ("objective", "bound", "gap", "status", "found_by", "proved_by"):
        row[key] = getattr(best, key) if best is not None else None
    return row


@app.command("show")
def show(
    instance: Annotated[
        str, typer.Argument(help="A name or a file.", autocompletion=completion.instances)
    ],
    best: Annotated[bool, typer.Option("--best", help="The best-known record instead.")] = False,
    json: JsonOption = False,
) -> int:
    """Show an instance: origin, size and best-known objective; with --json, the document itself."""
    from hetplan.instances.library import find

    entry = find(instance)
    known = entry.best_known() if entry is not None else None
    if best and known is None:
        raise InputError("no best-known record", got=instance)
    if json or best:
        document = (
            known.model_dump(mode="json")
            if best and known
            else sources.open_instance(instance).document()
        )
        print_json(document)
        return 0
    found = sources.open_instance(instance)
    rows = [("problem", f"{found.problem}: {found.family.title}"), ("origin", found.origin)]
    rows += [(key, size_text(value)) for key, value in found.document()["data"].items()]
    if known is not None:
        bound = (
            f"bound {number_text(known.bound, 8)} by {known.proved_by}"
            if known.proved_by
            else "no bound"
        )
        rows.append(
            ("best known", f"{number_text(known.objective, 8)} by {known.found_by}, {bound}")
        )
    print_tables([Table(found.name, ("", ""), tuple(rows))])
    return 0


def size_text(value: Any) -> str:
    """A value of the data, or how large it is."""
    if isinstance(value, list):
        return f"{len(value)} entries"
    return f"{', '.join(value)}" if isinstance(value, dict) else str(value)


@app.command("generate")
def generate(
    problem: Annotated[
        str, typer.Argument(help="The problem.", autocompletion=completion.problems)
    ],
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Another seed, another instance.")
    ] = 0,
    size: Annotated[
        str, typer.Option("--size", metavar="small|medium", help="At most 8 or 32 devices.")
    ] = "small",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Default: standard output."),
    ] = None,
) -> int:
    """Make a random instance of a problem: catalogued devices, a published model, a network as they
    are sold."""
    from hetplan.instances.envelope import save_instance
    from hetplan.instances.generate import draw

    check_target(output)
    made = draw(problem, seed, size)
    if output is None:
        print_json(made.document())
    else:
        save_instance(made, output)
    return 0


@app.command("validate")
def validate(
    files: Annotated[list[Path], typer.Argument(help="Instance files.")], json: JsonOption = False
) -> int:
    """Check instance files against their schemas.

    Exit code 2 when one cannot be used.
    """
    from hetplan.instances.envelope import load_instance

    rows: list[dict[str, Any]] = []
    for path in files:
        try:
            found = load_instance(path)
        except InputError as error:
            rows.append({"file": str(path), "valid": False, "error": str(error)})
        else:
            rows.append(
                {"file": str(path), "valid": True, "problem": found.problem, "name": found.name}
            )
    if json:
        print_json({"files": rows})
    for row in rows:
        if not row["valid"]:
            typer.echo(f"hetplan: error: {row['error']}", err=True)
        elif not json:
            typer.echo(f"{row['file']}: {row['problem']} instance {row['name']!r}, valid")
    return 0 if all(row["valid"] for row in rows) else 2


@app.command("update")
def update(
    sources_: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE…",
            help="Outputs of `solve --json` (- for standard input), folders of studies.",
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder", metavar="DIR", help="Your instances; default the packaged library."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tell what would change; write nothing.")
    ] = False,
    json: JsonOption = False,
) -> int:
    """Better the best-known records by what runs found: every decision is priced again before it is
    believed.

    Objectives only go down. Bounds only go up, come from exact methods alone, and never above a
    decision that holds.
    Exit code 1 when something is refused; what is good of the rest is written nevertheless.
    """
    from hetplan.instances.update import changes, shelf, write

    found = list(changes(shelf(folder), findings(sources_)))
    for change in found:
        if change.news and not dry_run:
            write(change)
    refused = [line for change in found for line in change.refused]
    if json:
        print_json({"instances": [change.document() for change in found], "refused": refused})
    else:
        print_tables([change_table(found, dry_run)])
    for line in refused:
        note(f"refused: {line}")
    return 1 if refused else 0


def findings(given: list[str]) -> Iterator[Finding]:
    """What the sources say, in order; raises InputError."""
    from hetplan.instances.update import findings_of_answers

    for argument in given:
        if os.path.isdir(argument):
            from hetplan.studies.records import findings_of_rows
            from hetplan.studies.rows import read_rows

            yield from findings_of_rows(read_rows(Path(argument)), argument)
        else:
            value, where = sources.read_document(argument)
            yield from findings_of_answers(value, where)


def change_table(found: list[Change], dry_run: bool) -> Table:
    """The records that change, and how many stay."""
    cells = []
    for change in found:
        if change.news and change.after is not None:
            before, after = change.before, change.after
            cells.append(
                (
                    f"{change.entry.problem}/{change.entry.name}",
                    number_text(before.objective if before else None, 8),
                    number_text(after.objective, 8),
                    number_text(before.bound if before else None, 8),
                    number_text(after.bound, 8),
                    after.found_by,
                    after.proved_by or "-",
                )
            )
    word = "would change" if dry_run else "changed"
    return Table(
        f"{len(cells)} of {len(found)} records {word}",
        ("instance", "objective", "now", "bound", "now", "found by", "proved by"),
        tuple(cells),
        right=(1, 2, 3, 4),
    )
