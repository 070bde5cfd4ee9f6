"""The commands `hetplan profile …`.

`predict` predicts the seconds of a model's layers from datasheets, `import` reads files of other
planners and profilers. `measure`, `batch-curve`, `collectives`, `operators` and `quick` measure on
this machine; they need torch. `train` learns the efficiency of a device or of links from measured
operators or collectives.
"""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from hetplan.adapters.importers import import_cluster, import_file
from hetplan.adapters.importers.common import Imported, Settings
from hetplan.cli.help_page import described
from hetplan.cli.options import (
    ClusterOption,
    EfficiencyOption,
    JsonOption,
    MicroBatchesOption,
    ModelOption,
    NamedModelOption,
    PrecisionOption,
    QuietOption,
    SequenceOption,
    StackOption,
    TensorOption,
    TracedOption,
    WrittenOption,
    number,
    open_cluster,
    require_option,
    target,
    whole_numbers,
)
from hetplan.cli.output import emit, note
from hetplan.errors import InputError, require
from hetplan.files import read_json, to_json, to_yaml, write_text
from hetplan.profiling.hardware.cluster import GIB, Cluster, ClusterFile, build_cluster
from hetplan.profiling.models.model import Model, load_model
from hetplan.profiling.models.operators import Precision, load_stack
from hetplan.profiling.profiles.batch_curve import BatchCurve
from hetplan.profiling.profiles.measured_collectives import Collectives
from hetplan.profiling.profiles.predict import (
    LARGEST_MICRO_BATCH,
    default_micro_batches,
    predict as predicted,
)
from hetplan.profiling.profiles.profile import Profile
from hetplan.profiling.rates.efficiency import (
    Learned,
    LinkEfficiencyFile,
    OperatorData,
    packaged,
    train as train_operators,
    train_links,
)
from hetplan.profiling.rates.products import measured_products
from hetplan.runtime.launch.devices import required_torch
from hetplan.schema import parse
from hetplan.text import (
    Column,
    Table,
    bytes_text,
    count_text,
    digits,
    number_text,
    percent_text,
    seconds_text,
)

# The largest number of tokens, samples or nodes of an imported measurement, beyond any that is run.
LARGEST = 10**6
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


@described(
    examples=(
        (
            "A model's layers on the devices of a cluster",
            "hetplan profile predict --model gpt2 --cluster amp-mixed -o profile.json",
        ),
    ),
)
def predict(
    cluster: ClusterOption,
    model: NamedModelOption = None,
    factory: TracedOption = None,
    model_output: Annotated[
        Path | None,
        target("--model-output", help="Write the traced model, for --model."),
    ] = None,
    efficiency: EfficiencyOption = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch", metavar="N", help="Micro-batches as `plan` chooses them for it."
        ),
    ] = None,
    micro_batches: MicroBatchesOption = None,
    tensor: TensorOption = None,
    sequence: SequenceOption = None,
    precision: PrecisionOption = "fp16",
    stack: StackOption = "fused",
    json: JsonOption = False,
    output: WrittenOption = None,
    quiet: QuietOption = False,
) -> int:
    """Predict every layer's times, from published measurements of operators where there are some,
    for each device type of a cluster.

    With --factory the operators of any PyTorch module are counted without running them. Micro-
    batches default to 1, 2, 4, … 64, tensor degrees to the powers of two within a node.
    """
    require(
        model_output is None or factory is not None,
        "goes with --factory only",
        where="--model-output",
    )
    require(
        micro_batches is None or global_batch is None,
        "--micro-batches and --global-batch exclude each other",
    )
    if factory is not None:
        chosen = traced_model(factory, model, precision, model_output, quiet=quiet)
    else:
        attention = load_stack(stack).attention
        chosen = load_model(
            named(model), sequence=sequence, precision=precision, attention=attention
        )
    if micro_batches is not None:
        sizes = whole_numbers(micro_batches, "--micro-batches")
    elif global_batch is not None:
        sizes = default_micro_batches(global_batch)
    else:
        # The default sizes of this global batch are all powers of two up to it.
        sizes = default_micro_batches(LARGEST_MICRO_BATCH)
    hardware = open_cluster(cluster)
    profile = predicted(
        chosen,
        hardware,
        micro_batches=sizes,
        tensor_degrees=None if tensor is None else tensor_degrees(tensor, chosen),
        learned=learned_of(efficiency or [], hardware, chosen.precision),
        stack=load_stack(stack),
    )
    note(*chosen.notes)
    return emit(
        profile.model_dump(mode="json"), [profile_table(profile, chosen)], json=json, output=output
    )


