"""The sets of published measurements: each row read, posed, and predicted or ranked."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from evidence.truth import operators, ranked, runs
from evidence.truth.sailor import compare_plans
from evidence.truth.tables import (
    Cells,
    Compared,
    DamagedError,
    Source,
    read_table,
    summary,
)
from hetplan.errors import HetplanError, require, unknown_name

SOURCES = {**runs.SOURCES, "operators": operators.FILES}
SETS = (*SOURCES, "sailor")


def compare(
    name: str, folder: Path, framework: float | None = None, *, rank: bool = False
) -> list[Compared]:
    """Every row of a set beside its prediction or its reason, in the order of files and rows.

    folder: with the set's files. framework: of sailor, bytes that it takes of each GPU, if known.
    rank: price each training run in closed form, among all configurations of its model and GPUs.
    Raises InputError for an unknown set, or a file that is missing or damaged.
    """
    if name == "sailor":
        return compare_plans(folder, framework)
    rows = list(rows_of(name, folder))
    reasons_passed_over: dict[tuple[str, int], str] = {}
    for file, source in SOURCES[name].items():
        cells = [row for of, _, _, row in rows if of == file]
        for number, reason in source.passed_over(cells).items():
            reasons_passed_over[file, number] = reason
    made = []
    for file, number, source, row in rows:
        passed_over = reasons_passed_over.get((file, number))
        if passed_over is None:
            made.append(compared(file, number, source, row, rank=rank))
        else:
            made.append(Compared(file, number, source.published(row), None, passed_over))
    return made


def rows_of(name: str, folder: Path) -> Iterator[tuple[str, int, Source, Cells]]:
    """(file, number, source, row) of a set of tables; raises InputError as `compare` does."""
    if name not in SOURCES:
        raise unknown_name("unknown set", name, SETS)
    files = SOURCES[name]
    absent = [file for file in files if not (folder / file).exists()]
    require(
        not absent or (name in runs.PARTIAL and len(absent) != len(files)),
        "no such file",
        where=str(folder / next(iter(absent), "")),
        expected=f"set {name}",
    )
    for file, source in files.items():
        if file not in absent:
            for i, row in enumerate(read_table(folder / file, by_hand=source.by_hand)):
                yield file, i, source, row


def compared(file: str, number: int, source: Source, row: Cells, *, rank: bool = False) -> Compared:
    """One row, predicted where it can be said."""
    published = source.published(row)
    try:
        place = ranked.ranked(source.job(row)) if rank and source.job else None
        outcome = place.own if place else source.predicted(row)
        return Compared(file, number, published, outcome, ranked=place)
    except DamagedError:
        raise
    except HetplanError as error:
        return Compared(file, number, published, None, str(error))


def reasons(rows: Sequence[Compared]) -> list[tuple[str, int]]:
    """Why rows have no prediction, and how many for each reason, the commonest first."""
    return Counter(row.reason for row in rows if row.reason is not None).most_common()


def standings(folder: Path) -> list[dict[str, Any]]:
    """The figures of every set below `folder` (truth, operators, sailor), part by part.

    Returns rows of `name`, `part` (a file or a GPU type) and `figures`. Raises InputError where no
    set is there or a file is damaged.
    """
    rows: list[dict[str, Any]] = []
    for name in SETS:
        place = folder / (name if name in ("operators", "sailor") else "truth")
        if not any((place / file).exists() for file in SOURCES.get(name, ("validation",))):
            continue
        whole = summary(compare(name, place))
        by_kind = whole["kinds" if name in ("mosaicml", "sailor") else "files"]
        for part, figures in (by_kind or {"": whole}).items():
            rows.append({"name": name, "part": part, "figures": figures})
    require(
        rows,
        "no set",
        where=str(folder),
        expected="a folder with truth, operators or sailor in it",
    )
    return rows
