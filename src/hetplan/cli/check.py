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
    from hetplan.instances.envelope import Instance
    from hetplan.instances.judging import Verdict


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

    Exit code 0 when all hold; 1 when one breaks a constraint, contradicts what is stated of it, or
    is missing
    (a result that is infeasible or unknown has nothing to verify).
    """
    from hetplan.instances.answers import read_claims
    from hetplan.instances.judging import judge

    if instance == decision == "-":
        raise InputError("instance and decision cannot both come from standard input")
    found = sources.open_instance(instance)
    value, where = sources.read_document(decision)
    claims = read_claims(value, found, where=where)
    if isinstance(value, dict) and "results" in value and value.get("instance") != found.name:
        note(f"{where} answers instance {value.get('instance')!r}, checked against {found.name!r}")
    verdicts = judge(claims, found)
    if json:
        documents = [verdict.document() for verdict in verdicts]
        print_json({"instance": found.name, "problem": found.problem, "decisions": documents})
    else:
        print_tables(verdict_tables(found, verdicts))
    return 0 if all(verdict.holds for verdict in verdicts) else 1


def verdict_tables(instance: Instance, verdicts: Sequence[Verdict]) -> list[Table]:
    """What was found out about each claim: its decision's parts, then its complaints or its
    description."""
    tables = []
    for verdict in verdicts:
        claim, evaluation = verdict.claim, verdict.evaluation
        word = {True: "holds", False: "does not hold", None: "nothing to price"}[verdict.holds]
        title = f"{instance.name}: {claim.source}: {word}"
        if evaluation is None:
            stated = f"stated {claim.status}" if claim.status else "no status stated"
            bound = "" if claim.bound is None else f", bound {number_text(claim.bound, 10)}"
            tables.append(
                Table(title, (), (), (*verdict.complaints, f"no decision ({stated}{bound})"))
            )
            continue
        rows = [(name, number_text(value, 10)) for name, value in evaluation.parts.items()]
        rows.append(("objective", number_text(evaluation.objective, 10)))
        tables.append(
            Table(title, ("part", "value"), tuple(rows), notes=verdict.complaints, right=(1,))
        )
        if evaluation.objective is not None:
            tables += describe(instance, claim.decision, claim.source)
    return tables
