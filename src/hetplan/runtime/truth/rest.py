"""A set calibrated on some of its rows, and what that is worth on all others."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from hetplan.errors import InputError
from hetplan.formulations.joint.plan import Plan
from hetplan.profiling.workload import Workload
from hetplan.runtime.calibration import (
    Estimate,
    MeasuredRun,
    calibrate,
    predicted_seconds,
)
from hetplan.runtime.truth.compare import compared, rows_of
from hetplan.runtime.truth.tables import Compared


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
        if one.error is not None and source.posed is not None:
            posed.append((one, *source.posed(row)))
    if len(posed) < count:
        raise InputError(
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
    seconds = predicted_seconds(plan, workload, values)
    return replace(one, predicted=replace(one.predicted, seconds=seconds))
