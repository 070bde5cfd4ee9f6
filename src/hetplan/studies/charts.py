"""A study's pictures, by matplotlib: excess of heuristics, proofs against time, performance profiles."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hetplan.errors import InputError
from hetplan.studies.findings import Study, cactus, profile

# Okabe and Ito's palette, told apart by the colour-blind.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#B0A800")
WIDE = 7.2
LEAST_SECONDS = 1e-4
# Excess below this share is drawn at the left edge: "the optimum".
LEAST_EXCESS = 1e-4


def figure(height: float) -> tuple[Any, Any]:
    """(figure, axes) without a display; raises InputError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("pictures need matplotlib", expected="pip install 'hetplan[plots]'") from None
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
        ("Proofs against time", proofs),
        ("Performance profile of the exact methods", profiles),
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
            axes.step(stairs, [*shares, shares[-1]], where="post", label=method, color=colour, linewidth=1.8)
        else:
            axes.plot([], [], label=f"{method} (none)", color=colour)
    axes.set_xscale("log")
    axes.set_ylim(0, 103)
    axes.set_xlabel("seconds")
    axes.set_ylabel("% of instances proven")
    axes.legend(frameon=False, fontsize=8)
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
    axes.set_xscale("log")
    axes.set_ylim(0, 103)
    axes.set_xlabel("times the seconds of the fastest")
    axes.set_ylabel("% of instances")
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


def as_png(made: Any) -> bytes:
    """The figure as PNG."""
    buffer = io.BytesIO()
    made.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()
