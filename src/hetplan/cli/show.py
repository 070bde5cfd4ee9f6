"""`hetplan show` draws a plan or prints a decision in full; `hetplan plan simulate` replays a plan
event by event; `hetplan export` writes a plan for a framework."""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hetplan.adapters.exports import export as written, model_left_out
from hetplan.adapters.exports.hugging_face import device_map_notes
from hetplan.cli.help_page import described
from hetplan.cli.options import (
    JsonOption,
    LinksOption,
    PlanArgument,
    offer,
    offered,
    open_instance,
    read_document,
    target,
)
from hetplan.cli.output import emit, note, write_document
from hetplan.cli.setting import Setting, note_changes, with_links
from hetplan.cli.solve import describe, titled
from hetplan.errors import InputError, UnsupportedError, require
from hetplan.files import read_json, write_bytes, write_text
from hetplan.instances.answers import Claim, parse_decision, read_claims
from hetplan.instances.library import Instance, find, plain
from hetplan.planner.nearest import nearest
from hetplan.planner.pictures.figure import figure
from hetplan.planner.pictures.html import page
from hetplan.planner.pictures.scene import WhatIfDocument, read, scene
from hetplan.planner.pictures.terminal import tables
from hetplan.plans.plan import Plan, load_plan
from hetplan.plans.words import degrees_table, summary
from hetplan.profiling.inputs.inputs import Replaced
from hetplan.profiling.models.model import load_model
from hetplan.profiling.workload import Workload
from hetplan.replays.chains import Replay, Settings
from hetplan.replays.replay import Replayer, replay
from hetplan.replays.simulator.pipeline import Sends
from hetplan.replays.stages import stage_table
from hetplan.replays.trace import trace as traced
from hetplan.runtime.calibration import Calibration, slots
from hetplan.schema import parse
from hetplan.solvers.registry import evaluate, load
from hetplan.text import Table, percent_text, seconds_text

# The share of an iteration by which noise may change it before `simulate` prints the noisy seconds.
# The planner compares plans by them from the same share on.
ROBUST = 0.01


