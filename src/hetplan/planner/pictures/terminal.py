"""A plan on the terminal: stages, a timeline of letters, memory, and the candidates."""

from hetplan.planner.pictures.scene import Row, Scene, sampled
from hetplan.text import Table, counted, percent_text, seconds_text, share_text

COLUMNS, LISTED = 72, 32
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
    notes = [
        f"{seconds_text(scene.seconds)} per iteration, predicted; "
        f"{percent_text(scene.bubble)} of the time idle",
        "F forward, B backward, U optimizer, t transfer, s synchronisation, . idle; "
        f"a column is {seconds_text(scene.seconds / COLUMNS)}",
    ]
    more = scene.more + max(len(scene.rows) - LISTED, 0)
    return Table.of(
        f"{scene.title}: {scene.subtitle}",
        scene.rows[:LISTED],
        {
            "stage": lambda row: row.title,
            "devices": lambda row: row.devices,
            "layers": lambda row: row.layers,
            "one iteration": lambda row: drawn(row, scene.seconds),
            "computes": lambda row: percent_text(row.busy),
        },
        [*notes, *([f"{counted(more, 'more stage')}; --html draws more"] if more else [])],
        right=(4,),
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
    """One line per device in use, the fullest of them where they are many."""
    fullest = sorted(scene.used, key=lambda d: -d.held / max(d.limit, 1.0))[:LISTED]
    more = len(scene.used) - len(fullest)
    return Table.of(
        "memory",
        sorted(fullest, key=lambda d: d.device),
        {
            "device": lambda d: f"{d.device}",
            "type": lambda d: d.kind,
            "node": lambda d: f"{d.node}",
            "place": lambda d: d.place,
            "holds": lambda d: share_text(d.held, d.limit),
            "of it": lambda d: percent_text(d.held / max(d.limit, 1.0)),
        },
        [f"left out: {counted(more, 'device')} with more room"] if more else [],
        right=(0, 2, 4, 5),
    )


def candidates(scene: Scene) -> Table:
    """Seconds of the plans, with the bound of each strategy's own problem."""
    best = None if scene.winner is None else scene.offers[scene.winner]
    return Table.of(
        "candidates",
        [offer for offer in scene.offers if offer.predicted_seconds is not None],
        {
            "plan": lambda offer: f"{offer.name} *" if offer is best else offer.name,
            "iteration": lambda offer: seconds_text(offer.predicted_seconds),
            "bound": lambda offer: seconds_text(offer.bound),
            "": lambda offer: "" if offer.fits_memory else "does not fit",
        },
        ["*: the winner; bound: of the strategy's own problem"],
        right=(1, 2),
    )
