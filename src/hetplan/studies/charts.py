"""A study's pictures, by matplotlib: excess of heuristics, proofs against time, performance
profiles."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hetplan.errors import InputError
from hetplan.studies.findings import Study, cactus, profile
from hetplan.studies.sizes import SIZES, row_size

# Okabe and Ito's palette, told apart by the colour-blind.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#B0A800")
WIDE = 7.2
LEAST_SECONDS = 1e-4
# Excess below this share is drawn at the left edge: "the optimum".
LEAST_EXCESS = 1e-4
# Beyond this factor between the ends an axis is logarithmic.
WIDE_RANGE = 10


def figure(height: float) -> tuple[Any, Any]:
    """(figure, axes) without a display; raises InputError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            "pictures need matplotlib", expected="pip install 'hetplan[plots]'"
        ) from None
    made = Figure(figsize=(WIDE, height), layout="constrained")
    axes = made.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    return made, axes


def charts(study: Study, problem: str) -> Mapping[str, Any]:
    """Title -> figure, those for which the problem has rows."""
    makers: Sequence[tuple[str, Callable[[Study, str], Any | None]]] = (
        ("Predicted time above the best known, one dot per run", excesses),
        (
            "Predicted speed-up of the best known plan over each heuristic's: half of the runs, all runs",
            speedups,
        ),
        ("Gaps at the end of the exact methods' runs", gaps),
        ("Proofs against time", proofs),
        ("Performance profile of the exact methods", profiles),
        ("Seconds against the size of the instance; crosses: ended without a proof", scaling),
    )
    found = {title: maker(study, problem) for title, maker in makers}
    return {title: made for title, made in found.items() if made is not None}


def excesses(study: Study, problem: str) -> Any | None:
    """A row of dots per heuristic, its median marked."""
    methods = study.methods(problem, exact=False)
    found = {
        method: [
            excess
            for row in study.of(problem)
            if row["method"] == method and (excess := study.excess(row)) is not None
        ]
        for method in methods
    }
    found = {method: values for method, values in found.items() if values}
    if not found:
        return None
    made, axes = figure(0.9 + 0.38 * len(found))
    for at, values in enumerate(found.values()):
        shown = sorted(max(100 * value, 100 * LEAST_EXCESS) for value in values)
        spread = [at + 0.28 * ((7 * i) % 11 / 5 - 1) for i in range(len(shown))]
        axes.scatter(shown, spread, s=12, alpha=0.55, color=COLOURS[0], linewidths=0)
        middle = statistics.median(shown)
        axes.plot([middle, middle], [at - 0.36, at + 0.36], color=COLOURS[1], linewidth=2.2)
    axes.set_xscale("log")
    axes.set_xlim(left=100 * LEAST_EXCESS * 0.8)
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set_xlabel("% above the best known (left edge: the optimum; bar: median)")
    return made


def speedups(study: Study, problem: str) -> Any | None:
    """A bar per heuristic from the lower to the upper quartile of its time over the best known, a
    line over all."""
    found = {}
    for method in study.methods(problem, exact=False):
        runs = [row for row in study.of(problem) if row["method"] == method]
        values = sorted(1 + excess for row in runs if (excess := study.excess(row)) is not None)
        if values:
            found[method] = values
    if not found:
        return None
    made, axes = figure(0.9 + 0.38 * len(found))
    for at, values in enumerate(found.values()):
        low, middle, high = (quantile(values, share) for share in (0.25, 0.5, 0.75))
        axes.plot([values[0], values[-1]], [at, at], color=COLOURS[0], linewidth=1)
        axes.barh(at, high - low, left=low, height=0.5, color=COLOURS[5], edgecolor=COLOURS[0])
        axes.plot([middle, middle], [at - 0.25, at + 0.25], color=COLOURS[1], linewidth=2.2)
    most = max(values[-1] for values in found.values())
    if most > WIDE_RANGE:
        axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set_xlabel("times the best known predicted time (bar in the middle: median)")
    return made


def quantile(values: Sequence[float], share: float) -> float:
    """Of ascending values, between neighbours in proportion."""
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


