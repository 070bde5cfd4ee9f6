"""Draws a plan file as an SVG: `python docs/plan_picture.py PLAN.json CLUSTER.yaml PICTURE.svg [--check]`.

One row per stage with its devices and its layers, as wide as the seconds that they take, and one bar for the whole
iteration. Times are those of AMP's objective on the predicted profile. With --check nothing is written and the exit
code is 1 if the picture is out of date.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from html import escape
from pathlib import Path

from hetplan.errors import InputError
from hetplan.formulations.amp.breakdown import Breakdown, price
from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.amp.pose import pose
from hetplan.profiling.workload import make_workload
from hetplan.runtime.plan import Plan, load_plan
from hetplan.text import names_text, ranges_text, seconds_text

WIDTH, MARGIN, LABELS, FIGURES = 980, 20, 250, 130
ROW, BAR = 58, 34
TYPE_COLOURS = ("#3b6fb6", "#e08a2b", "#4c9f70", "#8d5fb0", "#c0504d")
PART_COLOURS = ("#3b6fb6", "#7fa3d1", "#b9b9b9", "#8a8a8a")
LIGHT = "#b9b9b9"


def decision_of(plan: Plan) -> AmpDecision:
    """The plan as a decision of problem `amp`; raises InputError where it is none (unequal replicas, ZeRO …)."""
    first = plan.replicas[0]
    cut = [stage.layers for stage in first.stages]
    alike = all(
        [stage.layers for stage in replica.stages] == cut and replica.micro_batches == first.micro_batches
        for replica in plan.replicas
    )
    groups = [[stage.devices for stage in replica.stages] for replica in plan.replicas]
    single = all(len(devices) == 1 for replica in groups for devices in replica)
    if not (
        alike and single and len(first.micro_batches) == 1 and plan.zero == 0 and plan.schedule == "1f1b"
    ):
        raise InputError("only plans of strategy amp can be drawn", where=plan.name, got=plan.origin)
    return AmpDecision(
        pipeline=len(cut),
        data=len(plan.replicas),
        tensor=len(groups[0][0][0]),
        micro_batch=first.micro_batches[0].samples,
        placement=[[replica[j][0] for replica in groups] for j in range(len(cut))],
        stages=[ranges[0] for ranges in cut],
    )


def layer_times(data: AmpData, decision: AmpDecision, priced: Breakdown, j: int) -> list[float]:
    """Seconds of each layer of stage j in the slowest pipeline; a share of the stage's all-reduces goes to each."""
    row = priced.slowest
    types = {data.devices[device].type for device in decision.placement[j][row]}
    key = (decision.tensor, decision.micro_batch)
    tables = [t.seconds for t in data.layer_seconds if t.type in types and (t.tensor, t.micro_batch) == key]
    first, last = decision.stages[j]
    compute = [max(table[layer] for table in tables) for layer in range(first, last)]
    factor = priced.stages[row][j] / sum(compute)
    return [seconds * factor for seconds in compute]


