"""`hetplan simulate`: a plan file replayed, event by event, on a described cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetplan.cli import sources
from hetplan.cli.options import (
    JsonOption,
    LinksOption,
    PlanArgument,
    PlanClusterOption,
    PlanModelOption,
    ProfileOption,
)
from hetplan.cli.output import check_target, print_json, print_tables, write_document
from hetplan.text import Table, devices_text, percent_text, seconds_text, share_text

if TYPE_CHECKING:
    from hetplan.profiling.workload import Workload
    from hetplan.runtime.plan import Plan
    from hetplan.runtime.replay import Replay

LISTED = 64  # stages


def simulate(
    plan: PlanArgument,
    cluster: PlanClusterOption = None,
    model: PlanModelOption = None,
    profile: ProfileOption = None,
    overlap: Annotated[
        int,
        typer.Option(
            "--overlap",
            metavar="BUCKETS",
            help="Gradients leave in that many parts while others are computed.",
        ),
    ] = 1,
    blocking: Annotated[
        bool, typer.Option("--blocking", help="Senders wait for their transfers to the next stage.")
    ] = False,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration", metavar="FILE", help="Constants, as `hetplan calibrate` writes them."
        ),
    ] = None,
    links: LinksOption = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Write a trace for Perfetto (JSON)."),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Replay a plan on the event-driven simulator: seconds per iteration, idle time, memory; all
    predicted.

    Exit code 0 when the plan fits in memory, 1 when it does not.
    """
    from hetplan.errors import InputError
    from hetplan.runtime.plan import load_plan
    from hetplan.runtime.replay import Settings, replay

    check_target(trace)
    if overlap < 1:
        raise InputError("--overlap", got=overlap, expected="1 part or more")
    loaded = load_plan(plan)
    workload = sources.workload_of(loaded, cluster, model, profile)
    if links is not None and calibration is not None:
        raise InputError("does not go with --calibration", where="--links")
    workload = sources.with_links(workload, links)
    beside = 0.0
    if calibration is not None:
        workload, beside = calibrated(loaded, workload, calibration)
    found = replay(loaded, workload, Settings(buckets=overlap, blocking=blocking))
    if trace is not None:
        from hetplan.runtime.replay import trace as traced

        write_document(trace, traced(found))
    if json:
        print_json(document(loaded, found, beside, calibration is not None))
    else:
        print_tables([stages(loaded, found, workload, beside, calibration is not None)])
    return 0 if found.fits else 1


def calibrated(plan: Plan, workload: Workload, path: Path) -> tuple[Workload, float]:
    """The workload with a calibration's links and memory, and the seconds that its passes take
    beside their layers."""
    from dataclasses import replace

    from hetplan.errors import InputError
    from hetplan.runtime.calibration import load_calibration, scaled, slots

    constants = load_calibration(path)
    if constants.cluster != workload.cluster.name:
        expected = repr(workload.cluster.name)
        raise InputError(
            "is of another cluster", where=str(path), got=constants.cluster, expected=expected
        )
    links = scaled(workload.cluster, constants.within, constants.between)
    reserved = constants.framework_bytes
    held = replace(workload, cluster=links)
    if reserved is not None:
        held = replace(held, reserved_bytes=reserved)
    return held, constants.slot_seconds * slots(plan)


def document(
    plan: Plan, found: Replay, beside: float = 0.0, is_calibrated: bool = False
) -> dict[str, Any]:
    """As JSON types; seconds and bytes. beside: seconds of the iteration that are in no task of the
    timeline."""
    timeline = found.timeline
    return {
        "plan": plan.name,
        "origin": plan.origin,
        "predicted_seconds": found.seconds + beside,
        "calibrated": is_calibrated,
        "bubble": timeline.bubble,
        "fits_memory": found.fits,
        "peak_bytes": list(found.peak_bytes),
        "stages": [
            {
                "replica": replica,
                "stage": stage,
                "devices": list(devices),
                "busy_seconds": float(timeline.busy[unit]),
                "idle_seconds": float(timeline.idle[unit]),
            }
            for unit, ((replica, stage), devices) in enumerate(
                zip(found.owners, found.devices, strict=True)
            )
        ],
    }


def stages(
    plan: Plan, found: Replay, workload: Workload, beside: float = 0.0, is_calibrated: bool = False
) -> Table:
    """One line per stage of every replica."""
    timeline = found.timeline
    places = [(device.node, device.type) for device in workload.cluster.devices]
    rows = []
    for unit, ((replica, stage), devices) in enumerate(
        zip(found.owners, found.devices, strict=True)
    ):
        ranges = ", ".join(
            f"{first}-{last - 1}" for first, last in plan.replicas[replica].stages[stage].layers
        )
        fullest = max(devices, key=lambda d: found.peak_bytes[d] / max(found.limit_bytes[d], 1.0))
        rows.append(
            (
                str(replica),
                str(stage),
                ranges,
                devices_text(places, devices),
                seconds_text(float(timeline.busy[unit])),
                percent_text(float(timeline.idle[unit]) / found.seconds),
                share_text(found.peak_bytes[fullest], found.limit_bytes[fullest]),
            )
        )
    idle = percent_text(timeline.bubble)
    word = "predicted, calibrated" if is_calibrated else "predicted"
    seconds = seconds_text(found.seconds + beside)
    notes = [f"{seconds} per iteration, {word}; {idle} of the devices' time idle"]
    if len(rows) > LISTED:
        notes.append(f"{len(rows) - LISTED} more stages; --json lists all")
    if not found.fits:
        notes.append("does not fit in memory")
    header = ("replica", "stage", "layers", "devices", "computes", "idle", "memory")
    title = f"{plan.name}, {plan.origin or 'plan'}: {plan.schedule}, ZeRO {plan.zero}"
    return Table(title, header, tuple(rows[:LISTED]), tuple(notes), right=(0, 1, 2, 4, 5))
