"""Draws a plan file as an SVG: `python docs/plan_picture.py PLAN.json CLUSTER.yaml PICTURE.svg
[--check]`.

One row per stage with its devices and its layers, as wide as the seconds that they take, and one
bar for the whole iteration. Times are those of AMP's objective on the predicted profile, for plans
of strategies amp and ditto. With
--check nothing is written and the exit code is 1 if the picture is out of date.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from math import fsum
from pathlib import Path

from hetplan.errors import InputError
from hetplan.formulations.amp.data import AmpDecision
from hetplan.formulations.amp.evaluate import price
from hetplan.formulations.amp.pose import pose
from hetplan.formulations.ditto.data import DittoDecision, DittoStage
from hetplan.planner import ditto
from hetplan.profiling.workload import Workload, make_workload
from hetplan.runtime.plan import Plan, load_plan
from hetplan.text import names_text, ranges_text, seconds_text

WIDTH, MARGIN, LABELS, FIGURES = 980, 20, 250, 130
ROW, BAR = 58, 34
TYPE_COLOURS = ("#3b6fb6", "#e08a2b", "#4c9f70", "#8d5fb0", "#c0504d")
PART_COLOURS = ("#3b6fb6", "#7fa3d1", "#b9b9b9", "#8a8a8a")
LIGHT = "#b9b9b9"


@dataclass(frozen=True)
class DrawnStage:
    """One stage: layers [first, last) with their seconds, devices of all pipelines, its seconds and
    those to send."""

    first: int
    last: int
    devices: list[int]
    layer_seconds: list[float]
    seconds: float
    send: float


@dataclass(frozen=True)
class Drawn:
    """What the picture shows: the stages of the slowest pipeline, and the parts of one iteration
    with their names."""

    stages: list[DrawnStage]
    parts: list[tuple[str, float]]
    degrees: str

    @property
    def seconds(self) -> float:
        """One iteration."""
        return fsum(seconds for _, seconds in self.parts)


def drawn(plan: Plan, workload: Workload) -> Drawn:
    """The plan priced; raises InputError for plans that are neither AMP's nor one pipeline (ZeRO,
    row shares …)."""
    first = plan.replicas[0]
    single = all(len(stage.devices) == 1 for replica in plan.replicas for stage in replica.stages)
    if not single or len(first.micro_batches) != 1 or plan.zero != 0 or plan.schedule != "1f1b":
        raise InputError(
            "only plans of strategies amp and ditto can be drawn", where=plan.name, got=plan.origin
        )
    if len(plan.replicas) == 1:
        return drawn_template(plan, workload)
    return drawn_amp(plan, workload)


def drawn_template(plan: Plan, workload: Workload) -> Drawn:
    """One pipeline, stages of any width."""
    stages, (batches,) = plan.replicas[0].stages, plan.replicas[0].micro_batches
    groups = [stage.devices[0] for stage in stages]
    decision = DittoDecision(
        stages=[
            DittoStage(
                first=stage.layers[0][0],
                last=stage.layers[0][1],
                type=plan.devices[group[0]].type,
                devices=len(group),
            )
            for stage, group in zip(stages, groups, strict=True)
        ]
    )
    priced = ditto.price(workload, pose(workload), decision, groups, batches.samples)
    rows = [
        DrawnStage(
            stage.first,
            stage.last,
            group,
            shared(
                ditto.layer_seconds(workload, group, batches.samples)[stage.first : stage.last],
                t,
            ),
            t,
            send,
        )
        for stage, group, t, send in zip(
            decision.stages, groups, priced.stages, priced.links, strict=True
        )
    ]
    parts = [
        (f"{batches.count - 1} x slowest stage", (batches.count - 1) * max(priced.stages)),
        ("one pass over the stages", fsum(priced.stages)),
        ("links", fsum(priced.links)),
    ]
    degrees = (
        f"{len(rows)} stages in one pipeline, {batches.count} micro-batches of {batches.samples}"
    )
    return Drawn(rows, parts, degrees)


def drawn_amp(plan: Plan, workload: Workload) -> Drawn:
    """Equal pipelines side by side."""
    data, decision = pose(workload), decision_of(plan)
    priced = price(data, decision)
    row, terms = priced.slowest, priced.parts()
    links = [*priced.links[row], 0.0]
    key = (decision.tensor, decision.micro_batch)
    rows = []
    for j, (first, last) in enumerate(decision.stages):
        types = {data.devices[device].type for device in decision.placement[j][row]}
        tables = [
            t.seconds
            for t in data.layer_seconds
            if t.type in types and (t.tensor, t.micro_batch) == key
        ]
        compute = [max(table[layer] for table in tables) for layer in range(first, last)]
        seconds = priced.stages[row][j]
        devices = [d for group in decision.placement[j] for d in group]
        rows.append(DrawnStage(first, last, devices, shared(compute, seconds), seconds, links[j]))
    parts = [
        (f"{priced.gas - 1} x slowest stage", terms["bottleneck"]),
        ("one pass over the stages", terms["fill"]),
        ("links", terms["links"]),
        ("gradients", terms["synchronisation"]),
    ]
    degrees = (
        f"{decision.pipeline} stages x {decision.data} pipelines x tensor {decision.tensor}, "
        f"{priced.gas} micro-batches of {decision.micro_batch} in each"
    )
    return Drawn(rows, parts, degrees)


def shared(compute: list[float], seconds: float) -> list[float]:
    """Seconds of each layer; the stage's all-reduces go to its layers in proportion."""
    return [t * seconds / sum(compute) for t in compute]


