"""`hetplan export-model`: the models that general solvers would be given, as files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hetplan.cli import completion, sources
from hetplan.cli.options import JsonOption
from hetplan.cli.output import check_target, print_json, print_tables
from hetplan.errors import InputError
from hetplan.text import Table, number_text


def export_model(
    instance: Annotated[
        str,
        typer.Argument(
            help="Instance file, - for standard input, or a name from `hetplan instances list`.",
            autocompletion=completion.instances,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
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
    from hetplan.solvers.options import Options
    from hetplan.solvers.run import Run

    method = method_of(output)
    check_target(output)
    found = sources.open_instance(instance)
    collector = Collector()
    outcome = found.family.method(method).load()(found.data, Run(Options(), tap=collector))
    if not collector.models:
        reason = outcome.message or f"{method} needs no model for it"
        raise InputError(f"has no model to export: {reason}", where=found.name)
    exported = collector.write(output)
    if json:
        print_json(
            {"instance": found.name, "method": method, "models": [asdict(one) for one in exported]}
        )
        return 0
    rows = tuple(
        (
            one.file,
            f"{one.rows}",
            f"{one.columns}",
            f"{one.discrete}",
            number_text(one.per_unit, 8),
            number_text(one.offset),
        )
        for one in exported
    )
    header = ("file", "rows", "columns", "discrete", "objective per second", "plus seconds")
    print_tables([Table(f"{found.name}: models of {method}", header, rows, right=(1, 2, 3, 4, 5))])
    return 0
