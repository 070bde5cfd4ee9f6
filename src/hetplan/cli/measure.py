"""`hetplan profile measure`, `batch-curve`, `collectives` and `operators`: measured on this machine
(needs torch); `train`: efficiency of devices and links learned from that."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetplan.cli.options import (
    JsonOption,
    MicroBatchesOption,
    ModelOption,
    PrecisionOption,
    QuietOption,
    SequenceOption,
    TensorOption,
    WrittenOption,
    number,
    whole_numbers,
)
from hetplan.cli.output import emit, note
from hetplan.cli.profile import profile_table, rate_text, tensor_degrees
from hetplan.errors import InputError
from hetplan.files import read_json
from hetplan.profiling.efficiency import (
    EfficiencyFile,
    LinkEfficiencyFile,
    load_operators,
    train_links,
)
from hetplan.profiling.efficiency import train as train_operators
from hetplan.profiling.measured import BatchCurve, Collectives, load_collectives
from hetplan.profiling.models import load_model
from hetplan.text import Table, bytes_text, number_text, percent_text, seconds_text

GIB = 2.0**30
DeviceOption = Annotated[
    str, typer.Option("--device", metavar="cpu|cuda[:N]", help="Measure there (needs torch).")
]
DeviceTypeOption = Annotated[
    str | None,
    typer.Option("--device-type", metavar="NAME", help="The device's name in cluster files."),
]
RepeatsOption = Annotated[
    int, typer.Option("--repeats", metavar="N", help="Timed passes per size.", min=1)
]


def measure(
    model: ModelOption,
    device: DeviceOption,
    micro_batches: MicroBatchesOption = None,
    tensor: TensorOption = None,
    sequence: SequenceOption = None,
    precision: PrecisionOption = "fp16",
    device_type: DeviceTypeOption = None,
    repeats: RepeatsOption = 3,
    json: JsonOption = False,
    output: WrittenOption = None,
    quiet: QuietOption = False,
) -> int:
    """Measure what each layer takes on a device, each distinct layer once (needs torch).

    With -o the profile is written table by table, and gone on with after an interruption. Plan with
    it by `hetplan plan --profile FILE`. Micro-batches default to 1, 2, 4, the tensor degree to 1.
    """
    from hetplan.runtime.measuring.layers import measure_profile

    chosen = load_model(model, sequence=sequence, precision=precision)
    profile = measure_profile(
        chosen,
        device,
        micro_batches=whole_numbers(micro_batches or ["1,2,4"], "--micro-batches"),
        tensor_degrees=tensor_degrees(tensor or ["1"], chosen),
        name=device_type,
        repeats=repeats,
        output=output,
        tell=None if quiet else note,
    )
    document = profile.model_dump(mode="json")
    emit(document, [profile_table(profile, chosen)], json=json, output=output)
    return 0


def batch_curve(
    model: ModelOption,
    device: DeviceOption = "cpu",
    memory_gib: Annotated[
        float | None,
        number(
            "--memory-gib",
            least=1e-9,
            most=1e15,
            metavar="GIB",
            help="Limit; default the GPU's free memory.",
        ),
    ] = None,
    devices: Annotated[
        int, typer.Option("--devices", metavar="N", help="Devices that share ZeRO's shards.")
    ] = 1,
    max_micro_batch: Annotated[
        int, typer.Option("--max-micro-batch", metavar="N", help="Try none beyond this.")
    ] = 256,
    sequence: SequenceOption = None,
    precision: PrecisionOption = "fp16",
    device_type: DeviceTypeOption = None,
    repeats: RepeatsOption = 3,
    json: JsonOption = False,
    output: WrittenOption = None,
    quiet: QuietOption = False,
) -> int:
    """Measure seconds per micro-batch and the largest that fits, by Poplar's Algorithm 1.

    Needs torch. Plan with it by `hetplan plan --set poplar.curves=FILE`. Exit code 1 where no
    sample fits.
    """
    from hetplan.runtime.measuring.batches import measure_batch_curve

    if memory_gib is None and device == "cpu":
        expected = "what training may use of a CPU's memory"
        raise InputError("missing", where="--memory-gib", expected=expected)
    curve = measure_batch_curve(
        load_model(model, sequence=sequence, precision=precision),
        device,
        memory=None if memory_gib is None else memory_gib * GIB,
        name=device_type,
        devices=devices,
        largest=max_micro_batch,
        repeats=repeats,
        tell=None if quiet else note,
    )
    emit(curve.model_dump(mode="json"), [curve_table(curve)], json=json, output=output)
    return 0 if curve.zero_stage is not None else 1


def curve_table(curve: BatchCurve) -> Table:
    """The points, and what fits at which ZeRO stage."""
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
        saved = bytes_text(curve.saved_bytes_per_sample)
        notes.append(f"activations: {saved} per sample, measured")
    return Table.of(
        f"{curve.model} x {curve.sequence} tokens in {curve.precision} on {curve.device}, measured "
        f"within {bytes_text(curve.memory_bytes)}, one of {curve.devices}",
        curve.points,
        {
            "micro-batch": lambda point: str(point.micro_batch),
            "forward + backward": lambda point: seconds_text(point.seconds),
            "spread": lambda point: seconds_text(point.spread_seconds),
            "samples/s": lambda point: rate_text(point.micro_batch, point.seconds),
        },
        notes,
        right=(0, 1, 2, 3),
    )


def collectives(
    device: DeviceOption = "cpu",
    repeats: RepeatsOption = 3,
    json: JsonOption = False,
    output: WrittenOption = None,
    quiet: QuietOption = False,
) -> int:
    """Measure latency and bandwidth of what ranks do together; run it under torchrun, a process per
    device. Rank 0 prints and writes."""
    from hetplan.runtime.measuring.collectives import measure_collectives

    measured = measure_collectives(device, repeats=repeats, tell=None if quiet else note)
    if measured is not None:
        table = collectives_table(measured, repeats)
        emit(measured.model_dump(mode="json"), [table], json=json, output=output)
    return 0


def collectives_table(measured: Collectives, repeats: int) -> Table:
    """The fitted lines."""
    return Table.of(
        f"collectives of {measured.ranks} ranks on {measured.device}, {measured.backend}, "
        "fitted to "
        f"the fastest of {repeats}",
        measured.fits,
        {
            "operation": lambda fit: fit.operation,
            "group": lambda fit: fit.group,
            "ranks": lambda fit: str(fit.ranks),
            "latency": lambda fit: seconds_text(fit.latency_seconds),
            "GB/s": lambda fit: number_text(fit.bytes_per_second / 1e9, 4),
            "R2": lambda fit: number_text(fit.r_squared, 4),
        },
        right=(2, 3, 4, 5),
    )


def operators(
    device: DeviceOption = "cpu",
    precision: PrecisionOption = "fp16",
    device_type: DeviceTypeOption = None,
    repeats: RepeatsOption = 3,
    json: JsonOption = False,
    output: WrittenOption = None,
    quiet: QuietOption = False,
) -> int:
    """Measure operators of many sizes on a device (needs torch), for `profile train`."""
    from hetplan.runtime.measuring.layers import measure_operators

    measured = measure_operators(
        device,
        precision,
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
    output: WrittenOption = None,
) -> int:
    """Learn a device's efficiency from measured operators, or that of links from collectives.

    Prints the error on what was kept apart. The result is for `profile predict --efficiency FILE`,
    that of links for `plan --links FILE`.
    """
    value = read_json(files[0])
    learned: EfficiencyFile | LinkEfficiencyFile
    if isinstance(value, dict) and value.get("format") == "hetplan-collectives":
        learned = train_links([load_collectives(path) for path in files])
        table = links_table(learned)
    else:
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