def decision_of(plan: Plan) -> AmpDecision:
    """The plan as a decision of problem `amp`; raises InputError where its pipelines differ."""
    first = plan.replicas[0]
    cut = [stage.layers for stage in first.stages]
    if any(
        [stage.layers for stage in replica.stages] != cut
        or replica.micro_batches != first.micro_batches
        for replica in plan.replicas
    ):
        raise InputError("pipelines that differ cannot be drawn", where=plan.name, got=plan.origin)
    return AmpDecision(
        pipeline=len(cut),
        data=len(plan.replicas),
        tensor=len(first.stages[0].devices[0]),
        micro_batch=first.micro_batches[0].samples,
        placement=[
            [replica.stages[j].devices[0] for replica in plan.replicas] for j in range(len(cut))
        ],
        stages=[ranges[0] for ranges in cut],
    )


def text(
    x: float, y: float, content: str, *, size: int = 13, anchor: str = "start", style: str = ""
) -> str:
    """A line of text."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" '
        f'text-anchor="{anchor}"{style}>{escape(content)}</text>'
    )


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    """A rectangle, separated from its neighbours by a white line."""
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.1):.2f}" height="{height:.1f}" '
        f'fill="{colour}" '
        'stroke="#ffffff" stroke-width="1"/>'
    )


def stage_rows(plan: Plan, picture: Drawn, top: float) -> Iterator[str]:
    """Label, layers and figures of each stage."""
    chart = WIDTH - 2 * MARGIN - LABELS - FIGURES
    scale = chart / max(stage.seconds + stage.send for stage in picture.stages)
    types = list(dict.fromkeys(device.type for device in plan.devices))
    for j, stage in enumerate(picture.stages):
        kinds = Counter(plan.devices[d].type for d in stage.devices)
        nodes = ranges_text(plan.devices[d].node for d in stage.devices)
        y = top + j * ROW
        label = " + ".join(f"{count} x {name}" for name, count in kinds.items())
        yield text(MARGIN, y + 14, f"stage {j}: {label}", style=' font-weight="600"')
        yield text(MARGIN, y + 31, f"node {nodes}, devices {ranges_text(stage.devices)}", size=12)
        x = float(MARGIN + LABELS)
        slowest = max(kinds, key=types.index)
        for seconds in stage.layer_seconds:
            yield box(
                x, y, seconds * scale, BAR, TYPE_COLOURS[types.index(slowest) % len(TYPE_COLOURS)]
            )
            x += seconds * scale
        if stage.send > 0:
            yield box(x, y + BAR / 4, stage.send * scale, BAR / 2, LIGHT)
        count = stage.last - stage.first
        names = names_text(plan.workload.layers[stage.first : stage.last])
        layers = f"{count} layer{'s' if count > 1 else ''}: {names}"
        yield text(MARGIN + LABELS + 2, y + BAR + 14, layers, size=11)
        right = WIDTH - MARGIN
        yield text(
            right, y + 14, seconds_text(stage.seconds), anchor="end", style=' font-weight="600"'
        )
        if stage.send > 0:
            yield text(
                right, y + 31, f"+ {seconds_text(stage.send)} to send", size=12, anchor="end"
            )


def iteration_bar(picture: Drawn, top: float) -> Iterator[str]:
    """What one iteration consists of."""
    scale = (WIDTH - 2 * MARGIN) / picture.seconds
    x = float(MARGIN)
    for (name, seconds), colour in zip(picture.parts, PART_COLOURS, strict=False):
        yield box(x, top, seconds * scale, BAR, colour)
        room = seconds * scale
        if room > 8 * len(name):
            yield text(x + 6, top + 15, name, size=12, style=' fill="#ffffff"')
            yield text(x + 6, top + 29, seconds_text(seconds), size=12, style=' fill="#ffffff"')
        x += room
    rest = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in picture.parts)
    yield text(
        MARGIN, top + BAR + 16, f"one iteration, {seconds_text(picture.seconds)}: {rest}", size=12
    )


def draw(plan: Plan, cluster: Path) -> str:
    """The picture; raises InputError where the plan does not go with the cluster."""
    asked = plan.workload
    workload = make_workload(
        asked.model, cluster, asked.global_batch, sequence=asked.sequence, precision=asked.precision
    )
    if [(d.type, d.node) for d in plan.devices] != [
        (d.type, d.node) for d in workload.cluster.devices
    ]:
        raise InputError(
            "plan is for other devices", where=plan.name, expected=workload.cluster.name
        )
    picture = drawn(plan, workload)
    rows = MARGIN + 62
    bar = rows + len(picture.stages) * ROW + 14
    height = bar + BAR + 34
    head = (
        f"{asked.model} on {workload.cluster.name}: {seconds_text(picture.seconds)} per iteration"
    )
    degrees = f"{picture.degrees}; one micro-batch on each stage, forward and backward:"
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" '
        f'height="{height:.0f}" font-family="Helvetica, Arial, sans-serif" fill="#222222">',
        f"<title>{escape(head)}</title>",
        f'<rect width="{WIDTH}" height="{height:.0f}" rx="8" fill="#ffffff"/>',
        text(MARGIN, MARGIN + 14, head, size=18, style=' font-weight="600"'),
        text(MARGIN, MARGIN + 36, degrees, size=12),
        *stage_rows(plan, picture, rows),
        *iteration_bar(picture, bar),
        "</svg>",
    ]
    return "\n".join(body) + "\n"


def main(arguments: list[str]) -> int:
    """Draw, or check what was drawn."""
    plan, cluster, target = (Path(a) for a in arguments if a != "--check")
    picture = draw(load_plan(plan), cluster)
    if "--check" in arguments:
        fresh = target.exists() and target.read_text(encoding="utf-8") == picture
        if not fresh:
            print(
                f"{target} is out of date: run python docs/plan_picture.py {plan} {cluster} "
                f"{target}",
                file=sys.stderr,
            )
        return int(not fresh)
    target.write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
