"""Writes a study as Markdown, and as one self-contained HTML page with the pictures of `charts`."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from hetplan.errors import one_line
from hetplan.formulations import family
from hetplan.solvers.run import relative_gap
from hetplan.studies.charts import as_svg, charts
from hetplan.studies.findings import (
    SAME,
    SIZES,
    Study,
    Summary,
    instances_of,
    row_size,
)
from hetplan.studies.rows import Row, of_older_code, package_versions
from hetplan.text import (
    Table,
    bytes_text,
    counted,
    html_text,
    number_text,
    percent_text,
    seconds_text,
)

WORST = 20  # a page lists at most this number of worst cases
FEWEST = 7  # a page has pictures of a problem with at least this number of instances
LEGEND = (
    "Objectives are predicted iteration times; seconds of solves and memory are measured. A method "
    "misses the optimum where a plan is known that is more than a relative "
    f"{SAME:g} better. Columns 'above' say how much longer a plan takes than the best known plan, "
    "which is proven optimal where the gap is 0. Means above are geometric means of the ratios of "
    "the two; a mean of five runs or more has its 95 % bootstrap interval in brackets."
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
CONTRADICTED = "contradicted!"  # marks a run that another one contradicts
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
    """The cells of a summary, under HEADER."""
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
    """The mean excess, with its interval where that is known: `7.3 % [5.1 %, 9.9 %]`."""
    mean = percent_text(summary.mean_excess)
    if summary.mean_interval is None:
        return mean
    low, high = summary.mean_interval
    return f"{mean} [{percent_text(low)}, {percent_text(high)}]"


def instance_cells(study: Study, name: str, problem: str, instance: str) -> tuple[str, ...]:
    """The cells of an instance, under INSTANCES. name: the instance's set."""
    best = study.references[problem, instance]
    rows = [row for row in study.of(problem) if row["instance"] == instance]
    size = row_size(rows[0])
    size_text = "-"
    if size is not None:
        size_name, _ = SIZES[problem]
        size_text = f"{size} ({size_name})"
    found_by = "-"
    if best.objective is not None:
        methods = [row["method"] for row in rows if row["objective"] == best.objective]
        found_by = ", ".join(dict.fromkeys(methods)) or "the library"
    return (
        instance,
        name,
        problem,
        size_text,
        number_text(best.objective, 8),
        number_text(best.bound, 8),
        percent_text(relative_gap(best.objective, best.bound)),
        found_by,
    )


def case_cells(study: Study, excess: float, row: Row) -> tuple[str, ...]:
    """The cells of a worst case, under CASES."""
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
    """Lines with the machines, the versions, the rows of older code, the time limits and the dates
    of the rows."""
    machines = [json.loads(row["machine_json"]) for row in rows]
    yield from distinct_lines("machine", machines)
    yield from distinct_lines("versions", map(package_versions, rows))
    older = Counter(f"{row['problem']} {row['method']}" for row in rows if of_older_code(row))
    for name, count in older.items():
        yield f"of an older version of the method's code: {name}, {counted(count, 'run')}"
    limits = sorted({row["time_limit"] for row in rows if row["time_limit"] is not None})
    limit_texts = [seconds_text(limit) for limit in limits]
    yield f"time limits: {', '.join(limit_texts) or 'none'}"
    times = sorted(row["begun"][:16].replace("T", " ") for row in rows)
    yield f"{counted(len(rows), 'run')}, begun from {times[0]} to {times[-1]} UTC"