def gaps(study: Study, problem: str) -> Any | None:
    """Share of an exact method's runs whose gap is at most so much; those without a gap never
    come."""
    methods = study.methods(problem, exact=True)
    if not methods:
        return None
    made, axes = figure(3.0)
    for colour, method in zip(COLOURS, methods, strict=False):
        runs = [
            row
            for row in study.of(problem)
            if row["method"] == method and row["status"] != "infeasible"
        ]
        left = sorted(100 * max(row["gap"], LEAST_EXCESS) for row in runs if row["gap"] is not None)
        if not left:
            axes.plot([], [], label=f"{method} (none)", color=colour)
            continue
        shares = [100 * (k + 1) / len(runs) for k in range(len(left))]
        axes.step(
            [left[0], *left, 100.0],
            [0.0, *shares, shares[-1]],
            where="post",
            label=method,
            color=colour,
        )
    label_shares(axes, "gap in % (left edge: none to speak of)", "% of runs")
    return made


def scaling(study: Study, problem: str) -> Any | None:
    """Seconds of each run against its instance's size, exact methods."""
    if problem not in SIZES:
        return None
    points: dict[str, list[tuple[int, float, bool]]] = {}
    for row in study.of(problem):
        size = row_size(row) if row["exact"] and row["seconds"] is not None else None
        if size:
            ended = row["status"] in ("optimal", "infeasible")
            points.setdefault(row["method"], []).append(
                (size, max(row["seconds"], LEAST_SECONDS), ended)
            )
    if not points:
        return None
    made, axes = figure(3.4)
    for colour, (method, found) in zip(COLOURS, points.items(), strict=False):
        axes.scatter([], [], s=16, color=colour, label=method)
        for ended, marker in ((True, "o"), (False, "x")):
            sizes = [size for size, _, proof in found if proof is ended]
            times = [seconds for _, seconds, proof in found if proof is ended]
            axes.scatter(sizes, times, s=16, alpha=0.6, marker=marker, color=colour)
    sizes = [size for found in points.values() for size, _, _ in found]
    if max(sizes) > WIDE_RANGE * min(sizes):
        axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(SIZES[problem][0])
    axes.set_ylabel("seconds")
    axes.legend(frameon=False, fontsize=8)
    return made


def proofs(study: Study, problem: str) -> Any | None:
    """Share of instances proven within a time, per exact method."""
    methods = study.methods(problem, exact=True)
    total = len({(row["instance"], row["seed"]) for row in study.of(problem) if row["exact"]})
    if not methods:
        return None
    times = {
        method: [
            max(value, LEAST_SECONDS)
            for value in cactus(row for row in study.of(problem) if row["method"] == method)
        ]
        for method in methods
    }
    every = [value for values in times.values() for value in values]
    made, axes = figure(3.0)
    for colour, (method, values) in zip(COLOURS, times.items(), strict=False):
        if values:  # from before the first proof of all to after the last
            stairs = [min(every) / 1.5, *values, max(every) * 1.5]
            shares = [100 * k / total for k in range(len(values) + 1)]
            axes.step(
                stairs,
                [*shares, shares[-1]],
                where="post",
                label=method,
                color=colour,
                linewidth=1.8,
            )
        else:
            axes.plot([], [], label=f"{method} (none)", color=colour)
    label_shares(axes, "seconds", "% of instances proven")
    return made


def profiles(study: Study, problem: str) -> Any | None:
    """Share of instances on which a method is within a factor of the fastest."""
    methods = study.methods(problem, exact=True)
    ratios = profile(study, problem, methods)
    total = max((len(values) for values in ratios.values()), default=0)
    if total == 0 or len(methods) < 2:
        return None
    every = {
        (row["instance"], row["seed"])
        for row in study.of(problem)
        if row["exact"] and row["status"] in ("optimal", "infeasible")
    }
    made, axes = figure(3.0)
    for colour, (method, values) in zip(COLOURS, ratios.items(), strict=False):
        shares = [100 * (k + 1) / len(every) for k in range(len(values))]
        end = 1.5 * max(one for ratio in ratios.values() for one in ratio)
        stairs, heights = [1.0, *values, end], [0.0, *shares, shares[-1] if shares else 0.0]
        axes.step(stairs, heights, where="post", label=method, color=colour, linewidth=1.8)
    label_shares(axes, "times the seconds of the fastest", "% of instances")
    return made


def label_shares(axes: Any, across: str, upwards: str) -> None:
    """The axes of stairs that rise to 100 %."""
    axes.set_xscale("log")
    axes.set_ylim(0, 103)
    axes.set_xlabel(across)
    axes.set_ylabel(upwards)
    axes.legend(frameon=False, fontsize=8)


def as_svg(made: Any) -> str:
    """The figure as an SVG element, reproducible, without the XML prologue."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "hetplan", "svg.fonttype": "none"}):
        made.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def as_png(made: Any) -> bytes:
    """The figure as PNG."""
    buffer = io.BytesIO()
    made.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()
