"""One self-contained page: nothing is fetched; figures are HTML tables, and one script of the page
draws the timeline, zooms in it and says what an event is.

Colours follow the reader's light or dark setting, and paper. Everything that a drawing shows also
stands in a table, for those who do not see colours and for screen readers; the timeline obeys the
keyboard.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import groupby

from hetplan.planner.pictures.scene import Held, Offer, Scene, Span
from hetplan.solvers.run import relative_gap
from hetplan.text import (
    bytes_text,
    grouped,
    html_text,
    more_text,
    number_text,
    percent_text,
    ranges_text,
    seconds_text,
    share_text,
)

KINDS = ("forward", "backward", "optimizer", "transfer", "synchronisation")
WIDTH, HEIGHT, EDGE = 640, 260, 46  # of the drawing of money against time
BUTTONS = {
    "in": "Zoom in",
    "out": "Zoom out",
    "earlier": "Earlier",
    "later": "Later",
    "whole": "Whole iteration",
}
KEYS = (
    "Point at a bar to read it; drag over a span of time to zoom into it. With the keyboard: Tab "
    "to the timeline, ← → from event to event, ↑ ↓ from stage to stage, + and − zoom, 0 shows "
    "the whole iteration."
)


class Markup(str):
    """HTML, as against text that is to be escaped."""


def page(scene: Scene) -> str:
    """The page."""
    sections = {title: body for title, body in sections_of(scene).items() if body}
    anchors = {title: title.lower().replace(" ", "-") for title in sections}
    links = (f'<li><a href="#{anchors[title]}">{title}</a></li>' for title in sections)
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',
        f"<title>{html_text(scene.title)}</title>\n<style>{packaged('page.css')}</style>\n</head>",
        '<body>\n<a class="skip" href="#one-iteration">To the timeline</a>',
        f"<header><h1>{html_text(scene.title)}</h1>",
        f'<p class="faint">{html_text(scene.subtitle)}</p>\n{figures(scene)}</header>',
        f'<nav aria-label="Contents"><ul>{"".join(links)}</ul></nav>\n<main>',
        *(
            f'<section><h2 id="{anchors[title]}">{title}</h2>\n{body}</section>'
            for title, body in sections.items()
        ),
        f'</main>\n<script type="application/json" id="data">{timeline_data(scene)}</script>',
        f"<script>{packaged('page.js')}</script>\n</body>\n</html>\n",
    ]
    return "\n".join(parts)


def packaged(name: str) -> str:
    """A file beside this module."""
    return (files("hetplan.planner.pictures") / name).read_text(encoding="utf-8")


def sections_of(scene: Scene) -> Mapping[str, str]:
    """Heading -> HTML; empty where there is nothing to say."""
    return {
        "One iteration": timeline(scene),
        "Why it takes that long": table(("what", ""), scene.why.items(), text=(1,)),
        "Stages and memory": stages(scene),
        "Where everything is": "".join(['<div class="nodes">', *nodes(scene), "</div>"]),
        "Price of each paradigm": prices(scene.offers),
        "Plans and their bounds": candidates(scene),
        "Money against time": money(scene),
        "What a change would bring": changes(scene),
    }


def figures(scene: Scene) -> str:
    """The figures that matter."""
    fullest = max(scene.used, key=lambda d: d.held / max(d.limit, 1.0))
    gap = relative_gap(scene.seconds, scene.bound)
    entries = {
        "per iteration, predicted by replaying the plan": seconds_text(scene.seconds),
        f"no plan of stages is faster than {seconds_text(scene.bound)} (proven)": (
            None if gap is None else f"gap {percent_text(gap)}"
        ),
        "of the devices' time not computing": percent_text(scene.bubble),
        "devices in use": f"{len(scene.used)} of {len(scene.devices)}",
        f"on the fullest device, {fullest.device} ({fullest.kind})": share_text(
            fullest.held, fullest.limit
        ),
    }
    items = (
        f"<li><b>{v}</b><span>{html_text(what)}</span></li>" for what, v in entries.items() if v
    )
    return f'<ul class="figures">{"".join(items)}</ul>'


def timeline(scene: Scene) -> str:
    """Where the script draws, what steers it, and what the colours mean."""
    marks = (f'<span><i style="background: var(--{kind})"></i>{kind}</span>' for kind in KINDS)
    buttons = (
        f'<button type="button" data-act="{a}">{text}</button>' for a, text in BUTTONS.items()
    )
    more = f"<p>{scene.more} more stages are not drawn.</p>" if scene.more else ""
    return (
        f'<p class="legend">{"".join(marks)}<span><i class="lane" style="background: var(--lane)">'
        f'</i>idle</span></p>\n<div class="controls">{"".join(buttons)}</div>\n'
        f'<p id="said" role="status">{seconds_text(scene.seconds)} from left to right</p>\n'
        '<div id="timeline" tabindex="0" role="group" aria-label="Timeline of one iteration" '
        f'aria-describedby="keys"></div>\n{more}<p class="faint keys" id="keys">{KEYS}</p>\n'
        "<noscript><p>The timeline needs JavaScript; the table of stages does not.</p></noscript>"
    )


def timeline_data(scene: Scene) -> str:
    """The spans that the script draws, as JSON: two lanes of each row with [kind, begin, end,
    micro-batch], begin and end in millionths of the iteration."""
    scale = 1e6 / (scene.seconds or 1.0)

    def lane(spans: Sequence[Span]) -> list[tuple[int, int, int, int]]:
        return [
            (KINDS.index(s.kind), round(s.start * scale), round(s.end * scale), s.batch)
            for s in spans
        ]

    rows = [
        {
            "title": row.title,
            "devices": row.devices,
            "layers": row.layers,
            "lanes": [lane(row.computes), lane(row.communicates)],
        }
        for row in scene.rows
    ]
    return json.dumps(
        {"seconds": scene.seconds, "kinds": KINDS, "rows": rows}, separators=(",", ":")
    ).replace("<", "\\u003c")


def bar(share: float, mark: float | None = None, colour: str = "forward") -> Markup:
    """A bar of that share of its width, with a mark across it."""
    tick = "" if mark is None else f'<b style="left: {100 * min(mark, 1):.1f}%"></b>'
    look = f"--part: {100 * min(share, 1):.1f}%; --fill: var(--{colour})"
    return Markup(f'<span class="bar" style="{look}">{tick}</span>')


def with_bar(text: str, made: Markup) -> Markup:
    """A figure and its bar."""
    return Markup(html_text(text) + made)


def stages(scene: Scene) -> str:
    """One line per row of the timeline, with the fullest of its devices."""
    lines = []
    for number, row in enumerate(scene.rows):
        own = [device for device in scene.used if device.row == number]
        fullest = max(own, key=lambda d: d.held / max(d.limit, 1.0))
        share = fullest.held / max(fullest.limit, 1.0)
        held = f"{share_text(fullest.held, fullest.limit)} (device {fullest.device})"
        lines.append(
            (
                row.title,
                row.devices,
                row.layers,
                with_bar(percent_text(row.busy), bar(row.busy)),
                with_bar(held, bar(share, None, "over" if share > 1 else "forward")),
            )
        )
    return table(
        ("stage", "devices", "layers", "computes", "memory of the fullest device"),
        lines,
        text=(1, 2),
        caption="Pipelines that do the same share one line; of them the first is drawn.",
    )


def nodes(scene: Scene) -> Iterator[str]:
    """Nodes as boxes, devices as cells in the colour of their stage; nodes that look the same are
    one box."""
    cells = {
        n: tuple(cell(d, len(scene.rows)) for d in scene.devices if d.node == n)
        for n in range(len(scene.nodes))
    }
    looks = grouped(((links, cells[n]), n) for n, links in enumerate(scene.nodes))
    for (links, inside), numbers in looks.items():
        count = f" ({len(numbers)} nodes)" if len(numbers) > 1 else ""
        yield (
            f'<div class="node"><p><b>node {ranges_text(numbers)}</b>{count}<br>'
            f"{html_text(links)}</p>"
            f"<ul>{''.join(inside)}</ul></div>"
        )


def cell(device: Held, rows: int) -> str:
    """A device; hues lie around the circle, neighbours apart from each other."""
    hue, light = (
        (210 + 360 * (device.row or 0) / max(rows, 1)) % 360,
        80 + 8 * ((device.row or 0) % 2),
    )
    look = "" if device.row is None else f' style="background: hsl({hue:.0f} 62% {light}%)"'
    held = f"{bytes_text(device.held)} of {bytes_text(device.limit)}"
    return (
        f'<li{look} title="{html_text(held)}"><b>{html_text(device.place or "idle")}</b>'
        f"{html_text(device.kind)}</li>"
    )


def prices(offers: Sequence[Offer]) -> str:
    """The best plan of each strategy, and how much longer it takes than the best of all."""
    fits = [o for o in offers if o.fits_memory and o.predicted_seconds]
    fits.sort(key=lambda o: (o.strategy, o.predicted_seconds))
    best = [next(own) for _, own in groupby(fits, key=lambda o: o.strategy)]
    best.sort(key=lambda o: o.predicted_seconds or 0.0)
    seconds = [o.predicted_seconds or 0.0 for o in best]
    lines = [
        (
            o.strategy,
            o.name,
            with_bar(seconds_text(s), bar(s / seconds[-1])),
            more_text(s / seconds[0] - 1) if s > seconds[0] else "the best",
        )
        for o, s in zip(best, seconds, strict=True)
    ]
    return table(
        ("paradigm", "best plan", "iteration", "longer by"),
        lines,
        text=(1,),
        caption="What it costs to plan in one paradigm alone: its best plan against the best of "
        "all.",
    )


def candidates(scene: Scene) -> str:
    """All plans with their bounds."""
    most = max((o.predicted_seconds or 0.0 for o in scene.offers), default=0.0) or 1.0
    caption = (
        "Iterations are replayed. Objective, status and bound are of each strategy's own "
        "problem; its bound is the mark across the bar."
    )
    lines = [
        (
            *(name, status),
            with_bar(seconds, bar((o.predicted_seconds or 0.0) / most, o.bound and o.bound / most)),
            *rest,
        )
        for o in scene.offers
        for name, status, seconds, *rest in (cells(o),)
    ]
    return table(
        ("plan", "status", "iteration", "objective", "bound", "$/1M tokens"),
        lines,
        text=(1,),
        caption=caption,
        winner=scene.winner,
    )


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


def money(scene: Scene) -> str:
    """Every plan that fits as a dot; a line joins those than which none is faster and cheaper."""
    dots = {
        (o.predicted_seconds, o.money_per_million_tokens): o.name
        for o in reversed(scene.offers)
        if o.fits_memory and o.predicted_seconds and o.money_per_million_tokens
    }
    if len(dots) < 2:
        return ""
    slowest, dearest = (max(values) for values in zip(*dots, strict=True))
    best = min(dots)

    def place(dot: tuple[float, float]) -> tuple[float, float]:
        return EDGE + dot[0] / slowest * (WIDTH - 2 * EDGE), HEIGHT - EDGE - dot[1] / dearest * (
            HEIGHT - EDGE - 20
        )

    front = [d for d in sorted(dots) if all(d[1] < other[1] for other in dots if other < d)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, front))
    marks = [
        f'<circle class="point{" best" if dot == best else ""}" cx="{x:.1f}" cy="{y:.1f}" r="5">'
        f"<title>{html_text(dot_text(name, *dot))}</title></circle>"
        for dot, name in dots.items()
        for x, y in (place(dot),)
    ]
    axes = (
        f'<path class="axis" fill="none" d="M{EDGE} 10V{HEIGHT - EDGE}H{WIDTH - EDGE}"/>'
        f'<text x="{WIDTH - EDGE}" y="{HEIGHT - 28}" text-anchor="end">iteration, to '
        f'{seconds_text(slowest)}</text><text x="{EDGE + 6}" y="18">$ per million tokens, to '
        f"{number_text(dearest, 4)}</text>"
    )
    label = "Money against time: " + "; ".join(dot_text(dots[dot], *dot) for dot in front)
    drawing = f'<polyline class="front" points="{path}"/>{axes}{"".join(marks)}'
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" style="max-width: {WIDTH}px" role="img" '
        f'aria-label="{html_text(label)}">{drawing}</svg><figcaption class="faint">Each dot is a '
        "plan that fits; the line joins those than which none is both faster and cheaper."
        "</figcaption></figure>"
    )


def dot_text(name: str, seconds: float, dollars: float) -> str:
    """`amp/auto: 347 ms, $0.06 per million tokens`."""
    return f"{name}: {seconds_text(seconds)}, ${number_text(dollars, 4)} per million tokens"


def changes(scene: Scene) -> str:
    """The table of the changes that `hetplan plan what-if` tried."""
    lines = []
    for change in scene.changes:
        saved = seconds_text(change.seconds_saved)
        if change.within_precision:
            saved = "nothing beyond the search's precision"
        name, seconds = "nothing fits", None
        if change.best is not None:
            name, seconds = change.best.name, change.best.predicted_seconds
        lines.append((change.change, name, seconds_text(seconds), saved))
    return table(("change", "best plan", "iteration", "saves"), lines, text=(1,))


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    text: Sequence[int] = (),
    caption: str = "",
    winner: int | None = None,
) -> str:
    """A table, empty without rows; the winner's row stands out. text: columns of words."""
    body = []
    for number, row in enumerate(rows):
        cells = [cell if isinstance(cell, Markup) else html_text(cell) for cell in row]
        head = f'<th scope="row">{cells[0]}</th>'
        rest = (f"<td{looks(at in text)}>{cell}</td>" for at, cell in enumerate(cells[1:], start=1))
        body.append(f"<tr{' class=winner' if number == winner else ''}>{head}{''.join(rest)}</tr>")
    names = (
        f'<th scope="col"{looks(at in (0, *text))}>{name}</th>' for at, name in enumerate(header)
    )
    inner = f"<thead><tr>{''.join(names)}</tr></thead><tbody>{''.join(body)}</tbody>"
    above = f"<caption>{caption}</caption>" if caption else ""
    return f'<div class="scroll"><table>{above}{inner}</table></div>' if body else ""


def looks(words: bool) -> str:
    """The attribute of cells that hold words."""
    return ' class="text wide"' if words else ""