def named(model: str | None) -> str:
    """The value of `--model`. Raises InputError where the option is missing."""
    if model is None:
        raise InputError("missing option '--model'", expected="a name, a file, or --factory")
    return model


def traced_model(
    factory: str,
    name: str | None,
    precision: Precision,
    output: Path | None,
    *,
    quiet: bool,
    probe: bool | None = False,
) -> Model:
    """The model traced from the module that a factory makes.

    name: the model's name; None: the factory's name. output: the file to which to write the traced
    model; None: no file. quiet: write no note on stderr. probe: whether to compare the module's
    training with that of its layers; None: where the module is not large. Raises UnsupportedError
    where they differ.
    """
    required_torch("tracing modules")
    from hetplan.runtime.engine.models import check_planned, from_factory
    from hetplan.runtime.spmd.runs import check_planned_runs
    from hetplan.runtime.tracing.layers import trace
    from hetplan.runtime.tracing.program import plannable

    module = from_factory(factory, None)  # None: there is no plan yet that the factory could read
    traced = trace(module, name=name or factory, precision=precision)
    if output is not None:
        traced.save(output)
    unknown = check_planned(module, [layer.name for layer in traced.layers], probe)
    if unknown is not None:
        note(unknown)
    model = plannable(module, traced, partial(check_planned_runs, module, probe))
    if not quiet:
        count = sum(len(layer.operators) for layer in model.layers)
        forward, backward = model.forward_flops() / 1e9, model.backward_flops() / 1e9
        note(
            f"traced {count} operators in {len(model.layers)} layers: {forward:.4g} GFLOP "
            f"forward, {backward:.4g} backward per sample"
        )
    return model


def learned_of(files: Sequence[Path], cluster: Cluster, precision: str) -> dict[str, Learned]:
    """Device type of the cluster -> its learned efficiency, from one of the files or else from the
    data that come with hetplan. Device types without either are left out.

    Raises InputError for a file of another precision and for two files of one device type.
    """
    measured: dict[str, OperatorData] = {}
    for path in files:
        file = OperatorData.load(path)
        require(
            file.precision == precision,
            "is of another precision",
            where=str(path),
            got=file.precision,
            expected=repr(precision),
        )
        require(
            file.device not in measured,
            "device type is in two files",
            where=str(path),
            got=file.device,
        )
        measured[file.device] = file
    learned = {}
    for name in cluster.types:
        data = measured.get(name) or packaged(name, precision)
        if data:
            learned[name] = Learned(data, cluster.specs[name])
    return learned


def tensor_degrees(texts: Sequence[str], model: Model) -> tuple[int, ...]:
    """The tensor-parallel degrees of `--tensor`. Raises InputError for one that does not divide the
    model."""
    degrees = whole_numbers(texts, "--tensor")
    for degree in degrees:
        require_option(
            model.tensor_degree_fits(degree),
            "--tensor",
            degree,
            "a divisor of the model's heads and feed-forward size",
        )
    return degrees


