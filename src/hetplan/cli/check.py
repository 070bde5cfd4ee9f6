"""`hetplan check`: price a decision again, and say everything that it breaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli import completion, sources
from hetplan.cli.options import JsonOption
from hetplan.cli.output import note, print_json, print_tables
from hetplan.cli.solve import describe
from hetplan.errors import InputError
from hetplan.text import Table, number_text

if TYPE_CHECKING:
    from hetplan.instances.answers import Verdict
    from hetplan.instances.envelope import Instance


def check(
    instance: Annotated[
        str,
        typer.Argument(
            help="Instance file, - for standard input, or a name from `hetplan instances list`.",
            autocompletion=completion.instances,
        ),
    ],
    decision: Annotated[
        str,
        typer.Argument(
            help="A decision, the output of `solve --json`, or a best-known record; - for standard input."
        ),
    ],
    json: JsonOption = False,
) -> int:
    """Verify decisions against an instance and price them again.

    Exit code 0 when all hold, 1 when one breaks a constraint or is not worth what is stated of it.
    """
    from hetplan.instances.answers import judge, read_claims

    if instance == decision == "-":
        raise InputError("instance and decision cannot both come from standard input")
    found = sources.open_instance(instance)
    value, where = sources.read_document(decision)
    claims = read_claims(value, found, where=where)
    if isinstance(value, dict) and "results" in value and value.get("instance") != found.name:
        note(f"{where} answers instance {value.get('instance')!r}, checked against {found.name!r}")
    verdicts = [judge(claim, found) for claim in claims]
    if json:
        documents = [verdict.document() for verdict in verdicts]
        print_json({"instance": found.name, "problem": found.problem, "decisions": documents})
    else:
        print_tables(verdict_tables(found, verdicts))
    return 1 if any(verdict.complaints for verdict in verdicts) else 0


def verdict_tables(instance: Instance, verdicts: Sequence[Verdict]) -> list[Table]:
    """What was found out about each decision: its parts, then its complaints or its description."""
    tables = []
    for verdict in verdicts:
        word = "does not hold" if verdict.complaints else "holds"
        title = f"{instance.name}: {verdict.claim.source}: {word}"
        rows = [(name, number_text(value, 10)) for name, value in verdict.evaluation.parts.items()]
        rows.append(("objective", number_text(verdict.evaluation.objective, 10)))
        tables.append(Table(title, ("part", "value"), tuple(rows), notes=verdict.complaints, right=(1,)))
        if verdict.evaluation.objective is not None:
            tables += describe(instance, verdict.claim.decision, verdict.claim.source)
    return tables