def text(x: float, y: float, content: str, *, size: int = 13, anchor: str = "start", style: str = "") -> str:
    """A line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{style}>{escape(content)}</text>'


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    """A rectangle, separated from its neighbours by a white line."""
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.1):.2f}" height="{height:.1f}" fill="{colour}" '
        'stroke="#ffffff" stroke-width="1"/>'
    )


def stage_rows(
    plan: Plan, data: AmpData, decision: AmpDecision, priced: Breakdown, top: float
) -> Iterator[str]:
    """Label, layers and figures of each stage."""
    row = priced.slowest
    links = [*priced.links[row], 0.0]
    chart = WIDTH - 2 * MARGIN - LABELS - FIGURES
    scale = chart / max(t + e for t, e in zip(priced.stages[row], links, strict=True))
    types = list(dict.fromkeys(device.type for device in data.devices))
    for j, (first, last) in enumerate(decision.stages):
        devices = [d for group in decision.placement[j] for d in group]
        counts = Counter(data.devices[d].type for d in devices)
        nodes = ranges_text(data.devices[d].node for d in devices)
        y = top + j * ROW
        kinds = " + ".join(f"{count} x {name}" for name, count in counts.items())
        yield text(MARGIN, y + 14, f"stage {j}: {kinds}", style=' font-weight="600"')
        names = names_text(plan.workload.layers[first:last])
        yield text(MARGIN, y + 31, f"node {nodes}, devices {ranges_text(devices)}", size=12)
        x = float(MARGIN + LABELS)
        slowest = max((data.devices[d].type for d in decision.placement[j][row]), key=types.index)
        colour = TYPE_COLOURS[types.index(slowest) % len(TYPE_COLOURS)]
        for seconds in layer_times(data, decision, priced, j):
            yield box(x, y, seconds * scale, BAR, colour)
            x += seconds * scale
        if links[j] > 0:
            yield box(x, y + BAR / 4, links[j] * scale, BAR / 2, LIGHT)
        yield text(MARGIN + LABELS + 2, y + BAR + 14, f"{last - first} layers: {names}", size=11)
        right = WIDTH - MARGIN
        yield text(
            right, y + 14, seconds_text(priced.stages[row][j]), anchor="end", style=' font-weight="600"'
        )
        if links[j] > 0:
            yield text(right, y + 31, f"+ {seconds_text(links[j])} to send", size=12, anchor="end")


def iteration_bar(priced: Breakdown, top: float) -> Iterator[str]:
    """What one iteration consists of."""
    parts = priced.parts()
    named = (
        (f"{priced.gas - 1} x slowest stage", parts["bottleneck"]),
        ("one pass over the stages", parts["fill"]),
        ("links", parts["links"]),
        ("gradients", parts["synchronisation"]),
    )
    scale = (WIDTH - 2 * MARGIN) / priced.objective
    x = float(MARGIN)
    for (name, seconds), colour in zip(named, PART_COLOURS, strict=True):
        yield box(x, top, seconds * scale, BAR, colour)
        room = seconds * scale
        if room > 8 * len(name):
            yield text(x + 6, top + 15, name, size=12, style=' fill="#ffffff"')
            yield text(x + 6, top + 29, seconds_text(seconds), size=12, style=' fill="#ffffff"')
        x += room
    rest = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in named)
    yield text(MARGIN, top + BAR + 16, f"one iteration, {seconds_text(priced.objective)}: {rest}", size=12)


def draw(plan: Plan, cluster: Path) -> str:
    """The picture; raises InputError where the plan does not go with the cluster."""
    asked = plan.workload
    workload = make_workload(
        asked.model, cluster, asked.global_batch, sequence=asked.sequence, precision=asked.precision
    )
    if [(d.type, d.node) for d in plan.devices] != [(d.type, d.node) for d in workload.cluster.devices]:
        raise InputError("plan is for other devices", where=plan.name, expected=workload.cluster.name)
    data, decision = pose(workload), decision_of(plan)
    priced = price(data, decision)
    rows = MARGIN + 62
    bar = rows + len(decision.stages) * ROW + 14
    height = bar + BAR + 34
    head = f"{asked.model} on {workload.cluster.name}: {seconds_text(priced.objective)} per iteration"
    degrees = (
        f"{decision.pipeline} stages x {decision.data} pipelines x tensor {decision.tensor}, "
        f"{priced.gas} micro-batches of {decision.micro_batch} in each; "
        "one micro-batch on each stage, forward and backward:"
    )
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" font-family="Helvetica, Arial, sans-serif" fill="#222222">',
        f"<title>{escape(head)}</title>",
        f'<rect width="{WIDTH}" height="{height:.0f}" rx="8" fill="#ffffff"/>',
        text(MARGIN, MARGIN + 14, head, size=18, style=' font-weight="600"'),
        text(MARGIN, MARGIN + 36, degrees, size=12),
        *stage_rows(plan, data, decision, priced, rows),
        *iteration_bar(priced, bar),
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
                f"{target} is out of date: run python docs/plan_picture.py {plan} {cluster} {target}",
                file=sys.stderr,
            )
        return int(not fresh)
    target.write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
