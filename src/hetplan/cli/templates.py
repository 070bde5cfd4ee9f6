"""`hetplan templates`: Oobleck's templates of a cluster and the pipelines to run from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli import completion, sources
from hetplan.cli.options import (
    GapOption,
    JsonOption,
    OutputOption,
    QuietOption,
    TimeOption,
    make_options,
)
from hetplan.cli.output import check_target, print_json, print_tables, write_document
from hetplan.cli.progress import watched
from hetplan.errors import InputError

if TYPE_CHECKING:
    from hetplan.formulations.ditto.readiness import Readiness


def templates(
    instance: Annotated[
        str,
        typer.Argument(
            help="Instance of problem ditto: a file, - for standard input, or a name of the library.",
            autocompletion=completion.instances,
        ),
    ],
    fewest: Annotated[
        int, typer.Option("--fewest-nodes", metavar="N", help="Leave out templates of fewer nodes.")
    ] = 1,
    failures: Annotated[
        int,
        typer.Option(
            "--failures", metavar="F", help="Pipelines that may be lost; F + 1 are run at least."
        ),
    ] = 0,
    micro_batches: Annotated[
        int | None,
        typer.Option(
            "--micro-batches", metavar="N", help="Of all pipelines; default the instance's."
        ),
    ] = None,
    time_limit: TimeOption = None,
    gap: GapOption = None,
    json: JsonOption = False,
    output: OutputOption = None,
    quiet: QuietOption = False,
) -> int:
    """List a proven pipeline template for every part of a cluster, and the pipelines to run from
    them.

    Exit code 0 when the list is complete and an instantiation is found, 1 otherwise.
    """
    from hetplan.formulations.ditto.readiness import readiness, rows_of, tables_of
    from hetplan.solvers.run import Run

    check_target(output)
    run = Run(make_options(time_limit=time_limit, gap=gap))
    found = sources.open_instance(instance)
    if found.problem != "ditto":
        raise InputError(
            "has no templates", where=instance, got=f"problem {found.problem}", expected="ditto"
        )

    def work() -> Readiness:
        return readiness(
            found.data, run, fewest=fewest, micro_batches=micro_batches, failures=failures
        )

    ready = watched(run, work, label=f"{found.name}: templates", quiet=quiet)
    document = {"instance": found.name, "problem": "ditto", **rows_of(ready)}
    write_document(output, document)
    if json:
        print_json(document)
    else:
        print_tables(tables_of(ready))
    return 0 if ready.listed.complete and ready.exact.pipelines else 1
