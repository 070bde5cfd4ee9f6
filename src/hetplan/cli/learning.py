"""`hetplan profile --operators` and `hetplan profile train`: operators measured, and their
efficiency learned."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hetplan.cli.output import check_target, note, print_json, print_tables
from hetplan.errors import InputError
from hetplan.names import unknown_name
from hetplan.text import Table, number_text, percent_text

if TYPE_CHECKING:
    from hetplan.profiling.cluster import Cluster
    from hetplan.profiling.efficiency import EfficiencyFile, Learned, LinkEfficiencyFile
    from hetplan.profiling.precision import Precision


def operators(
    device: str,
    precision: str,
    *,
    device_type: str | None,
    repeats: int,
    json: bool,
    output: Path | None,
    quiet: bool,
) -> int:
    """Measure operators and write them."""
    from hetplan.profiling.precision import PRECISIONS
    from hetplan.runtime.operators import measure_operators

    check_target(output)
    chosen: Precision | None = next((p for p in PRECISIONS if p == precision), None)
    if chosen is None:
        raise unknown_name("unknown precision", precision, PRECISIONS, where="--precision")
    found = measure_operators(
        device, chosen, repeats=repeats, name=device_type, tell=None if quiet else note
    )
    if output is not None:
        found.save(output)
    if json:
        print_json(found.model_dump(mode="json"))
        return 0
    rows = (
        ("operators", str(len(found.operators))),
        ("TFLOP/s at most", number_text(found.flops_per_second / 1e12, 4)),
        ("GB/s at most", number_text(found.bytes_per_second / 1e9, 4)),
    )
    print_tables(
        [Table(f"operators of {found.device} in {found.precision}, measured", ("", ""), rows)]
    )
    return 0


def train(files: Sequence[str], *, json: bool, output: Path | None) -> int:
    """Train from a file of measured operators, or files of collectives; tell the error on those
    kept apart."""
    from hetplan.files import read_json

    check_target(output)
    if not files:
        expected = "a file of `profile --operators`, or files of `profile --collectives`"
        raise InputError("hetplan profile train", got="no file", expected=expected)
    found: EfficiencyFile | LinkEfficiencyFile
    value = read_json(files[0])
    if isinstance(value, dict) and value.get("format") == "hetplan-collectives":
        from hetplan.profiling.collectives import load_collectives
        from hetplan.profiling.efficiency import train_links

        found = train_links([load_collectives(path) for path in files])
        shown = link_table(found)
    else:
        from hetplan.profiling.efficiency import load_operators
        from hetplan.profiling.efficiency import train as trained

        if len(files) > 1:
            raise InputError(
                "hetplan profile train", got=len(files), expected="one file of measured operators"
            )
        found = trained(load_operators(files[0]))
        shown = table(found)
    if output is not None:
        found.save(output)
    if json:
        print_json(found.model_dump(mode="json"))
    else:
        print_tables([shown])
    return 0


def link_table(found: LinkEfficiencyFile) -> Table:
    """Errors on messages kept apart."""
    rows = (
        ("learned", percent_text(found.error)),
        ("plain, at the median efficiency", percent_text(found.plain_error)),
        ("latency + bytes/bandwidth of each operation", percent_text(found.line_error)),
    )
    notes = (
        f"mean error of seconds of {found.kept_apart} sizes kept apart; trained on {found.trained_on}",
        "the lines were fitted with the sizes that are kept apart here",
    )
    title = f"learned efficiency of links between {found.device}, {found.backend}"
    return Table(title, ("prediction", "error"), rows, notes, right=(1,))


def table(found: EfficiencyFile) -> Table:
    """Errors on operators kept apart, beside the plain roofline's."""
    rows = tuple(
        (
            k.kind,
            str(k.trained_on),
            str(k.kept_apart),
            percent_text(k.error),
            percent_text(k.roofline_error),
        )
        for k in found.kinds
    )
    header = ("operators", "trained on", "kept apart", "error", "plain roofline's")
    notes = (
        "mean error of the seconds of operators kept apart; the plain roofline at its median efficiency",
    )
    return Table(
        f"learned efficiency of {found.device} in {found.precision}",
        header,
        rows,
        notes,
        right=(1, 2, 3, 4),
    )


def learned_of(files: Sequence[Path], cluster: Cluster, precision: str) -> dict[str, Learned]:
    """By device type of the cluster, what files hold of it, or else what comes with hetplan."""
    from hetplan.profiling.efficiency import Learned, load_efficiency, packaged

    found: dict[str, Learned] = {}
    for path in files:
        file = load_efficiency(path)
        if file.precision != precision:
            raise InputError(
                "is of another precision",
                where=str(path),
                got=file.precision,
                expected=repr(precision),
            )
        if file.device in found:
            raise InputError("device type is in two files", where=str(path), got=file.device)
        found[file.device] = Learned(file)
    for name in cluster.types:
        own = packaged(name, precision) if name not in found else None
        if own is not None and importlib.util.find_spec("xgboost") is None:
            note(f"{name}: learned efficiency needs xgboost: pip install 'hetplan[learn]'")
        elif own is not None:
            found[name] = Learned(own)
    return {name: found[name] for name in cluster.types if name in found}
