"""`hetplan profile operators` and `train`: operators measured, efficiency of devices and links
learned."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import JsonOption, PrecisionOption, QuietOption
from hetplan.cli.output import emit, note
from hetplan.cli.profile import (
    DeviceOption,
    DeviceTypeOption,
    RepeatsOption,
    TargetOption,
    checked,
)
from hetplan.errors import InputError
from hetplan.files import read_json
from hetplan.text import Table, number_text, percent_text

if TYPE_CHECKING:
    from hetplan.profiling.efficiency import EfficiencyFile, LinkEfficiencyFile


def operators(
    device: DeviceOption = "cpu",
    precision: PrecisionOption = "fp16",
    device_type: DeviceTypeOption = None,
    repeats: RepeatsOption = 3,
    json: JsonOption = False,
    output: TargetOption = None,
    quiet: QuietOption = False,
) -> int:
    """Measure operators of many sizes on a device (needs torch), for `profile train`."""
    from hetplan.runtime.measuring.layers import measure_operators

    measured = measure_operators(
        device,
        checked(precision),
        repeats=repeats,
        name=device_type,
        tell=None if quiet else note,
    )
    rows = (
        ("operators", str(len(measured.operators))),
        ("TFLOP/s at most", number_text(measured.flops_per_second / 1e12, 4)),
        ("GB/s at most", number_text(measured.bytes_per_second / 1e9, 4)),
    )
    title = f"operators of {measured.device} in {measured.precision}, measured"
    document = measured.model_dump(mode="json")
    emit(document, [Table(title, ("", ""), rows)], json=json, output=output)
    return 0


def train(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE…",
            help="A file of `profile operators`, or files of `profile collectives`.",
        ),
    ],
    json: JsonOption = False,
    output: TargetOption = None,
) -> int:
    """Learn a device's efficiency from measured operators, or that of links from collectives.

    Prints the error on what was kept apart. The result is for `profile predict --efficiency FILE`,
    that of links for `plan --links FILE`.
    """
    value = read_json(files[0])
    learned: EfficiencyFile | LinkEfficiencyFile
    if isinstance(value, dict) and value.get("format") == "hetplan-collectives":
        from hetplan.profiling.efficiency import train_links
        from hetplan.profiling.measured import load_collectives

        learned = train_links([load_collectives(path) for path in files])
        table = links_table(learned)
    else:
        from hetplan.profiling.efficiency import load_operators
        from hetplan.profiling.efficiency import train as train_operators

        if len(files) > 1:
            expected = "one file of measured operators"
            raise InputError("hetplan profile train", got=len(files), expected=expected)
        learned = train_operators(load_operators(files[0]))
        table = operators_table(learned)
    emit(learned.model_dump(mode="json"), [table], json=json, output=output)
    return 0


def links_table(learned: LinkEfficiencyFile) -> Table:
    """Errors on messages kept apart."""
    rows = (
        ("learned", percent_text(learned.error)),
        ("plain, at the median efficiency", percent_text(learned.plain_error)),
        ("latency + bytes/bandwidth of each operation", percent_text(learned.line_error)),
    )
    notes = (
        f"mean error of seconds of {learned.kept_apart} sizes kept apart; trained on "
        f"{learned.trained_on}",
        "the lines were fitted with the sizes that are kept apart here",
    )
    title = f"learned efficiency of links between {learned.device}, {learned.backend}"
    return Table(title, ("prediction", "error"), rows, notes, right=(1,))


def operators_table(learned: EfficiencyFile) -> Table:
    """Errors on operators kept apart, beside the plain roofline's."""
    return Table.of(
        f"learned efficiency of {learned.device} in {learned.precision}",
        learned.kinds,
        {
            "operators": lambda kind: kind.kind,
            "trained on": lambda kind: str(kind.trained_on),
            "kept apart": lambda kind: str(kind.kept_apart),
            "error": lambda kind: percent_text(kind.error),
            "plain roofline's": lambda kind: percent_text(kind.roofline_error),
        },
        [
            "mean error of the seconds of operators kept apart; the plain roofline at its median "
            "efficiency"
        ],
        right=(1, 2, 3, 4),
    )
