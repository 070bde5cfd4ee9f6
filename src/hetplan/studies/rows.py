"""Tasks and rows of a study: one task per instance, method and seed, and one row for each task that
has ended.

A row has the key of its task. A study carries out the tasks that have no row yet. It writes each
row as soon as its task ends, to a small Parquet file of its own in DIR/rows. The file is written
completely or not at all, so that a study needs no locks and no repair: whatever ends it, the rows
of finished tasks stay and there is nothing of unfinished ones. Any Parquet reader reads the folder
as one table.
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
from operator import itemgetter
from pathlib import Path
from typing import Any

from hetplan.errors import InputError, import_optional, one_line, require, unknown_name
from hetplan.files import make_folder, read_bytes, write_bytes
from hetplan.formulations import FAMILIES, JOINED, add_plugins, family
from hetplan.instances.answers import Answer
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
from hetplan.instances.records import Finding
from hetplan.solvers.registry import Family
from hetplan.solvers.run import Options
from hetplan.studies.cells import fault_of
from hetplan.text import counted

# Words of `--methods` that stand for several methods of a problem.
ALL = "all"
HEURISTICS, EXACT = "heuristics", "exact-methods"


def digest(instance: Instance) -> str:
    """The hash of an instance's problem, name, origin and data. Different instances of the same
    name have different hashes."""
    return hashlib.sha256(json.dumps(instance.document(), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Task:
    """One run of a method on an instance. Its fields are JSON types, since it is sent to other
    processes and machines."""

    key: str  # the hash of instance, method and options, see `task_key`
    source_name: str  # the name on the command line that brought the instance
    document: dict[str, Any]  # the content of the instance file
    method: str
    options: dict[str, Any]  # as `Options.as_dict` returns them, with the task's seed
    best_known: float | None  # the objective of the best-known record
    bound_known: float | None  # the bound of the best-known record
    plugins: tuple[str, ...]  # modules that add methods to the families

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
        """The family of the problem, with the methods of the plugins. Raises InputError where a
        plugin cannot be imported."""
        add_plugins(self.plugins)
        return family(self.problem)


def subjects(names: Sequence[str]) -> Iterator[tuple[str, Instance, BestKnown | None]]:
    """(name, instance, best-known record) of each instance that the names stand for.

    A name names a set of the library, a problem or an instance, or it is a pattern, a file or a
    folder. Each instance comes once, with the first name that brings it. Raises InputError for a
    name that brings none.
    """
    seen: set[str] = set()
    for name in names:
        for entry in entries_named(name):
            instance = entry.load()
            instance_hash = digest(instance)
            if instance_hash not in seen:
                seen.add(instance_hash)
                yield name, instance, entry.best_known()


def entries_named(name: str) -> list[Entry]:
    """The entries of the instances that a name stands for, see `subjects`. Raises InputError where
    there are none."""
    if os.path.isdir(name):
        entries = entries_in(Path(name))
        require(entries, "holds no instance files", where=name)
        return entries
    if os.path.exists(name):
        return [entry_of(Path(name))]
    entries = [entry for entry in library() if in_set(entry.problem, entry.name, name)]
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
    """The tasks of a study: one for each instance, each chosen method of its problem, and each
    seed.

    names: see `subjects`. methods: names of methods, ALL, HEURISTICS or EXACT. Raises InputError
    for a method that no problem of the study has.
    """
    groups = {ALL, HEURISTICS, EXACT}
    wanted = list(dict.fromkeys(methods))
    used: set[str] = set()  # the wanted words that an instance of the study has
    known = set(groups)  # what the error for an unknown word offers
    for source_name, instance, record in subjects(names):
        instance_hash = digest(instance)
        chosen = chosen_methods(instance, wanted)
        # `heuristics` is right for a problem without any, and then stands for no method.
        used.update(chosen, groups.intersection(wanted))
        known.update(method.name for method in instance.family.methods)
        for method, seed in itertools.product(chosen, seeds):
            task_options = {**options.as_dict(), "seed": seed}
            yield Task(
                key=task_key(instance_hash, method, task_options),
                source_name=source_name,
                document=instance.document(),
                method=method,
                options=task_options,
                best_known=record.objective if record else None,
                bound_known=record.bound if record else None,
                plugins=tuple(JOINED),
            )
    for word in wanted:
        if word not in used:
            raise unknown_name(
                "no instance of the study has the method", word, sorted(known), where="--methods"
            )


def chosen_methods(instance: Instance, wanted: Sequence[str]) -> list[str]:
    """The names of the wanted methods that the instance's problem has, in the family's order.

    wanted: names of methods, ALL, HEURISTICS or EXACT.
    """
    chosen = []
    for method in instance.family.methods:
        group = EXACT if method.exact else HEURISTICS
        if method.name in wanted or group in wanted or ALL in wanted:
            chosen.append(method.name)
    return chosen


def task_key(instance_hash: str, method: str, options: dict[str, Any]) -> str:
    """The key of a task and of its row. Equal runs have equal keys in all studies.

    instance_hash: the result of `digest`.
    """
    text = json.dumps([instance_hash, method, options], sort_keys=True)
    # The key is a file's name, too; 96 bits are enough that no two runs share one by chance.
    return hashlib.sha256(text.encode()).hexdigest()[:24]


FOLDER = "rows"  # the folder of the rows within a study's folder
PACKED = "all.parquet"  # the file in FOLDER that may hold many rows
VERSION = "1"  # of the rows' format
# The most rows of a file and the most bytes of their cells: a small damaged file may state any.
MOST_ROWS, MOST_ROW_BYTES = 10**6, 2**30
# The name of a column -> its Arrow type. Columns `…_json` hold JSON text. Figures are in seconds
# and bytes; unknown ones are null.
COLUMNS: Mapping[str, str] = {
    "key": "string",
    "set": "string",  # `Task.source_name`
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
# The entry of a row's `versions_json` with the version of its method, `Method.version`. Rows of
# before this entry are of version 1.
METHOD_VERSION = "method"


def package_versions(row: Row) -> dict[str, str]:
    """The versions of the packages with which a row was made."""
    versions: dict[str, str] = json.loads(row["versions_json"])
    return {name: version for name, version in versions.items() if name != METHOD_VERSION}


def of_older_code(row: Row) -> bool:
    """Whether a row was made with an older version of its method's code than the present one, so
    that the method may give another result today.

    False for a row of an unknown problem or method, such as a method of a plugin.
    """
    if row["problem"] not in FAMILIES:
        return False
    present = {method.name: method.version for method in family(row["problem"]).methods}
    version = json.loads(row["versions_json"]).get(METHOD_VERSION, 1)
    return bool(version < present.get(row["method"], 1))


def arrow() -> Any:
    """pyarrow with its module `parquet`; raises InputError where it is not installed."""
    pa = import_optional("pyarrow", "studies keep their rows as Parquet", "study")
    importlib.import_module("pyarrow.parquet")
    return pa


def schema() -> Any:
    """The columns as an Arrow schema."""
    pa = arrow()
    fields = [pa.field(name, pa.type_for_alias(kind)) for name, kind in COLUMNS.items()]
    return pa.schema(fields, metadata={"hetplan-study-rows": VERSION})


def write_row(folder: Path, row: Row) -> None:
    """Write a row to a study's folder, atomically. It replaces a row of the same key."""
    write_rows(folder / FOLDER / f"{row['key']}.parquet", [row])


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows to one Parquet file, atomically.

    To pack a study's many small files into one, write its rows to the file PACKED of the folder
    FOLDER of a new study: `keys` and `read_rows` find them there.
    """
    pa = arrow()
    cells = [{name: row.get(name) for name in COLUMNS} for row in rows]
    buffer = io.BytesIO()
    pa.parquet.write_table(
        pa.Table.from_pylist(cells, schema=schema()),
        buffer,
        compression="zstd",
        compression_level=19,  # slow, but a row is small
        write_page_checksum=True,  # `read_rows` notices a damaged file by it
    )
    make_folder(path.parent)
    write_bytes(path, buffer.getvalue())


def keys(folder: Path) -> set[str]:
    """The keys of a study's rows that can be used."""
    if not (folder / FOLDER).is_dir():
        return set()
    return {row["key"] for row in kept_rows(folder).rows}


