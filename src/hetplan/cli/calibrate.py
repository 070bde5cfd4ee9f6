"""`hetplan profile calibrate` estimates constants of the prediction from measured runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hetplan.cli.options import JsonOption, WrittenOption
from hetplan.cli.output import emit
from hetplan.cli.setting import OwnClusterOption, OwnModelOption, Setting
from hetplan.runtime.calibration import (
    Estimate,
    MeasuredRun,
    calibrate as estimate,
    load_measured_run,
)
from hetplan.text import (
    Column,
    Table,
    bytes_text,
    number_text,
    percent_text,
    seconds_text,
    signed_percent_text,
)


def calibrate(
    profile: Annotated[
        Path, typer.Argument(metavar="PROFILE", help="The profile that the plans ran with.")
    ],
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUNS…",
            help='JSON files: {"plan": plan or its file, "seconds": …, "peak_bytes": …}.',
        ),
    ],
    cluster: OwnClusterOption = None,
    model: OwnModelOption = None,
    output: WrittenOption = None,
    json: JsonOption = False,
) -> int:
    """Estimate factors of compute, host time and bandwidths, a pass's overhead and the framework's
    memory from your own measured runs.

    `hetplan plan simulate --calibration FILE` predicts with them. Exit code 1, and no file, where
    the runs do not tell.
    """
    measured = [load_measured_run(path) for path in runs]
    setting = Setting(cluster=cluster, model=model, profile=profile)
    workload = setting.workload(measured[0].plan, runs[0])
    # The replay of each run's plan refuses a plan that was made for another workload.
    estimated = estimate(measured, [workload] * len(measured))
    constants = estimated.calibration
    if constants is not None and output is not None:
        constants.save(output)
    return emit(
        calibration_document(measured, estimated),
        [calibration_table(measured, estimated)],
        json=json,
        ok=constants is not None,
    )


def calibration_document(runs: Sequence[MeasuredRun], estimated: Estimate) -> dict[str, Any]:
    """A calibration as JSON types: the constants, or the reason why there are none, and each run's
    measured and predicted seconds."""
    constants = estimated.calibration
    return {
        "calibration": None if constants is None else constants.model_dump(mode="json"),
        "reason": estimated.reason or None,
        "runs": [
            {"run": run.where, "measured_seconds": run.seconds, "predicted_seconds": seconds}
            for run, seconds in zip(runs, estimated.predictions, strict=True)
        ],
    }


def calibration_table(runs: Sequence[MeasuredRun], estimated: Estimate) -> Table:
    """The table of a calibration: each run's measured and predicted seconds, with the constants as
    notes."""
    constants = estimated.calibration
    if constants is None:
        word = "not calibrated"
        notes = [f"not calibrated: {estimated.reason}"]
    else:
        word = "calibrated"
        values = constants.values()
        notes = [f"{name}: {number_text(values[name], 3)}" for name in constants.fitted]
        notes += [f"{name} keeps its value: {why}" for name, why in constants.refused.items()]
        notes.append(
            f"mean error {percent_text(constants.error_before)} before, "
            f"{percent_text(constants.error_left_out)} of runs left out"
        )
        if constants.framework_bytes is not None:
            notes.append(
                f"framework and driver hold {bytes_text(constants.framework_bytes)} of each device"
            )
    left_out = estimated.left_out or (None,) * len(runs)  # empty where nothing could be estimated
    return Table.of(
        "calibration",
        zip(runs, estimated.predictions, left_out, strict=True),
        [
            Column("run", lambda row: row[0].where),
            Column("measured", lambda row: row[0].seconds, seconds_text, right=True),
            Column(f"predicted, {word}", lambda row: row[1], seconds_text, right=True),
            Column("left out", left_out_text, right=True),
        ],
        notes,
    )


def left_out_text(row: tuple[MeasuredRun, float, float | None]) -> str:
    """The relative error of a run's prediction by constants that were estimated without the run;
    `-` where there are no such constants.

    row: the run, its predicted seconds, and its predicted seconds when it is left out.
    """
    run, _, seconds = row
    error = None if seconds is None else seconds / run.seconds - 1
    return signed_percent_text(error)
