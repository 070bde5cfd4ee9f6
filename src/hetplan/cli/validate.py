"""`hetplan validate`: predictions held against plans that others really ran."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetplan.cli.options import JsonOption, QuietOption
from hetplan.cli.output import check_target, note, print_json, print_tables
from hetplan.errors import InputError
from hetplan.text import Table, bytes_text, percent_text, seconds_text

if TYPE_CHECKING:
    from hetplan.profiling.sailor.validation import Compared
    from hetplan.runtime.rehearsals import Rehearsed

WITHIN, RANKED = 0.1, 0.97  # of a rehearsal that confirms the simulator

app = typer.Typer(
    help="Hold predictions against plans that were really run.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def root() -> None:
    """Hold predictions against plans that were really run."""


@app.command("sailor")
def sailor(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="With profiles/, llm_info.json, network_coeffs*, validation/**.json.",
        ),
    ],
    framework_gib: Annotated[
        float | None,
        typer.Option(
            "--framework-gib",
            metavar="GIB",
            help="What framework and driver take of each GPU, where known.",
        ),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Predict every plan in DIR/validation from Sailor's profiles and link fits; nothing is fitted
    to the totals.

    Exit code 0, or 1 where a plan has no prediction.
    """
    from hetplan.profiling.sailor.validation import validate

    if framework_gib is not None and not 0 <= framework_gib <= 1e6:
        raise InputError(
            "not usable", where="--framework-gib", got=framework_gib, expected="0 to 1e6 GiB"
        )
    found = validate(folder, None if framework_gib is None else framework_gib * 2**30)
    if json:
        print_json({"plans": [document(one) for one in found]})
    else:
        print_tables([table(found)])
    return 0 if all(one.prediction for one in found) else 1


@app.command("rehearsal")
def rehearsal(
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            metavar="FILE",
            help="Of gpt2 at 64 tokens in fp32 on one device; default: measure here.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the measured profile there."),
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", help="Iterations of each plan.")
    ] = 4,
    time_scale: Annotated[
        float | None,
        typer.Option(
            "--time-scale", metavar="X", help="Seconds slept per predicted second; default by plan."
        ),
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Measure a profile on this CPU, predict uneven plans from it, run them on virtual devices,
    compare.

    Exit code 0 where every plan is within 10 % and Spearman's rank correlation is 0.97 or more,
    else 1.
    """
    import os

    from hetplan.profiling.models import load_model
    from hetplan.profiling.profile import load_profile
    from hetplan.runtime import rehearsals
    from hetplan.runtime.measure import measure_profile

    check_target(output)
    if steps < 2:
        raise InputError("--steps", got=steps, expected="2 or more: the first one is not counted")
    if time_scale is not None and not 0 < time_scale < 1e9:
        raise InputError("--time-scale", got=time_scale, expected="a positive number")
    say = None if quiet else note
    model = load_model(rehearsals.MODEL, sequence=rehearsals.SEQUENCE, precision="fp32")
    found = (
        measure_profile(model, "cpu", micro_batches=(1, 2, 4), repeats=3, output=output, tell=say)
        if profile is None
        else load_profile(profile)
    )
    workload = rehearsals.workload_here(model, found)

    def tell(one: rehearsals.Rehearsed) -> None:
        if say is not None:
            say(f"{one.name}: {signed(one.error)}")

    cores = len(os.sched_getaffinity(0))
    compared = rehearsals.rehearse_all(
        workload, steps=steps, scale=time_scale, cores=cores, tell=tell
    )
    rank = rehearsals.rank_correlation(compared)
    if json:
        plans = [
            {
                "plan": c.name,
                "predicted_seconds": c.predicted,
                "measured_seconds": c.measured,
                "error": c.error,
            }
            for c in compared
        ]
        print_json(
            {"plans": plans, "spearman": rank, "profile": found.provenance.model_dump(mode="json")}
        )
    else:
        print_tables([rehearsed_table(compared, rank)])
    good = all(abs(c.error) <= WITHIN for c in compared) and rank is not None and rank >= RANKED
    return 0 if good else 1


def rehearsed_table(found: list[Rehearsed], rank: float | None) -> Table:
    """One row per plan."""
    rows = tuple(
        (one.name, seconds_text(one.predicted), seconds_text(one.measured), signed(one.error))
        for one in found
    )
    worst = max(abs(one.error) for one in found)
    notes = (
        f"{len(found)} plans: largest error {percent_text(worst)}, Spearman {'-' if rank is None else f'{rank:.4g}'}",
        "predicted by the simulator from a measured profile; measured: real processes and messages, passes slept",
    )
    header = ("plan", "predicted", "measured", "error")
    return Table("uneven plans rehearsed on virtual devices", header, rows, notes, right=(1, 2, 3))


def document(one: Compared) -> dict[str, Any]:
    """One plan as JSON types. overlapped_seconds: transfers that occupy nobody; predicted ones
    occupy both ends."""
    run, found = one.run, one.prediction
    return {
        "file": run.file,
        "measured_seconds": run.seconds,
        "predicted_seconds": None if found is None else found.seconds,
        "overlapped_seconds": None if found is None else found.overlapped,
        "measured_bytes": run.max_bytes,
        "predicted_bytes": None if found is None else found.peak_bytes,
        "calibrated": False,
        **({} if one.reason is None else {"reason": one.reason}),
    }


def table(found: list[Compared]) -> Table:
    """One row per plan; summary by first folder."""
    from hetplan.profiling.sailor.validation import mean_error, rank_correlation

    rows = []
    for one in found:
        p = one.prediction
        rows.append(
            (
                one.run.file,
                seconds_text(one.run.seconds),
                seconds_text(p.seconds if p else None),
                signed(one.error),
                bytes_text(one.run.max_bytes),
                bytes_text(p.peak_bytes if p else None),
                signed(one.memory_error),
            )
        )
    notes = [f"{one.run.file}: {one.reason}" for one in found if one.reason is not None]
    for group in dict.fromkeys(one.run.file.split("/")[0] for one in found if "/" in one.run.file):
        chosen = [one for one in found if one.run.file.startswith(f"{group}/")]
        rank = rank_correlation(chosen)
        told = "" if rank is None else f", Spearman {rank:.3g}"
        notes.append(f"{group}: mean error of seconds {percent_text(mean_error(chosen))}{told}")
    notes.append("predicted, not calibrated: nothing is fitted to these measurements")
    header = ("plan", "measured", "predicted", "error", "memory", "predicted", "error")
    return Table("Sailor's plans", header, tuple(rows), tuple(notes), right=(1, 2, 3, 4, 5, 6))


def signed(value: float | None) -> str:
    """A relative error with its sign: `+3.2 %`."""
    return "-" if value is None else f"{100 * value:+.1f} %"