@dataclass(frozen=True)
class Kept:
    """The contents of a study's folder."""

    rows: list[Row]  # sorted by problem, instance, method and seed
    faults: list[str]  # one line for each file and each row that cannot be used, with the file


def kept_rows(folder: Path) -> Kept:
    """All rows of a study that can be used, and what is wrong with the others. Raises InputError
    where the folder is no study's."""
    require(
        (folder / FOLDER).is_dir(),
        "holds no study",
        where=str(folder),
        expected=f"a folder {FOLDER} of Parquet files",
    )
    rows: dict[str, Row] = {}
    faults: list[str] = []
    for path in sorted((folder / FOLDER).glob("*.parquet")):
        try:
            rows_of_file = rows_in(path)
        except InputError as error:
            faults.append(str(error))
            continue
        for number, row in enumerate(rows_of_file):
            fault = fault_of(row)
            if fault is None:
                rows[row["key"]] = row  # Rows of one key are of equal runs: the last one stays.
            else:
                faults.append(f"{path}: row {number}: {fault}")
    in_order = sorted(rows.values(), key=itemgetter("problem", "instance", "method", "seed"))
    return Kept(in_order, faults)


def read_rows(folder: Path) -> list[Row]:
    """All rows of a study, sorted by problem, instance, method and seed. Raises InputError for a
    file that does not hold rows of a study, and for a row that cannot be used."""
    kept = kept_rows(folder)
    if kept.faults:
        raise InputError(kept.faults[0])
    return kept.rows


