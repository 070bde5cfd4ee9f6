"""The picture of a plan as one self-contained HTML page, which fetches nothing. Figures are HTML
tables; the script of the page draws the timeline, zooms in it, and describes its events.

Colours follow the reader's light or dark setting, and are printable. Everything that a drawing
shows is also in a table, for readers who do not see colours and for screen readers. The timeline
can be used with the keyboard.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import groupby

from hetplan.planner.pictures.scene import OF_OTHER_COSTS, DeviceMemory, Offer, Scene, Span
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

# of spans
KINDS = ("forward", "backward", "weights", "optimizer", "transfer", "synchronisation")
WIDTH, HEIGHT, EDGE = 640, 260, 46  # pixels of the drawing of money against time, and its margin
# Action of the script -> text of its button.
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
    """A text that is HTML. Other texts are escaped before they are put into the page."""


def page(scene: Scene) -> str:
    """The HTML of the page."""
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
    """The text of a file beside this module."""
    return (files("hetplan.planner.pictures") / name).read_text(encoding="utf-8")


def sections_of(scene: Scene) -> Mapping[str, str]:
    """Heading of a section -> its HTML; empty for a section without content."""
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
    """The list of the most important figures, at the top of the page."""
    fullest = max(scene.used, key=lambda d: d.peak_bytes / max(d.limit, 1.0))
    entries = {"per iteration, predicted by replaying the plan": seconds_text(scene.seconds)}
    gap = relative_gap(scene.seconds, scene.bound)
    if gap is not None:
        least = seconds_text(scene.bound)
        entries[f"no {scene.bounded} is faster than {least} (proven)"] = f"gap {percent_text(gap)}"
    entries["of the devices' time not computing"] = percent_text(scene.bubble)
    entries["devices in use"] = f"{len(scene.used)} of {len(scene.devices)}"
    on_fullest = f"on the fullest device, {fullest.device} ({fullest.kind})"
    entries[on_fullest] = share_text(fullest.peak_bytes, fullest.limit)
    items = (
        f"<li><b>{figure}</b><span>{html_text(what)}</span></li>"
        for what, figure in entries.items()
    )
    return f'<ul class="figures">{"".join(items)}</ul>'


def timeline(scene: Scene) -> str:
    """The legend, the buttons, and the element in which the script draws the timeline."""
    marks = (f'<span><i style="background: var(--{kind})"></i>{kind}</span>' for kind in KINDS)
    buttons = (
        f'<button type="button" data-act="{action}">{text}</button>'
        for action, text in BUTTONS.items()
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
    """The spans that the script draws, as JSON. Each row has two lanes of spans [index of the kind,
    begin, end, micro-batch]; begin and end are in millionths of the iteration."""
    scale = 1e6 / (scene.seconds or 1.0)

    def lane(spans: Sequence[Span]) -> list[tuple[int, int, int, int]]:
        """The spans of one lane for the script."""
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
    document = {"seconds": scene.seconds, "kinds": KINDS, "rows": rows}
    text = json.dumps(document, separators=(",", ":"))
    return text.replace("<", "\\u003c")  # no name in it can close the element of the script


def bar(share: float, mark: float | None = None, colour: str = "forward") -> Markup:
    """A bar that fills `share` of its width, with a mark across it at the share `mark`."""
    tick = "" if mark is None else f'<b style="left: {100 * min(mark, 1):.1f}%"></b>'
    look = f"--part: {100 * min(share, 1):.1f}%; --fill: var(--{colour})"
    return Markup(f'<span class="bar" style="{look}">{tick}</span>')


def with_bar(text: str, made: Markup) -> Markup:
    """A figure as text, and a bar behind it."""
    return Markup(html_text(text) + made)


def stages(scene: Scene) -> str:
    """The table of stages: a line for each row of the timeline, with the fullest of its devices."""
    lines = []
    for number, row in enumerate(scene.rows):
        of_row = [device for device in scene.used if device.row == number]
        fullest = max(of_row, key=lambda d: d.peak_bytes / max(d.limit, 1.0))
        share = fullest.peak_bytes / max(fullest.limit, 1.0)
        held = f"{share_text(fullest.peak_bytes, fullest.limit)} (device {fullest.device})"
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
    """The nodes as boxes with a cell for each device, in the colour of its stage. Nodes whose boxes
    are equal share one box."""
    cells = {
        n: tuple(cell(d, len(scene.rows)) for d in scene.devices if d.node == n)
        for n in range(len(scene.nodes))
    }
    # (text about links, cells) of a box -> the nodes
    boxes = grouped(((links, cells[n]), n) for n, links in enumerate(scene.nodes))
    for (links, inside), numbers in boxes.items():
        count = f" ({len(numbers)} nodes)" if len(numbers) > 1 else ""
        yield (
            f'<div class="node"><p><b>node {ranges_text(numbers)}</b>{count}<br>'
            f"{html_text(links)}</p>"
            f"<ul>{''.join(inside)}</ul></div>"
        )


def cell(device: DeviceMemory, rows: int) -> str:
    """The cell of a device. rows: the number of rows of the timeline; each has a hue of its own,
    and neighbouring rows differ in lightness, too."""
    look = ""
    if device.row is not None:
        hue = (210 + 360 * device.row / max(rows, 1)) % 360  # from blue once round the wheel
        light = 80 + 8 * (device.row % 2)
        look = f' style="background: hsl({hue:.0f} 62% {light}%)"'
    held = f"{bytes_text(device.peak_bytes)} of {bytes_text(device.limit)}"
    return (
        f'<li{look} title="{html_text(held)}"><b>{html_text(device.place or "idle")}</b>'
        f"{html_text(device.kind)}</li>"
    )


def prices(offers: Sequence[Offer]) -> str:
    """The table of the best plan of each strategy, with how much longer it takes than the best of
    all."""
    fits = [o for o in offers if o.fits_memory and o.predicted_seconds]
    fits.sort(key=lambda o: (o.strategy, o.predicted_seconds))
    best = [next(of_strategy) for _, of_strategy in groupby(fits, key=lambda o: o.strategy)]
    best.sort(key=lambda o: o.predicted_seconds or 0.0)
    seconds = [o.predicted_seconds or 0.0 for o in best]
    lines = []
    for offer, spent in zip(best, seconds, strict=True):
        figure = with_bar(seconds_text(spent), bar(spent / seconds[-1]))
        more = more_text(spent / seconds[0] - 1) if spent > seconds[0] else "the best"
        lines.append((offer.strategy, offer.name, figure, more))
    return table(
        ("paradigm", "best plan", "iteration", "longer by"),
        lines,
        text=(1,),
        caption="What it costs to plan in one paradigm alone: its best plan against the best of "
        "all.",
    )


def candidates(scene: Scene) -> str:
    """The table of all candidates with their bounds."""
    most = max((o.predicted_seconds or 0.0 for o in scene.offers), default=0.0) or 1.0
    caption = (
        "Iterations are replayed. Objective, status and bound are of each strategy's own "
        "problem; its bound is the mark across the bar."
    )
    if scene.other_costs:
        caption += f" Here {OF_OTHER_COSTS}."
    lines = []
    for offer in scene.offers:
        name, status, seconds, *others = cells(offer)
        mark = offer.bound and offer.bound / most
        drawn = bar((offer.predicted_seconds or 0.0) / most, mark)
        lines.append((name, status, with_bar(seconds, drawn), *others))
    return table(
        ("plan", "status", "iteration", "objective", "bound", "$/1M tokens"),
        lines,
        text=(1,),
        caption=caption,
        winner=scene.winner,
    )


def cells(offer: Offer) -> tuple[str, ...]:
    """The texts of a candidate's cells: name, status, seconds of the replay, seconds of the
    objective, bound, money."""
    status = offer.status[:40]  # a document of other origin may have a long text there
    # only the objective of `joint` is the replayed seconds, which the row shows
    if offer.status == "optimal" and offer.strategy != "joint":
        status += " for its formula"
    if offer.fits_memory is False:
        status = "does not fit"
    return (
        offer.name,
        status,
        seconds_text(offer.predicted_seconds),
        seconds_text(offer.closed_form_seconds),
        seconds_text(offer.bound),
        number_text(offer.money_per_million_tokens, 4),
    )


def money(scene: Scene) -> str:
    """The drawing of money against time: a dot for each plan that fits, and a line along the Pareto
    front. Empty for fewer than two dots."""
    # (seconds, dollars per million tokens) -> name; of equal ones that of the better candidate
    dots: dict[tuple[float, float], str] = {}
    for offer in reversed(scene.offers):
        seconds, dollars = offer.predicted_seconds, offer.money_per_million_tokens
        if offer.fits_memory and seconds and dollars:
            dots[seconds, dollars] = offer.name
    if len(dots) < 2:
        return ""
    slowest = max(seconds for seconds, _ in dots)
    dearest = max(dollars for _, dollars in dots)
    best = min(dots)

    def place(dot: tuple[float, float]) -> tuple[float, float]:
        """The coordinates of a dot in the drawing."""
        seconds, dollars = dot
        x = EDGE + seconds / slowest * (WIDTH - 2 * EDGE)
        y = HEIGHT - EDGE - dollars / dearest * (HEIGHT - EDGE - 20)
        return x, y

    front = [d for d in sorted(dots) if all(d[1] < other[1] for other in dots if other < d)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, front))
    marks = []
    for dot, name in dots.items():
        x, y = place(dot)
        look = "point best" if dot == best else "point"
        marks.append(
            f'<circle class="{look}" cx="{x:.1f}" cy="{y:.1f}" r="5">'
            f"<title>{html_text(dot_text(name, *dot))}</title></circle>"
        )
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
    """The text of a dot: `amp/auto: 347 ms, $0.06 per million tokens`."""
    return f"{name}: {seconds_text(seconds)}, ${number_text(dollars, 4)} per million tokens"


def changes(scene: Scene) -> str:
    """The table of the changes of the cluster that `hetplan plan what-if` tried."""
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
    """A table; empty if it has no rows. text: numbers of the columns that contain words instead of
    figures. winner: number of the row that is highlighted."""
    body = []
    for number, row in enumerate(rows):
        cells = [cell if isinstance(cell, Markup) else html_text(cell) for cell in row]
        head = f'<th scope="row">{cells[0]}</th>'
        others = [f"<td{looks(j in text)}>{cell}</td>" for j, cell in enumerate(cells) if j > 0]
        look = " class=winner" if number == winner else ""
        body.append(f"<tr{look}>{head}{''.join(others)}</tr>")
    if not body:
        return ""
    names = [
        f'<th scope="col"{looks(j in (0, *text))}>{name}</th>' for j, name in enumerate(header)
    ]
    inner = f"<thead><tr>{''.join(names)}</tr></thead><tbody>{''.join(body)}</tbody>"
    above = f"<caption>{caption}</caption>" if caption else ""
    return f'<div class="scroll"><table>{above}{inner}</table></div>'


def looks(words: bool) -> str:
    """The attribute of a cell: that of words, or none for a figure."""
    return ' class="text wide"' if words else ""
