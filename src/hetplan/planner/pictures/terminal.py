"""A plan on the terminal: stages, a timeline of letters, memory, and the candidates."""

from textwrap import fill

from hetplan.planner.pictures.scene import Held, Row, Scene, sampled
from hetplan.text import (
    Column,
    Table,
    counted,
    grouped,
    percent_text,
    ranges_text,
    seconds_text,
    share_text,
)

COLUMNS, LISTED, WORDS = 72, 32, 82  # WORDS: columns of a reason
LETTERS = {
    "forward": "F",
    "backward": "B",
    "optimizer": "U",
    "transfer": "t",
    "synchronisation": "s",
}


def tables(scene: Scene) -> list[Table]:
    """The texts that `hetplan show` prints."""
    return [
        timeline(scene),
        reasons(scene),
        memory(scene),
        *([candidates(scene)] if scene.offers else []),
    ]


def reasons(scene: Scene) -> Table:
    """Why the iteration takes that long, in words."""
    rows = tuple((what, fill(text, WORDS)) for what, text in scene.why.items())
    return Table(f"why it takes {seconds_text(scene.seconds)}", ("", ""), rows)


def timeline(scene: Scene) -> Table:
    """One line per stage; what takes most of a column's time stands there."""
    notes = [
        f"{seconds_text(scene.seconds)} per iteration, predicted; "
        f"{percent_text(scene.bubble)} of the time idle",
        "F forward, B backward, U optimizer, t transfer, s synchronisation, . idle; "
        f"a column is {seconds_text(scene.seconds / COLUMNS)}",
    ]
    more = scene.more + max(len(scene.rows) - LISTED, 0)
    if more:
        notes.append(f"{counted(more, 'more stage')}; --html draws more")
    return Table.of(
        f"{scene.title}: {scene.subtitle}",
        scene.rows[:LISTED],
        [
            Column("stage", lambda row: row.title),
            Column("devices", lambda row: row.devices),
            Column("layers", lambda row: row.layers),
            Column("one iteration", lambda row: drawn(row, scene.seconds), right=True),
            Column("computes", lambda row: row.busy, percent_text, right=True),
        ],
        notes,
    )


def drawn(row: Row, seconds: float) -> str:
    """`FFFBBB..ss`: what takes most of a column's time; computing hides communicating."""
    letters = ["."] * COLUMNS
    for lane in (row.communicates, row.computes):
        for span in sampled(lane, seconds, COLUMNS):
            begin, end = (round(COLUMNS * at / seconds) for at in (span.start, span.end))
            letters[begin:end] = LETTERS[span.kind] * (end - begin)
    return "".join(letters)


def memory(scene: Scene) -> Table:
    """One line per kind of devices in use that hold the same, the fullest where they are many."""

    def share(devices: list[Held]) -> float:
        """The share of its memory that each of these devices holds."""
        return devices[0].held / max(devices[0].limit, 1.0)

    alike = grouped(((d.kind, d.place, d.held, d.limit), d) for d in scene.used).values()
    fullest = sorted(alike, key=share, reverse=True)[:LISTED]
    notes = ["limits are all that training can use"]
    if scene.margin:
        notes = [f"limits leave {percent_text(scene.margin)} of each device free for its allocator"]
    more = len(scene.used) - sum(map(len, fullest))
    if more:
        notes.append(f"left out: {counted(more, 'device')} with more room")
    return Table.of(
        "memory",
        sorted(fullest, key=lambda devices: devices[0].device),
        [
            Column("devices", lambda devices: ranges_text(d.device for d in devices)),
            Column("type", lambda devices: devices[0].kind),
            Column("node", lambda devices: ranges_text(d.node for d in devices), right=True),
            Column("place", lambda devices: devices[0].place),
            Column(
                "each holds",
                lambda devices: share_text(devices[0].held, devices[0].limit),
                right=True,
            ),
            Column("of it", share, percent_text, right=True),
        ],
        notes,
    )


def candidates(scene: Scene) -> Table:
    """Seconds of the plans, with the bound of each strategy's own problem."""
    best = None if scene.winner is None else scene.offers[scene.winner]
    return Table.of(
        "candidates",
        [offer for offer in scene.offers if offer.predicted_seconds is not None],
        [
            Column("plan", lambda offer: f"{offer.name} *" if offer is best else offer.name),
            Column("iteration", lambda offer: offer.predicted_seconds, seconds_text, right=True),
            Column("bound", lambda offer: offer.bound, seconds_text, right=True),
            Column("", lambda offer: "" if offer.fits_memory else "does not fit"),
        ],
        ["*: the winner; bound: of the strategy's own problem"],
    )
