"""Draws a study's pictures with matplotlib: excesses of heuristics, proofs against time,
performance profiles, and seconds against the size of instances."""

import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetplan.errors import import_optional
from hetplan.files import make_folder, write_bytes
from hetplan.studies.cells import PROVEN
from hetplan.studies.findings import SIZES, Study, cactus, profile, row_size
from hetplan.studies.rows import Row
from hetplan.text import figure_text, grouped

# Okabe and Ito's palette, which colour-blind readers can distinguish.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#B0A800")
WIDE = 7.2  # inches: the width of a figure
LEAST_SECONDS = 1e-4  # shorter runs are drawn at this time
LEAST_EXCESS = 0.01  # %: smaller excesses are drawn here, at the left edge: "the optimum"
WIDE_RANGE = 10  # the axis of sizes is logarithmic where the ends differ by more than this factor


def charts(study: Study, problem: str) -> Mapping[str, Any]:
    """Title -> matplotlib figure, for each figure for which the problem has rows."""
    makers: Mapping[str, Callable[[Study, str], Any | None]] = {
        "Predicted time above the best known, one dot per run": excesses,
        "Gaps at the end of the exact methods' runs": gaps,
        "Proofs against time": proofs,
        "Performance profile of the exact methods": profiles,
        "Seconds against the size of the instance; crosses: ended without a proof": scaling,
    }
    figures = {title: make(study, problem) for title, make in makers.items()}
    return {title: drawn for title, drawn in figures.items() if drawn is not None}


def figure(height: float) -> tuple[Any, Any]:
    """(matplotlib figure, its axes), empty and without a display. height: inches. Raises InputError
    where matplotlib is not installed."""
    figures = import_optional("matplotlib.figure", "pictures need matplotlib", "plots")
    canvas = figures.Figure(figsize=(WIDE, height), layout="constrained")
    axes = canvas.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    return canvas, axes


def excesses(study: Study, problem: str) -> Any | None:
    """The figure of the heuristics' excesses: a row of dots for each heuristic, with its median
    marked."""
    percents: dict[str, list[float]] = {}  # heuristic -> excess of each run
    for row in study.of(problem):
        excess = study.excess(row)
        if not row["exact"] and excess is not None:
            percents.setdefault(row["method"], []).append(max(100 * excess, LEAST_EXCESS))
    if not percents:
        return None
    canvas, axes = figure(0.9 + 0.38 * len(percents))
    axes.set_yticks(range(len(percents)), list(map(figure_text, percents)))
    axes.invert_yaxis()
    for height, values in enumerate(percents.values()):
        # A fixed pattern moves dots up or down by at most 0.28, so that dots of equal excess do not
        # hide each other.
        heights = [height + 0.28 * ((7 * i) % 11 / 5 - 1) for i in range(len(values))]
        axes.scatter(sorted(values), heights, s=12, alpha=0.55, color=COLOURS[0], linewidths=0)
        median = statistics.median(values)
        axes.plot([median, median], [height - 0.36, height + 0.36], color=COLOURS[1], linewidth=2.2)
    axes.set(
        xscale="log",
        xlim=(LEAST_EXCESS * 0.8, None),
        xlabel="% above the best known (left edge: the optimum; bar: median)",
    )
    return canvas


def stairs(lines: Mapping[str, tuple[Sequence[float], int]], x_label: str, y_label: str) -> Any:
    """A figure with a step line for each method, which rises at each of the method's values.

    lines: method -> (ascending values, count). After k values the line is at k / count, in percent.
    All lines begin before the least value of all methods and end after the largest. x_label,
    y_label: labels of the axes.
    """
    all_values = [value for values, _ in lines.values() for value in values]
    canvas, axes = figure(3.0)
    for colour, (method, (values, count)) in zip(COLOURS, lines.items(), strict=False):
        if not values:
            axes.plot([], [], label=f"{figure_text(method)} (none)", color=colour)
            continue
        shares = [100 * k / count for k in range(len(values) + 1)]
        axes.step(
            [min(all_values) / 1.5, *values, max(all_values) * 1.5],
            [*shares, shares[-1]],
            where="post",
            label=figure_text(method),
            color=colour,
            linewidth=1.8,
        )
    axes.set(xscale="log", ylim=(0, 103), xlabel=x_label, ylabel=y_label)
    axes.legend(frameon=False, fontsize=8)
    return canvas


