"""The commands `hetplan instances`: they list, show, generate, check, update and export instances,
and print the schemas of hetplan's files."""

import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

from hetplan.cli.help_page import described
from hetplan.cli.options import (
    InstanceArgument,
    JsonOption,
    offer,
    open_instance,
    read_document,
    target,
)
from hetplan.cli.output import emit, few_lines, note, print_json
from hetplan.errors import InputError, require
from hetplan.formulations import family
from hetplan.instances.generate import draw
from hetplan.instances.library import (
    SETS,
    BestKnown,
    Entry,
    find,
    instance_schema,
    library,
    save_instance,
)
from hetplan.instances.records import (
    Change,
    Finding,
    changes,
    entries_to_update,
    findings_of_answers,
    write,
)
from hetplan.solvers.export import method_of, write_models
from hetplan.solvers.registry import load
from hetplan.solvers.run import Options, Run
from hetplan.studies.findings import library_size
from hetplan.studies.rows import entries_named, findings_of_rows, kept_rows
from hetplan.text import (
    Column,
    Table,
    digits,
    number_text,
    percent_text,
)

ProblemOption = Annotated[
    str | None,
    typer.Option(
        "--problem",
        help="Only this problem; `schema decision` needs one.",
        autocompletion=offer("problems"),
    ),
]


@described(
    examples=(
        (
            "The instances of one problem whose names begin alike",
            "hetplan instances list --problem ditto --name 'ditto-ex1*'",
        ),
    ),
)
def show_list(
    sets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SET…]",
            help=f"Sets ({', '.join(SETS)}), problems, patterns; default all.",
            autocompletion=offer("sets"),
        ),
    ] = None,
    problem: ProblemOption = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="PATTERN", help="Only names that match, such as 'amp-*'."),
    ] = None,
    unsolved: Annotated[
        bool, typer.Option("--open", help="Only those whose optimum nobody has proven.")
    ] = False,
    largest: Annotated[
        int | None,
        typer.Option(
            "--largest",
            metavar="N",
            help="Only instances up to this size (devices x layers, for example).",
        ),
    ] = None,
    json: JsonOption = False,
) -> int:
    """List the packaged instances with the best objective and bound known of each."""
    if problem is not None:
        family(problem, where="--problem")  # raises for an unknown problem
    chosen = {entry for word in sets or ["*"] for entry in entries_named(word)}
    rows = [summary(entry) for entry in library(problem, name) if entry in chosen]
    rows = [row for row in rows if not (unsolved and row["status"] == "optimal")]
    if largest is not None:
        rows = [row for row in rows if at_most(library_size(row["problem"], row["name"]), largest)]
    require(
        rows or json,  # to a program an empty list says the same
        "none of the packaged instances matches",
        where=None if name is None else "--name",
        got=name,
        expected="fewer conditions, or names from `hetplan instances list`",
    )
    table = Table.of(
        "",
        rows,
        [
            Column("problem", lambda row: row["problem"]),
            Column("name", lambda row: row["name"]),
            Column(
                "objective",
                lambda row: row["objective"],
                digits(8),
                right=True,
            ),
            Column("bound", lambda row: row["bound"], digits(8), right=True),
            Column("gap", lambda row: row["gap"], percent_text, right=True),
            Column("status", lambda row: row["status"] or "-"),
            Column("proved by", lambda row: row["proved_by"] or "-"),
        ],
    )
    return emit({"instances": rows}, [table], json=json)


def summary(entry: Entry) -> dict[str, Any]:
    """The row of a packaged instance in the list, as JSON types; None: unknown."""
    best = entry.best_known()
    row: dict[str, Any] = {"problem": entry.problem, "name": entry.name}
    for key in ("objective", "bound", "gap", "status", "found_by", "proved_by"):
        row[key] = None if best is None else getattr(best, key)
    return row


