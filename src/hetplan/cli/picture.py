"""`hetplan show PLAN`: a plan file drawn: on the terminal, as one self-contained page, or as a PNG or SVG file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hetplan.cli import sources
from hetplan.cli.output import check_target, note, print_json, print_tables

if TYPE_CHECKING:
    from hetplan.planner.pictures.scene import Scene


def show_plan(
    plan: str,
    cluster: str | None,
    model: str | None,
    profile: Path | None,
    targets: dict[str, Path | None],
    *,
    json: bool,
) -> int:
    """Draw a plan: timeline of one iteration, memory of each device, placement, candidates with their bounds."""
    for target in targets.values():
        check_target(target)
    scene = drawn(plan, cluster, model, profile)
    written = [write(scene, kind, target) for kind, target in targets.items() if target is not None]
    if json:
        print_json(asdict(scene))
    elif not written:
        from hetplan.planner.pictures.terminal import tables

        print_tables(tables(scene))
    for target in written:
        note(f"written: {target}")
    return 0


def drawn(argument: str, cluster: str | None, model: str | None, profile: Path | None) -> Scene:
    """What the file's plan looks like, replayed; raises InputError."""
    from hetplan.planner.pictures.scene import read, scene
    from hetplan.profiling.workload import make_workload
    from hetplan.runtime.replay import replay

    value, where = sources.read_document(argument)
    plan, offers = read(value, where)
    told = plan.workload
    workload = make_workload(
        model or told.model,
        sources.open_cluster(cluster or told.cluster),
        told.global_batch,
        sequence=told.sequence,
        precision=told.precision,
        profile=profile,
    )
    return scene(plan, replay(plan, workload), workload, offers)


def write(scene: Scene, kind: str, target: Path) -> Path:
    """One file."""
    from hetplan.files import write_bytes, write_text

    if kind == "html":
        from hetplan.planner.pictures.html import page

        write_text(target, page(scene))
    else:
        from hetplan.planner.pictures.figure import figure

        write_bytes(target, figure(scene, kind))
    return target
