"""A study: one task per instance, method and seed, and one row for each task that has ended.

A task's key names its row. Tasks that have no row yet are done, and each row is written as it ends:
one small Parquet file under DIR/rows, written whole or not at all. A file per row needs no lock and
no repair: whatever kills a study, finished rows stay and unfinished ones were never there. Any
Parquet reader takes the folder as one table.
"""

import hashlib
import importlib
import io
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hetplan.errors import InputError, optional, require, unknown_name
from hetplan.files import write_bytes
from hetplan.formulations import FAMILIES, JOINED, family, join
from hetplan.instances.answers import Answer, Finding
from hetplan.instances.library import (
    SETS,
    BestKnown,
    Entry,
    Instance,
    entries_in,
    entry_of,
    in_set,
    library,
)
from hetplan.solvers.registry import Family
from hetplan.solvers.run import Options
from hetplan.text import counted

ALL = "all"
HEURISTICS, EXACT = "heuristics", "exact-methods"


def digest(instance: Instance) -> str:
    """The hash of problem, name and data: another file of the same name is another instance."""
    return hashlib.sha256(json.dumps(instance.document(), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Task:
    """One solve, of JSON types: it travels to other processes and machines."""

    key: str
    set: str
    document: dict[str, Any]  # the instance file's content
    method: str
    options: dict[str, Any]  # as `Options.as_dict`
    best_known: float | None
    bound_known: float | None
    plugins: tuple[str, ...]  # modules whose methods join

    @property
    def name(self) -> str:
        """The name of the instance."""
        return str(self.document["name"])

    @property
    def problem(self) -> str:
        """The problem of the instance."""
        return str(self.document["problem"])

    @property
    def family(self) -> Family:
        """The family of the problem, with the methods of the plugins; raises InputError where they
        cannot be imported."""
        join(self.plugins)
        return family(self.problem)


def subjects(names: Sequence[str]) -> Iterator[tuple[str, Instance, BestKnown | None]]:
    """(set, instance, record) of each name: a set of the library, a problem, an instance, a
    pattern, a file, a folder.

    Each instance once, under the first name that brings it. Raises InputError for a name that
    brings none.
    """
    seen: set[str] = set()
    for name in names:
        for entry in entries_named(name):
            instance = entry.load()
            number = digest(instance)
            if number not in seen:
                seen.add(number)
                yield name, instance, entry.best_known()


def entries_named(name: str) -> list[Entry]:
    """The instances behind one name; raises InputError where there are none."""
    if os.path.isdir(name):
        entries = entries_in(Path(name))
        require(entries, "holds no instance files", where=name)
        return entries
    if os.path.exists(name):
        return [entry_of(Path(name))]
    entries = [e for e in library() if in_set(e.problem, e.name, name)]
    if not entries:
        raise unknown_name(
            "neither a file nor an instance of the library:", name,
            [*SETS, *FAMILIES, *(entry.name for entry in library())],
            see="a name from `hetplan instances list`",
        )  # fmt: skip
    return entries


def tasks(
    names: Sequence[str], methods: Sequence[str], seeds: Sequence[int], options: Options
) -> Iterator[Task]:
    """One task per instance, method that its problem has, and seed; raises InputError for a method
    no problem has."""
    wanted = list(dict.fromkeys(methods))
    used: set[str] = set()
    known = {ALL, HEURISTICS, EXACT}
    for set_name, instance, record in subjects(names):
        number = digest(instance)
        chosen = chosen_methods(instance, wanted)
        used.update(chosen, {word for word in wanted if word in (ALL, HEURISTICS, EXACT)})
        known.update(method.name for method in instance.family.methods)
        for method, seed in itertools.product(chosen, seeds):
            own = {**options.as_dict(), "seed": seed}
            yield Task(
                task_key(number, method, own),
                set_name,
                instance.document(),
                method,
                own,
                record.objective if record else None,
                record.bound if record else None,
                tuple(JOINED),
            )
    for word in wanted:
        if word not in used:
            raise unknown_name(
                "no instance of the study has the method", word, sorted(known), where="--methods"
            )


def chosen_methods(instance: Instance, wanted: Sequence[str]) -> list[str]:
    """The family's methods among those wanted, in the family's order."""
    return [
        method.name
        for method in instance.family.methods
        if method.name in wanted
        or ALL in wanted
        or (EXACT if method.exact else HEURISTICS) in wanted
    ]


def task_key(digest: str, method: str, options: dict[str, Any]) -> str:
    """The same for the same solve, whatever else the study does: the name of its row."""
    text = json.dumps([digest, method, options], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


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
    """pyarrow with its module `parquet`; raises InputError where it is not installed."""
    pa = optional("pyarrow", "studies keep their rows as Parquet", "study")
    importlib.import_module("pyarrow.parquet")
    return pa


def schema() -> Any:
    """The columns as an Arrow schema."""
    pa = arrow()
    fields = [pa.field(name, pa.type_for_alias(kind)) for name, kind in COLUMNS.items()]
    return pa.schema(fields, metadata={"hetplan-study-rows": VERSION})


def write_row(folder: Path, row: Row) -> None:
    """Add a row, atomically; one of the same key is replaced."""
    write_rows(folder / FOLDER / f"{row['key']}.parquet", [row])


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Many rows as one file, to keep; as the file PACKED in a folder `rows` they are a study
    again."""
    pa = arrow()
    cells = [{name: row.get(name) for name in COLUMNS} for row in rows]
    buffer = io.BytesIO()
    pa.parquet.write_table(
        pa.Table.from_pylist(cells, schema=schema()),
        buffer,
        compression="zstd",
        compression_level=19,
        write_page_checksum=True,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, buffer.getvalue())


def keys(folder: Path) -> set[str]:
    """The keys of the rows in a folder."""
    names = {path.stem for path in (folder / FOLDER).glob("*.parquet")}
    if Path(PACKED).stem in names:
        kept = arrow().parquet.read_table(folder / FOLDER / PACKED, columns=["key"])
        names = (names - {Path(PACKED).stem}) | set(kept["key"].to_pylist())
    return names


def read_rows(folder: Path) -> list[Row]:
    """All rows, by problem, instance, method and seed; raises InputError where a file is none of a
    study's."""
    pa = arrow()
    require(
        (folder / FOLDER).is_dir(),
        "holds no study",
        where=str(folder),
        expected=f"a folder {FOLDER} of Parquet files",
    )
    rows: dict[str, Row] = {}
    for path in sorted((folder / FOLDER).glob("*.parquet")):
        try:
            table = pa.parquet.read_table(
                io.BytesIO(path.read_bytes()), page_checksum_verification=True
            )
        except (pa.ArrowException, OSError) as error:
            raise InputError(
                f"cannot be read: {str(error).splitlines()[0]}", where=str(path)
            ) from None
        require(
            table.schema.equals(schema(), check_metadata=True),
            "holds other columns than a study's",
            where=str(path),
        )
        rows |= {row["key"]: row for row in table.to_pylist()}
    return sorted(
        rows.values(), key=lambda row: (row["problem"], row["instance"], row["method"], row["seed"])
    )


def text(value: object) -> str:
    """Compact JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


Runner = Callable[[Iterable[Task]], Iterator[Row]]


@dataclass
class Tally:
    """The progress of a study."""

    total: int
    known: int  # rows from before
    counts: Counter[str] = field(default_factory=Counter)  # rows of now, by status

    @property
    def done(self) -> int:
        """Rows there are."""
        return self.known + sum(self.counts.values())

    def text(self) -> str:
        """`12 of 40 runs: 9 optimal, 2 feasible, 1 unknown`."""
        counts = {"from before": self.known, **dict(sorted(self.counts.items()))}
        ended = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        return f"{self.done} of {counted(self.total, 'run')}" + (f": {ended}" if ended else "")


def carry_out(
    tasks: Sequence[Task],
    folder: Path,
    runner: Runner,
    watch: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Do what has no row in `folder` yet; the tally at the end, or where the runner stopped
    early."""
    there = keys(folder)
    left = [task for task in tasks if task.key not in there]
    tally = Tally(len(tasks), len(tasks) - len(left))
    watch(tally)
    for row in runner(left):
        write_row(folder, row)
        tally.counts[row["status"]] += 1
        watch(tally)
    return tally


def findings_of_rows(rows: Iterable[Row], where: str) -> Iterator[Finding]:
    """The findings of rows with a decision or a bound, for best-known records; a row's key tells
    exactly which instance it is of."""
    for row in rows:
        decision = row["decision_json"]
        if decision is None and row["bound"] is None:
            continue
        claimed = {key: row[key] for key in ("method", "status", "objective", "bound", "solver")}
        if decision is not None:
            claimed["decision"] = json.loads(decision)
        yield Finding(
            where=f"{where}: {row['instance']} by {row['method']} (row {row['key']})",
            problem=row["problem"],
            instance=row["instance"],
            answer=Answer(**claimed),
            about=partial(made_on, row),
        )


def made_on(row: Row, instance: Instance) -> bool:
    """Whether the row's key is that of this instance, its method and its options."""
    key = task_key(digest(instance), row["method"], json.loads(row["options_json"]))
    return bool(key == row["key"])