def profile_table(profile: Profile, model: Model) -> Table:
    """A table of the whole model's forward and backward seconds per micro-batch, with samples per
    second. For a predicted profile, notes name the source of each device type's rates."""
    tokens = "" if profile.sequence is None else f", {profile.sequence} tokens per sample"
    provenance = profile.provenance
    notes = ["whole model on one tensor group, without all-reduces between its devices"]
    if provenance.kind == "predicted":
        # the source of rates -> the device types whose rates come from it
        sources = {"rescaled by its own operators": list(provenance.learned)}
        for name in profile.devices():
            if name in provenance.learned:
                continue
            if measured_products(name, profile.precision):
                source = "as others measured its operators"
            else:
                source = "never measured, physics alone"
            sources.setdefault(source, []).append(name)
        notes += [f"{source}: {', '.join(names)}" for source, names in sources.items() if names]
    return passes_table(
        f"{provenance.kind} profile of {profile.model} ({count_text(model.params)} "
        f"parameters, {len(profile.layers)} layers{tokens}, {profile.precision})",
        profile,
        notes,
    )


def passes_table(title: str, profile: Profile, notes: Sequence[str] = ()) -> Table:
    """A table with one row per table of a profile: device type, tensor degree and micro-batch."""
    return Table.of(
        title,
        profile.tables,
        [
            Column("device", lambda table: table.device),
            Column("tensor", lambda table: table.tensor, right=True),
            Column("micro-batch", lambda table: table.micro_batch, right=True),
            Column("forward", lambda table: sum(table.forward_seconds), seconds_text, right=True),
            Column("backward", lambda table: sum(table.backward_seconds), seconds_text, right=True),
            Column(
                "samples/s",
                lambda table: rate_text(table.micro_batch, sum(table.layer_seconds())),
                right=True,
            ),
        ],
        notes,
    )


def rate_text(samples: int, seconds: float) -> str:
    """Samples per second as text; `-` where `seconds` is 0."""
    return number_text(samples / seconds if seconds > 0 else None, 4)


