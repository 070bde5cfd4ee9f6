"""A study's rows: one small Parquet file each under DIR/rows, written whole or not at all.

A file per row needs no lock and no repair: whatever kills a study, finished rows stay and
unfinished ones were never there. Any Parquet reader takes the folder as one table.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetplan.errors import InputError
from hetplan.files import write_bytes

FOLDER = "rows"
# Many rows in one file.
PACKED = "all.parquet"
VERSION = "1"
# name -> Arrow type; `_json` columns hold JSON text. Unknown figures are null. Seconds, bytes.
COLUMNS: Mapping[str, str] = {
    "key": "string",
    "set": "string",
    "instance": "string",
    "problem": "string",
    "method": "string",
    "exact": "bool",
    "seed": "int64",
    "status": "string",
    "stop": "string",
    "objective": "float64",
    "bound": "float64",
    "gap": "float64",
    "best_known": "float64",
    "bound_known": "float64",
    "seconds": "float64",
    "build_seconds": "float64",
    "solve_seconds": "float64",
    "peak_bytes": "int64",
    "time_limit": "float64",
    "message": "string",
    "solver": "string",
    "decision_json": "string",
    "details_json": "string",
    "options_json": "string",
    "versions_json": "string",
    "machine_json": "string",
    "begun": "string",
}
Row = dict[str, Any]


def arrow() -> Any:
    """pyarrow; raises InputError where it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(
            "studies keep their rows as Parquet", expected="pip install 'hetplan[study]'"
        ) from None
    return pyarrow


def schema() -> Any:
    """The columns as an Arrow schema."""
    pa = arrow()
    types = {
        "string": pa.string(),
        "bool": pa.bool_(),
        "int64": pa.int64(),
        "float64": pa.float64(),
    }
    fields = [pa.field(name, types[kind]) for name, kind in COLUMNS.items()]
    return pa.schema(fields, metadata={"hetplan-study-rows": VERSION})


def write_row(folder: Path, row: Row) -> None:
    """Add a row, atomically; one of the same key is replaced."""
    pa = arrow()
    table = pa.Table.from_pylist([{name: row.get(name) for name in COLUMNS}], schema=schema())
    buffer = io.BytesIO()
    pa.parquet.write_table(table, buffer, compression="zstd")
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    write_bytes(folder / FOLDER / f"{row['key']}.parquet", buffer.getvalue())


def write_rows(path: Path, rows: list[Row]) -> None:
    """Many rows as one file, to keep; as the file PACKED in a folder `rows` they are a study
    again."""
    pa = arrow()
    table = pa.Table.from_pylist(
        [{name: row.get(name) for name in COLUMNS} for row in rows], schema=schema()
    )
    buffer = io.BytesIO()
    pa.parquet.write_table(table, buffer, compression="zstd", compression_level=19)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, buffer.getvalue())


def keys(folder: Path) -> set[str]:
    """Of the rows there."""
    found = {path.stem for path in (folder / FOLDER).glob("*.parquet")}
    if Path(PACKED).stem in found:
        pa = arrow()
        kept = pa.parquet.read_table(folder / FOLDER / PACKED, columns=["key"])
        found = (found - {Path(PACKED).stem}) | set(kept["key"].to_pylist())
    return found


def read_rows(folder: Path) -> list[Row]:
    """All rows, by problem, instance, method and seed; raises InputError where a file is none of a
    study's."""
    pa = arrow()
    if not (folder / FOLDER).is_dir():
        raise InputError(
            "holds no study", where=str(folder), expected=f"a folder {FOLDER} of Parquet files"
        )
    rows: dict[str, Row] = {}
    for path in sorted((folder / FOLDER).glob("*.parquet")):
        try:
            table = pa.parquet.read_table(io.BytesIO(path.read_bytes()))
        except (pa.ArrowException, OSError) as error:
            raise InputError(
                f"cannot be read: {str(error).splitlines()[0]}", where=str(path)
            ) from None
        if not table.schema.equals(schema(), check_metadata=True):
            raise InputError("holds other columns than a study's", where=str(path))
        rows |= {row["key"]: row for row in table.to_pylist()}
    return sorted(
        rows.values(), key=lambda row: (row["problem"], row["instance"], row["method"], row["seed"])
    )


def text(value: object) -> str:
    """Compact JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
