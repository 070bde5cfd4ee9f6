"""Tables of operations, one row for each: Parquet, or CSV, with these columns.

`step`      number of the training step
`dp_rank`   the replica
`stage`     the pipeline stage
`optype`    kind of operation; `forward-compute` and `backward-compute` are passes
`start_ts`  seconds
`duration`  seconds
`gmc`       the virtual stage; without it, `stage`
`mb_id`     the micro-batch, empty for other operations; without it, `seq_id`, the number of the
            operation among those of its kind on the worker

Other columns are not read. Source: the README of github.com/ByteDance-Seed/StragglerAnalysis
(Apache-2.0), whose sample traces have these columns.
"""

import csv
import importlib
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetplan.errors import InputError, import_optional, require
from hetplan.files import read_bytes
from hetplan.replays.observed.steps import Pass, PassKind, Step, make_step

PASS_KINDS: Mapping[str, PassKind] = {
    "forward-compute": "forward",
    "backward-compute": "backward",
    "backward-wgrad-compute": "weights",
}
NEEDED = ("step", "dp_rank", "stage", "optype", "start_ts", "duration")
OPTIONAL = ("gmc", "mb_id", "seq_id")
MOST_ROWS = 20_000_000
MOST_BYTES = 512 * 2**20

Row = Mapping[str, Any]


def read_operations(path: Path) -> list[Step]:
    """The steps of a table, by their numbers. Raises InputError."""
    where = str(path)
    rows = parquet_rows(path) if path.suffix == ".parquet" else csv_rows(path)
    passes: dict[int, list[tuple[int, int, Pass]]] = {}
    ends: dict[int, float] = {}
    for number, row in enumerate(rows, start=1):
        place = f"{where}: row {number}"
        step = whole(row, "step", place)
        begin, duration = real(row, "start_ts", place), real(row, "duration", place)
        require(duration >= 0, "a negative duration", where=place, got=duration)
        end = begin + duration
        ends[step] = max(ends.get(step, end), end)
        kind = PASS_KINDS.get(str(row["optype"]))
        if kind is None:
            continue
        stage = whole(row, "stage", place)
        virtual_stage = stage if is_empty(row.get("gmc")) else whole(row, "gmc", place)
        batch = "seq_id" if is_empty(row.get("mb_id")) else "mb_id"
        one = Pass(kind, virtual_stage, whole(row, batch, place), begin, end)
        passes.setdefault(step, []).append((whole(row, "dp_rank", place), stage, one))
    require(passes, "has no forward or backward passes", where=where, got=f"{len(ends)} steps")
    return [make_step(step, passes[step], ends[step], where) for step in sorted(passes)]


def parquet_rows(path: Path) -> Iterator[Row]:
    """The rows of a Parquet file, with the columns that are read."""
    where = str(path)
    arrow = import_optional("pyarrow", "traces in Parquet", "study", where=where)
    parquet = importlib.import_module("pyarrow.parquet")
    try:
        names = parquet.read_schema(path).names
        check_columns(names, where)
        wanted = [name for name in (*NEEDED, *OPTIONAL) if name in names]
        table = parquet.read_table(path, columns=wanted)
    except (OSError, arrow.ArrowException) as error:
        raise InputError(f"cannot be read as Parquet: {str(error)[:80]}", where=where) from None
    require(table.num_rows <= MOST_ROWS, "has too many rows", where=where, got=table.num_rows)
    for batch in table.to_batches():
        yield from batch.to_pylist()


def csv_rows(path: Path) -> Iterator[Row]:
    """The rows of a CSV file."""
    content = read_bytes(path, MOST_BYTES)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError("is not UTF-8 text", where=str(path)) from None
    reader = csv.DictReader(io.StringIO(text, newline=""))
    check_columns(reader.fieldnames or (), str(path))
    yield from reader


def check_columns(names: Sequence[str], where: str) -> None:
    """Raise InputError where a column is missing."""
    missing = [name for name in NEEDED if name not in names]
    require(
        not missing,
        f"has no column {', '.join(missing)}",
        where=where,
        got=", ".join(map(str, names))[:200] or "no columns",
        expected=", ".join(NEEDED),
    )


def is_empty(cell: Any) -> bool:
    """Whether a cell has no value: it is missing, None, empty text, or not a number."""
    is_nan = isinstance(cell, float) and math.isnan(cell)
    return cell is None or cell == "" or is_nan


def real(row: Row, column: str, where: str) -> float:
    """The finite number in a cell. Raises InputError."""
    try:
        value = float(row[column])
    except (TypeError, ValueError):
        value = math.nan
    require(math.isfinite(value), f"{column} is no number", where=where, got=row[column])
    return value


def whole(row: Row, column: str, where: str) -> int:
    """The whole number, 0 or more, in a cell. Raises InputError."""
    value = real({column: row.get(column)}, column, where)
    require(
        value.is_integer() and value >= 0,
        f"{column} is no number of a {column}",
        where=where,
        got=value,
        expected="0, 1, 2 …",
    )
    return int(value)
