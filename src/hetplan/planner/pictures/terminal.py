"""A plan on the terminal: stages, a timeline of letters, and the candidates as bars."""

from __future__ import annotations

from collections.abc import Sequence

from hetplan.planner.pictures.scene import Held, Offer, Row, Scene, Span
from hetplan.text import Table, bytes_text, percent_text, seconds_text, share_text

COLUMNS, LISTED, BAR = 72, 32, 40
LETTERS = {
    "forward": "F",
    "backward": "B",
    "optimizer": "U",
    "transfer": "t",
    "synchronisation": "s",
}


def tables(scene: Scene) -> list[Table]:
    """What `hetplan show` prints."""
    return [timeline(scene), memory(scene), *([candidates(scene.offers)] if scene.offers else [])]


def timeline(scene: Scene) -> Table:
    """One line per stage; what takes most of a column's time stands there."""
    rows = tuple(
        (row.title, row.devices, row.layers, drawn(row, scene.seconds), percent_text(row.busy))
        for row in scene.rows[:LISTED]
    )
    notes = [
        f"{seconds_text(scene.seconds)} per iteration, predicted; {percent_text(scene.bubble)} of the time idle",
        "F forward, B backward, U optimizer, t transfer, s synchronisation, . idle; "
        f"a column is {seconds_text(scene.seconds / COLUMNS)}",
    ]
    if scene.units > len(rows):
        notes.append(f"{scene.units - len(rows)} more stages; --html draws more")
    header = ("stage", "devices", "layers", "one iteration", "computes")
    return Table(f"{scene.title}: {scene.subtitle}", header, rows, tuple(notes), right=(4,))


def drawn(row: Row, seconds: float) -> str:
    """`FFFBBB..ss`: computing first, communicating where nothing is computed."""
    width = seconds / COLUMNS or 1.0
    letters = []
    for column in range(COLUMNS):
        begin, end = column * width, (column + 1) * width
        for spans in (row.computes, row.communicates):
            most = longest(spans, begin, end)
            if most is not None:
                letters.append(LETTERS[most])
                break
        else:
            letters.append(".")
    return "".join(letters)


def longest(spans: Sequence[Span], begin: float, end: float) -> str | None:
    """The kind that takes most of [begin, end), None where it is less than a third of it."""
    spent: dict[str, float] = {}
    for span in spans:
        inside = min(span.end, end) - max(span.start, begin)
        if inside > 0:
            spent[span.kind] = spent.get(span.kind, 0.0) + inside
    if not spent or sum(spent.values()) < (end - begin) / 3:
        return None
    return max(spent, key=lambda kind: spent[kind])


def memory(scene: Scene) -> Table:
    """One line per device in use, or per kind and node where they are many."""
    used = [d for d in scene.devices if d.unit is not None]
    fullest = sorted(used, key=lambda d: -d.held / max(d.limit, 1.0))[:LISTED]
    shown = sorted(fullest, key=lambda d: d.device)
    rows = tuple(
        (f"{d.device}", d.kind, f"{d.node}", d.place, share_text(d.held, d.limit), bar(d))
        for d in shown
    )
    notes = (
        (f"{len(used) - len(shown)} devices with more room are left out",)
        if len(used) > len(shown)
        else ()
    )
    return Table(
        "memory", ("device", "type", "node", "place", "holds", ""), rows, notes, right=(0, 2, 4)
    )


def bar(device: Held) -> str:
    """`#####.....`, up to the limit."""
    full = min(round(BAR / 2 * device.held / max(device.limit, 1.0)), BAR // 2)
    over = device.held - device.limit
    return (
        "#" * full + "." * (BAR // 2 - full) + (f" {bytes_text(over)} too much" if over > 0 else "")
    )


def candidates(offers: Sequence[Offer]) -> Table:
    """Bars of seconds, with the bound of each strategy's own problem as a |."""
    timed = [o for o in offers if o.seconds is not None]
    most = max((o.seconds or 0.0 for o in timed), default=0.0) or 1.0
    rows = []
    for offer in timed:
        length = round(BAR * (offer.seconds or 0.0) / most)
        cells = ["#"] * length + [" "] * (BAR + 1 - length)
        if offer.bound is not None and offer.bound <= most:
            cells[round(BAR * offer.bound / most)] = "|"
        name = f"{offer.name} *" if offer.winner else offer.name
        fits = "" if offer.fits else "does not fit"
        rows.append((name, seconds_text(offer.seconds), "".join(cells).rstrip(), fits))
    notes = ("*: the winner; |: the proven bound of the strategy's own problem",)
    return Table("candidates", ("plan", "iteration", "", ""), tuple(rows), notes, right=(1,))