@described(
    examples=(
        (
            "An instance as a file, to change or to solve elsewhere",
            "hetplan instances show tiny-mixed --json",
        ),
    ),
)
def show(
    instance: Annotated[
        str, typer.Argument(help="A name or a file.", autocompletion=offer("instances"))
    ],
    best: Annotated[
        bool, typer.Option("--best", help="Print the best-known record instead.")
    ] = False,
    json: JsonOption = False,
) -> int:
    """Show an instance: origin, size and best-known objective; with --json, the document itself."""
    # A file of the argument's name is meant, as for every other command; it has no record.
    entry = None if os.path.exists(instance) else find(instance)
    record = entry.best_known() if entry is not None else None
    if best:
        if record is None:
            raise InputError("no best-known record", got=instance)
        print_json(record.model_dump(mode="json"))
        return 0
    opened = open_instance(instance)
    document = opened.document()
    rows = [("problem", f"{opened.problem}: {opened.family.title}"), ("origin", opened.origin)]
    rows += [(key, size_text(value)) for key, value in document["data"].items()]
    if record is not None:
        bound = "no bound"
        if record.proved_by:
            bound = f"bound {number_text(record.bound, 8)} by {record.proved_by}"
        objective = f"{number_text(record.objective, 8)} by {record.found_by}"
        rows.append(("best known", f"{objective}, {bound}"))
    return emit(document, [Table(opened.name, ("", ""), tuple(rows))], json=json)


def size_text(value: Any) -> str:
    """A value of an instance's data as text: the length of a list, the keys of a dictionary, or the
    value."""
    if isinstance(value, list):
        return f"{len(value)} entries"
    if isinstance(value, dict):
        return ", ".join(value)
    return str(value)


@described(
    examples=(
        (
            "A random instance, the same for the same seed",
            "hetplan instances generate amp --seed 1 -o mine.json",
        ),
    ),
)
def generate(
    problem: Annotated[str, typer.Argument(help="The problem.", autocompletion=offer("problems"))],
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
    drawn = draw(problem, seed, size)
    if output is None:
        print_json(drawn.document())
    else:
        save_instance(drawn, output)
    return 0


@described(
    examples=(
        (
            "What runs found that is better than the records, written nowhere",
            "hetplan instances update answer.json my-study --dry-run",
        ),
    ),
)
def update(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE…",
            help="Outputs of `solve --json` (- for standard input), folders of studies.",
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder",
            metavar="DIR",
            help="Folder of your instances; default the packaged library.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would change and write nothing.")
    ] = False,
    json: JsonOption = False,
) -> int:
    """Improve the best-known records by what runs found: every decision is priced again before it
    is believed.

    Objectives only go down. Bounds only go up, come from exact methods alone, and never above a
    decision that holds. Exit code 1 when something is refused; what is good of the rest is written
    nevertheless.
    """
    all_changes = list(changes(entries_to_update(folder), findings(sources)))
    for change in all_changes:
        if change.changed and not dry_run:
            write(change)
    refused = [line for change in all_changes for line in change.refused]
    emit(
        {"instances": [change.document() for change in all_changes], "refused": refused},
        [change_table(all_changes, dry_run)],
        json=json,
    )
    note(*(f"refused: {line}" for line in refused))
    return 1 if refused else 0


def findings(given: list[str]) -> Iterator[Finding]:
    """The findings of all sources, in order: files of answers, `-` for standard input, and folders
    of studies. Raises InputError."""
    for argument in given:
        if os.path.isdir(argument):
            kept = kept_rows(Path(argument))
            note(*few_lines([f"left out: {fault}" for fault in kept.faults]))
            yield from findings_of_rows(kept.rows, argument)
        else:
            value, where = read_document(argument)
            yield from findings_of_answers(value, where)


def at_most(size: int | None, largest: int) -> bool:
    """Whether a size is known and not larger than `largest`."""
    return size is not None and size <= largest


class ChangedRecord(NamedTuple):
    """A row of `change_table`."""

    entry: Entry
    old_objective: float | None  # None: the instance had no record
    old_bound: float | None  # None: also where nothing was proven
    record: BestKnown  # the new record


