"""`hetplan show` draws a plan or prints a decision in full; `hetplan export` writes a plan for a
framework."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetplan.cli import completion, sources
from hetplan.cli.options import JsonOption, PlanArgument, target
from hetplan.cli.output import emit, note
from hetplan.errors import InputError
from hetplan.files import write_bytes, write_text
from hetplan.solvers.registry import evaluate, load
from hetplan.text import Table

if TYPE_CHECKING:
    from hetplan.instances.answers import Claim
    from hetplan.instances.library import Instance

PLAN = "hetplan-plan"


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Files to draw a plan into."""

    html: Annotated[
        Path | None,
        target("--html", help="Of a plan: write one self-contained page."),
    ] = None
    png: Annotated[Path | None, target("--png", help="Of a plan: write a picture.")] = None
    svg: Annotated[Path | None, target("--svg", help="Of a plan: write a drawing.")] = None


def show(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="PLAN|INSTANCE",
            help="A plan file or what `hetplan plan --json` printed; or an instance: a file, -, a "
            "name of the library.",
            autocompletion=completion.instances,
        ),
    ],
    setting: sources.Setting,
    pictures: Pictures,
    decision: Annotated[
        str | None,
        typer.Argument(
            help="Of an instance: a decision, the output of `solve --json`, a best-known record; "
            "default the library's."
        ),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Draw a plan (timeline, memory, placement, candidates), or print a decision of an instance in
    full."""
    options = {**vars(setting), **vars(pictures)}
    asked = [name for name, value in options.items() if value is not None]
    read = plan_document(subject, asked=bool(asked))
    if read is None:
        if asked:
            raise InputError("is for plan files", where=f"--{asked[0]}", got=subject)
        return show_decision(subject, decision, json=json)
    if decision is not None:
        raise InputError("a plan has no second argument", got=decision)
    return show_plan(*read, setting, pictures, json=json)


def show_plan(
    value: Any, where: str, setting: sources.Setting, pictures: Pictures, *, json: bool
) -> int:
    """Draw a plan: timeline of one iteration, memory of each device, placement, candidates with
    their bounds. `where` names the parsed JSON `value` in errors; raises InputError."""
    from hetplan.planner.pictures.scene import read, scene
    from hetplan.planner.pictures.terminal import tables
    from hetplan.runtime.replay import replay

    targets = {kind: path for kind, path in vars(pictures).items() if path is not None}
    plan, offers = read(value, where)
    workload = setting.workload(plan)
    drawn = scene(plan, replay(plan, workload), workload, offers)
    for kind, path in targets.items():
        if kind == "html":
            from hetplan.planner.pictures.html import page

            write_text(path, page(drawn))
        else:
            from hetplan.planner.pictures.figure import figure

            write_bytes(path, figure(drawn, kind))
    if json or not targets:
        emit(asdict(drawn), tables(drawn), json=json)
    for path in targets.values():
        note(f"written: {path}")
    return 0


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
    posed = sources.open_instance(instance)
    claims = [claim for claim in claims_of(posed, instance, decision) if claim.decision is not None]
    if not claims:
        raise InputError("no decision to show", where=decision or instance)
    shown = [in_full(posed, claim) for claim in claims]
    documents = [
        {"source": claim.source, **document}
        for claim, (_, document) in zip(claims, shown, strict=True)
    ]
    document = {"instance": posed.name, "problem": posed.problem, "decisions": documents}
    emit(document, [table for tables, _ in shown for table in tables], json=json)
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
    from hetplan.instances.library import plain

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


def export(
    plan: PlanArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="megatron|deepspeed|torchtitan|flagscale|torchrun",
            help="Who is to run it.",
            autocompletion=completion.frameworks,
        ),
    ],
    output: Annotated[
        Path | None, target("--output", "-o", help="Write to a file instead.")
    ] = None,
) -> int:
    """Print a plan as flags or configuration of a framework; what it cannot express is refused by
    name."""
    from hetplan.runtime.export import export as written
    from hetplan.runtime.plan import load_plan

    text = written(load_plan(plan), to)
    if output is None:
        sys.stdout.write(text)
    else:
        write_text(output, text)
    return 0
