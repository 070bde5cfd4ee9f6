"""`hetplan instances`: the packaged library, instance files, their schemas and models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetplan.cli import completion, sources
from hetplan.cli.options import InstanceArgument, JsonOption, target
from hetplan.cli.output import emit, note, print_json
from hetplan.errors import InputError
from hetplan.formulations import family
from hetplan.solvers.options import Options
from hetplan.solvers.registry import load
from hetplan.solvers.run import Run
from hetplan.text import Table, number_text, percent_text

if TYPE_CHECKING:
    from hetplan.instances.library import Entry
    from hetplan.instances.update import Change, Finding

ProblemOption = Annotated[
    str | None,
    typer.Option(
        "--problem",
        help="Only this problem; `schema decision` needs one.",
        autocompletion=completion.problems,
    ),
]


def show_list(
    problem: ProblemOption = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="PATTERN", help="Like 'amp-*'.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """List the packaged instances with the best objective and bound known of each."""
    from hetplan.instances.library import library

    if problem is not None:
        family(problem, where="--problem")
    rows = [summary(entry) for entry in library(problem, name)]
    table = Table.of(
        "",
        rows,
        {
            "problem": lambda row: row["problem"],
            "name": lambda row: row["name"],
            "objective": lambda row: number_text(row["objective"], 8),
            "bound": lambda row: number_text(row["bound"], 8),
            "gap": lambda row: percent_text(row["gap"]),
            "status": lambda row: row["status"] or "-",
            "proved by": lambda row: row["proved_by"] or "-",
        },
        right=(2, 3, 4),
    )
    emit({"instances": rows}, [table], json=json)
    return 0


def summary(entry: Entry) -> dict[str, Any]:
    """One row of the list; what is not known is None."""
    best = entry.best_known()
    row: dict[str, Any] = {"problem": entry.problem, "name": entry.name}
    for key in ("objective", "bound", "gap", "status", "found_by", "proved_by"):
        row[key] = getattr(best, key) if best is not None else None
    return row


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
    if best:
        if known is None:
            raise InputError("no best-known record", got=instance)
        print_json(known.model_dump(mode="json"))
        return 0
    opened = sources.open_instance(instance)
    document = opened.document()
    rows = [("problem", f"{opened.problem}: {opened.family.title}"), ("origin", opened.origin)]
    rows += [(key, size_text(value)) for key, value in document["data"].items()]
    if known is not None:
        bound = (
            f"bound {number_text(known.bound, 8)} by {known.proved_by}"
            if known.proved_by
            else "no bound"
        )
        rows.append(
            ("best known", f"{number_text(known.objective, 8)} by {known.found_by}, {bound}")
        )
    emit(document, [Table(opened.name, ("", ""), tuple(rows))], json=json)
    return 0


def size_text(value: Any) -> str:
    """A value of the data, or how large it is."""
    if isinstance(value, list):
        return f"{len(value)} entries"
    return f"{', '.join(value)}" if isinstance(value, dict) else str(value)


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
        target("--output", "-o", help="Default: standard output."),
    ] = None,
) -> int:
    """Make a random instance of a problem: catalogued devices, a published model, a network as they
    are sold."""
    from hetplan.instances.generate import draw
    from hetplan.instances.library import save_instance

    drawn = draw(problem, seed, size)
    if output is None:
        print_json(drawn.document())
    else:
        save_instance(drawn, output)
    return 0


def validate(
    files: Annotated[list[Path], typer.Argument(help="Instance files.")], json: JsonOption = False
) -> int:
    """Check instance files against their schemas.

    Exit code 2 when one cannot be used.
    """
    from hetplan.instances.library import load_instance

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

    looked_at = list(changes(shelf(folder), findings(sources_)))
    for change in looked_at:
        if change.news and not dry_run:
            write(change)
    refused = [line for change in looked_at for line in change.refused]
    document = {"instances": [change.document() for change in looked_at], "refused": refused}
    emit(document, [change_table(looked_at, dry_run)], json=json)
    for line in refused:
        note(f"refused: {line}")
    return 1 if refused else 0


def findings(given: list[str]) -> Iterator[Finding]:
    """What the sources say, in order; raises InputError."""
    from hetplan.instances.update import findings_of_answers

    for argument in given:
        if os.path.isdir(argument):
            from hetplan.studies.rows import findings_of_rows, read_rows

            yield from findings_of_rows(read_rows(Path(argument)), argument)
        else:
            value, where = sources.read_document(argument)
            yield from findings_of_answers(value, where)


def change_table(looked_at: list[Change], dry_run: bool) -> Table:
    """The records that change, and how many stay."""
    pairs = [(c, c.before, c.after) for c in looked_at if c.news]
    changed = [(c, before, after) for c, before, after in pairs if after is not None]
    word = "would change" if dry_run else "changed"
    return Table(
        f"{len(changed)} of {len(looked_at)} records {word}",
        ("instance", "objective", "now", "bound", "now", "found by", "proved by"),
        tuple(
            (
                f"{change.entry.problem}/{change.entry.name}",
                number_text(before.objective if before else None, 8),
                number_text(after.objective, 8),
                number_text(before.bound if before else None, 8),
                number_text(after.bound, 8),
                after.found_by,
                after.proved_by or "-",
            )
            for change, before, after in changed
        ),
        right=(1, 2, 3, 4),
    )


def export_model(
    instance: InstanceArgument,
    output: Annotated[
        Path,
        target(
            "--output",
            "-o",
            metavar="FILE",
            help=".mps or .lp: the method milp's; .pb or .pbtxt: the method cp-sat's.",
        ),
    ],
    json: JsonOption = False,
) -> int:
    """Write an instance's models for other solvers: MPS or LP files, or CP-SAT protocol buffers.

    A method with one model per configuration writes as many files, numbered, less those that bounds
    exclude.
    """
    from hetplan.solvers.export import Collector, method_of

    method = method_of(output)
    posed = sources.open_instance(instance)
    collector = Collector()
    outcome = posed.family.method(method).load()(posed.data, Run(Options(), tap=collector))
    if not collector.models:
        reason = outcome.message or f"{method} needs no model for it"
        raise InputError(f"has no model to export: {reason}", where=posed.name)
    exported = collector.write(output)
    table = Table.of(
        f"{posed.name}: models of {method}",
        exported,
        {
            "file": lambda model: model.file,
            "rows": lambda model: f"{model.rows}",
            "columns": lambda model: f"{model.columns}",
            "discrete": lambda model: f"{model.discrete}",
            "objective per second": lambda model: number_text(model.per_unit, 8),
            "plus seconds": lambda model: number_text(model.offset),
        },
        right=(1, 2, 3, 4, 5),
    )
    models = [asdict(model) for model in exported]
    emit({"instance": posed.name, "method": method, "models": models}, [table], json=json)
    return 0


class Kind(StrEnum):
    """Files that have a schema."""

    INSTANCE = "instance"
    DECISION = "decision"
    PLAN = "plan"
    CLUSTER = "cluster"
    PROFILE = "profile"
    MODEL = "model"


# Kind -> the pydantic model of its file.
MODELS = {
    Kind.PLAN: "hetplan.runtime.plan:Plan",
    Kind.CLUSTER: "hetplan.profiling.cluster:ClusterFile",
    Kind.PROFILE: "hetplan.profiling.profile:Profile",
    Kind.MODEL: "hetplan.profiling.model_files:ModelFile",
}


def schema(
    kind: Annotated[Kind, typer.Argument(help="Which file.")],
    problem: ProblemOption = None,
    json: JsonOption = False,
) -> int:
    """Print the JSON schema of a file (JSON with and without --json)."""
    if problem is not None and kind not in (Kind.INSTANCE, Kind.DECISION):
        raise InputError(
            f"--problem does not go with schema {kind}", expected="instance or decision"
        )
    print_json(schema_document(kind, problem))
    return 0


def schema_document(kind: Kind, problem: str | None = None) -> dict[str, Any]:
    """The schema as JSON types; raises InputError for an unknown problem."""
    if kind is Kind.INSTANCE:
        from hetplan.instances.library import instance_schema

        return instance_schema(problem)
    if kind is Kind.DECISION:
        if problem is None:
            raise InputError("schema decision needs --problem")
        document: dict[str, Any] = family(problem).load_decision().model_json_schema()
    else:
        document = load(MODELS[kind]).model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document}
