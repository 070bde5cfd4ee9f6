"""One self-contained page: no scripts, no fonts, nothing fetched; drawings are SVG, details appear
on hovering.

Colours follow the reader's light or dark setting. Every drawing scales with the window; tables of
the same figures stand below for those who cannot see colours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from hetplan.planner.pictures.scene import Held, Offer, Row, Scene, Span
from hetplan.text import bytes_text, number_text, percent_text, seconds_text, share_text

KINDS = ("forward", "backward", "optimizer", "transfer", "synchronisation")
WIDTH, LABEL, ROW, LANE = 1200, 190, 34, 12
CELL, LINE, CELLS = 80, 46, 12  # of the cluster drawing: a device's size, devices in a line
STYLE = """
:root { --ground: #fcfcfb; --ink: #1f2328; --faint: #67707b; --line: #d9dde2; --lane: #eceef1;
  --forward: #2f6fb5; --backward: #79a9dc; --optimizer: #35506e; --transfer: #d98a29; --synchronisation: #b3459a;
  --over: #c23b32; --good: #2e8b57; }
@media (prefers-color-scheme: dark) { :root { --ground: #15181c; --ink: #e6e9ed; --faint: #9aa4b0; --line: #343a42;
  --lane: #22272d; --forward: #4c8fd9; --backward: #8ab8ea; --optimizer: #b7c9dd; --transfer: #e6a04a;
  --synchronisation: #d070b9; --over: #ef6a60; --good: #58b984; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 1320px; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; font-weight: 650; } h2 { font-size: 1.05rem; margin: 2.2rem 0 .6rem; }
p { margin: .2rem 0; color: var(--faint); } strong { color: var(--ink); font-weight: 650; }
svg { display: block; width: 100%; height: auto; } text { fill: var(--ink); font-size: 12px; }
text.small { font-size: 11px; fill: var(--faint); } .lane { fill: var(--lane); } .axis { stroke: var(--line); }
.figures { display: flex; flex-wrap: wrap; gap: .6rem 2.2rem; margin: 1rem 0 0; padding: 0; list-style: none; }
.figures b { display: block; font-size: 1.35rem; font-weight: 650; font-variant-numeric: tabular-nums; }
.figures span { color: var(--faint); font-size: .85rem; }
.legend span { display: inline-flex; align-items: center; gap: .35rem; margin-right: 1rem; font-size: .85rem; }
.legend i { width: .8rem; height: .8rem; border-radius: 2px; display: inline-block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem; }
th, td { text-align: right; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--faint); font-weight: 500; } td:first-child, th:first-child { text-align: left; }
tr.winner td { font-weight: 650; } .node { fill: none; stroke: var(--line); } .idle { fill: var(--lane); }
details { margin-top: .8rem; } summary { color: var(--faint); cursor: pointer; }
"""


def page(scene: Scene) -> str:
    """The page."""
    body = [
        f"<h1>{escape(scene.title)}</h1>",
        f"<p>{escape(scene.subtitle)}</p>",
        figures(scene),
        "<h2>One iteration</h2>",
        legend(),
        timeline(scene),
        "<h2>Memory of each device</h2>",
        memory(scene.devices),
        "<h2>Where everything is</h2>",
        cluster(scene),
        *(
            []
            if not scene.offers
            else ["<h2>What else there was</h2>", offers(scene.offers), table(scene.offers)]
        ),
        stages(scene.rows),
    ]
    head = [
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',
        f"<title>{escape(scene.title)}</title>",
        f"<style>{STYLE}</style>",
    ]
    whole = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        *head,
        "</head>",
        "<body>",
        *body,
        "</body>",
        "</html>",
    ]
    return "\n".join(whole) + "\n"


def figures(scene: Scene) -> str:
    """The figures that matter."""
    used = [d for d in scene.devices if d.unit is not None]
    fullest = max(used, key=lambda d: d.held / max(d.limit, 1.0))
    entries = [
        (seconds_text(scene.seconds), "per iteration, predicted by replaying the plan"),
        (percent_text(scene.bubble), "of the devices' time not computing"),
        (f"{len(used)} of {len(scene.devices)}", "devices in use"),
        (
            share_text(fullest.held, fullest.limit),
            f"on the fullest device, {fullest.device} ({fullest.kind})",
        ),
    ]
    items = "".join(
        f"<li><b>{escape(value)}</b><span>{escape(what)}</span></li>" for value, what in entries
    )
    return f'<ul class="figures">{items}</ul>'


def legend() -> str:
    """Colours by name."""
    marks = "".join(
        f'<span><i style="background: var(--{kind})"></i>{kind}</span>' for kind in KINDS
    )
    return f'<p class="legend">{marks}<span><i style="background: var(--lane)"></i>idle</span></p>'


def svg(height: float, label: str, parts: Iterator[str] | Sequence[str]) -> str:
    """A drawing."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">' + "".join(parts) + "</svg>"
    )  # fmt: skip


def rect(x: float, y: float, width: float, height: float, look: str, title: str = "") -> str:
    """A rectangle with what hovering shows."""
    inner = f"<title>{escape(title)}</title>" if title else ""
    place = f'x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.15):.2f}" height="{height:.1f}"'
    return f"<rect {place} {look}>{inner}</rect>" if inner else f"<rect {place} {look}/>"


def text(x: float, y: float, content: str, look: str = "") -> str:
    """A line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}"{look}>{escape(content)}</text>'


def timeline(scene: Scene) -> str:
    """Two lanes per stage: computing above, communicating below; the ground is idle."""
    height = len(scene.rows) * ROW + 26
    note = ""
    if scene.units > len(scene.rows):
        note = f"<p>{scene.units - len(scene.rows)} more stages are not drawn.</p>"
    return svg(height, "timeline of one iteration", timeline_parts(scene)) + note


def timeline_parts(scene: Scene) -> Iterator[str]:
    """Axis and rows."""
    scale = (WIDTH - LABEL) / scene.seconds if scene.seconds else 0.0
    bottom = len(scene.rows) * ROW
    for i, row in enumerate(scene.rows):
        y = i * ROW + 4
        yield text(0, y + 11, row.title)
        yield text(0, y + 24, shortened(row.devices, 34), ' class="small"')
        yield rect(
            LABEL,
            y,
            WIDTH - LABEL,
            LANE,
            'class="lane"',
            f"{row.title}: {row.devices}; {row.layers}",
        )
        yield rect(LABEL, y + LANE + 2, WIDTH - LABEL, LANE - 2, 'class="lane"')
        for spans, top, thick in (
            (row.computes, y, LANE),
            (row.communicates, y + LANE + 2, LANE - 2),
        ):
            for span in spans:
                x, width = LABEL + span.start * scale, (span.end - span.start) * scale
                yield rect(x, top, width, thick, f'fill="var(--{span.kind})"', hover(span))
    for k in range(6):
        x = LABEL + k / 5 * (WIDTH - LABEL)
        anchor = "end" if k == 5 else "middle" if k else "start"
        yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom + 4}"/>'
        yield text(
            x,
            bottom + 20,
            seconds_text(scene.seconds * k / 5),
            f' class="small" text-anchor="{anchor}"',
        )


def hover(span: Span) -> str:
    """`forward 3: 12.1 ms, from 36.3 ms`."""
    name = f"{span.kind} {span.batch}" if span.batch >= 0 else span.kind
    return f"{name}: {seconds_text(span.end - span.start)}, from {seconds_text(span.start)}"


def shortened(content: str, most: int) -> str:
    """At most so many characters."""
    return content if len(content) <= most else content[: most - 1] + "…"


def memory(devices: Sequence[Held]) -> str:
    """A bar per device against its limit, which is the end of its lane."""
    used = [d for d in devices if d.unit is not None]
    columns = 1 if len(used) <= 16 else 2 if len(used) <= 64 else 4
    lines = -(-len(used) // columns)
    return svg(lines * 20 + 4, "memory per device", memory_parts(used, lines, columns))


def memory_parts(used: Sequence[Held], lines: int, columns: int) -> Iterator[str]:
    """Bars, column by column."""
    each = WIDTH / columns
    label, figure = (190, 130) if columns < 4 else (40, 0)
    most = max(max(d.limit, d.held) for d in used) or 1.0
    for i, d in enumerate(used):
        x, y = (i // lines) * each, (i % lines) * 20 + 3
        room = each - label - figure - 16
        name = f"{d.device}  {d.kind}, {d.place}" if columns < 4 else str(d.device)
        colour = "over" if d.held > d.limit else "forward"
        told = f"device {d.device} ({d.kind}, node {d.node}, {d.place}): {bytes_text(d.held)} of {bytes_text(d.limit)}"
        yield text(x, y + 11, shortened(name, 28))
        yield rect(x + label, y, room * d.limit / most, 14, 'class="lane"', told)
        yield rect(x + label, y, room * d.held / most, 14, f'fill="var(--{colour})"', told)
        if figure:
            yield text(x + label + room + 8, y + 11, share_text(d.held, d.limit), ' class="small"')


def colour_of(unit: int, units: int) -> str:
    """Hues around the circle, neighbours apart from each other."""
    hue = (unit * 360 / max(units, 1) + 210) % 360
    return f"hsl({hue:.0f} 52% {58 if unit % 2 else 48}%)"


def cluster(scene: Scene) -> str:
    """Nodes as boxes, devices as cells in the colour of their stage."""
    parts: list[str] = []
    y = 4.0
    for n, name in enumerate(scene.nodes):
        inside = [d for d in scene.devices if d.node == n]
        lines = -(-len(inside) // CELLS)
        wide = min(len(inside), CELLS) * CELL + 16
        parts.append(rect(1, y, max(wide, 330), lines * (LINE) + 30, 'class="node" rx="6"'))
        parts.append(text(10, y + 17, name, ' class="small"'))
        for i, d in enumerate(inside):
            left, top = 9 + (i % CELLS) * CELL, y + 24 + (i // CELLS) * (LINE)
            look = (
                'class="idle" rx="4"'
                if d.unit is None
                else f'fill="{colour_of(d.unit, scene.units)}" rx="4"'
            )
            told = f"device {d.device}, {d.kind}: {d.place or 'idle'}, {bytes_text(d.held)} of {bytes_text(d.limit)}"
            parts.append(rect(left, top, CELL - 6, LINE - 6, look, told))
            white = "" if d.unit is None else ' style="fill: #fff"'
            parts.append(text(left + 6, top + 16, d.place or "idle", white))
            parts.append(text(left + 6, top + 31, f"device {d.device}", ' class="small"' + white))
        y += lines * (LINE) + 40
    return svg(y, "placement on the cluster", parts)


def offers(every: Sequence[Offer]) -> str:
    """A bar per candidate: predicted, with the closed form and the proven bound as marks."""
    timed = [o for o in every if o.seconds is not None]
    return svg(len(timed) * 22 + 22, "candidates", offer_parts(timed))


def offer_parts(timed: Sequence[Offer]) -> Iterator[str]:
    """Bars and marks; the scale ends at four times the winner, longer bars are cut."""
    known = [o.seconds or 0.0 for o in timed]
    most = min(max(known, default=1.0), 4 * min((s for s in known if s > 0), default=1.0)) or 1.0
    label, figure = 250, 90
    room = WIDTH - label - figure
    for i, o in enumerate(timed):
        y, seconds = i * 22 + 3, o.seconds or 0.0
        colour = "good" if o.winner else "backward" if o.fits else "over"
        told = f"{o.name}: {seconds_text(o.seconds)} replayed, {seconds_text(o.closed_form)} by its closed form, "
        told += f"bound of its own problem {seconds_text(o.bound)}"
        yield text(
            0, y + 12, shortened(o.name, 36), ' style="font-weight: 650"' if o.winner else ""
        )
        yield rect(label, y, room * min(seconds / most, 1.0), 15, f'fill="var(--{colour})"', told)
        for value, width in ((o.closed_form, 1.5), (o.bound, 3.5)):
            if value is not None and value <= most:
                yield rect(
                    label + room * value / most - width / 2,
                    y - 1,
                    width,
                    17,
                    'fill="var(--ink)"',
                    told,
                )
        more = " …" if seconds > most else ""
        yield text(label + room + 8, y + 12, seconds_text(o.seconds) + more, ' class="small"')
    note = "thin mark: the closed form; thick mark: proven bound of the strategy's own problem"
    yield text(label, len(timed) * 22 + 17, note, ' class="small"')


def table(every: Sequence[Offer]) -> str:
    """The same as figures."""
    head = "".join(
        f"<th>{h}</th>"
        for h in ("plan", "status", "iteration", "closed form", "bound", "$/1M tokens")
    )
    rows = "".join(
        f"<tr{' class=' + chr(34) + 'winner' + chr(34) if o.winner else ''}><td>{escape(o.name)}</td>"
        f"<td>{escape(o.status if o.fits or o.seconds is None else 'does not fit')}</td>"
        f"<td>{seconds_text(o.seconds)}</td><td>{seconds_text(o.closed_form)}</td><td>{seconds_text(o.bound)}</td>"
        f"<td>{number_text(o.money, 4)}</td></tr>"
        for o in every
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def stages(rows: Sequence[Row]) -> str:
    """The stages as a table."""
    head = "".join(f"<th>{h}</th>" for h in ("stage", "devices", "layers", "computes"))
    body = "".join(
        f"<tr><td>{escape(r.title)}</td><td>{escape(r.devices)}</td><td>{escape(r.layers)}</td>"
        f"<td>{percent_text(r.busy)} of the time</td></tr>"
        for r in rows
    )
    return (
        "<details><summary>Stages as a table</summary>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></details>'
    )
