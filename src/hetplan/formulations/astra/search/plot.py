"""The Pareto set as a picture (Astra, Figure 7), by matplotlib (extra `plots`): throughput on the x
axis, money on the y axis, every priced strategy a dot, the Pareto set a line."""

import importlib.util
import io
from pathlib import Path

from hetplan.errors import InputError, UnsupportedError
from hetplan.files import write_bytes
from hetplan.formulations.astra.search.result import SearchResult

FORMATS = (".svg", ".png")
# Dots drawn at most, and how far above the set's dearest point they may lie: far worse ones would
# squeeze the set into a corner.
DOTS, CEILING = 3000, 4.0


def check_plot_target(path: Path) -> None:
    """Refuse a name whose ending says no format, or any without matplotlib, before anything is
    searched."""
    if path.suffix.lower() not in FORMATS:
        raise InputError(
            "unknown kind of picture", where=str(path), got=path.suffix, expected=", ".join(FORMATS)
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError(
            "pictures need matplotlib", where=str(path), expected="pip install 'hetplan[plots]'"
        )


def write_plot(result: SearchResult, path: Path, title: str) -> None:
    """The picture of a search, in the format of the file's ending; raises InputError where no
    money is known."""
    check_plot_target(path)
    from matplotlib.figure import Figure

    front = [(c.tokens_per_second, c.money) for c in result.pareto if c.money is not None]
    if not front:
        raise InputError(
            "nothing to plot", where=str(path), expected="strategies with a known price"
        )
    ceiling = CEILING * max(money for _, money in front)
    near = sorted((x, y) for x, y in result.points if y is not None and y <= ceiling)
    figure = Figure(figsize=(8, 4.8))
    axes = figure.add_subplot()
    speeds, dollars = zip(*near[:: max(1, len(near) // DOTS)], strict=True)
    axes.scatter(speeds, dollars, s=3, color="#9aa5b1")
    axes.plot(*zip(*front, strict=True), "o-", color="#c0392b", markersize=5)
    axes.set(xlabel="tokens per second", ylabel="dollars for the job", title=title)
    axes.set(xlim=(0, None), ylim=(0, None))
    axes.grid(alpha=0.3)
    kind, stream = path.suffix[1:].lower(), io.BytesIO()
    figure.savefig(stream, format=kind, dpi=150)
    write_bytes(path, stream.getvalue())
