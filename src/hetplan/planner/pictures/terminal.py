"""A plan on the terminal: stages, a timeline of letters, and the candidates as bars."""

from collections import defaultdict

from hetplan.planner.pictures.scene import Held, Row, Scene
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
    return [timeline(scene), memory(scene), *([candidates(scene)] if scene.offers else [])]


def timeline(scene: Scene) -> Table:
    """One line per stage; what takes most of a column's time stands there."""
    rows = tuple(
        (row.title, row.devices, row.layers, drawn(row, scene.seconds), percent_text(row.busy))
        for row in scene.rows[:LISTED]
    )
    notes = [
        f"{seconds_text(scene.seconds)} per iteration, predicted; "
        f"{percent_text(scene.bubble)} of the time idle",
        "F forward, B backward, U optimizer, t transfer, s synchronisation, . idle; "
        f"a column is {seconds_text(scene.seconds / COLUMNS)}",
    ]
    if scene.units > len(rows):
        notes.append(f"{scene.units - len(rows)} more stages; --html draws more")
    header = ("stage", "devices", "layers", "one iteration", "computes")
    return Table(f"{scene.title}: {scene.subtitle}", header, rows, tuple(notes), right=(4,))


def drawn(row: Row, seconds: float) -> str:
    """`FFFBBB..ss`: computing first, communicating where nothing is computed; what takes most of a
    column's time, if all of it takes a third."""
    width = seconds / COLUMNS or 1.0
    letters = ["."] * COLUMNS
    for lane in (row.communicates, row.computes):
        spent: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for span in lane:
            for column in range(int(span.start / width), min(int(span.end / width) + 1, COLUMNS)):
                begin, end = column * width, (column + 1) * width
                spent[column][span.kind] += max(0.0, min(span.end, end) - max(span.start, begin))
        for column, kinds in spent.items():
            if sum(kinds.values()) >= width / 3:
                letters[column] = LETTERS[max(kinds, key=lambda kind: kinds[kind])]
    return "".join(letters)


def memory(scene: Scene) -> Table:
    """One line per device in use, the fullest of them where they are many."""
    fullest = sorted(scene.used, key=lambda d: -d.held / max(d.limit, 1.0))[:LISTED]
    rows = tuple(
        (f"{d.device}", d.kind, f"{d.node}", d.place, share_text(d.held, d.limit), bar(d))
        for d in sorted(fullest, key=lambda d: d.device)
    )
    more = len(scene.used) - len(rows)
    notes = (f"{more} devices with more room are left out",) if more else ()
    header = ("device", "type", "node", "place", "holds", "")
    return Table("memory", header, rows, notes, right=(0, 2, 4))


def bar(device: Held) -> str:
    """`#####.....`, up to the limit."""
    full = min(round(BAR / 2 * device.held / max(device.limit, 1.0)), BAR // 2)
    over = device.held - device.limit
    excess = f" {bytes_text(over)} too much" if over > 0 else ""
    return "#" * full + "." * (BAR // 2 - full) + excess


def candidates(scene: Scene) -> Table:
    """Bars of seconds, with the bound of each strategy's own problem as a |."""
    most = max((offer.predicted_seconds or 0.0 for offer in scene.offers), default=0.0) or 1.0
    rows = []
    for i, offer in enumerate(scene.offers):
        if offer.predicted_seconds is None:
            continue
        cells = list(("#" * round(BAR * offer.predicted_seconds / most)).ljust(BAR + 1))
        if offer.bound is not None and offer.bound <= most:
            cells[round(BAR * offer.bound / most)] = "|"
        name = f"{offer.name} *" if i == scene.winner else offer.name
        fits = "" if offer.fits_memory else "does not fit"
        rows.append((name, seconds_text(offer.predicted_seconds), "".join(cells).rstrip(), fits))
    notes = ("*: the winner; |: the proven bound of the strategy's own problem",)
    return Table("candidates", ("plan", "iteration", "", ""), tuple(rows), notes, right=(1,))
