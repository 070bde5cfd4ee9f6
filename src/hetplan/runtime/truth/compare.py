"""The sets of published measurements, each read, posed and predicted row by row."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from hetplan.errors import HetplanError, InputError
from hetplan.names import unknown_name
from hetplan.profiling.sailor.validation import Compared as ComparedPlan, validate
from hetplan.runtime.truth import operators, runs
from hetplan.runtime.truth.tables import (
    Cells,
    Compared,
    DamagedError,
    Predicted,
    Published,
    Source,
    read_table,
)

SOURCES = {**runs.SOURCES, "operators": operators.FILES}
SETS = (*SOURCES, "sailor")


def compare(name: str, folder: Path, framework: float | None = None) -> list[Compared]:
    """Every row of a set beside its prediction or its reason, in the order of files and rows.

    folder: with the set's files. framework: of sailor, bytes that it takes of each GPU, if known.
    Raises InputError for an unknown set, or a file that is missing or damaged.
    """
    if name == "sailor":
        return sailor_rows(validate(folder, framework))
    return [compared(*row) for row in rows_of(name, folder)]


def rows_of(name: str, folder: Path) -> Iterator[tuple[str, int, Source, Cells]]:
    """(file, number, source, row) of a set of tables; raises InputError as `compare` does."""
    if name not in SOURCES:
        raise unknown_name("unknown set", name, SETS)
    files = SOURCES[name]
    absent = [file for file in files if not (folder / file).exists()]
    if absent and (name not in runs.PARTIAL or len(absent) == len(files)):
        raise InputError("no such file", where=str(folder / absent[0]), expected=f"set {name}")
    for file, source in files.items():
        if file not in absent:
            for i, row in enumerate(read_table(folder / file, by_hand=source.by_hand)):
                yield file, i, source, row


def compared(file: str, number: int, source: Source, row: Cells) -> Compared:
    """One row, predicted where it can be said."""
    published = source.published(row)
    try:
        return Compared(file, number, published, source.predicted(row))
    except DamagedError:
        raise
    except HetplanError as error:
        return Compared(file, number, published, None, str(error))


def sailor_rows(plans: Sequence[ComparedPlan]) -> list[Compared]:
    """Sailor's plans as rows; each is a file of its own."""
    rows = []
    for plan in plans:
        run, outcome = plan.run, plan.prediction
        used: Counter[str] = Counter()
        for pipeline in run.pipelines:
            for node in (n for stage in pipeline.groups for group in stage for n in group.nodes):
                used[node.kind] += node.gpus
        folder, gpus = run.file.rpartition("/")[0], ", ".join(f"{n} {k}" for k, n in used.items())
        workload = f"{folder}, batch {run.global_batch}, {gpus}"
        kind = run.file.partition("/")[0] if "/" in run.file else ""
        published = Published(workload, run.seconds, run.max_bytes, kind=kind)
        prediction = Predicted(outcome.seconds, outcome.peak_bytes) if outcome else None
        rows.append(Compared(run.file, 0, published, prediction, plan.reason))
    return rows


def reasons(rows: Sequence[Compared]) -> list[tuple[str, int]]:
    """Why rows have no prediction, and how many for each reason, the commonest first."""
    return Counter(row.reason for row in rows if row.reason is not None).most_common()