def rows_in(path: Path) -> list[Row]:
    """The rows of one Parquet file. Raises InputError."""
    pa = arrow()
    content = read_bytes(path)
    try:
        metadata = pa.parquet.read_metadata(io.BytesIO(content))
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        size = sum(group.total_byte_size for group in groups)
        small = 0 <= metadata.num_rows <= MOST_ROWS and 0 <= size <= MOST_ROW_BYTES
        require(small, "holds too much", where=str(path), got=f"{metadata.num_rows} rows")
        table = pa.parquet.read_table(io.BytesIO(content), page_checksum_verification=True)
        own = table.schema.equals(schema(), check_metadata=True)
        require(own, "holds other columns than a study's", where=str(path))
        return list(table.to_pylist())
    except InputError:  # is a ValueError too
        raise
    # ValueError: text that is not UTF-8. A damaged file may also ask for absurd amounts of memory.
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        reason = one_line(str(error))[:160] or type(error).__name__
        raise InputError(f"cannot be read: {reason}", where=str(path)) from None


def compact_json(value: object) -> str:
    """A value as compact JSON text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


# Carries out tasks and yields the row of each as soon as it ends.
Runner = Callable[[Iterable[Task]], Iterator[Row]]


@dataclass
class Tally:
    """The progress of a study, counted in rows."""

    total: int  # number of tasks
    known: int  # rows that an earlier call of the study wrote
    # status -> number of rows that this call wrote
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def done(self) -> int:
        """The number of tasks that have a row."""
        return self.known + sum(self.counts.values())

    def text(self) -> str:
        """The progress as text: `12 of 40 runs: 9 optimal, 2 feasible, 1 unknown`."""
        counts = {"from before": self.known, **dict(sorted(self.counts.items()))}
        progress = f"{self.done} of {counted(self.total, 'run')}"
        ended = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        return f"{progress}: {ended}" if ended else progress


def carry_out(
    tasks: Sequence[Task],
    folder: Path,
    runner: Runner,
    watch: Callable[[Tally], None] = lambda tally: None,
    tell: Callable[[Sequence[str]], None] = lambda lines: None,
) -> Tally:
    """Carry out the tasks that have no row in `folder` yet, and write their rows. A task whose row
    is damaged is carried out again.

    watch: called with the tally at the beginning and after each row. tell: called with one line for
    each damaged row or file. Returns the tally at the end, or where the runner stopped early.
    """
    keys_with_row: set[str] = set()
    if (folder / FOLDER).is_dir():
        kept = kept_rows(folder)
        keys_with_row = {row["key"] for row in kept.rows}
        tell(kept.faults)
    left = [task for task in tasks if task.key not in keys_with_row]
    tally = Tally(total=len(tasks), known=len(tasks) - len(left))
    watch(tally)
    for row in runner(left):
        write_row(folder, row)
        tally.counts[row["status"]] += 1
        watch(tally)
    return tally


def findings_of_rows(rows: Iterable[Row], where: str) -> Iterator[Finding]:
    """The findings of the rows that have a decision or a bound, for best-known records.

    A row's key says exactly which instance its run solved. where: the study's folder, for messages.
    """
    for row in rows:
        decision = row["decision_json"]
        if decision is None and row["bound"] is None:
            continue
        figures = {key: row[key] for key in ("method", "status", "objective", "bound", "solver")}
        if decision is not None:
            figures["decision"] = json.loads(decision)
        yield Finding(
            where=f"{where}: {row['instance']} by {row['method']} (row {row['key']})",
            problem=row["problem"],
            instance=row["instance"],
            answer=Answer(**figures),
            about=partial(made_on, row),
        )


def made_on(row: Row, instance: Instance) -> bool:
    """Whether the row's run solved exactly this instance: its key is the hash of this instance and
    of the row's method and options."""
    key = task_key(digest(instance), row["method"], json.loads(row["options_json"]))
    return bool(key == row["key"])
