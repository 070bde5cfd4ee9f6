"""The picture of a plan on the terminal: a timeline of letters, the reasons for its seconds, the
memory, and the candidates, as tables of text."""

from textwrap import fill

from hetplan.planner.pictures.scene import OF_OTHER_COSTS, DeviceMemory, Row, Scene, sampled
from hetplan.planner.proofs import ladder_table
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

COLUMNS = 72  # characters of a row of the timeline
LISTED = 32  # most rows of a table
WORDS = 82  # characters of a line of a reason; with its heading it stays within 100
LETTERS = {
    "forward": "F",
    "backward": "B",
    "weights": "W",
    "optimizer": "U",
    "transfer": "t",
    "synchronisation": "s",
}


def tables(scene: Scene) -> list[Table]:
    """The tables that `hetplan show` prints."""
    shown = [timeline(scene), reasons(scene), memory(scene)]
    if scene.ladder:
        shown.append(ladder_table(scene.ladder))
    if scene.offers:
        shown.append(candidates(scene))
    return shown


def reasons(scene: Scene) -> Table:
    """The table of the reasons why the iteration takes as long as it does."""
    rows = tuple((what, fill(text, WORDS)) for what, text in scene.why.items())
    return Table(f"why it takes {seconds_text(scene.seconds)}", ("", ""), rows)


def timeline(scene: Scene) -> Table:
    """The table of the timeline, one line for each row of the scene."""
    kinds = {span.kind for row in scene.rows for span in row.computes}
    of_weights = "W backward of weights, " if "weights" in kinds else ""
    notes = [
        f"{seconds_text(scene.seconds)} per iteration, predicted; "
        f"{percent_text(scene.bubble)} of the time idle",
        f"F forward, B backward, {of_weights}U optimizer, t transfer, s synchronisation, . idle; "
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
    """A row of the timeline as letters: `FFFBBB..ss`. Each letter is what takes most of its
    column's time. Computation hides communication at the same time."""
    letters = ["."] * COLUMNS
    for lane in (row.communicates, row.computes):  # the second overwrites the first
        for span in sampled(lane, seconds, COLUMNS):
            # sampled spans begin and end at columns, but for errors of rounding
            begin = round(COLUMNS * span.start / seconds)
            end = round(COLUMNS * span.end / seconds)
            letters[begin:end] = LETTERS[span.kind] * (end - begin)
    return "".join(letters)


def memory(scene: Scene) -> Table:
    """The table of the memory of devices in use. Devices of the same type and place with equal
    bytes share a line. Of many lines the fullest devices are listed."""

    def share(devices: list[DeviceMemory]) -> float:
        """The share of its memory that is in use on each of these devices."""
        return devices[0].peak_bytes / max(devices[0].limit, 1.0)  # a limit may be 0

    alike = grouped(((d.kind, d.place, d.peak_bytes, d.limit), d) for d in scene.used).values()
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
                lambda devices: share_text(devices[0].peak_bytes, devices[0].limit),
                right=True,
            ),
            Column("of it", share, percent_text, right=True),
        ],
        notes,
    )


def candidates(scene: Scene) -> Table:
    """The table of the candidates: their seconds, with the bound of each strategy's problem."""
    best = None if scene.winner is None else scene.offers[scene.winner]
    notes = ["*: the winner; bound: of the strategy's own problem"]
    if scene.other_costs:
        notes.append(OF_OTHER_COSTS)
    return Table.of(
        "candidates",
        [offer for offer in scene.offers if offer.predicted_seconds is not None],
        [
            Column("plan", lambda offer: f"{offer.name} *" if offer is best else offer.name),
            Column("iteration", lambda offer: offer.predicted_seconds, seconds_text, right=True),
            Column("bound", lambda offer: offer.bound, seconds_text, right=True),
            Column("", lambda offer: "" if offer.fits_memory else "does not fit"),
        ],
        notes,
    )
