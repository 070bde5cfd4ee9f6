"""The Pareto set as a picture (Astra, Figure 7): SVG written here, HTML around it, PNG through
matplotlib.

Throughput on the x axis, money on the y axis, every priced strategy a dot (thinned out), the Pareto
set a line. SVG and HTML need nothing but this module and load nothing from anywhere; PNG needs the
optional extra `plots`.
"""

from __future__ import annotations

import html
import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path

from hetplan.errors import InputError, UnsupportedError
from hetplan.files import write_bytes, write_text
from hetplan.formulations.astra.search.result import Candidate, Found

WIDTH, HEIGHT = 800, 480
LEFT, RIGHT, TOP, BOTTOM = 90, 20, 40, 60
MOST_DOTS = 3000
FORMATS = (".svg", ".html", ".png")
Point = tuple[float, float]


def check_plot_target(path: Path) -> None:
    """Refuse a name whose ending says no format, or PNG without matplotlib, before anything is
    searched."""
    if path.suffix.lower() not in FORMATS:
        raise InputError(
            "unknown kind of picture", where=str(path), got=path.suffix, expected=", ".join(FORMATS)
        )
    if path.suffix.lower() == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError(
            "PNG needs matplotlib",
            where=str(path),
            expected="pip install 'hetplan[plots]', or a name in .svg or .html",
        )


def write_plot(found: Found, path: Path, title: str) -> None:
    """The picture of a search, in the format of the file's ending; raises InputError, or where no
    money is known."""
    check_plot_target(path)
    data = _Data.of(found, path)
    if path.suffix.lower() == ".svg":
        write_text(path, svg(data, title))
    elif path.suffix.lower() == ".html":
        write_text(path, page(data, title, found))
    else:
        write_bytes(path, png(data, title))


@dataclass(frozen=True)
class _Data:
    """dots: (tokens per second, dollars) of priced strategies; front: those of the Pareto set,
    fastest first."""

    dots: list[Point]
    front: list[tuple[Point, Candidate]]

    @classmethod
    def of(cls, found: Found, path: Path) -> _Data:
        """Dots thinned evenly over the ranking; raises InputError where there is nothing to
        draw."""
        dots = [(x, y) for x, y in found.points if y is not None]
        front = [((c.tokens_per_second, c.money), c) for c in found.pareto if c.money is not None]
        if not front:
            raise InputError(
                "nothing to plot", where=str(path), expected="strategies with a known price"
            )
        # Far worse than the set by money: dots up there would only squeeze the set into a corner.
        ceiling = 4 * max(y for (_, y), _ in front)
        near = sorted(dot for dot in dots if dot[1] <= ceiling)
        return cls(near[:: max(1, len(near) // MOST_DOTS)], front)


@dataclass(frozen=True)
class _Axis:
    """A linear scale from values to pixels, with round ticks; starts at 0."""

    most: float
    low: float
    high: float

    def at(self, value: float) -> float:
        """Pixel of a value."""
        return self.low + (self.high - self.low) * value / self.most

    def ticks(self) -> list[float]:
        """Four to ten round values."""
        step = 10.0 ** math.floor(math.log10(self.most / 4))
        step = next(step * f for f in (1, 2, 5, 10) if self.most / (step * f) <= 10)
        return [i * step for i in range(int(self.most / step) + 1)]


def svg(data: _Data, title: str) -> str:
    """A stand-alone SVG document."""
    every = [*data.dots, *(point for point, _ in data.front)]
    x = _Axis(1.05 * max(p[0] for p in every), LEFT, WIDTH - RIGHT)
    y = _Axis(1.05 * max(1e-9, *(p[1] for p in every)), HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="22" text-anchor="middle" font-size="15">'
        f"{html.escape(title)}</text>",
        *_axes(x, y),
        *(
            f'<circle cx="{x.at(a):.1f}" cy="{y.at(b):.1f}" r="1.5" fill="#9aa5b1"/>'
            for a, b in data.dots
        ),
    ]
    line = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for (a, b), _ in data.front)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#c0392b" stroke-width="1.5"/>')
    for (a, b), candidate in data.front:
        note = html.escape(f"{a:,.0f} tokens/s, {b:,.2f} dollars: {summary(candidate)}")
        circle = f'<circle cx="{x.at(a):.1f}" cy="{y.at(b):.1f}" r="4" fill="#c0392b">'
        parts.append(f"{circle}<title>{note}</title></circle>")
    return "\n".join([*parts, "</svg>", ""])


def _axes(x: _Axis, y: _Axis) -> list[str]:
    """Grid lines with their values, and what the axes show."""
    bottom, middle = HEIGHT - BOTTOM, (TOP + HEIGHT - BOTTOM) / 2
    parts = [
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 16}" text-anchor="middle">'
        "tokens per second</text>",
        f'<text transform="translate(20 {middle}) rotate(-90)" text-anchor="middle">'
        "dollars for the job</text>",
    ]
    for tick in x.ticks():
        at = f"{x.at(tick):.1f}"
        parts += [
            f'<line x1="{at}" y1="{TOP}" x2="{at}" y2="{bottom}" stroke="#e5e8eb"/>',
            f'<text x="{at}" y="{bottom + 18}" text-anchor="middle">{tick:,g}</text>',
        ]
    for tick in y.ticks():
        at = f"{y.at(tick):.1f}"
        below = f"{y.at(tick) + 4:.1f}"
        parts += [
            f'<line x1="{LEFT}" y1="{at}" x2="{WIDTH - RIGHT}" y2="{at}" stroke="#e5e8eb"/>',
            f'<text x="{LEFT - 8}" y="{below}" text-anchor="end">{tick:,g}</text>',
        ]
    return parts


def page(data: _Data, title: str, found: Found) -> str:
    """A self-contained HTML page: the picture, the counts, the Pareto set as a table."""
    rows = "\n".join(
        f"<tr><td>{a:,.0f}</td><td>{b:,.2f}</td><td>{c.seconds:.4g}</td><td>{html.escape(summary(c))}</td></tr>"
        for (a, b), c in data.front
    )
    counts = ", ".join(f"{value:,} {key.replace('_', ' ')}" for key, value in found.counts.items())
    style = "body{font-family:sans-serif;margin:2em}td,th{padding:.2em 1em;text-align:right}"
    style += "td:last-child{text-align:left}"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title>"
        f"<style>{style}</style></head><body>\n{svg(data, title)}\n<p>{html.escape(counts)}</p>\n"
        f"<p>{html.escape(found.proof)}</p>\n<table><tr><th>tokens/s</th><th>dollars</th><th>s/iteration</th>"
        f"<th>strategy</th></tr>\n{rows}\n</table></body></html>\n"
    )


