"""`hetplan report`: a paper's experiments with predicted figures of every method, beside what the paper measured."""

from __future__ import annotations

from typing import Annotated

import typer

from hetplan.cli import completion
from hetplan.cli.options import JsonOption, OutputOption, QuietOption
from hetplan.cli.output import check_target, note, print_json, print_tables, write_document
from hetplan.errors import InputError


def report(
    problem: Annotated[
        str,
        typer.Argument(
            help="Whose experiments: a problem with a report.", autocompletion=completion.problems
        ),
    ],
    name: Annotated[
        str | None, typer.Option("--name", metavar="PATTERN", help="Only experiments whose names match.")
    ] = None,
    json: JsonOption = False,
    output: OutputOption = None,
    quiet: QuietOption = False,
) -> int:
    """Predict a paper's experiments with its methods, its baselines and the optimum, beside what it measured."""
    from hetplan.formulations import FAMILIES, family
    from hetplan.solvers.registry import load

    check_target(output)
    chosen = family(problem)
    if chosen.report is None:
        having = " or ".join(other for other in FAMILIES if family(other).report is not None)
        raise InputError("problem has no report", got=problem, expected=having)
    tables, rows = load(chosen.report)(name, None if quiet else note)
    if not rows:
        raise InputError("no experiment matches", where="--name", got=name)
    document = {
        "problem": problem,
        "predicted": True,
        "rows": rows,
        "notes": [line for table in tables for line in table.notes],
    }
    write_document(output, document)
    if json:
        print_json(document)
    else:
        print_tables(tables)
    return 0
