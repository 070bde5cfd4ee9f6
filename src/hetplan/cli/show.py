"""`hetplan show`: a plan drawn, or a decision of an instance in full."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetplan.cli import completion, sources
from hetplan.cli.options import JsonOption
from hetplan.cli.output import print_json, print_tables
from hetplan.cli.picture import show_plan
from hetplan.errors import InputError

if TYPE_CHECKING:
    from hetplan.instances.answers import Claim
    from hetplan.instances.envelope import Instance
    from hetplan.text import Table


PLAN = "hetplan-plan"


def show(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="PLAN|INSTANCE",
            help="A plan file or what `hetplan plan --json` printed; or an instance: a file, -, a name of the library.",
            autocompletion=completion.instances,
        ),
    ],
    decision: Annotated[
        str | None,
        typer.Argument(
            help="Of an instance: a decision, the output of `solve --json`, a best-known record; default the library's."
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="FILE|NAME",
            help="Of a plan: cluster file (YAML); default an example of the plan's cluster's name.",
            autocompletion=completion.clusters,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME|FILE",
            help="Of a plan: default the plan's own.",
            autocompletion=completion.models,
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile", metavar="FILE", help="Of a plan: measured profile; default a prediction."
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Of a plan: write one self-contained page."),
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Of a plan: write a picture.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Of a plan: write a drawing.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Draw a plan (timeline, memory, placement, candidates), or print a decision of an instance in
    full."""
    given = {
        "--cluster": cluster,
        "--model": model,
        "--profile": profile,
        "--html": html,
        "--png": png,
        "--svg": svg,
    }
    found = plan_document(subject, asked=any(value is not None for value in given.values()))
    if found is not None:
        if decision is not None:
            raise InputError("a plan has no second argument", got=decision)
        targets = {"html": html, "png": png, "svg": svg}
        return show_plan(*found, cluster, model, profile, targets, json=json)
    for option, value in given.items():
        if value is not None:
            raise InputError("is for plan files", where=option, got=subject)
    return show_decision(subject, decision, json=json)


def plan_document(subject: str, *, asked: bool) -> tuple[Any, str] | None:
    """A plan's file, or a planning's document, and its name for errors; None for what is neither.

    asked: with options of plans, where a file that is not there is the plan. Raises InputError for
    unreadable files.
    """
    if not (os.path.isfile(subject) or (asked and not os.path.exists(subject))):
        return None
    value, where = sources.read_document(subject)
    is_plan = isinstance(value, dict) and (value.get("format") == PLAN or "candidates" in value)
    return (value, where) if is_plan else None


def show_decision(instance: str, decision: str | None, *, json: bool) -> int:
    """For hap every instruction with its properties, and every device's stages; for others the
    family's tables."""
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
        raise InputError(
            "no best-known decision of this instance", where=argument, expected=expected
        )
    return [Claim(source=best.found_by, decision=parse_decision(best.decision, instance, argument))]


def in_full(instance: Instance, claim: Claim) -> tuple[list[Table], dict[str, Any]]:
    """Tables and JSON types of one decision; raises InputError where it breaks a constraint."""
    from hetplan.instances.envelope import plain
    from hetplan.solvers.registry import evaluate, load

    family = instance.family
    evaluation = evaluate(family, instance.data, claim.decision)
    if evaluation.objective is None:
        raise InputError(
            f"decision breaks a constraint: {evaluation.violations[0]}", where=instance.name
        )
    tables: list[Table] = []
    document: dict[str, Any] = {"decision": plain(claim.decision)}
    if family.show is not None:
        tables, document = load(family.show)(instance.data, claim.decision)
    elif family.describe is not None:
        tables = load(family.describe)(instance.data, claim.decision)
    titled = [replace(t, title=f"{instance.name}: {claim.source}: {t.title}") for t in tables[:1]]
    return [*titled, *tables[1:]], {"objective": evaluation.objective, **document}