def png(data: _Data, title: str) -> bytes:
    """The same picture by matplotlib."""
    import io

    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=150)
    axes = figure.add_subplot()
    speeds, dollars = zip(*data.dots, strict=True)
    axes.scatter(speeds, dollars, s=3, color="#9aa5b1")
    axes.plot(
        *zip(*(point for point, _ in data.front), strict=True), "o-", color="#c0392b", markersize=5
    )
    axes.set_xlabel("tokens per second")
    axes.set_ylabel("dollars for the job")
    axes.set_title(title)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def summary(candidate: Candidate) -> str:
    """A strategy in a line: `32 A800-SXM4-80GB: pp 2, tp 8, dp 2, mbs 1 x 128, sequence
    parallel`."""
    s = candidate.strategy
    devices = " + ".join(f"{count} {name}" for name, count in candidate.devices.items())
    parts = [
        f"pp {s['pipeline_model_parallel_size']}",
        f"tp {s['tensor_model_parallel_size']}",
        f"dp {s['data_parallel_size']}",
        f"mbs {s['micro_batch_size']} x {s['num_micro_batches']}",
    ]
    if s["expert_model_parallel_size"] != 1:
        parts.append(f"ep {s['expert_model_parallel_size']}")
    if s["num_layers_per_virtual_pipeline_stage"] is not None:
        parts.append(f"{s['virtual_pipeline_model_parallel_size']} virtual stages")
    if s["sequence_parallel"]:
        parts.append("sequence parallel")
    if s["use_distributed_optimizer"]:
        parts.append("distributed optimizer")
    if s["recompute_granularity"] is not None:
        details = [
            str(s[key])
            for key in ("recompute_method", "recompute_num_layers")
            if s[key] is not None
        ]
        parts.append(" ".join(["recompute", str(s["recompute_granularity"]), *details]))
    if candidate.offloaded > 0:
        parts.append(f"{100 * candidate.offloaded:.0f} % of the optimizer offloaded")
    if candidate.segments:
        cut = " | ".join(
            f"{stages} x {name}: {layers} layers" for name, stages, layers in candidate.segments
        )
        parts.append(f"[{cut}]")
    return f"{devices}: {', '.join(parts)}"
