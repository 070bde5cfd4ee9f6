"""A study as one self-contained HTML page, and as Markdown; its pictures by matplotlib: excess of
heuristics, proofs against time, performance profiles."""

import io
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hetplan.errors import one_line, optional
from hetplan.files import write_bytes
from hetplan.formulations import family
from hetplan.solvers.run import relative_gap
from hetplan.studies.findings import (
    PROVEN,
    SAME,
    SIZES,
    Study,
    Summary,
    cactus,
    instances_of,
    profile,
    row_size,
)
from hetplan.studies.rows import Row
from hetplan.text import (
    Table,
    bytes_text,
    counted,
    figure_text,
    grouped,
    html_text,
    number_text,
    percent_text,
    seconds_text,
)

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
    axes.set_yticks(range(len(runs)), list(map(figure_text, runs)))
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
            axes.plot([], [], label=f"{figure_text(method)} (none)", color=colour)
            continue
        shares = [100 * k / count for k in range(len(values) + 1)]
        axes.step(
            [min(every) / 1.5, *values, max(every) * 1.5],
            [*shares, shares[-1]],
            where="post",
            label=figure_text(method),
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
        axes.scatter([], [], s=16, color=colour, label=figure_text(method))
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


WORST = 20
FEWEST = 7  # instances of a problem that are worth a picture; the table says it of fewer
FIGURES = (
    "Objectives are predicted iteration times; seconds of solves and memory are measured. A method "
    "misses the optimum where a plan is known that is more than a relative "
    f"{SAME:g} better. Above: how much longer than the best known plan, which is proven optimal "
    "where the gap is 0; means of it are geometric means of the ratios, and in "
    "brackets stands the 95 % bootstrap interval of a mean of five runs or more."
)
HEADER = (
    *("method", "proves optima", "runs", "solved", "proven", "misses the optimum"),
    *("median above", "mean above", "most above"),
    *("median time", "longest", "peak memory"),
)
CASES = ("instance", "method", "above the best known", "best known", "time")
INSTANCES = ("instance", "set", "problem", "size", "best known", "bound", "gap", "found by")
ROWS = (
    *("set", "problem", "instance", "method", "seed", "status"),
    *("objective", "bound", "gap", "time", "memory", "message"),
)
STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1b1b1b; --faint: #555; --line: #ddd }
@media (prefers-color-scheme: dark) { :root { --ground: #15181c; --ink: #e6e9ed; --faint: #a3acb8;
  --line: #343a42 } figure svg { background: #fff } }
@media print { :root { --ground: #fff; --ink: #000 } nav { display: none }
  tr, figure { break-inside: avoid } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 78rem; padding: 0 1rem;
  color: var(--ink); background: var(--ground) }
a { color: inherit } :focus-visible { outline: 2px solid #0a58ca }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1rem; list-style: none; padding: 0 }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; display: block;
  overflow-x: auto }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap }
th:first-child, td:first-child, td.text { text-align: left } th { border-bottom: 2px solid #888 }
tr:target { outline: 2px solid #d98a29 } figure { margin: 1.2rem 0 }
figcaption { font-size: 13px; color: var(--faint) }
svg { max-width: 100%; height: auto } .warn { color: #c23b32; font-weight: 600 }
"""


def cells(summary: Summary) -> tuple[str, ...]:
    """The cells of a summary."""
    return (
        summary.method,
        "yes" if summary.exact else "no",
        f"{summary.runs}",
        f"{summary.solved}",
        f"{summary.proven}" if summary.exact else "-",
        percent_text(summary.missed),
        percent_text(summary.median_excess),
        mean_text(summary),
        percent_text(summary.worst_excess),
        seconds_text(summary.median_seconds),
        seconds_text(summary.most_seconds),
        "-" if summary.most_bytes is None else bytes_text(summary.most_bytes),
    )


def mean_text(summary: Summary) -> str:
    """`7.3 % [5.1 %, 9.9 %]`: the mean excess and its interval, where there is one."""
    ends = ", ".join(map(percent_text, summary.mean_interval or ()))
    return percent_text(summary.mean_excess) + (f" [{ends}]" if ends else "")


def instance_cells(study: Study, name: str, problem: str, instance: str) -> tuple[str, ...]:
    """The cells of an instance."""
    best = study.references[problem, instance]
    rows = [row for row in study.of(problem) if row["instance"] == instance]
    size = row_size(rows[0])
    found_by = "-"
    if best.objective is not None:
        methods = [row["method"] for row in rows if row["objective"] == best.objective]
        found_by = ", ".join(dict.fromkeys(methods)) or "the library"
    return (
        instance,
        name,
        problem,
        "-" if size is None else f"{size} ({SIZES[problem][0]})",
        number_text(best.objective, 8),
        number_text(best.bound, 8),
        percent_text(relative_gap(best.objective, best.bound)),
        found_by,
    )


def case_cells(study: Study, excess: float, row: Row) -> tuple[str, ...]:
    """The cells of a worst case."""
    best = study.reference(row)
    proof = " (proven)" if best.proven else ""
    return (
        row["instance"],
        row["method"],
        percent_text(excess),
        f"{seconds_text(best.objective)}{proof}",
        seconds_text(row["seconds"]),
    )


def origin(rows: Sequence[Row]) -> Iterator[str]:
    """Where, with what and under which limits the rows were taken."""
    for column, name in (("machine_json", "machine"), ("versions_json", "versions")):
        for text in dict.fromkeys(row[column] for row in rows):
            parts = ", ".join(f"{key} {value}" for key, value in json.loads(text).items())
            yield f"{name}: {parts}"
    limits = sorted({row["time_limit"] for row in rows if row["time_limit"] is not None})
    yield "time limits: " + (", ".join(seconds_text(limit) for limit in limits) or "none")
    times = sorted(row["begun"][:16].replace("T", " ") for row in rows)
    yield f"{counted(len(rows), 'run')}, begun from {times[0]} to {times[-1]} UTC"


def in_words(study: Study, problem: str) -> str:
    """The section of the page about one problem."""
    rows, summaries = study.of(problem), study.summaries(problem)
    instances = {row["instance"] for row in rows}
    text = f"{counted(len(rows), 'run')} on {counted(len(instances), 'instance')}."
    exact = [summary for summary in summaries if summary.exact]
    if exact:
        best = max(exact, key=lambda summary: summary.proven / summary.runs)
        runs = counted(best.runs, "run")
        text += f" {best.method} ends {best.proven} of its {runs} with a proof."
    heuristics = [s for s in summaries if not s.exact and s.mean_excess is not None]
    if heuristics:
        near = min(heuristics, key=lambda one: one.mean_excess or 0.0)
        most = percent_text(near.worst_excess)
        text += f" {near.method} comes nearest of the heuristics: {mean_text(near)} above the "
        text += f"best known on average, {most} at most, over {counted(near.solved, 'plan')}."
    return text


def document(title: str, body: Iterable[str]) -> str:
    """A whole page."""
    head = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{html_text(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{STYLE}</style></head><body>
<h1>{html_text(title)}</h1>"""
    return "\n".join([head, *body, "</body></html>"]) + "\n"


def of_tables(title: str, tables: Iterable[Table], pictures: Mapping[str, Any]) -> str:
    """A page of tables, each with the picture that its title begins with."""
    parts = list[str]()
    for one in tables:
        parts += [f"<h2>{html_text(one.title)}</h2>", *table(one.header, one.rows)]
        parts += [f"<p>{html_text(line)}</p>" for line in one.notes]
        made = pictures.get(one.title.partition(":")[0])
        parts += [] if made is None else [f"<figure>{as_svg(made)}</figure>"]
    return document(title, parts)


def lines(study: Study) -> Iterator[str]:
    """The parts of a study's page."""
    yield f"<p>{FIGURES}</p><ul>"
    yield from (f"<li>{html_text(line)}</li>" for line in origin(study.rows))
    yield "</ul>"
    parts = [*study.problems, "instances", "rows"]
    contents = "".join(f'<li><a href="#{part}">{part}</a></li>' for part in parts)
    yield f'<nav aria-label="Contents"><ul>{contents}</ul></nav>'
    yield from (f'<p class="warn">{html_text(line)}</p>' for line in study.conflicts())
    for problem in study.problems:
        own = family(problem)
        yield f'<h2 id="{problem}">{problem}: {html_text(own.title)}</h2>'
        yield f"<p>{html_text(own.paper)}</p>"
        yield f"<p><strong>{html_text(in_words(study, problem))}</strong></p>"
        yield from table(HEADER, [cells(summary) for summary in study.summaries(problem)])
        few = len({row["instance"] for row in study.of(problem)}) < FEWEST
        for text, made in () if few else charts(study, problem).items():
            caption = f"<figcaption>{problem}: {html_text(text)}</figcaption>"
            yield f"<figure>{as_svg(made)}{caption}</figure>"
    worst = study.worst_cases(WORST)
    if worst:
        yield '<h2 id="worst">Worst cases of the heuristics</h2>'
        links = [{0: anchor(row), 1: f"row-{row['key']}"} for _, row in worst]
        yield from table(CASES, [case_cells(study, *pair) for pair in worst], links=links)
    yield '<h2 id="instances">Instances</h2>'
    yield "<p><code>hetplan instances show NAME</code> shows one of the library.</p>"
    listed = instances_of(study)
    keys = [f"instance-{problem}-{instance}" for _, problem, instance in listed]
    yield from table(INSTANCES, [instance_cells(study, *one) for one in listed], keys=keys)
    yield '<h2 id="rows">All runs</h2>'
    keys = [f"row-{row['key']}" for row in study.rows]
    links = [{2: anchor(row)} for row in study.rows]
    yield from table(ROWS, [row_cells(row) for row in study.rows], keys=keys, links=links)


def row_cells(row: Row) -> tuple[str, ...]:
    """The cells of a run."""
    return (
        row["set"],
        row["problem"],
        row["instance"],
        row["method"],
        f"{row['seed']}",
        row["status"],
        number_text(row["objective"], 8),
        number_text(row["bound"], 8),
        percent_text(row["gap"]),
        seconds_text(row["seconds"]),
        "-" if row["peak_bytes"] is None else bytes_text(row["peak_bytes"]),
        row["message"] or "",
    )


def anchor(row: Row) -> str:
    """The anchor of the row's instance in the table of instances."""
    return f"instance-{row['problem']}-{row['instance']}"


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    links: Sequence[Mapping[int, str]] | None = None,
    keys: Sequence[str] | None = None,
) -> Iterator[str]:
    """An HTML table. links: of a row's cells, by place, to anchors of the page; keys: the rows' own
    anchors."""
    yield (
        "<table><thead><tr>"
        + "".join(f'<th scope="col">{html_text(name)}</th>' for name in header)
        + "</tr></thead><tbody>"
    )
    for at, row in enumerate(rows):
        own = "" if keys is None else f' id="{html_text(keys[at])}"'
        texts = [html_text(cell) for cell in row]
        for place, target in (links[at] if links is not None else {}).items():
            texts[place] = f'<a href="#{html_text(quote(target))}">{texts[place]}</a>'
        yield f"<tr{own}>" + "".join(f"<td>{text}</td>" for text in texts) + "</tr>"
    yield "</tbody></table>"


def markdown(study: Study, title: str) -> str:
    """The same without pictures and raw rows."""
    text = [
        f"# {markdown_text(title)}",
        "",
        FIGURES,
        "",
        *(f"- {markdown_text(line)}" for line in origin(study.rows)),
        "",
    ]
    text += [f"**{markdown_text(line)}**" for line in study.conflicts()]
    for problem in study.problems:
        summaries = [cells(summary) for summary in study.summaries(problem)]
        text += [f"## {problem}: {family(problem).title}", "", *pipes(HEADER, summaries), ""]
    worst = [case_cells(study, *pair) for pair in study.worst_cases(WORST)]
    if worst:
        text += ["## Worst cases of the heuristics", "", *pipes(CASES, worst), ""]
    return "\n".join(text)


def pipes(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    return [
        "| " + " | ".join(header) + " |",
        "|" + " --- |" * len(header),
        *("| " + " | ".join(map(markdown_text, row)) + " |" for row in rows),
    ]


def markdown_text(text: str) -> str:
    """`text` within a line or a cell; what looks like HTML stays text."""
    for mark, escaped in (("\\", "\\\\"), ("|", "\\|"), ("<", "&lt;")):
        text = text.replace(mark, escaped)
    return one_line(text)
