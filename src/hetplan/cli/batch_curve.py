"""`hetplan profile --batch-curve`: Poplar's Algorithm 1 on a live device, as a table and a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hetplan.cli.output import note, print_json, print_tables
from hetplan.errors import InputError
from hetplan.text import Table, bytes_text, number_text, seconds_text

if TYPE_CHECKING:
    from hetplan.profiling.batch_curve import BatchCurve
    from hetplan.profiling.models import Model

GIB = 2.0**30


def run(
    model: Model,
    device: str,
    *,
    memory_gib: float | None,
    device_type: str | None,
    devices: int,
    largest: int,
    repeats: int,
    json: bool,
    output: Path | None,
    quiet: bool,
) -> int:
    """Measure, print, write; 0 when a sample fits at some ZeRO stage, else 1. Raises InputError,
    UnsupportedError."""
    from hetplan.runtime.batch_curve import measure_batch_curve

    if memory_gib is None and device == "cpu":
        raise InputError(
            "missing", where="--memory-gib", expected="what training may use of a CPU's memory"
        )
    if memory_gib is not None and not 0 < memory_gib < 1e15:
        raise InputError("--memory-gib", got=memory_gib, expected="more than 0")
    curve = measure_batch_curve(
        model,
        device,
        memory=None if memory_gib is None else memory_gib * GIB,
        name=device_type,
        devices=devices,
        largest=largest,
        repeats=repeats,
        tell=None if quiet else note,
    )
    if output is not None:
        curve.save(output)
    if json:
        print_json(curve.model_dump(mode="json"))
    else:
        print_tables(curve_tables(curve))
    return 0 if curve.zero_stage is not None else 1


def curve_tables(curve: BatchCurve) -> list[Table]:
    """The points, and what fits at which ZeRO stage."""
    rows = tuple(
        (
            str(point.micro_batch),
            seconds_text(point.seconds),
            seconds_text(point.spread_seconds),
            number_text(point.micro_batch / point.seconds, 4),
        )
        for point in curve.points
    )
    title = (
        f"{curve.model} x {curve.sequence} tokens in {curve.precision} on {curve.device}, measured within "
        f"{bytes_text(curve.memory_bytes)}, one of {curve.devices}"
    )
    stages = ", ".join(f"ZeRO {stage}: {size}" for stage, size in enumerate(curve.largest))
    lowest = (
        "no sample fits"
        if curve.zero_stage is None
        else f"a sample fits from ZeRO {curve.zero_stage} on"
    )
    notes = [f"largest micro-batch: {stages}; {lowest}"]
    if curve.tried_up_to is not None and curve.tried_up_to in curve.largest:
        notes.append(f"stopped at --max-micro-batch {curve.tried_up_to}: more may fit")
    if curve.saved_bytes_per_sample is not None:
        notes.append(
            f"activations: {bytes_text(curve.saved_bytes_per_sample)} per sample, measured"
        )
    header = ("micro-batch", "forward + backward", "spread", "samples/s")
    return [Table(title, header, rows, tuple(notes), right=(0, 1, 2, 3))]
