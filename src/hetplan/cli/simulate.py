"""`hetplan plan simulate`: a plan file replayed, event by event, on a described cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetplan.cli import sources
from hetplan.cli.options import JsonOption, LinksOption, PlanArgument, target
from hetplan.cli.output import emit, write_document
from hetplan.errors import InputError
from hetplan.text import Table, devices_text, percent_text, seconds_text, share_text

if TYPE_CHECKING:
    from hetplan.profiling.workload import Workload
    from hetplan.runtime.plan import Plan
    from hetplan.runtime.replay import Replay

LISTED = 64  # stages


def simulate(
    plan: PlanArgument,
    setting: sources.Setting,
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
            "--calibration",
            metavar="FILE",
            help="Constants, as `hetplan truth calibrate` writes them.",
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
    from hetplan.runtime.plan import load_plan
    from hetplan.runtime.replay import Settings, replay

    if overlap < 1:
        raise InputError("--overlap", got=overlap, expected="1 part or more")
    loaded = load_plan(plan)
    workload = setting.workload(loaded)
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
    view = View(loaded, found, workload, beside, calibration is not None)
    emit(view.document(), [view.table()], json=json)
    return 0 if found.fits else 1


def calibrated(plan: Plan, workload: Workload, path: Path) -> tuple[Workload, float]:
    """The workload with a calibration's links and memory, and the seconds that its passes take
    beside their layers."""
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


@dataclass(frozen=True)
class View:
    """A replay as it is printed. beside: seconds of the iteration that are in no task of the
    timeline; calibrated: whether measured constants went into it."""

    plan: Plan
    replay: Replay
    workload: Workload
    beside: float
    calibrated: bool

    def document(self) -> dict[str, Any]:
        """As JSON types; seconds and bytes."""
        replay, timeline = self.replay, self.replay.timeline
        return {
            "plan": self.plan.name,
            "origin": self.plan.origin,
            "predicted_seconds": replay.seconds + self.beside,
            "calibrated": self.calibrated,
            "bubble": timeline.bubble,
            "fits_memory": replay.fits,
            "peak_bytes": list(replay.peak_bytes),
            "stages": [
                {
                    "replica": replica,
                    "stage": stage,
                    "devices": list(replay.devices[unit]),
                    "busy_seconds": float(timeline.busy[unit]),
                    "idle_seconds": float(timeline.idle[unit]),
                }
                for unit, (replica, stage) in enumerate(replay.owners)
            ],
        }

    def table(self) -> Table:
        """One line per stage of every replica."""
        plan, replay, timeline = self.plan, self.replay, self.replay.timeline
        idle = percent_text(timeline.bubble)
        word = "predicted, calibrated" if self.calibrated else "predicted"
        seconds = seconds_text(replay.seconds + self.beside)
        notes = [f"{seconds} per iteration, {word}; {idle} of the devices' time idle"]
        if len(replay.owners) > LISTED:
            notes.append(f"{len(replay.owners) - LISTED} more stages; --json lists all")
        if not replay.fits:
            notes.append("does not fit in memory")
        places = [(device.node, device.type) for device in self.workload.cluster.devices]
        return Table.of(
            f"{plan.name}, {plan.origin or 'plan'}: {plan.schedule}, ZeRO {plan.zero}",
            range(min(LISTED, len(replay.owners))),
            {
                "replica": lambda unit: str(replay.owners[unit][0]),
                "stage": lambda unit: str(replay.owners[unit][1]),
                "layers": self.layers,
                "devices": lambda unit: devices_text(places, replay.devices[unit]),
                "computes": lambda unit: seconds_text(float(timeline.busy[unit])),
                "idle": lambda unit: percent_text(float(timeline.idle[unit]) / replay.seconds),
                "memory": self.memory,
            },
            notes,
            right=(0, 1, 2, 4, 5),
        )

    def layers(self, unit: int) -> str:
        """The layers of a stage: `0-3, 8-11`."""
        replica, stage = self.replay.owners[unit]
        ranges = self.plan.replicas[replica].stages[stage].layers
        return ", ".join(f"{first}-{last - 1}" for first, last in ranges)

    def memory(self, unit: int) -> str:
        """What the stage's device nearest to its limit holds, of that limit."""
        peak, limit = self.replay.peak_bytes, self.replay.limit_bytes
        fullest = max(self.replay.devices[unit], key=lambda d: peak[d] / max(limit[d], 1.0))
        return share_text(peak[fullest], limit[fullest])
