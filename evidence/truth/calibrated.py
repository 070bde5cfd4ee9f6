"""A set calibrated on some of its rows: constants are estimated from rows drawn at random, and all
other rows are predicted without and with them."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from evidence.truth import job
from evidence.truth.command import figures_table, parts_of
from evidence.truth.sets import SETS, compared, rows_of
from evidence.truth.tables import Compared, NotPosedError, summary
from hetplan.cli.calibrate import calibration_document, calibration_table
from hetplan.cli.options import JsonOption, SeedOption, WrittenOption
from hetplan.cli.output import emit
from hetplan.errors import require
from hetplan.plans.plan import Plan
from hetplan.profiling.workload import Workload
from hetplan.runtime.calibration import Estimate, MeasuredRun, calibrate, predicted_seconds


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


def calibrate_rows(
    name: Annotated[str, typer.Argument(metavar="SET", help=f"One of {', '.join(SETS)}.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="With the set's CSV files.")],
    rows: Annotated[
        int, typer.Option("--rows", metavar="N", help="Rows to estimate from.", min=1)
    ] = 20,
    seed: SeedOption = None,
    output: WrittenOption = None,
    json: JsonOption = False,
) -> int:
    """Estimate constants from some rows of a set, and predict the others without and with them.

    The constants are those of `hetplan profile calibrate`. Exit code 1, and no file, where the rows
    do not tell.
    """
    rest = calibrate_set(name, folder, rows, seed or 0)
    constants = rest.estimate.calibration
    if constants is not None and output is not None:
        constants.save(output)
    figures = {"before": summary(rest.before), "after": summary(rest.after)}
    before, after = parts_of(figures["before"]), parts_of(figures["after"])
    parts = {part: (before[part], after[part]) for part in after}
    document = {
        **calibration_document(rest.runs, rest.estimate),
        "set": name,
        "rest": figures,
    }
    tables = [
        calibration_table(rest.runs, rest.estimate),
        figures_table("the other rows: before -> calibrated", parts),
    ]
    return emit(document, tables, json=json, ok=constants is not None)
