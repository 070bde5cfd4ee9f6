"""`hetplan calibrate`: physical constants from measured runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli import completion, sources
from hetplan.cli.options import JsonOption
from hetplan.cli.output import check_target, print_json, print_tables
from hetplan.text import Table, bytes_text, number_text, percent_text, seconds_text

if TYPE_CHECKING:
    from hetplan.runtime.calibration import Estimate, MeasuredRun


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
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="FILE|NAME",
            help="Cluster file (YAML); default an example of the plans' cluster's name.",
            autocompletion=completion.clusters,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME|FILE",
            help="Built-in model or config.json; default the plans'.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the constants to a file."),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Estimate effective bandwidths, a pass's overhead and the framework's memory from your own
    measured runs.

    `hetplan simulate --calibration FILE` predicts with them. Exit code 1, and no file, where the
    runs do not tell.
    """
    from hetplan.runtime.calibration import calibrate as estimate
    from hetplan.runtime.calibration import load_measured_run

    check_target(output)
    measured = [load_measured_run(path) for path in runs]
    workload = sources.workload_of(measured[0].plan, cluster, model, profile)
    found = estimate(measured, workload)
    if found.calibration is not None and output is not None:
        found.calibration.save(output)
    if json:
        constants = None if found.calibration is None else found.calibration.model_dump(mode="json")
        predicted = [
            {"run": run.where, "measured_seconds": run.seconds, "predicted_seconds": seconds}
            for run, seconds in zip(measured, found.predictions, strict=True)
        ]
        print_json({"calibration": constants, "reason": found.reason or None, "runs": predicted})
    else:
        print_tables([table(measured, found)])
    return 0 if found.calibration is not None else 1


def table(runs: list[MeasuredRun], found: Estimate) -> Table:
    """Runs beside their predictions, and the constants."""
    constants = found.calibration
    left = found.left_out or (None,) * len(runs)
    rows = tuple(
        (
            run.where,
            seconds_text(run.seconds),
            seconds_text(seconds),
            "-" if out is None else f"{100 * (out / run.seconds - 1):+.1f} %",
        )
        for run, seconds, out in zip(runs, found.predictions, left, strict=True)
    )
    if constants is None:
        notes = [f"not calibrated: {found.reason}"]
    else:
        notes = [
            f"links within nodes reach {number_text(constants.within, 3)}, between nodes "
            f"{number_text(constants.between, 3)} of the cluster file's bandwidth",
            f"a pass takes {seconds_text(constants.slot_seconds)} beside its layers",
            f"mean error {percent_text(constants.error_before)} before, {percent_text(constants.error_left_out)} "
            "of runs left out",
        ]
        if constants.framework_bytes is not None:
            notes.append(
                f"framework and driver hold {bytes_text(constants.framework_bytes)} of each device"
            )
    word = "calibrated" if constants is not None else "not calibrated"
    header = ("run", "measured", f"predicted, {word}", "left out")
    return Table("calibration", header, rows, tuple(notes), right=(1, 2, 3))
