"""The sets of published measurements, each read, posed and predicted row by row, or ranked; all
sets at once, beside what an earlier predictor said of them; and a set calibrated on some of its
rows.

`before.json` holds the figures of the predictor of November 2026 before measured rates, software
stacks and overlapped gathers (roofline of datasheets, ring collectives, serial gathers), of the
same rows, posed in the same way.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from hetplan.errors import HetplanError, require, unknown_name
from hetplan.files import read_json
from hetplan.formulations.joint.plan import Plan
from hetplan.profiling.workload import Workload
from hetplan.runtime.calibration import Estimate, MeasuredRun, calibrate, predicted_seconds
from hetplan.studies.truth import job, operators, ranked, runs
from hetplan.studies.truth.sailor import compare_plans
from hetplan.studies.truth.tables import (
    Cells,
    Compared,
    DamagedError,
    NotPosedError,
    Source,
    read_table,
    summary,
)

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
    return (
        compare_plans(folder, framework)
        if name == "sailor"
        else [compared(*row, rank=rank) for row in rows_of(name, folder)]
    )


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
    """Every set below `folder` (truth, operators, sailor), part by part: `name`, `part` (a file or
    a GPU type), and figures `now` and `before`. Raises InputError where no set is there or a file
    is damaged."""
    earlier = read_json(Path(__file__).with_name("before.json"))  # by `set/part`
    rows: list[dict[str, Any]] = []
    for name in SETS:
        place = folder / (name if name in ("operators", "sailor") else "truth")
        if any((place / file).exists() for file in SOURCES.get(name, ("validation",))):
            whole = summary(compare(name, place))
            by_kind = whole.get("kinds" if name in ("mosaicml", "sailor") else "files")
            rows += [
                {
                    "name": name,
                    "part": part,
                    "now": figures,
                    "before": earlier.get(f"{name}/{part}", {}),
                }
                for part, figures in (by_kind or {"": whole}).items()
            ]
    require(
        rows,
        "no set",
        where=str(folder),
        expected="a folder with truth, operators or sailor in it",
    )
    return rows


@dataclass(frozen=True)
class Rest:
    """runs: the rows that constants were estimated from. before, after: all others, predicted
    without and with the constants; alike where there are none."""

    estimate: Estimate
    runs: tuple[MeasuredRun, ...]
    before: tuple[Compared, ...]
    after: tuple[Compared, ...]


def calibrate_set(name: str, folder: Path, count: int, seed: int) -> Rest:
    """Draw `count` rows that can be said and were measured, estimate constants, predict the others.

    Raises InputError as `compare` does, for a set of no training runs, and for too few rows.
    """
    posed: list[tuple[Compared, Plan, Workload]] = []
    for file, number, source, row in rows_of(name, folder):
        one = compared(file, number, source, row)
        if one.error is not None and source.job is not None:
            with suppress(NotPosedError):
                posed.append((one, *job.posed(source.job(row))))
    require(
        len(posed) >= count,
        "rows of the set",
        where=name,
        got=len(posed),
        expected=f"at least {count} training runs that can be said",
    )
    chosen = set(Random(seed).sample(range(len(posed)), count))
    drawn = [one for i, one in enumerate(posed) if i in chosen]
    others = [one for i, one in enumerate(posed) if i not in chosen]
    runs = tuple(
        MeasuredRun(plan, one.published.seconds or 0.0, None, f"{one.file} {one.row}")
        for one, plan, _ in drawn
    )
    estimate = calibrate(runs, [workload for *_, workload in drawn])
    after = [one for one, *_ in others]
    if estimate.calibration is not None:
        values = estimate.calibration.values()
        after = [with_constants(*one, values) for one in others]
    return Rest(estimate, runs, tuple(one for one, *_ in others), tuple(after))


def with_constants(
    one: Compared, plan: Plan, workload: Workload, values: Mapping[str, float]
) -> Compared:
    """The row predicted with constants."""
    assert one.predicted is not None
    return replace(
        one, predicted=replace(one.predicted, seconds=predicted_seconds(plan, workload, values))
    )
