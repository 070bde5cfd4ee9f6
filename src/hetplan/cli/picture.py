"""`hetplan show PLAN`: a plan file drawn: on the terminal, as one self-contained page, or as a PNG
or SVG file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetplan.cli import sources
from hetplan.cli.output import check_target, note, print_json, print_tables

if TYPE_CHECKING:
    from hetplan.planner.pictures.scene import Scene


def show_plan(
    value: Any,
    where: str,
    cluster: str | None,
    model: str | None,
    profile: Path | None,
    targets: dict[str, Path | None],
    *,
    json: bool,
) -> int:
    """Draw a plan: timeline of one iteration, memory of each device, placement, candidates with
    their bounds."""
    for target in targets.values():
        check_target(target)
    scene = drawn(value, where, cluster, model, profile)
    written = [write(scene, kind, target) for kind, target in targets.items() if target is not None]
    if json:
        print_json(asdict(scene))
    elif not written:
        from hetplan.planner.pictures.terminal import tables

        print_tables(tables(scene))
    for target in written:
        note(f"written: {target}")
    return 0


def drawn(
    value: Any, where: str, cluster: str | None, model: str | None, profile: Path | None
) -> Scene:
    """What the plan in parsed JSON looks like, replayed; `where` names it in errors. Raises
    InputError."""
    from hetplan.planner.pictures.scene import read, scene
    from hetplan.runtime.replay import replay

    plan, offers = read(value, where)
    workload = sources.workload_of(plan, cluster, model, profile)
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
