"""`hetplan profile`: what a model costs, predicted per layer (a profile file), or measured here (a batch curve)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli import batch_curve as curves
from hetplan.cli import learning
from hetplan.cli.options import JsonOption, QuietOption, split_list
from hetplan.cli.output import check_target, note, print_json, print_tables, write_document
from hetplan.cli.sources import open_cluster
from hetplan.errors import InputError
from hetplan.text import Table, count_text, number_text, seconds_text

if TYPE_CHECKING:
    from hetplan.profiling.cluster import Cluster
    from hetplan.profiling.models import Model
    from hetplan.profiling.profile import Profile, ProfileTable

LARGEST = 4096  # of micro-batches and tensor degrees: beyond any device and any node


def profile(
    action: Annotated[
        list[str] | None,
        typer.Argument(metavar="[train FILE]", help="Learn a device's efficiency from its --operators file."),
    ] = None,
    predict: Annotated[
        bool, typer.Option("--predict", help="Predict the times from datasheets (roofline); nothing is run.")
    ] = False,
    batch_curve: Annotated[
        bool,
        typer.Option(
            "--batch-curve", help="Measure seconds per micro-batch, and the largest that fits (needs torch)."
        ),
    ] = False,
    operators: Annotated[
        bool, typer.Option("--operators", help="Measure operators of many sizes, for `train` (needs torch).")
    ] = False,
    efficiency: Annotated[
        list[Path] | None,
        typer.Option("--efficiency", metavar="FILE", help="Predict with what `train` wrote, by device type."),
    ] = None,
    collectives: Annotated[
        bool,
        typer.Option(
            "--collectives", help="Measure collectives; run it under torchrun, a process per device."
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME|FILE", help="Built-in model, or a Hugging Face config.json."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="FILE|NAME", help="Cluster file (YAML), or an example's name."),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option("--global-batch", metavar="N", help="Micro-batches as `plan` chooses them for it."),
    ] = None,
    micro_batches: Annotated[
        list[str] | None,
        typer.Option("--micro-batches", metavar="N[,N…]", help="Sizes; default 1, 2, 4, … 64."),
    ] = None,
    tensor: Annotated[
        list[str] | None,
        typer.Option("--tensor", metavar="N[,N…]", help="Degrees; default powers of two within a node."),
    ] = None,
    sequence: Annotated[
        int | None, typer.Option("--sequence", metavar="N", help="Tokens per sample; default the model's.")
    ] = None,
    precision: Annotated[str, typer.Option("--precision", metavar="fp16|bf16|fp32")] = "fp16",
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="cpu|cuda[:N]", help="Measure there (needs torch); default cpu."),
    ] = None,
    device_type: Annotated[
        str | None,
        typer.Option("--device-type", metavar="NAME", help="Measured: the device's name in cluster files."),
    ] = None,
    devices: Annotated[
        int, typer.Option("--devices", metavar="N", help="Batch curve: devices that share ZeRO's shards.")
    ] = 1,
    memory_gib: Annotated[
        float | None,
        typer.Option(
            "--memory-gib", metavar="GIB", help="Batch curve: limit; default the GPU's free memory."
        ),
    ] = None,
    max_micro_batch: Annotated[
        int, typer.Option("--max-micro-batch", metavar="N", help="Batch curve: try none beyond this.")
    ] = 256,
    repeats: Annotated[
        int, typer.Option("--repeats", metavar="N", help="Measured: timed passes per size.")
    ] = 3,
    json: JsonOption = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the profile to a file.")
    ] = None,
    quiet: QuietOption = False,
) -> int:
    """Write what a model costs: predicted for every device type of a cluster, or measured on this machine.

    --predict: a profile from datasheets. --device alone: a profile of what each layer takes there, each distinct layer
    once; with -o it is written table by table, and gone on with after an interruption. Plan with either by `hetplan
    plan --profile FILE`. --batch-curve: Poplar's Algorithm 1 on a live device, for `hetplan plan --set
    poplar.curves=FILE`. --collectives: latency and bandwidth of what ranks do together.
    --operators, then `hetplan profile train FILE`: a device's learned efficiency, for --predict --efficiency FILE.
    """
    if action is not None:
        if action[0] != "train":
            raise InputError("hetplan profile", got=action[0], expected="train, or options")
        return learning.train(action[1:], json=json, output=output)
    if efficiency is not None and not predict:
        raise InputError("goes with --predict only", where="--efficiency")
    if operators:
        if predict or batch_curve or collectives or model is not None:
            raise InputError("goes with --device, --precision, --repeats and -o only", where="--operators")
        return learning.operators(
            device or "cpu",
            precision,
            device_type=device_type,
            repeats=repeats,
            json=json,
            output=output,
            quiet=quiet,
        )
    if collectives:
        if predict or batch_curve or model is not None:
            raise InputError("goes with --device, --repeats and -o only", where="--collectives")
        return joint(device or "cpu", repeats, json=json, output=output, quiet=quiet)
    if (predict and batch_curve) or not (predict or batch_curve or device):
        expected = "--predict, --device, --batch-curve, --collectives or --operators"
        raise InputError("nothing to do", where="hetplan profile", expected=expected)
    if predict and device is not None:
        raise InputError("does not go with --predict", where="--device")
    needed = {"--model": model, "--cluster": cluster} if predict else {"--model": model}
    for option, value in needed.items():
        if value is None:
            raise InputError("missing", where=option, expected="a name or a file")
    assert model is not None
    check_target(output)
    from hetplan.profiling.models import load_model

    if batch_curve:
        for option, given in {
            "--cluster": cluster,
            "--global-batch": global_batch,
            "--micro-batches": micro_batches,
            "--tensor": tensor,
        }.items():
            if given is not None:
                raise InputError("does not go with --batch-curve", where=option)
        return curves.run(
            load_model(model, sequence=sequence, precision=precision),
            device or "cpu",
            memory_gib=memory_gib,
            device_type=device_type,
            devices=devices,
            largest=max_micro_batch,
            repeats=repeats,
            json=json,
            output=output,
            quiet=quiet,
        )
    if device is not None:
        return measured(
            load_model(model, sequence=sequence, precision=precision),
            device,
            micro_batches,
            tensor,
            device_type=device_type,
            repeats=repeats,
            json=json,
            output=output,
            quiet=quiet,
        )
    assert cluster is not None
    chosen = load_model(model, sequence=sequence, precision=precision)
    found = predicted(chosen, open_cluster(cluster), global_batch, micro_batches, tensor, efficiency or [])
    document = found.model_dump(mode="json")
    write_document(output, document)
    for line in chosen.notes:
        note(line)
    if json:
        print_json(document)
    else:
        print_tables([summary(found, chosen)])
    return 0


def predicted(
    model: Model,
    cluster: Cluster,
    global_batch: int | None,
    micro_batches: Sequence[str] | None,
    tensor: Sequence[str] | None,
    efficiency: Sequence[Path],
) -> Profile:
    """The predicted profile for the given or the usual sizes and degrees; raises InputError."""
    from hetplan.profiling.predict import LARGEST_MICRO_BATCH, default_micro_batches, predict

    if micro_batches is not None and global_batch is not None:
        raise InputError("--micro-batches and --global-batch exclude each other")
    # All powers of two up to the largest divide it, so they are its own default sizes.
    sizes = default_micro_batches(LARGEST_MICRO_BATCH if global_batch is None else global_batch)
    if micro_batches is not None:
        sizes = whole_numbers(micro_batches, "--micro-batches")
    degrees = None if tensor is None else whole_numbers(tensor, "--tensor")
    check_degrees(model, degrees or ())
    learned = learning.learned_of(efficiency, cluster, model.precision) if efficiency else None
    return predict(model, cluster, micro_batches=sizes, tensor_degrees=degrees, learned=learned)


def measured(
    model: Model,
    device: str,
    micro_batches: Sequence[str] | None,
    tensor: Sequence[str] | None,
    *,
    device_type: str | None,
    repeats: int,
    json: bool,
    output: Path | None,
    quiet: bool,
) -> int:
    """Measure, write after every table, print."""
    from hetplan.runtime.measure import measure_profile

    degrees = (1,) if tensor is None else whole_numbers(tensor, "--tensor")
    check_degrees(model, degrees)
    found = measure_profile(
        model,
        device,
        micro_batches=(1, 2, 4) if micro_batches is None else whole_numbers(micro_batches, "--micro-batches"),
        tensor_degrees=degrees,
        name=device_type,
        repeats=repeats,
        output=output,
        tell=None if quiet else note,
    )
    if output is not None:
        found.save(output)
    if json:
        print_json(found.model_dump(mode="json"))
    else:
        print_tables([summary(found, model)])
    return 0


def joint(device: str, repeats: int, *, json: bool, output: Path | None, quiet: bool) -> int:
    """Measure collectives; rank 0 prints and writes."""
    from hetplan.runtime.collectives import measure_collectives

    check_target(output)
    if repeats < 1:
        raise InputError("repeats", got=repeats, expected="at least 1")
    found = measure_collectives(device, repeats=repeats, tell=None if quiet else note)
    if found is None:
        return 0
    if output is not None:
        found.save(output)
    if json:
        print_json(found.model_dump(mode="json"))
        return 0
    rows = tuple(
        (
            fit.operation,
            fit.group,
            str(fit.ranks),
            seconds_text(fit.latency_seconds),
            number_text(fit.bytes_per_second / 1e9, 4),
            number_text(fit.r_squared, 4),
        )
        for fit in found.fits
    )
    header = ("operation", "group", "ranks", "latency", "GB/s", "R2")
    title = f"collectives of {found.ranks} ranks on {found.device}, {found.backend}, fitted to the fastest of {repeats}"
    print_tables([Table(title, header, rows, right=(2, 3, 4, 5))])
    return 0


def check_degrees(model: Model, degrees: Sequence[int]) -> None:
    """Raise InputError for a tensor degree that the model cannot take."""
    for degree in degrees:
        if not model.tensor_degree_fits(degree):
            expected = "a divisor of the model's heads and feed-forward size"
            raise InputError("not usable", where="--tensor", got=degree, expected=expected)


def whole_numbers(texts: Sequence[str], option: str) -> tuple[int, ...]:
    """`["1,2", "4"]` as (1, 2, 4), each once, ascending; raises InputError."""
    numbers = set()
    for text in split_list(texts):
        if not (text.isdecimal() and 1 <= int(text[:9]) <= LARGEST and len(text) < 9):
            expected = f"whole numbers from 1 to {LARGEST}"
            raise InputError("not usable", where=option, got=text, expected=expected)
        numbers.add(int(text))
    if not numbers:
        raise InputError("no number given", where=option)
    return tuple(sorted(numbers))


def summary(profile: Profile, model: Model) -> Table:
    """One row per table: the whole model's forward and backward of one micro-batch, and the rate that gives."""
    tokens = "" if profile.sequence is None else f", {profile.sequence} tokens per sample"
    title = (
        f"{profile.provenance.kind} profile of {profile.model} ({count_text(model.params)} parameters, "
        f"{len(profile.layers)} layers{tokens}, {profile.precision})"
    )
    header = ("device", "tensor", "micro-batch", "forward", "backward", "samples/s")
    rows = tuple(summary_row(table) for table in profile.tables)
    notes = ("whole model on one tensor group, without all-reduces between its devices",)
    return Table(title, header, rows, notes, right=(1, 2, 3, 4, 5))


def summary_row(table: ProfileTable) -> tuple[str, ...]:
    """Sums over the layers."""
    seconds = sum(table.seconds())
    return (
        table.device,
        str(table.tensor),
        str(table.micro_batch),
        seconds_text(sum(table.forward_seconds)),
        seconds_text(sum(table.backward_seconds)),
        number_text(table.micro_batch / seconds if seconds > 0 else None, 4),
    )
