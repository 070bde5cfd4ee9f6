"""One self-contained page: no scripts, no fonts, nothing fetched; drawings are SVG, details appear
on hovering.

Colours follow the reader's light or dark setting. Every drawing scales with the window; tables of
the same figures stand below for those who cannot see colours.
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from hetplan.errors import shortened
from hetplan.planner.pictures.scene import Held, Offer, Scene, Span
from hetplan.text import bytes_text, number_text, percent_text, seconds_text, share_text

KINDS = ("forward", "backward", "optimizer", "transfer", "synchronisation")
WIDTH, LABEL, ROW, LANE = 1200, 190, 34, 12
CELL, LINE, CELLS = 80, 46, 12  # of the cluster drawing: a device's size, devices in a line
SMALL = ' class="small"'
STYLE = """
:root { --ground: #fcfcfb; --ink: #1f2328; --faint: #67707b; --line: #d9dde2; --lane: #eceef1;
  --forward: #2f6fb5; --backward: #79a9dc; --optimizer: #35506e; --transfer: #d98a29;
  --synchronisation: #b3459a; --over: #c23b32; --good: #2e8b57; }
@media (prefers-color-scheme: dark) { :root { --ground: #15181c; --ink: #e6e9ed; --faint: #9aa4b0;
  --line: #343a42; --lane: #22272d; --forward: #4c8fd9; --backward: #8ab8ea; --optimizer: #b7c9dd;
  --transfer: #e6a04a; --synchronisation: #d070b9; --over: #ef6a60; --good: #58b984; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 1320px; background: var(--ground);
  color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; font-weight: 650; }
h2 { font-size: 1.05rem; margin: 2.2rem 0 .6rem; }
p { margin: .2rem 0; color: var(--faint); } strong { color: var(--ink); font-weight: 650; }
svg { display: block; width: 100%; height: auto; } text { fill: var(--ink); font-size: 12px; }
text.small { font-size: 11px; fill: var(--faint); }
.lane { fill: var(--lane); } .axis { stroke: var(--line); }
.figures { display: flex; flex-wrap: wrap; gap: .6rem 2.2rem; margin: 1rem 0 0; padding: 0;
  list-style: none; }
.figures b { display: block; font-size: 1.35rem; font-weight: 650;
  font-variant-numeric: tabular-nums; }
.figures span { color: var(--faint); font-size: .85rem; }
.legend span { display: inline-flex; align-items: center; gap: .35rem; margin-right: 1rem;
  font-size: .85rem; }
.legend i { width: .8rem; height: .8rem; border-radius: 2px; display: inline-block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem; }
th, td { text-align: right; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th { color: var(--faint); font-weight: 500; }
td:first-child, th:first-child { text-align: left; }
tr.winner td { font-weight: 650; } .node { fill: none; stroke: var(--line); }
.idle { fill: var(--lane); }
details { margin-top: .8rem; } summary { color: var(--faint); cursor: pointer; }
"""


def page(scene: Scene) -> str:
    """The page."""
    return "\n".join(lines(scene)) + "\n"


def lines(scene: Scene) -> Iterator[str]:
    """The page's parts."""
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield '<link rel="icon" href="data:,">'
    yield f"<title>{escape(scene.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>"
    yield f"<h1>{escape(scene.title)}</h1>\n<p>{escape(scene.subtitle)}</p>"
    yield figures(scene)
    yield "<h2>One iteration</h2>"
    marks = (f'<span><i style="background: var(--{kind})"></i>{kind}</span>' for kind in KINDS)
    idle = '<span><i style="background: var(--lane)"></i>idle</span>'
    yield f'<p class="legend">{"".join(marks)}{idle}</p>'
    yield svg(len(scene.rows) * ROW + 26, "timeline of one iteration", timeline(scene))
    if scene.units > len(scene.rows):
        yield f"<p>{scene.units - len(scene.rows)} more stages are not drawn.</p>"
    yield "<h2>Memory of each device</h2>"
    yield svg(len(scene.used) * 20 + 4, "memory per device", memory(scene.used))
    yield "<h2>Where everything is</h2>"
    yield cluster(scene)
    if scene.offers:
        yield "<h2>What else there was</h2>"
        header = ("plan", "status", "iteration", "closed form", "bound", "$/1M tokens")
        yield table(header, map(cells, scene.offers), scene.winner)
    yield "<details><summary>Stages as a table</summary>"
    stages = ((r.title, r.devices, r.layers, percent_text(r.busy)) for r in scene.rows)
    yield table(("stage", "devices", "layers", "computes"), stages) + "</details>"
    yield "</body>\n</html>"


def figures(scene: Scene) -> str:
    """The figures that matter."""
    fullest = max(scene.used, key=lambda d: d.held / max(d.limit, 1.0))
    entries = [
        (seconds_text(scene.seconds), "per iteration, predicted by replaying the plan"),
        (percent_text(scene.bubble), "of the devices' time not computing"),
        (f"{len(scene.used)} of {len(scene.devices)}", "devices in use"),
        (
            share_text(fullest.held, fullest.limit),
            f"on the fullest device, {fullest.device} ({fullest.kind})",
        ),
    ]
    items = (f"<li><b>{escape(v)}</b><span>{escape(what)}</span></li>" for v, what in entries)
    return f'<ul class="figures">{"".join(items)}</ul>'


def svg(height: float, label: str, parts: Iterable[str]) -> str:
    """A drawing."""
    box = f'viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}"'
    return f"<svg {box}>{''.join(parts)}</svg>"


def rect(x: float, y: float, width: float, height: float, look: str, title: str = "") -> str:
    """A rectangle with what hovering shows."""
    place = f'x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.15):.2f}" height="{height:.1f}"'
    if not title:
        return f"<rect {place} {look}/>"
    return f"<rect {place} {look}><title>{escape(title)}</title></rect>"


def text(x: float, y: float, content: str, look: str = "") -> str:
    """A line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}"{look}>{escape(content)}</text>'


def timeline(scene: Scene) -> Iterator[str]:
    """Axis and rows, two lanes per stage: computing above, communicating below; the ground is
    idle."""
    wide = WIDTH - LABEL
    scale = wide / scene.seconds if scene.seconds else 0.0
    for i, row in enumerate(scene.rows):
        y = i * ROW + 4
        yield text(0, y + 11, row.title)
        yield text(0, y + 24, shortened(row.devices, 34), SMALL)
        for lane, top, thick in (
            (row.computes, y, LANE),
            (row.communicates, y + LANE + 2, LANE - 2),
        ):
            hint = f"{row.title}: {row.devices}; {row.layers}"
            yield rect(LABEL, top, wide, thick, 'class="lane"', hint)
            for span in lane:
                x, width = LABEL + span.start * scale, (span.end - span.start) * scale
                yield rect(x, top, width, thick, f'fill="var(--{span.kind})"', hover(span))
    bottom = len(scene.rows) * ROW
    for k in range(6):
        x, anchor = LABEL + k / 5 * wide, "end" if k == 5 else "middle" if k else "start"
        yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom + 4}"/>'
        label = seconds_text(scene.seconds * k / 5)
        yield text(x, bottom + 20, label, f'{SMALL} text-anchor="{anchor}"')


def hover(span: Span) -> str:
    """`forward 3: 12.1 ms, from 36.3 ms`."""
    name = f"{span.kind} {span.batch}" if span.batch >= 0 else span.kind
    return f"{name}: {seconds_text(span.end - span.start)}, from {seconds_text(span.start)}"


def held_text(device: Held) -> str:
    """`1.2 GiB of 14.5 GiB`."""
    return f"{bytes_text(device.held)} of {bytes_text(device.limit)}"


def memory(used: Sequence[Held]) -> Iterator[str]:
    """A bar per device against its limit, which is the end of its lane."""
    room = WIDTH - LABEL - 146
    most = max(max(d.limit, d.held) for d in used) or 1.0
    for i, d in enumerate(used):
        y, colour = i * 20 + 3, "over" if d.held > d.limit else "forward"
        hint = f"device {d.device} ({d.kind}, node {d.node}, {d.place}): {held_text(d)}"
        yield text(0, y + 11, shortened(f"{d.device}  {d.kind}, {d.place}", 28))
        yield rect(LABEL, y, room * d.limit / most, 14, 'class="lane"', hint)
        yield rect(LABEL, y, room * d.held / most, 14, f'fill="var(--{colour})"', hint)
        yield text(LABEL + room + 8, y + 11, share_text(d.held, d.limit), SMALL)


def cluster(scene: Scene) -> str:
    """Nodes as boxes, devices as cells in the colour of their stage."""
    parts: list[str] = []
    y = 4.0
    for n, name in enumerate(scene.nodes):
        inside = [d for d in scene.devices if d.node == n]
        lines = -(-len(inside) // CELLS)
        wide = max(min(len(inside), CELLS) * CELL + 16, 330)
        parts.append(rect(1, y, wide, lines * LINE + 30, 'class="node" rx="6"'))
        parts.append(text(10, y + 17, name, SMALL))
        for i, d in enumerate(inside):
            left, top = 9 + (i % CELLS) * CELL, y + 24 + (i // CELLS) * LINE
            look, white = 'class="idle" rx="4"', ""
            if d.unit is not None:  # hues around the circle, neighbours apart from each other
                hue = (d.unit * 360 / max(scene.units, 1) + 210) % 360
                light = 58 if d.unit % 2 else 48
                look = f'fill="hsl({hue:.0f} 52% {light}%)" rx="4"'
                white = ' style="fill: #fff"'
            place = d.place or "idle"
            hint = f"device {d.device}, {d.kind}: {place}, {held_text(d)}"
            parts.append(rect(left, top, CELL - 6, LINE - 6, look, hint))
            parts.append(text(left + 6, top + 16, place, white))
            parts.append(text(left + 6, top + 31, f"device {d.device}", SMALL + white))
        y += lines * LINE + 40
    return svg(y, "placement on the cluster", parts)


def cells(offer: Offer) -> tuple[str, ...]:
    """A candidate in figures."""
    own = " for its formula" if offer.status == "optimal" and offer.strategy != "joint" else ""
    return (
        offer.name,
        "does not fit" if offer.fits_memory is False else offer.status[:40] + own,
        seconds_text(offer.predicted_seconds),
        seconds_text(offer.closed_form_seconds),
        seconds_text(offer.bound),
        number_text(offer.money_per_million_tokens, 4),
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]], winner: int | None = None) -> str:
    """A table; the winner's row stands out."""
    head = "".join(f"<th>{name}</th>" for name in header)
    body = []
    for i, row in enumerate(rows):
        look = ' class="winner"' if i == winner else ""
        body.append(f"<tr{look}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>")
    whole = f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'<div class="scroll"><table>{whole}</table></div>'
