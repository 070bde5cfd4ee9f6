"""The commands of `python -m evidence.truth` that compare: one set row by row, all sets, and the
well-known runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from evidence.truth.job import known_rows
from evidence.truth.sets import SETS, compare, reasons, standings
from evidence.truth.tables import GIB, Compared, summary
from hetplan.cli.options import JsonOption, number
from hetplan.cli.output import emit
from hetplan.text import (
    Column,
    Table,
    bytes_text,
    digits,
    number_text,
    percent_text,
    seconds_text,
    signed_percent_text,
)


def compare_set(
    name: Annotated[str, typer.Argument(metavar="SET", help=f"One of {', '.join(SETS)}.")],
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="With the set's CSV files; of sailor: profiles/, llm_info.json, network_coeffs*, "
            "validation/**.json.",
        ),
    ],
    framework_gib: Annotated[
        float | None,
        number(
            "--framework-gib",
            least=0,
            most=1e6,
            metavar="GIB",
            help="sailor: what framework and driver take of each GPU, where known.",
        ),
    ] = None,
    rank: Annotated[
        bool,
        typer.Option(
            "--rank", help="Rank each published configuration among all of its model and GPUs."
        ),
    ] = False,
    json: JsonOption = False,
) -> int:
    """Predict every run of a published set and compare; nothing is fitted to its totals.

    A run that cannot be said has its reason. Exit code 0; of sailor 1 where a plan has no
    prediction.
    """
    rows = compare(name, folder, None if framework_gib is None else framework_gib * GIB, rank=rank)
    figures = summary(rows)
    document = {"set": name, "rows": [row.document() for row in rows], "summary": figures}
    parts = {part: (None, own) for part, own in parts_of(figures).items()}
    tables = [
        figures_table(
            f"{name}, predicted", parts, [f"{count} x {reason}" for reason, count in reasons(rows)]
        )
    ]
    if name != "operators":  # they are a hundred thousand: the JSON lists them
        tables.insert(0, rows_table(name, rows))
    emit(document, tables, json=json)
    return int(name == "sailor" and any(row.predicted is None for row in rows))


def rows_table(name: str, rows: Sequence[Compared]) -> Table:
    """One line per row of a set, with its prediction or the reason."""
    documents = (
        row.document() | {"error": row.error, "memory_error": row.memory_error} for row in rows
    )
    columns: list[Column[dict[str, Any]]] = [
        Column("row", lambda row: f"{row['file']} {row['row']}"),
        Column("workload", lambda row: row["workload"] or "-"),
        Column("measured", lambda row: row["measured_seconds"], seconds_text, right=True),
        Column("predicted", lambda row: row["predicted_seconds"], seconds_text, right=True),
        Column("error", lambda row: row["error"], signed_percent_text, right=True),
        Column("memory", lambda row: row["measured_bytes"], bytes_text, right=True),
        Column("memory predicted", lambda row: row["predicted_bytes"], bytes_text, right=True),
        Column("memory error", lambda row: row["memory_error"], signed_percent_text, right=True),
        Column("reason", lambda row: row["reason"] or ""),
    ]
    if any(row.ranked for row in rows):
        columns.append(Column("ranking", ranking))
    return Table.of(
        f"{name}, row by row",
        cast(Iterator[dict[str, Any]], documents),
        columns,
    )


def ranking(row: Mapping[str, Any]) -> str:
    """A row's place among all configurations, what is preferred, and where the difference lies."""
    if "ranked" not in row:
        return ""
    of, (cause, own, best) = row["ranked"], row["ranked"]["why"][0]
    return (
        f"{round(of['place'] * of['count'])} of {of['count']} ({percent_text(of['place'])}) are no "
        f"faster; preferred {of['best']}, "
        f"{seconds_text(of['best_seconds'])}; {cause}: {seconds_text(own)}, preferred "
        f"{seconds_text(best)}"
    )


Figures = Mapping[str, Any]
# Columns of figures: title, key in a summary, how it reads.
COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("rows", "rows", number_text),
    ("predicted", "predicted", number_text),
    ("mean error of seconds", "error", percent_text),
    ("bias", "bias", signed_percent_text),
    ("of cells", "cell_error", percent_text),
    ("in the interval", "held", percent_text),
    ("Spearman", "spearman", digits(3)),
    ("of all", "order", digits(3)),
    ("of MFU", "utilisation", digits(3)),
    ("regret", "regret", percent_text),
    ("worst", "worst_regret", percent_text),
    ("mean error of memory", "memory_error", percent_text),
    ("from 5 GB on", "memory_large_error", percent_text),
    ("more than 5 % below", "memory_below", number_text),
    ("said not to fit", "unfit", number_text),
)


def parts_of(whole: Figures) -> dict[str, Figures]:
    """A set's figures as a whole, by file, and by GPU type or operator; a plan that is a file of
    its own stands in its folder."""
    return {
        "all": whole,
        **{name: part for name, part in whole["files"].items() if not name.endswith(".json")},
        **whole["kinds"],
    }


def figures_table(
    title: str, parts: Mapping[str, tuple[Figures | None, Figures]], notes: Sequence[str] = ()
) -> Table:
    """One line per part: each figure, or as it was and as it is; columns that nobody knows are left
    out."""

    def cell(part: str, key: str, text: Callable[[Any], str]) -> str:
        before, now = parts[part]
        old, new = None if before is None else before.get(key), now[key]
        return text(new) if before is None or old == new else f"{text(old)} -> {text(new)}"

    columns: list[Column[str]] = [Column("part", str)]
    for name, key, text in COLUMNS:
        if any(now[key] for _, now in parts.values()):
            columns.append(Column(name, partial(cell, key=key, text=text), right=True))
    notes = (*notes, "nothing is fitted to the totals of these measurements")
    return Table.of(title, parts, columns, notes)


def table(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="With truth, operators and sailor in it, or some."),
    ],
    json: JsonOption = False,
) -> int:
    """Print the figures of every set at once, by file or by GPU type."""
    rows = standings(folder)
    parts = {f"{row['name']} {row['part']}": (None, row["figures"]) for row in rows}
    tables = [figures_table("predictions beside published measurements", parts)]
    return emit({"parts": rows}, tables, json=json)


def known(json: JsonOption = False) -> int:
    """Model FLOPs utilisation of well-known runs, published and predicted; needs no files."""
    rows = list(known_rows())
    return emit(
        {"runs": rows},
        [
            Table.of(
                "model FLOPs utilisation of well-known runs",
                rows,
                [
                    Column("run", lambda row: row["name"]),
                    Column("GPUs", lambda row: row["gpus"], right=True),
                    Column("published", lambda row: row["published"], percent_text, right=True),
                    Column("predicted", lambda row: row["predicted"], percent_text, right=True),
                    Column(
                        "points",
                        lambda row: f"{100 * (row['predicted'] - row['published']):+.1f}",
                        right=True,
                    ),
                    Column("source", lambda row: row["source"]),
                ],
                ("nothing is fitted to these runs",),
            )
        ],
        json=json,
    )
