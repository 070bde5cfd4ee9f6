"""`hetplan validate`: predictions held against plans that others really ran."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetplan.cli.options import JsonOption
from hetplan.cli.output import print_json, print_tables
from hetplan.errors import InputError
from hetplan.text import Table, bytes_text, percent_text, seconds_text

if TYPE_CHECKING:
    from hetplan.profiling.sailor.validation import Compared

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
            metavar="DIR", help="With profiles/, llm_info.json, network_coeffs*, validation/**.json."
        ),
    ],
    framework_gib: Annotated[
        float | None,
        typer.Option(
            "--framework-gib", metavar="GIB", help="What framework and driver take of each GPU, where known."
        ),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Predict every plan in DIR/validation from Sailor's profiles and link fits; nothing is fitted to the totals.

    Exit code 0, or 1 where a plan has no prediction.
    """
    from hetplan.profiling.sailor.validation import validate

    if framework_gib is not None and not 0 <= framework_gib <= 1e6:
        raise InputError("not usable", where="--framework-gib", got=framework_gib, expected="0 to 1e6 GiB")
    found = validate(folder, None if framework_gib is None else framework_gib * 2**30)
    if json:
        print_json({"plans": [document(one) for one in found]})
    else:
        print_tables([table(found)])
    return 0 if all(one.prediction for one in found) else 1


def document(one: Compared) -> dict[str, Any]:
    """One plan as JSON types. overlapped_seconds: transfers that occupy nobody; predicted ones occupy both ends."""
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