def change_table(all_changes: list[Change], dry_run: bool) -> Table:
    """The table of the records that change; its title also counts the records that stay."""
    changed = []
    for change in all_changes:
        if not change.changed or change.after is None:
            continue
        objective = bound = None
        if change.before is not None:
            objective, bound = change.before.objective, change.before.bound
        changed.append(ChangedRecord(change.entry, objective, bound, change.after))
    word = "would change" if dry_run else "changed"
    return Table.of(
        f"{len(changed)} of {len(all_changes)} records {word}",
        changed,
        [
            Column("instance", lambda row: f"{row.entry.problem}/{row.entry.name}"),
            Column("objective", lambda row: row.old_objective, digits(8), right=True),
            Column("objective now", lambda row: row.record.objective, digits(8), right=True),
            Column("bound", lambda row: row.old_bound, digits(8), right=True),
            Column("bound now", lambda row: row.record.bound, digits(8), right=True),
            Column("found by", lambda row: row.record.found_by),
            Column("proved by", lambda row: row.record.proved_by or "-"),
        ],
    )


CONFIGURATIONS = (
    "each file is one configuration: the instance's optimum is the least over the files; decisions "
    "worse than the best known may be cut off, so an infeasible file has nothing better"
)
ROUNDED = "costs are rounded down to whole units, which may lower the optimum by up to"


@described(
    examples=(
        (
            "The model of an instance for another solver",
            "hetplan instances export tiny-mixed -o it.mps",
        ),
    ),
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

    Decisions worse than the best that hetplan knows may be cut off. Of AMP each file is one
    configuration, numbered; bounds exclude some. The instance's optimum is the least over the
    files; an infeasible one has nothing better.
    """
    method = method_of(output)
    opened = open_instance(instance)
    models: list[Any] = []
    outcome = opened.family.method(method).load()(opened.data, Run(Options(), tap=models.append))
    require(
        models,
        f"has no model to export: {outcome.message or f'{method} answers it without a model'}",
        where=opened.name,
    )
    exported = write_models(models, output)
    notes = []
    if len(exported) > 1:
        notes.append(CONFIGURATIONS)
    # Every family gives the models of its methods totals.
    error = max(model.totals.error for model in models if model.totals)
    if method == "cp-sat":
        notes.append(f"{ROUNDED} {error:.0e} of it")
    table = Table.of(
        f"{opened.name}: models of {method}",
        exported,
        [
            Column("file", lambda model: model.file),
            Column("rows", lambda model: model.rows, right=True),
            Column("columns", lambda model: model.columns, right=True),
            Column("discrete", lambda model: model.discrete, right=True),
            Column(
                "objective per second",
                lambda model: model.per_unit,
                digits(8),
                right=True,
            ),
            Column("plus seconds", lambda model: model.offset, number_text, right=True),
        ],
        notes,
    )
    return emit(
        {
            "instance": opened.name,
            "method": method,
            "models": [asdict(model) for model in exported],
        },
        [table],
        json=json,
    )


Kind = Literal["instance", "decision", "plan", "cluster", "profile", "model", "job"]
# A kind of file -> the pydantic model of its content. The models of an instance and of a decision
# depend on the problem.
MODELS = {
    "plan": "hetplan.plans.plan:Plan",
    "cluster": "hetplan.profiling.hardware.cluster:ClusterFile",
    "profile": "hetplan.profiling.profiles.profile:Profile",
    "model": "hetplan.profiling.models.traced_model:ModelFile",
    "job": "hetplan.cli.run:JobFile",
}


@described(
    examples=(("The schema of a cluster file", "hetplan instances schema cluster"),),
)
def schema(
    kind: Annotated[Kind, typer.Argument(help="Which kind of file.")],
    problem: ProblemOption = None,
    json: JsonOption = False,
) -> int:
    """Print the JSON schema of a file (JSON with and without --json)."""
    document: dict[str, Any]
    if kind in MODELS:
        require(
            problem is None,
            f"--problem does not go with schema {kind}",
            expected="instance or decision",
        )
        document = load(MODELS[kind]).model_json_schema()
    elif kind == "instance":
        document = instance_schema(problem)
    elif problem is None:
        raise InputError("schema decision needs --problem")
    else:
        document = family(problem).load_decision().model_json_schema()
    print_json({"$schema": "https://json-schema.org/draft/2020-12/schema", **document})
    return 0
