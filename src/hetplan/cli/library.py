"""`hetplan instances`: the packaged library, and checking of instance files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetplan.cli import completion, sources
from hetplan.cli.options import JsonOption
from hetplan.cli.output import check_target, print_json, print_tables
from hetplan.errors import InputError
from hetplan.text import Table, number_text, percent_text

if TYPE_CHECKING:
    from hetplan.instances.library import Entry

app = typer.Typer(
    help="List, show, generate and validate instances.", rich_markup_mode=None, pretty_exceptions_enable=False
)


@app.command("list")
def show_list(
    problem: Annotated[
        str | None,
        typer.Option("--problem", help="Only this problem.", autocompletion=completion.problems),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", metavar="PATTERN", help="Like 'amp-*'.")] = None,
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
    instance: Annotated[str, typer.Argument(help="A name or a file.", autocompletion=completion.instances)],
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
            known.model_dump(mode="json") if best and known else sources.open_instance(instance).document()
        )
        print_json(document)
        return 0
    found = sources.open_instance(instance)
    rows = [("problem", f"{found.problem}: {found.family.title}"), ("origin", found.origin)]
    rows += [(key, size_text(value)) for key, value in found.document()["data"].items()]
    if known is not None:
        bound = f"bound {number_text(known.bound, 8)} by {known.proved_by}" if known.proved_by else "no bound"
        rows.append(("best known", f"{number_text(known.objective, 8)} by {known.found_by}, {bound}"))
    print_tables([Table(found.name, ("", ""), tuple(rows))])
    return 0


def size_text(value: Any) -> str:
    """A value of the data, or how large it is."""
    if isinstance(value, list):
        return f"{len(value)} entries"
    return f"{', '.join(value)}" if isinstance(value, dict) else str(value)


@app.command("generate")
def generate(
    problem: Annotated[str, typer.Argument(help="The problem.", autocompletion=completion.problems)],
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Another seed, another instance.")] = 0,
    size: Annotated[
        str, typer.Option("--size", metavar="small|medium", help="At most 8 or 32 devices.")
    ] = "small",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: standard output.")
    ] = None,
) -> int:
    """Make a random instance of a problem: catalogued devices, a published model, a network as they are sold."""
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
            rows.append({"file": str(path), "valid": True, "problem": found.problem, "name": found.name})
    if json:
        print_json({"files": rows})
    for row in rows:
        if not row["valid"]:
            typer.echo(f"hetplan: error: {row['error']}", err=True)
        elif not json:
            typer.echo(f"{row['file']}: {row['problem']} instance {row['name']!r}, valid")
    return 0 if all(row["valid"] for row in rows) else 2
