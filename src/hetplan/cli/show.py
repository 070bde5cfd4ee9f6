"""`hetplan show`: a decision of an instance in full."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetplan.cli import completion, sources
from hetplan.cli.options import JsonOption
from hetplan.cli.output import print_json, print_tables
from hetplan.errors import InputError

if TYPE_CHECKING:
    from hetplan.instances.answers import Claim
    from hetplan.instances.envelope import Instance
    from hetplan.text import Table


def show(
    instance: Annotated[
        str,
        typer.Argument(
            help="Instance file, - for standard input, or a name from `hetplan instances list`.",
            autocompletion=completion.instances,
        ),
    ],
    decision: Annotated[
        str | None,
        typer.Argument(
            help="A decision, the output of `solve --json`, or a best-known record; default the library's best."
        ),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Print a decision in full: for hap every instruction with its properties, and every device's stages."""
    found = sources.open_instance(instance)
    claims = [claim for claim in claims_of(found, instance, decision) if claim.decision is not None]
    if not claims:
        raise InputError("no decision to show", where=decision or instance)
    shown = [in_full(found, claim) for claim in claims]
    if json:
        documents = [{"source": c.source, **d} for c, (_, d) in zip(claims, shown, strict=True)]
        print_json({"instance": found.name, "problem": found.problem, "decisions": documents})
    else:
        print_tables([table for tables, _ in shown for table in tables])
    return 0


def claims_of(instance: Instance, argument: str, decision: str | None) -> list[Claim]:
    """The decisions given, or the best known of a packaged instance."""
    from hetplan.instances.answers import Claim, parse_decision, read_claims
    from hetplan.instances.library import find

    if decision is not None:
        value, where = sources.read_document(decision)
        return read_claims(value, instance, where=where)
    entry = find(argument)
    best = entry.best_known() if entry is not None and entry.load() == instance else None
    if best is None:
        expected = "a decision as second argument, or an instance of the library"
        raise InputError("no best-known decision of this instance", where=argument, expected=expected)
    return [Claim(source=best.found_by, decision=parse_decision(best.decision, instance, argument))]


def in_full(instance: Instance, claim: Claim) -> tuple[list[Table], dict[str, Any]]:
    """Tables and JSON types of one decision; raises InputError where it breaks a constraint."""
    from hetplan.instances.envelope import plain
    from hetplan.solvers.registry import evaluate, load

    family = instance.family
    evaluation = evaluate(family, instance.data, claim.decision)
    if evaluation.objective is None:
        raise InputError(f"decision breaks a constraint: {evaluation.violations[0]}", where=instance.name)
    tables: list[Table] = []
    document: dict[str, Any] = {"decision": plain(claim.decision)}
    if family.show is not None:
        tables, document = load(family.show)(instance.data, claim.decision)
    elif family.describe is not None:
        tables = load(family.describe)(instance.data, claim.decision)
    titled = [replace(t, title=f"{instance.name}: {claim.source}: {t.title}") for t in tables[:1]]
    return [*titled, *tables[1:]], {"objective": evaluation.objective, **document}
