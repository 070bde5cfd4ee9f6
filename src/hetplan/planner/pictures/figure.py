"""The picture of a plan as a PNG or SVG file: the timeline and the memory, drawn by matplotlib
(extra `plots`)."""

import io
from typing import Any

from hetplan.errors import import_optional
from hetplan.planner.pictures.scene import Scene
from hetplan.profiling.hardware.cluster import GIB
from hetplan.text import figure_text, seconds_text

COLOURS = {
    "forward": "#2f6fb5",
    "backward": "#79a9dc",
    "weights": "#b9d3ee",
    "optimizer": "#35506e",
    "transfer": "#d98a29",
    "synchronisation": "#b3459a",
}
OVER = "#c23b32"  # memory above the limit


def figure(scene: Scene, kind: str) -> bytes:
    """The bytes of an image file of `kind` (png, svg). Raises InputError where matplotlib is not
    installed."""
    figures = import_optional(
        "matplotlib.figure", "needs matplotlib, as --html does not", "plots", where=f"--{kind}"
    )
    # inches; 1.5 more are for the heading, the legend and the labels of the axes
    heights = (max(2.0, 0.32 * len(scene.rows)), 2.4)
    drawing = figures.Figure(figsize=(12, sum(heights) + 1.5), layout="constrained")
    above, below = drawing.subplots(2, 1, height_ratios=heights)
    drawing.suptitle(
        figure_text(f"{scene.title}: {seconds_text(scene.seconds)} per iteration, predicted"),
        fontsize=13,
    )
    timeline(above, scene)
    memory(below, scene)
    stream = io.BytesIO()
    # without a date, equal plans give equal files
    metadata = {"Date": None} if kind == "svg" else {}
    drawing.savefig(stream, format=kind, dpi=150, metadata=metadata)
    return stream.getvalue()


def timeline(axes: Any, scene: Scene) -> None:
    """Draw a row for each stage: its computation in the upper lane, its communication in the lower
    one."""
    for kind, colour in COLOURS.items():
        axes.broken_barh([], (0, 1), facecolors=colour, label=kind)  # in the legend, drawn or not
        for i, row in enumerate(scene.rows):
            lanes = ((row.computes, -0.4, 0.45), (row.communicates, 0.07, 0.33))
            for spans, top, height in lanes:  # relative to the row
                axes.broken_barh(
                    [(s.start, s.end - s.start) for s in spans if s.kind == kind],
                    (i + top, height),
                    facecolors=colour,
                    linewidth=0,
                )
    titles = [figure_text(row.title) for row in scene.rows]
    axes.set_yticks(range(len(scene.rows)), titles, fontsize=8)
    axes.set(ylim=(len(scene.rows) - 0.5, -0.5), xlim=(0, scene.seconds), xlabel="seconds")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=8, ncols=5)


def memory(axes: Any, scene: Scene) -> None:
    """Draw a bar for each device in use: its bytes in front of its limit."""
    positions = range(len(scene.used))
    axes.bar(positions, [d.limit / GIB for d in scene.used], color="#e4e7eb", width=0.85)
    axes.bar(
        positions,
        [d.peak_bytes / GIB for d in scene.used],
        color=[OVER if d.peak_bytes > d.limit else COLOURS["forward"] for d in scene.used],
        width=0.85,
    )
    if len(scene.used) <= 48:  # the numbers of more devices overlap
        axes.set_xticks(positions, [str(d.device) for d in scene.used], fontsize=8)
    axes.set(xlabel="device", ylabel="GiB held, of what there is")
