"""`hetplan profile --operators` and `hetplan profile train`: operators measured, and their efficiency learned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hetplan.cli.output import check_target, note, print_json, print_tables
from hetplan.errors import InputError
from hetplan.names import unknown_name
from hetplan.text import Table, number_text, percent_text

if TYPE_CHECKING:
    from hetplan.profiling.cluster import Cluster
    from hetplan.profiling.efficiency import EfficiencyFile, Learned
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
    found = measure_operators(device, chosen, repeats=repeats, name=device_type, tell=None if quiet else note)
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
    print_tables([Table(f"operators of {found.device} in {found.precision}, measured", ("", ""), rows)])
    return 0


def train(files: Sequence[str], *, json: bool, output: Path | None) -> int:
    """Train from a file of measured operators, tell the error on those kept apart, write."""
    from hetplan.profiling.efficiency import load_operators
    from hetplan.profiling.efficiency import train as trained

    check_target(output)
    if len(files) != 1:
        raise InputError(
            "hetplan profile train", got=len(files), expected="one file of `profile --operators`"
        )
    found = trained(load_operators(files[0]))
    if output is not None:
        found.save(output)
    if json:
        print_json(found.model_dump(mode="json"))
    else:
        print_tables([table(found)])
    return 0


def table(found: EfficiencyFile) -> Table:
    """Errors on operators kept apart, beside the plain roofline's."""
    rows = tuple(
        (k.kind, str(k.trained_on), str(k.kept_apart), percent_text(k.error), percent_text(k.roofline_error))
        for k in found.kinds
    )
    header = ("operators", "trained on", "kept apart", "error", "plain roofline's")
    notes = (
        "mean error of the seconds of operators kept apart; the plain roofline at its median efficiency",
    )
    return Table(
        f"learned efficiency of {found.device} in {found.precision}", header, rows, notes, right=(1, 2, 3, 4)
    )


def learned_of(files: Sequence[Path], cluster: Cluster, precision: str) -> dict[str, Learned]:
    """By device type of the cluster, what files hold of it; tells which types keep the plain roofline."""
    from hetplan.profiling.efficiency import Learned, load_efficiency

    found: dict[str, Learned] = {}
    for path in files:
        file = load_efficiency(path)
        if file.precision != precision:
            raise InputError(
                "is of another precision", where=str(path), got=file.precision, expected=repr(precision)
            )
        if file.device in found:
            raise InputError("device type is in two files", where=str(path), got=file.device)
        found[file.device] = Learned(file)
    plain = [name for name in cluster.types if name not in found]
    if plain:
        note(f"never measured, plain roofline: {', '.join(plain)}")
    return {name: found[name] for name in cluster.types if name in found}