def distinct_lines(name: str, entries: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """A line `name: key value, …` for each entry that differs from all entries before it."""
    texts = []
    for entry in entries:
        texts.append(", ".join(f"{key} {value}" for key, value in entry.items()))
    for text in dict.fromkeys(texts):
        yield f"{name}: {text}"


def in_words(study: Study, problem: str) -> str:
    """The findings on one problem in a few sentences: the number of runs, the exact method with the
    most proofs, and the best heuristic."""
    rows = study.of(problem)
    summaries = study.summaries(problem)
    instances = {row["instance"] for row in rows}
    text = f"{counted(len(rows), 'run')} on {counted(len(instances), 'instance')}."
    exact = [summary for summary in summaries if summary.exact]
    if exact:
        best = max(exact, key=lambda summary: summary.proven / summary.runs)
        runs = counted(best.runs, "run")
        text += f" {best.method} ends {best.proven} of its {runs} with a proof."
    heuristics: list[tuple[float, Summary]] = []  # (mean excess, summary)
    for summary in summaries:
        if not summary.exact and summary.mean_excess is not None:
            heuristics.append((summary.mean_excess, summary))
    if heuristics:
        _, nearest = min(heuristics, key=lambda pair: pair[0])
        most = percent_text(nearest.worst_excess)
        text += f" {nearest.method} comes nearest of the heuristics: {mean_text(nearest)} above "
        text += f"the best known on average, {most} at most, "
        text += f"over {counted(nearest.solved, 'plan')}."
    return text


def document(title: str, body: Iterable[str]) -> str:
    """A complete HTML page. body: lines of HTML."""
    head = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{html_text(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{STYLE}</style></head><body>
<h1>{html_text(title)}</h1>"""
    return "\n".join([head, *body, "</body></html>"]) + "\n"


def page_of_tables(title: str, tables: Iterable[Table], pictures: Mapping[str, Any]) -> str:
    """An HTML page of tables with pictures.

    pictures: the beginning of a table's title, up to a colon -> the figure that follows the table.
    """
    parts: list[str] = []
    for content in tables:
        parts.append(f"<h2>{html_text(content.title)}</h2>")
        parts += table(content.header, content.rows)
        parts += [f"<p>{html_text(line)}</p>" for line in content.notes]
        name, _, _ = content.title.partition(":")
        canvas = pictures.get(name)
        if canvas is not None:
            parts.append(f"<figure>{as_svg(canvas)}</figure>")
    return document(title, parts)


def page_lines(study: Study) -> Iterator[str]:
    """The lines of HTML of a study's page, without its head."""
    yield f"<p>{LEGEND}</p><ul>"
    yield from (f"<li>{html_text(line)}</li>" for line in origin(study.rows))
    yield "</ul>"
    parts = [*study.problems, "instances", "rows"]
    contents = "".join(f'<li><a href="#{part}">{part}</a></li>' for part in parts)
    yield f'<nav aria-label="Contents"><ul>{contents}</ul></nav>'
    yield from (f'<p class="warn">{html_text(line)}</p>' for line in study.conflicts())
    for problem in study.problems:
        problem_family = family(problem)
        yield f'<h2 id="{problem}">{problem}: {html_text(problem_family.title)}</h2>'
        yield f"<p>{html_text(problem_family.paper)}</p>"
        yield f"<p><strong>{html_text(in_words(study, problem))}</strong></p>"
        yield from table(HEADER, [cells(summary) for summary in study.summaries(problem)])
        instances = {row["instance"] for row in study.of(problem)}
        if len(instances) >= FEWEST:
            for title, canvas in charts(study, problem).items():
                caption = f"<figcaption>{problem}: {html_text(title)}</figcaption>"
                yield f"<figure>{as_svg(canvas)}{caption}</figure>"
    worst = study.worst_cases(WORST)
    if worst:
        yield '<h2 id="worst">Worst cases of the heuristics</h2>'
        instance_column, method_column = CASES.index("instance"), CASES.index("method")
        links = [
            {instance_column: anchor(row), method_column: f"row-{row['key']}"} for _, row in worst
        ]
        case_rows = [case_cells(study, excess, row) for excess, row in worst]
        yield from table(CASES, case_rows, links=links)
    yield '<h2 id="instances">Instances</h2>'
    yield "<p><code>hetplan instances show NAME</code> shows one of the library.</p>"
    keys, instance_rows = [], []
    for set_name, problem, instance in instances_of(study):
        keys.append(f"instance-{problem}-{instance}")
        instance_rows.append(instance_cells(study, set_name, problem, instance))
    yield from table(INSTANCES, instance_rows, keys=keys)
    yield '<h2 id="rows">All runs</h2>'
    keys = [f"row-{row['key']}" for row in study.rows]
    links = [{ROWS.index("instance"): anchor(row)} for row in study.rows]
    run_rows = [row_cells(study, row) for row in study.rows]
    yield from table(ROWS, run_rows, keys=keys, links=links)


def row_cells(study: Study, row: Row) -> tuple[str, ...]:
    """The cells of a run, under ROWS. The message begins with CONTRADICTED where it is."""
    message = row["message"] or ""
    if study.contradicted(row):
        message = f"{CONTRADICTED} {message}".strip()
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
        message,
    )


def anchor(row: Row) -> str:
    """The HTML anchor of a row's instance in the table of instances."""
    return f"instance-{row['problem']}-{row['instance']}"


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    links: Sequence[Mapping[int, str]] | None = None,
    keys: Sequence[str] | None = None,
) -> Iterator[str]:
    """The lines of an HTML table.

    links: for each row, the number of a cell -> the anchor on the page to which the cell links.
    keys: for each row, its anchor.
    """
    headings = "".join(f'<th scope="col">{html_text(name)}</th>' for name in header)
    yield f"<table><thead><tr>{headings}</tr></thead><tbody>"
    for number, row in enumerate(rows):
        texts = [html_text(cell) for cell in row]
        if links is not None:
            for column, target in links[number].items():
                texts[column] = f'<a href="#{html_text(quote(target))}">{texts[column]}</a>'
        row_anchor = ""
        if keys is not None:
            row_anchor = f' id="{html_text(keys[number])}"'
        html_cells = "".join(f"<td>{text}</td>" for text in texts)
        yield f"<tr{row_anchor}>{html_cells}</tr>"
    yield "</tbody></table>"


def markdown(study: Study, title: str) -> str:
    """The findings of a study as Markdown: its page without pictures, instances and rows."""
    text = [
        f"# {markdown_text(title)}",
        "",
        LEGEND,
        "",
        *(f"- {markdown_text(line)}" for line in origin(study.rows)),
        "",
    ]
    text += [f"**{markdown_text(line)}**" for line in study.conflicts()]
    for problem in study.problems:
        summaries = [cells(summary) for summary in study.summaries(problem)]
        text += [f"## {problem}: {family(problem).title}", "", *pipes(HEADER, summaries), ""]
    worst = [case_cells(study, excess, row) for excess, row in study.worst_cases(WORST)]
    if worst:
        text += ["## Worst cases of the heuristics", "", *pipes(CASES, worst), ""]
    return "\n".join(text)


def pipes(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [
        "| " + " | ".join(header) + " |",
        "|" + " --- |" * len(header),
        *("| " + " | ".join(map(markdown_text, row)) + " |" for row in rows),
    ]


def markdown_text(text: str) -> str:
    """A text for a line or a cell of Markdown, with its special characters escaped."""
    for mark, escaped in (("\\", "\\\\"), ("|", "\\|"), ("<", "&lt;")):
        text = text.replace(mark, escaped)
    return one_line(text)