@described(
    sections={
        "Pictures": "--html --png --svg --what-if",
        "A run": "--trace-in",
        "In place of what the plan carries": "--cluster --model --profile",
        "Output": "--json --help",
    },
    examples=(
        (
            "One page with all plans that were found",
            "hetplan show planning.json --html page.html",
        ),
        ("The best decision known of a packaged instance", "hetplan show hap-chain-2x2"),
        (
            "The causes of a step's seconds, from torch.profiler's files of all ranks",
            "hetplan show plan.json --trace-in traces/",
        ),
    ),
)
def show(
    setting: Setting,
    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="PLAN|INSTANCE",
            help="A plan file or what `hetplan plan --json` printed; or an instance: a file, -, a "
            "name of the library.",
            autocompletion=offer("instances"),
        ),
    ] = None,
    decision: Annotated[
        str | None,
        typer.Argument(
            help="Of an instance: a decision, the output of `solve --json`, a best-known record; "
            "default the library's."
        ),
    ] = None,
    html: Annotated[
        Path | None,
        target("--html", help="Of a plan: write one self-contained page."),
    ] = None,
    png: Annotated[Path | None, target("--png", help="Of a plan: write a picture.")] = None,
    svg: Annotated[Path | None, target("--svg", help="Of a plan: write a drawing.")] = None,
    changes: Annotated[
        Path | None,
        typer.Option(
            "--what-if",
            metavar="FILE",
            help="For the page: what `hetplan plan what-if --json` printed.",
        ),
    ] = None,
    run_trace: Annotated[
        Path | None,
        typer.Option(
            "--trace-in",
            metavar="PATH",
            help="Say what the steps of a run took their seconds for: a trace of torch.profiler "
            "(a folder with one file for each rank), of `run --trace`, or a table of operations. "
            "With PLAN, beside its replay.",
        ),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Draw a plan (timeline, memory, placement, candidates), print a decision of an instance in
    full, or divide the seconds of a run that a trace recorded."""
    drawings = {"html": html, "png": png, "svg": svg}
    if run_trace is not None:
        given = {**drawings, "what-if": changes, "second argument": decision}
        refused = [name for name, value in given.items() if value is not None]
        if refused:
            raise InputError(f"does not go with {', '.join(refused)}", where="--trace-in")
        return show_run(run_trace, subject, setting, json=json)
    require(subject is not None, "nothing to show", where="show", expected="PLAN or INSTANCE")
    assert subject is not None
    options = {**vars(setting), **drawings, "what-if": changes}
    stated_options = [name for name, value in options.items() if value is not None]
    document = plan_document(subject, asked=bool(stated_options))
    if document is None:
        if stated_options:
            raise InputError("is for plan files", where=f"--{stated_options[0]}", got=subject)
        return show_decision(subject, decision, json=json)
    require(decision is None, "a plan has no second argument", got=decision)
    value, where = document
    files = {kind: path for kind, path in drawings.items() if path is not None}
    return show_plan(value, where, setting, files, changes, json=json)


def show_run(path: Path, subject: str | None, setting: Setting, *, json: bool) -> int:
    """Print the parts of the seconds of a run's steps. path: its trace. subject: the file of its
    plan. Raises InputError."""
    from hetplan.cli.run_traces import show_trace

    if subject is None:
        return show_trace(path, None, None, json=json)
    plan = load_plan(subject)
    return show_trace(path, plan, setting.workload(plan, subject), json=json)


def show_plan(
    value: Any,
    where: str,
    setting: Setting,
    drawings: Mapping[str, Path],
    changes: Path | None,
    *,
    json: bool,
) -> int:
    """Draw a plan: the timeline of one iteration, the memory of each device, the placement, and the
    candidates with their bounds.

    value: the parsed JSON. where: its name in errors. drawings: kind of picture (html, png or svg)
    -> file to write. changes: a file with the output of `plan what-if --json`. Raises InputError.
    """
    plan, planning = read(value, where)
    if plan.degrees is not None and not drawings:
        emit(plan.model_dump(mode="json"), [degrees_table(plan)], json=json)
        return 0
    workload = setting.workload(plan, where)
    drawn = scene(plan, replay(plan, workload), workload, planning)
    if changes is not None:
        answer = parse(WhatIfDocument, read_json(changes), where=str(changes))
        drawn = replace(drawn, changes=(answer.base, *answer.variants))
    for kind, path in drawings.items():
        content = page(drawn).encode() if kind == "html" else figure(drawn, kind)
        write_bytes(path, content)
    if json or not drawings:  # who asked for drawings alone gets no tables
        emit(drawn.document(), tables(drawn), json=json)
    for path in drawings.values():
        note(f"written: {path}")
    return 0


def plan_document(subject: str, *, asked: bool) -> tuple[Any, str] | None:
    """(the JSON of a plan file or of the output of `hetplan plan --json`, its name in errors); None
    where `subject` is neither.

    asked: whether the user gave options for plans. A subject that does not exist is then taken for
    a plan file. Raises InputError for a file that cannot be read, and for the answer of a solver.
    """
    if not os.path.isfile(subject):
        if not asked:
            return None
        if os.path.exists(subject) or find(subject) is not None:
            return None
    value, where = read_document(subject)
    require(
        not (isinstance(value, dict) and "results" in value),
        f"is an answer; show it with: hetplan show INSTANCE {subject}",
        where=where,
    )
    is_plan = isinstance(value, dict) and (
        value.get("format") == "hetplan-plan" or "candidates" in value
    )
    return (value, where) if is_plan else None


def show_decision(instance: str, decision: str | None, *, json: bool) -> int:
    """Print the decisions of an instance in full.

    For hap, this means every instruction with its properties and every device's stages; for other
    problems, the family's tables. decision: see `claims_of`.
    """
    opened = open_instance(instance)
    all_claims = claims_of(opened, instance, decision)
    claims = [claim for claim in all_claims if claim.decision is not None]
    require(claims, "no decision to show", where=decision or instance)
    decision_tables: list[Table] = []
    documents = []
    for claim in claims:
        tables_in_full, document_in_full = in_full(opened, claim)
        decision_tables += tables_in_full
        documents.append({"source": claim.source, **document_in_full})
    document = {"instance": opened.name, "problem": opened.problem, "decisions": documents}
    emit(document, decision_tables, json=json)
    return 0


def claims_of(instance: Instance, argument: str, decision: str | None) -> list[Claim]:
    """The decisions in the document `decision`, or the best-known decision of a packaged instance
    where that is None. argument: the instance's argument on the command line."""
    if decision is not None:
        value, where = read_document(decision)
        return read_claims(value, instance, where=where)
    # A file of the user's may have the name of a packaged instance, and other content.
    entry = find(argument)
    best = entry.best_known() if entry is not None and entry.load() == instance else None
    if best is None:
        raise InputError(
            "no best-known decision of this instance",
            where=argument,
            expected="a decision as second argument, or an instance of the library",
        )
    return [Claim(source=best.found_by, decision=parse_decision(best.decision, instance, argument))]


def in_full(instance: Instance, claim: Claim) -> tuple[list[Table], dict[str, Any]]:
    """One decision in full, as (tables, JSON types). Raises InputError where it breaks a
    constraint."""
    family = instance.family
    evaluation = evaluate(family, instance.data, claim.decision)
    if evaluation.objective is None:
        raise InputError(
            f"decision breaks a constraint: {evaluation.violations[0]}", where=instance.name
        )
    document: dict[str, Any] = {"decision": plain(claim.decision)}
    source = f"{instance.name}: {claim.source}"
    if family.show is None:
        tables_in_full = describe(instance, claim.decision, source)
    else:
        family_tables, document = load(family.show)(instance.data, claim.decision)
        tables_in_full = titled(source, family_tables)
    return tables_in_full, {"objective": evaluation.objective, **document}


@described(
    sections={"Framework": "--to --model --without-model --nearest", "Output": "--output --help"},
    examples=(
        ("A script for torchrun on standard output", "hetplan export plan.json --to torchrun"),
        (
            "Stock Megatron-LM's flags as a script",
            "hetplan export plan.json --to megatron -o run.sh",
        ),
        (
            "A model's balanced cut into two virtual stages on each of four ranks",
            "hetplan export layout --model gpt2-xl --pipeline 4 --virtual 2",
        ),
    ),
)
def export(
    plan: PlanArgument,
    to: Annotated[
        str,
        offered(
            "frameworks",
            "--to",
            metavar="FRAMEWORK",
            help="megatron, bridge, deepspeed, torchtitan, flagscale, device-map, accelerate or "
            "torchrun.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="NAME|FILE",
            help="Whose own flags are written; default the plan's own model.",
            autocompletion=offer("models"),
        ),
    ] = None,
    without_model: Annotated[
        bool,
        typer.Option(
            "--without-model", help="Write no settings of the model: they are left to you."
        ),
    ] = False,
    near: Annotated[
        bool,
        typer.Option(
            "--nearest", help="Where the framework cannot run the plan, take the nearest it can."
        ),
    ] = False,
    output: Annotated[
        Path | None, target("--output", "-o", help="Write to a file instead.")
    ] = None,
) -> int:
    """Print a plan as flags or configuration of a framework; what it cannot express is refused by
    name."""
    loaded = load_plan(plan)
    if near:
        text = nearest_text(loaded, plan, to, model, with_model=not without_model)
    else:
        text = written(loaded, to, model, with_model=not without_model)
    other_model = None if model is None else load_model(model)
    note_changes(loaded, plan, Replaced(model=other_model))
    if to == "device-map":
        note(*device_map_notes(loaded))
    left_out = None if without_model else model_left_out(loaded, to, model)
    if left_out is not None:
        note(f"{plan}: {left_out}")
    if output is None:
        sys.stdout.write(text)
    else:
        write_text(output, text)
    return 0


def nearest_text(plan: Plan, where: Path, to: str, model: str | None, *, with_model: bool) -> str:
    """The text of the export of a plan, or of the nearest plan that the framework runs. A note says
    what differs, and the seconds of both. Raises the framework's refusal where there is no such
    plan. where: the plan's file."""
    try:
        return written(plan, to, model, with_model=with_model)
    except UnsupportedError as error:
        refusal = error

    def runs(changed: Plan) -> bool:
        try:
            written(changed, to, model, with_model=with_model)
        except UnsupportedError:
            return False
        return True

    replayer = Replayer(Setting().workload(plan, where, quiet=True))
    found = nearest(plan, replayer, runs)
    if found is None:
        raise refusal
    note(f"{where}: {refusal}")
    note(
        f"{where}: the nearest plan has {', '.join(found.changes)}: "
        f"{seconds_text(found.seconds)} per iteration, replayed, in place of "
        f"{seconds_text(found.before)}"
    )
    return written(found.plan, to, model, with_model=with_model)


@described(
    sections={
        "Replay": "--overlap --sends --prefetch --calibration --links",
        "In place of what the plan carries": "--cluster --model --profile",
        "Output": "--trace --json --help",
    },
    examples=(
        ("Seconds, idle time and memory", "hetplan plan simulate plan.json"),
        (
            "Gradients that leave in four parts, and a trace for Perfetto",
            "hetplan plan simulate plan.json --overlap 4 --trace trace.json",
        ),
    ),
)
def simulate(
    plan: PlanArgument,
    setting: Setting,
    overlap: Annotated[
        int,
        typer.Option(
            "--overlap",
            metavar="BUCKETS",
            help="Gradients leave in that many parts while others are computed.",
            min=1,
        ),
    ] = 1,
    sends: Annotated[
        Sends,
        typer.Option(
            "--sends",
            help="A message between stages leaves at once (asynchronous), or when its receiver "
            "waits for it (waiting); its sender waits as well (blocking, rendezvous).",
        ),
    ] = "waiting",
    prefetch: Annotated[
        int,
        typer.Option(
            "--prefetch",
            metavar="LAYERS",
            help="ZeRO 2 and 3 gather that many layers ahead (FSDP: 1; 0: nothing overlaps).",
            min=0,
        ),
    ] = 0,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            metavar="FILE",
            help="Constants, as `hetplan profile calibrate` writes them.",
        ),
    ] = None,
    links: LinksOption = None,
    trace: Annotated[
        Path | None,
        target("--trace", help="Write a trace for Perfetto (JSON)."),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Replay a plan on the event-driven simulator: seconds per iteration, idle time, memory; all
    predicted.

    Exit code 0 when the plan fits in memory, 1 when it does not.
    """
    loaded = load_plan(plan)
    workload = setting.workload(loaded, plan)
    require(links is None or calibration is None, "does not go with --calibration", where="--links")
    workload = with_links(workload, links)
    overhead = 0.0  # seconds of the passes beside their layers
    if calibration is not None:
        workload, overhead = calibrated(loaded, workload, calibration)
    replayer = Replayer(workload, Settings(buckets=overlap, sends=sends, prefetch=prefetch))
    run = replayer.replay(loaded)
    robust = replayer.robust_seconds(loaded)
    if trace is not None:
        write_document(trace, traced(run))
    word = "predicted" if calibration is None else "predicted, calibrated"
    took = f"{seconds_text(run.seconds + overhead)} per iteration, {word}"
    if abs(robust - run.seconds) > ROBUST * run.seconds:
        took += f"; {seconds_text(robust + overhead)} where all durations are a little noisy"
    document = replay_document(loaded, run) | {
        "predicted_seconds": run.seconds + overhead,
        "robust_seconds": robust + overhead,
        "calibrated": calibration is not None,
    }
    notes = [f"{took}; {percent_text(run.timeline.bubble)} of the devices' time idle"]
    if not run.fits:
        notes.append("does not fit in memory")
    title = f"{loaded.name}, {loaded.origin or 'plan'}: {summary(loaded)}"
    emit(document, [stage_table(loaded, run, title, notes)], json=json)
    return 0 if run.fits else 1


def replay_document(plan: Plan, run: Replay) -> dict[str, Any]:
    """A replay of a plan as JSON types, without its predicted seconds."""
    return {
        "plan": plan.name,
        "origin": plan.origin,
        "bubble": run.timeline.bubble,
        "fits_memory": run.fits,
        "peak_bytes": list(run.peak_bytes),
        "stages": [
            {
                "replica": replica,
                "stage": stage,
                "devices": list(run.devices[unit]),
                "busy_seconds": float(run.timeline.busy[unit]),
                "idle_seconds": float(run.timeline.idle[unit]),
            }
            for unit, (replica, stage) in enumerate(run.owners)
        ],
    }


def calibrated(plan: Plan, workload: Workload, path: Path) -> tuple[Workload, float]:
    """(the workload with a calibration's times, links and memory, the seconds that the plan's
    passes take beside their layers).

    path: the calibration's file. Raises InputError for a calibration of another cluster.
    """
    constants = Calibration.load(path)
    require(
        constants.cluster == workload.cluster.name,
        "is of another cluster",
        where=str(path),
        got=constants.cluster,
        expected=repr(workload.cluster.name),
    )
    # The calibration's measured shares of the bandwidths replace the learned ones.
    without_learned_links = replace(workload, links=None)
    return constants.adjusted(without_learned_links), constants.slot_seconds * slots(plan)