def import_(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="sailor, pipedream, piper, dnn-partitioning, metis, calculon or deepspeed.",
        ),
    ],
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="The file (of some kinds: the folder) to read.")
    ],
    output: Annotated[Path | None, target("--output", "-o", help="Write hetplan's file.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="NAME", help="The model's (of systems: the cluster's) name."
        ),
    ] = None,
    device_type: DeviceTypeOption = None,
    precision: Annotated[
        Precision | None, typer.Option("--precision", help="In which it was measured.")
    ] = None,
    sequence: Annotated[
        int | None,
        typer.Option("--sequence", metavar="N", help="Tokens per sample.", min=1, max=LARGEST),
    ] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option("--micro-batch", metavar="N", help="Samples of one pass.", min=1, max=LARGEST),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes", metavar="N", help="Nodes, of a cluster; default 1.", min=1, max=LARGEST
        ),
    ] = None,
    cluster_output: Annotated[
        Path | None,
        target("--cluster-output", help="Write a cluster file with the links (of sailor)."),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Turn what another planner or profiler wrote into a profile, a model or a cluster file.

    What a file does not state has options; what is assumed instead is printed.
    """
    for option, text in (("--model", model), ("--device-type", device_type)):
        # As long as a field of type `Name` may be.
        require_option(text is None or 1 <= len(text) <= 200, option, text, "1 to 200 characters")
    settings = Settings(
        model=model,
        device=device_type,
        precision=precision,
        sequence=sequence,
        micro_batch=micro_batch,
        nodes=nodes,
        with_links=cluster_output is not None,
    )
    imported = import_file(kind, path, settings)
    document = imported.document
    notes = imported.notes
    if cluster_output is not None:
        cluster = import_cluster(kind, path, settings)
        build_cluster(parse(ClusterFile, cluster.document, where="the imported cluster"))
        write_text(cluster_output, to_yaml(cluster.document))
        notes += cluster.notes
    if output is not None:
        # Cluster files are read as YAML. JSON is YAML, too, but people edit cluster files.
        text = to_yaml(document) if imported.kind == "cluster" else to_json(document)
        write_text(output, text)
    note(*notes)
    return emit(document, [summary(imported, output)], json=json)


def summary(imported: Imported, path: Path | None) -> Table:
    """A table of an imported document: one row for each table of a profile, or for each entry of a
    model or cluster. path: the file to which it was written; None: not written."""
    where = "" if path is None else f", written to {path}"
    document = imported.document
    if imported.kind != "profile":
        return Table(
            f"{imported.kind}{where}",
            ("key", "value"),
            tuple((key, str(value)) for key, value in document.items()),
        )
    profile = Profile.model_validate(document, strict=False)  # JSON has lists for tuples
    params = bytes_text(sum(layer.param_bytes for layer in profile.layers))
    return passes_table(
        f"profile of {profile.model}, {len(profile.layers)} layers, {params} of parameters{where}",
        profile,
    )


@described(
    examples=(
        (
            "What each layer takes on the GPU of this machine",
            "hetplan profile measure --model gpt2 --device cuda -o profile.json",
        ),
    ),
)
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
    return emit(
        profile.model_dump(mode="json"), [profile_table(profile, chosen)], json=json, output=output
    )


@described(
    examples=(
        (
            "One card, standing for eight of its kind",
            "hetplan profile batch-curve --model gpt2 --device cuda --devices 8 -o a100.json",
        ),
    ),
)
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
    sample fits. Under torchrun the ranks hold the model's weights in shards, as under ZeRO 3.
    """
    from hetplan.runtime.launch.torchrun import is_rank
    from hetplan.runtime.measuring.batches import measure_batch_curve
    from hetplan.runtime.measuring.collectives import joined_ranks

    require(
        memory_gib is not None or device != "cpu",
        "missing",
        where="--memory-gib",
        expected="what training may use of a CPU's memory",
    )
    first_rank = not is_rank() or os.environ["RANK"] == "0"  # the process that prints and writes
    group = joined_ranks(device) if is_rank() else nullcontext(device)
    with group as place:
        curve = measure_batch_curve(
            load_model(model, sequence=sequence, precision=precision),
            place,
            memory=None if memory_gib is None else memory_gib * GIB,
            name=device_type,
            devices=devices,
            largest=max_micro_batch,
            repeats=repeats,
            tell=note if first_rank and not quiet else None,
        )
    fits = curve.zero_stage is not None
    if not first_rank:  # this process only returns the exit code
        return int(not fits)
    document = curve.model_dump(mode="json")
    return emit(document, [curve_table(curve)], json=json, output=output, ok=fits)


def curve_table(curve: BatchCurve) -> Table:
    """A table of the curve's measured points; its notes state the largest micro-batch under each
    ZeRO stage."""
    largest = ", ".join(f"ZeRO {stage}: {size}" for stage, size in enumerate(curve.largest))
    fits = "no sample fits"
    if curve.zero_stage is not None:
        fits = f"a sample fits from ZeRO {curve.zero_stage} on"
    notes = [f"largest micro-batch: {largest}; {fits}"]
    if curve.tried_up_to in curve.largest:  # some ZeRO stage was ended by the option, not by memory
        notes.append(f"stopped at --max-micro-batch {curve.tried_up_to}: more may fit")
    if curve.saved_bytes_per_sample is not None:
        activations = bytes_text(curve.saved_bytes_per_sample)
        notes.append(f"activations: {activations} per sample, measured")
    return Table.of(
        f"{curve.model} x {curve.sequence} tokens in {curve.precision} on {curve.device}, measured "
        f"within {bytes_text(curve.memory_bytes)}, one of {curve.devices}",
        curve.points,
        [
            Column("micro-batch", lambda point: point.micro_batch, right=True),
            Column("forward + backward", lambda point: point.seconds, seconds_text, right=True),
            Column("spread", lambda point: point.spread_seconds, seconds_text, right=True),
            Column(
                "samples/s", lambda point: rate_text(point.micro_batch, point.seconds), right=True
            ),
        ],
        notes,
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
    if measured is None:
        return 0
    table = Table.of(
        f"collectives of {measured.ranks} ranks on {measured.device}, {measured.backend}, "
        f"fitted to the fastest of {repeats}",
        measured.fits,
        [
            Column("operation", lambda fit: fit.operation),
            Column("group", lambda fit: fit.group),
            Column("ranks", lambda fit: fit.ranks, right=True),
            Column("latency", lambda fit: fit.latency_seconds, seconds_text, right=True),
            Column(
                "GB/s",
                lambda fit: fit.bytes_per_second / 1e9,
                digits(4),
                right=True,
            ),
            Column("R2", lambda fit: fit.r_squared, digits(4), right=True),
        ],
    )
    return emit(measured.model_dump(mode="json"), [table], json=json, output=output)


@described(
    examples=(
        (
            "Operators of many sizes, for `train`",
            "hetplan profile operators --device cuda --precision bf16 -o operators.json",
        ),
    ),
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
    from hetplan.runtime.measuring.operators import measure_operators

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
    table = Table(title, ("", ""), rows)
    return emit(measured.model_dump(mode="json"), [table], json=json, output=output)


@described(
    examples=(("Ten operators in a minute", "hetplan profile quick --device cuda -o quick.json"),),
)
def quick(
    device: DeviceOption = "cuda",
    precision: PrecisionOption = "fp16",
    device_type: DeviceTypeOption = None,
    json: JsonOption = False,
    output: WrittenOption = None,
) -> int:
    """Measure ten operators, and on several GPUs all-reduces, in a minute (needs torch).

    The result is for `profile predict --efficiency FILE`: seconds expected of the device type are
    rescaled to it.
    """
    from hetplan.runtime.measuring.operators import measure_quickly

    require(
        not device.startswith("cpu") or precision != "fp16",
        "takes many minutes on a CPU",
        where="--precision",
        got=precision,
        expected="fp32 or bf16 with --device cpu",
    )
    learned = train_operators(measure_quickly(device, precision, name=device_type))
    note(*all_reduce_lines(learned))
    return emit(
        learned.model_dump(mode="json"), [operators_table(learned)], json=json, output=output
    )


def all_reduce_lines(learned: OperatorData) -> list[str]:
    """A line with the measured all-reduces as a key of a cluster file; none without such
    measurements."""
    rates = learned.all_reduce_bytes_per_second
    if not rates:
        return []
    stated = ", ".join(f"{ranks}: {rate * 8e-9:.4g}" for ranks, rate in sorted(rates.items()))
    return [
        "large all-reduces by number of ranks, for the nodes of a cluster file: "
        f"all_reduce_gbit_per_s: {{{stated}}}"
    ]


@described(
    examples=(
        (
            "Rates of a device from measured operators",
            "hetplan profile train operators.json -o efficiency.json",
        ),
    ),
)
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
    """Learn from measured operators how much longer a device takes, or links from collectives.

    Prints the error of what was left out. The result is for `profile predict --efficiency FILE`,
    that of links for `plan --links FILE`.
    """
    value = read_json(files[0])
    learned: OperatorData | LinkEfficiencyFile
    if isinstance(value, dict) and value.get("format") == "hetplan-collectives":
        learned = train_links([Collectives.load(path) for path in files])
        table = links_table(learned)
    else:
        require(
            len(files) <= 1,
            "hetplan profile train",
            got=len(files),
            expected="one file of measured operators",
        )
        learned = train_operators(OperatorData.load(files[0]))
        table = operators_table(learned)
    return emit(learned.model_dump(mode="json"), [table], json=json, output=output)


def links_table(learned: LinkEfficiencyFile) -> Table:
    """A table of the mean errors of three predictions on message sizes that training left out."""
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
    return Table(
        f"learned efficiency of links between {learned.device}, {learned.backend}",
        ("prediction", "error"),
        rows,
        notes,
        right=(1,),
    )


def operators_table(learned: OperatorData) -> Table:
    """A table of the mean errors by kind of operator: predicted from the other measured operators,
    and without any measured operator."""
    return Table.of(
        f"operators of {learned.device} in {learned.precision}",
        learned.errors,
        [
            Column("operators", lambda kind: kind.kind),
            Column("measured", lambda kind: kind.operators, right=True),
            Column("error", lambda kind: kind.error, percent_text, right=True),
            Column("without them", lambda kind: kind.expected_error, percent_text, right=True),
        ],
        ["mean error of the seconds of each, predicted from the others"],
    )
