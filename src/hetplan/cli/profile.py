"""`hetplan profile`: what a model costs, predicted per layer (a profile file), or measured here (a
batch curve)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli import batch_curve as curves
from hetplan.cli import learning
from hetplan.cli.options import JsonOption, QuietOption
from hetplan.cli.output import check_target, note, print_json, print_tables
from hetplan.cli.predicting import (
    check_degrees,
    predicted,
    summary,
    told,
    traced_model,
    whole_numbers,
)
from hetplan.cli.sources import open_cluster
from hetplan.errors import InputError
from hetplan.text import Table, number_text, seconds_text

if TYPE_CHECKING:
    from hetplan.profiling.models import Model


def profile(
    action: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[train FILE…]",
            help="Learn an efficiency from a file of --operators, or some of --collectives.",
        ),
    ] = None,
    predict: Annotated[
        bool,
        typer.Option(
            "--predict", help="Predict the times from datasheets (roofline); nothing is run."
        ),
    ] = False,
    batch_curve: Annotated[
        bool,
        typer.Option(
            "--batch-curve",
            help="Measure seconds per micro-batch, and the largest that fits (needs torch).",
        ),
    ] = False,
    operators: Annotated[
        bool,
        typer.Option(
            "--operators", help="Measure operators of many sizes, for `train` (needs torch)."
        ),
    ] = False,
    efficiency: Annotated[
        list[Path] | None,
        typer.Option(
            "--efficiency", metavar="FILE", help="Predict with what `train` wrote, by device type."
        ),
    ] = None,
    collectives: Annotated[
        bool,
        typer.Option(
            "--collectives",
            help="Measure collectives; run it under torchrun, a process per device.",
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="NAME|FILE", help="Built-in model, config.json or traced model."
        ),
    ] = None,
    factory: Annotated[
        str | None,
        typer.Option(
            "--factory",
            metavar="MODULE:FUNCTION",
            help="Predict your own module, traced (needs torch).",
        ),
    ] = None,
    model_output: Annotated[
        Path | None,
        typer.Option("--model-output", metavar="FILE", help="Write the traced model, for --model."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", metavar="FILE|NAME", help="Cluster file (YAML), or an example's name."
        ),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch", metavar="N", help="Micro-batches as `plan` chooses them for it."
        ),
    ] = None,
    micro_batches: Annotated[
        list[str] | None,
        typer.Option("--micro-batches", metavar="N[,N…]", help="Sizes; default 1, 2, 4, … 64."),
    ] = None,
    tensor: Annotated[
        list[str] | None,
        typer.Option(
            "--tensor", metavar="N[,N…]", help="Degrees; default powers of two within a node."
        ),
    ] = None,
    sequence: Annotated[
        int | None,
        typer.Option("--sequence", metavar="N", help="Tokens per sample; default the model's."),
    ] = None,
    precision: Annotated[str, typer.Option("--precision", metavar="fp16|bf16|fp32")] = "fp16",
    device: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="cpu|cuda[:N]", help="Measure there (needs torch); default cpu."
        ),
    ] = None,
    device_type: Annotated[
        str | None,
        typer.Option(
            "--device-type", metavar="NAME", help="Measured: the device's name in cluster files."
        ),
    ] = None,
    devices: Annotated[
        int,
        typer.Option(
            "--devices", metavar="N", help="Batch curve: devices that share ZeRO's shards."
        ),
    ] = 1,
    memory_gib: Annotated[
        float | None,
        typer.Option(
            "--memory-gib", metavar="GIB", help="Batch curve: limit; default the GPU's free memory."
        ),
    ] = None,
    max_micro_batch: Annotated[
        int,
        typer.Option("--max-micro-batch", metavar="N", help="Batch curve: try none beyond this."),
    ] = 256,
    repeats: Annotated[
        int, typer.Option("--repeats", metavar="N", help="Measured: timed passes per size.")
    ] = 3,
    json: JsonOption = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the profile to a file."),
    ] = None,
    quiet: QuietOption = False,
) -> int:
    """Write what a model costs: predicted for every device type of a cluster, or measured on this
    machine.

    --predict: a profile from datasheets; with --factory of any PyTorch module, its operators
    counted without running them. --device alone: a profile of what each layer takes there, each
    distinct layer once; with -o it is written table by table, and gone on with after an
    interruption. Plan with either by `hetplan plan --profile FILE`. --batch-curve: Poplar's
    Algorithm 1 on a live device, for `hetplan plan --set poplar.curves=FILE`. --collectives:
    latency and bandwidth of what ranks do together.
    --operators, then `hetplan profile train FILE`: a device's learned efficiency, for --predict
    --efficiency FILE; of --collectives: that of links, for `hetplan plan --links FILE`.
    """
    if action is not None:
        if action[0] != "train":
            raise InputError("hetplan profile", got=action[0], expected="train, or options")
        return learning.train(action[1:], json=json, output=output)
    for option, given in {
        "--efficiency": efficiency, "--factory": factory, "--model-output": model_output,
    }.items():  # fmt: skip
        if given is not None and not predict:
            raise InputError("goes with --predict only", where=option)
    if model_output is not None and factory is None:
        raise InputError("goes with --factory only", where="--model-output")
    if operators:
        if predict or batch_curve or collectives or model is not None:
            raise InputError(
                "goes with --device, --precision, --repeats and -o only", where="--operators"
            )
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
    needed = {"--model": model or factory, "--cluster": cluster} if predict else {"--model": model}
    for option, value in needed.items():
        if value is None:
            raise InputError("missing", where=option, expected="a name or a file")
    check_target(output)
    if factory is not None:
        assert cluster is not None
        chosen = traced_model(factory, model, precision, model_output, quiet=quiet)
        found = predicted(
            chosen, open_cluster(cluster), global_batch, micro_batches, tensor, efficiency or []
        )
        return told(found, chosen, json=json, output=output)
    assert model is not None
    from hetplan.profiling.models import load_model

    if batch_curve:
        for option, unused in {
            "--cluster": cluster,
            "--global-batch": global_batch,
            "--micro-batches": micro_batches,
            "--tensor": tensor,
        }.items():
            if unused is not None:
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
    found = predicted(
        chosen, open_cluster(cluster), global_batch, micro_batches, tensor, efficiency or []
    )
    return told(found, chosen, json=json, output=output)


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
        micro_batches=(1, 2, 4)
        if micro_batches is None
        else whole_numbers(micro_batches, "--micro-batches"),
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