def by_method(study: Study, problem: str) -> Mapping[str, Sequence[Row]]:
    """Exact method -> its rows of a problem."""
    return grouped((row["method"], row) for row in study.of(problem) if row["exact"])


def gaps(study: Study, problem: str) -> Any | None:
    """The figure of gaps: for each exact method, the share of its runs whose gap is at most a
    value. Runs without a gap count in the total alone."""
    lines = {}
    for method, runs in by_method(study, problem).items():
        run_gaps = [row["gap"] for row in runs if row["status"] != "infeasible"]
        percents = sorted(max(100 * gap, LEAST_EXCESS) for gap in run_gaps if gap is not None)
        lines[method] = percents, len(run_gaps)
    if not lines:
        return None
    return stairs(lines, "gap in % (left edge: none to speak of)", "% of runs")


def proofs(study: Study, problem: str) -> Any | None:
    """The figure of proofs: for each exact method, the share of instances proven within a time."""
    runs = by_method(study, problem)
    total = len({(row["instance"], row["seed"]) for rows in runs.values() for row in rows})
    lines = {}
    for method, rows in runs.items():
        seconds = [max(proof_seconds, LEAST_SECONDS) for proof_seconds in cactus(rows)]
        lines[method] = seconds, total
    return stairs(lines, "seconds", "% of instances proven") if lines else None


def profiles(study: Study, problem: str) -> Any | None:
    """The figure of performance profiles: for each exact method, the share of instances on which
    its seconds are within a factor of the fastest method's."""
    ratios = profile(study, problem, list(by_method(study, problem)))
    rows = [row for row in study.of(problem) if row["exact"] and row["status"] in PROVEN]
    total = len({(row["instance"], row["seed"]) for row in rows})
    if total == 0 or len(ratios) < 2:
        return None
    lines = {method: (values, total) for method, values in ratios.items()}
    return stairs(lines, "times the seconds of the fastest", "% of instances")


def scaling(study: Study, problem: str) -> Any | None:
    """The figure of scaling: the seconds of each run of an exact method against the size of its
    instance."""
    if problem not in SIZES:
        return None
    size_name, _ = SIZES[problem]
    # method -> (size, seconds, whether the run ended with a proof) of each run
    points: dict[str, list[tuple[int, float, bool]]] = {}
    for row in study.of(problem):
        if not row["exact"] or row["seconds"] is None:
            continue
        size = row_size(row)
        if size:
            seconds = max(row["seconds"], LEAST_SECONDS)
            points.setdefault(row["method"], []).append((size, seconds, row["status"] in PROVEN))
    if not points:
        return None
    canvas, axes = figure(3.4)
    for colour, (method, method_points) in zip(COLOURS, points.items(), strict=False):
        axes.scatter([], [], s=16, color=colour, label=figure_text(method))
        for with_proof, marker in ((True, "o"), (False, "x")):
            drawn = [
                (size, seconds) for size, seconds, proven in method_points if proven is with_proof
            ]
            sizes = [size for size, _ in drawn]
            times = [seconds for _, seconds in drawn]
            axes.scatter(sizes, times, s=16, alpha=0.6, marker=marker, color=colour)
    all_sizes = [size for method_points in points.values() for size, _, _ in method_points]
    if max(all_sizes) > WIDE_RANGE * min(all_sizes):
        axes.set_xscale("log")
    axes.set(yscale="log", xlabel=size_name, ylabel="seconds")
    axes.legend(frameon=False, fontsize=8)
    return canvas


def as_svg(canvas: Any) -> str:
    """A figure as an SVG element, reproducible, without the XML prologue."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "hetplan", "svg.fonttype": "none"}):
        canvas.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def write_pictures(folder: Path, pictures: Mapping[str, Any]) -> None:
    """Write each figure as a PNG file that is named after it. pictures: name -> figure."""
    make_folder(folder)
    for name, canvas in pictures.items():
        write_bytes(folder / f"{name.replace(' ', '-').lower()}.png", as_picture(canvas, "png"))


def as_picture(canvas: Any, kind: str) -> bytes:
    """The content of a figure's file. kind: png or svg."""
    buffer = io.BytesIO()
    canvas.savefig(buffer, format=kind, dpi=150)
    return buffer.getvalue()
