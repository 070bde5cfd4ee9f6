"""The same picture as a PNG or SVG file, by matplotlib (extra `plots`)."""

from __future__ import annotations

import io
from typing import Any

from hetplan.errors import UnsupportedError
from hetplan.planner.pictures.scene import Scene
from hetplan.profiling.catalogue import GIB
from hetplan.text import seconds_text

COLOURS = {
    "forward": "#2f6fb5",
    "backward": "#79a9dc",
    "optimizer": "#35506e",
    "transfer": "#d98a29",
    "synchronisation": "#b3459a",
}


def figure(scene: Scene, kind: str) -> bytes:
    """The bytes of a file of `kind` (png, svg). Raises UnsupportedError where matplotlib is not
    installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UnsupportedError(
            "matplotlib is not installed",
            where=f"--{kind}",
            expected="pip install 'hetplan[plots]', or --html",
        ) from None
    heights = [max(2.0, 0.32 * len(scene.rows)), 2.4] + (
        [0.24 * len(scene.offers) + 0.8] if scene.offers else []
    )
    drawing = Figure(figsize=(12, sum(heights) + 1.5), layout="constrained")
    FigureCanvasAgg(drawing)
    axes = drawing.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    drawing.suptitle(
        f"{scene.title}: {seconds_text(scene.seconds)} per iteration, predicted", fontsize=13
    )
    timeline(axes[0], scene)
    memory(axes[1], scene)
    if scene.offers:
        offers(axes[2], scene)
    stream = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {}
    drawing.savefig(stream, format=kind, dpi=150, metadata=metadata)
    return stream.getvalue()


def timeline(axes: Any, scene: Scene) -> None:
    """A row per stage."""
    for i, row in enumerate(scene.rows):
        for spans, low, thick in ((row.computes, -0.4, 0.45), (row.communicates, 0.07, 0.33)):
            for kind, colour in COLOURS.items():
                bars = [(s.start, s.end - s.start) for s in spans if s.kind == kind]
                if bars:
                    axes.broken_barh(
                        bars, (i + low, thick), facecolors=colour, label=kind, linewidth=0
                    )
    axes.set_yticks(range(len(scene.rows)), [row.title for row in scene.rows], fontsize=8)
    axes.set_ylim(len(scene.rows) - 0.5, -0.5)
    axes.set_xlim(0, scene.seconds)
    axes.set_xlabel("seconds")
    handles, names = axes.get_legend_handles_labels()
    unique = dict(zip(names, handles, strict=True))
    axes.legend(
        unique.values(),
        unique.keys(),
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        fontsize=8,
        ncols=5,
    )


def memory(axes: Any, scene: Scene) -> None:
    """A bar per device in use, its limit above it."""
    used = [d for d in scene.devices if d.unit is not None]
    at = range(len(used))
    axes.bar(at, [d.limit / GIB for d in used], color="#e4e7eb", width=0.85)
    colours = ["#c23b32" if d.held > d.limit else COLOURS["forward"] for d in used]
    axes.bar(at, [d.held / GIB for d in used], color=colours, width=0.85)
    if len(used) <= 48:
        axes.set_xticks(at, [str(d.device) for d in used], fontsize=8)
    axes.set_xlabel("device")
    axes.set_ylabel("GiB held, of what there is")


def offers(axes: Any, scene: Scene) -> None:
    """A bar per candidate with its bound."""
    timed = [o for o in scene.offers if o.seconds is not None]
    colours = ["#2e8b57" if o.winner else "#79a9dc" if o.fits else "#c23b32" for o in timed]
    axes.barh(range(len(timed)), [o.seconds for o in timed], color=colours)
    bounds = [(i, o.bound) for i, o in enumerate(timed) if o.bound is not None]
    if bounds:
        axes.plot(
            [b for _, b in bounds],
            [i for i, _ in bounds],
            "k|",
            markersize=9,
            label="bound of its own problem",
        )
        axes.legend(fontsize=8)
    axes.set_yticks(range(len(timed)), [o.name for o in timed], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds per iteration, replayed")
