"""A study's pictures, by matplotlib: excess of heuristics, proofs against time, performance
profiles."""

import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetplan.errors import optional
from hetplan.files import write_bytes
from hetplan.studies.findings import PROVEN, SIZES, Study, cactus, profile, row_size
from hetplan.studies.rows import Row
from hetplan.text import grouped

# Okabe and Ito's palette, told apart by the colour-blind.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#B0A800")
WIDE = 7.2
LEAST_SECONDS = 1e-4
LEAST_EXCESS = 0.01  # %; below it a run is drawn at the left edge: "the optimum"
WIDE_RANGE = 10  # beyond this factor between the ends an axis is logarithmic


def charts(study: Study, problem: str) -> Mapping[str, Any]:
    """Title -> figure, those for which the problem has rows."""
    makers: Mapping[str, Callable[[Study, str], Any | None]] = {
        "Predicted time above the best known, one dot per run": excesses,
        "Gaps at the end of the exact methods' runs": gaps,
        "Proofs against time": proofs,
        "Performance profile of the exact methods": profiles,
        "Seconds against the size of the instance; crosses: ended without a proof": scaling,
    }
    figures = {title: maker(study, problem) for title, maker in makers.items()}
    return {title: made for title, made in figures.items() if made is not None}


def figure(height: float) -> tuple[Any, Any]:
    """(figure, axes) without a display; raises InputError where matplotlib is not installed."""
    figures = optional("matplotlib.figure", "pictures need matplotlib", "plots")
    made = figures.Figure(figsize=(WIDE, height), layout="constrained")
    axes = made.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    return made, axes


def excesses(study: Study, problem: str) -> Any | None:
    """A row of dots per heuristic, its median marked."""
    runs = grouped(
        (row["method"], max(100 * excess, LEAST_EXCESS))
        for row in study.of(problem)
        if not row["exact"] and (excess := study.excess(row)) is not None
    )
    if not runs:
        return None
    made, axes = figure(0.9 + 0.38 * len(runs))
    axes.set_yticks(range(len(runs)), list(runs))
    axes.invert_yaxis()
    for at, shown in enumerate(runs.values()):
        spread = [at + 0.28 * ((7 * i) % 11 / 5 - 1) for i in range(len(shown))]
        axes.scatter(sorted(shown), spread, s=12, alpha=0.55, color=COLOURS[0], linewidths=0)
        middle = statistics.median(shown)
        axes.plot([middle, middle], [at - 0.36, at + 0.36], color=COLOURS[1], linewidth=2.2)
    axes.set(
        xscale="log",
        xlim=(LEAST_EXCESS * 0.8, None),
        xlabel="% above the best known (left edge: the optimum; bar: median)",
    )
    return made


def stairs(lines: Mapping[str, tuple[Sequence[float], int]], across: str, upwards: str) -> Any:
    """Shares that rise with each value, to 100 % of a method's count; method -> (ascending values,
    count). From before the first value of all to after the last."""
    every = [value for values, _ in lines.values() for value in values]
    made, axes = figure(3.0)
    for colour, (method, (values, count)) in zip(COLOURS, lines.items(), strict=False):
        if not values:
            axes.plot([], [], label=f"{method} (none)", color=colour)
            continue
        shares = [100 * k / count for k in range(len(values) + 1)]
        axes.step(
            [min(every) / 1.5, *values, max(every) * 1.5],
            [*shares, shares[-1]],
            where="post",
            label=method,
            color=colour,
            linewidth=1.8,
        )
    axes.set(xscale="log", ylim=(0, 103), xlabel=across, ylabel=upwards)
    axes.legend(frameon=False, fontsize=8)
    return made


def by_method(study: Study, problem: str) -> Mapping[str, Sequence[Row]]:
    """Exact method -> its rows."""
    return grouped((row["method"], row) for row in study.of(problem) if row["exact"])


def gaps(study: Study, problem: str) -> Any | None:
    """Share of an exact method's runs whose gap is at most so much; those without a gap never
    come."""
    lines = {}
    for method, runs in by_method(study, problem).items():
        feasible = [row["gap"] for row in runs if row["status"] != "infeasible"]
        known = sorted(max(100 * gap, LEAST_EXCESS) for gap in feasible if gap is not None)
        lines[method] = known, len(feasible)
    return stairs(lines, "gap in % (left edge: none to speak of)", "% of runs") if lines else None


def proofs(study: Study, problem: str) -> Any | None:
    """Share of instances proven within a time, per exact method."""
    runs = by_method(study, problem)
    total = len({(row["instance"], row["seed"]) for rows in runs.values() for row in rows})
    lines = {
        method: ([max(seconds, LEAST_SECONDS) for seconds in cactus(rows)], total)
        for method, rows in runs.items()
    }
    return stairs(lines, "seconds", "% of instances proven") if lines else None


def profiles(study: Study, problem: str) -> Any | None:
    """Share of instances on which a method is within a factor of the fastest."""
    ratios = profile(study, problem, list(by_method(study, problem)))
    rows = [row for row in study.of(problem) if row["exact"] and row["status"] in PROVEN]
    total = len({(row["instance"], row["seed"]) for row in rows})
    if total == 0 or len(ratios) < 2:
        return None
    lines = {method: (values, total) for method, values in ratios.items()}
    return stairs(lines, "times the seconds of the fastest", "% of instances")


def scaling(study: Study, problem: str) -> Any | None:
    """Seconds of each run against its instance's size, exact methods."""
    points = grouped(
        (row["method"], (size, max(row["seconds"], LEAST_SECONDS), row["status"] in PROVEN))
        for row in study.of(problem)
        if problem in SIZES and row["exact"] and row["seconds"] is not None
        if (size := row_size(row))
    )
    if not points:
        return None
    made, axes = figure(3.4)
    for colour, (method, own) in zip(COLOURS, points.items(), strict=False):
        axes.scatter([], [], s=16, color=colour, label=method)
        for ended, marker in ((True, "o"), (False, "x")):
            shown = [(size, seconds) for size, seconds, proof in own if proof is ended]
            x, y = [size for size, _ in shown], [seconds for _, seconds in shown]
            axes.scatter(x, y, s=16, alpha=0.6, marker=marker, color=colour)
    sizes = [size for own in points.values() for size, _, _ in own]
    if max(sizes) > WIDE_RANGE * min(sizes):
        axes.set_xscale("log")
    axes.set(yscale="log", xlabel=SIZES[problem][0], ylabel="seconds")
    axes.legend(frameon=False, fontsize=8)
    return made


def as_svg(made: Any) -> str:
    """The figure as an SVG element, reproducible, without the XML prologue."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "hetplan", "svg.fonttype": "none"}):
        made.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def write_pictures(folder: Path, pictures: Mapping[str, Any]) -> None:
    """One PNG file per figure, by its name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, made in pictures.items():
        write_bytes(folder / f"{name.replace(' ', '-').lower()}.png", as_picture(made, "png"))


def as_picture(made: Any, kind: str) -> bytes:
    """A file of the figure, of kind png or svg."""
    buffer = io.BytesIO()
    made.savefig(buffer, format=kind, dpi=150)
    return buffer.getvalue()
