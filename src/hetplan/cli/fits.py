"""`hetplan fits`: whether a model can be trained on a cluster, by memory alone."""

from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from hetplan.cli.help_page import described
from hetplan.cli.options import (
    ClusterOption,
    JsonOption,
    MarginOption,
    ModelOption,
    PrecisionOption,
    SequenceOption,
    Trainer,
    number,
    open_cluster,
)
from hetplan.cli.output import emit, note
from hetplan.planner import fits as memory
from hetplan.text import (
    Column,
    Table,
    bytes_text,
    devices_counted,
)

ORDER = (
    "one row for each ZeRO level, simplest first: least recomputation, then fewest devices in a "
    "replica, then the lowest level"
)


@described(
    sections={
        "Model, cluster and batch": "--model --cluster --global-batch --sequence --precision",
        "Memory": "--framework --memory-margin --optimizer --gradient-bytes --moment-bytes --loss "
        "--reshard",
        "Adapters": "--adapters --base",
        "Choice of layouts": "--zero --recomputation --micro-batch",
        "Output": "--json --help",
    },
    examples=(
        (
            "Does Llama 2 7B fit on 8 A100 and 8 V100, and how?",
            "hetplan fits --model llama2-7b --cluster department",
        ),
        (
            "The same under PyTorch's FSDP, with weights sharded and bf16",
            "hetplan fits --model llama2-7b --cluster department --framework fsdp --precision bf16 "
            "--zero 3",
        ),
        (
            "The same with adapters beside frozen weights in 4 bits",
            "hetplan fits --model llama2-7b --cluster department --adapters lora:16 --base 4",
        ),
    ),
)
def fits(
    model: ModelOption,
    cluster: ClusterOption,
    training: Trainer,
    global_batch: Annotated[
        int | None,
        number(
            "--global-batch",
            least=1,
            most=10**9,
            help="Samples per iteration; default enough for every device.",
        ),
    ] = None,
    sequence: SequenceOption = None,
    precision: PrecisionOption = "fp16",
    memory_margin: MarginOption = 0.05,
    zero: Annotated[
        int | None, number("--zero", least=0, most=3, help="ZeRO level; default any.")
    ] = None,
    recomputation: Annotated[
        str | None,
        typer.Option(
            "--recomputation",
            metavar="MODE",
            help="Recomputation of layers: none, selective or full; under fsdp none, operators "
            "or full; default any.",
        ),
    ] = None,
    micro_batch: Annotated[
        int | None,
        number(
            "--micro-batch",
            least=1,
            most=10**9,
            help="Samples of a micro-batch; default the most that fit.",
        ),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Say whether a model can be trained on a cluster, how, and what would make it fit.

    Memory alone: weights, gradients, Adam's states, activations. Exit code 0 when it fits, 1 when
    it does not.
    """
    fit = memory.fits(
        training.trained(model),
        open_cluster(cluster),
        global_batch=global_batch,
        sequence=sequence,
        precision=precision,
        framework=training.trainer(),
        memory_margin=memory_margin,
        zero=zero,
        recomputation=recomputation,
        micro_batch=micro_batch,
    )
    note(*fit.workload.model.notes)
    return emit(fit.document(), fit_tables(fit, zero), json=json, ok=fit.fits)


def fit_tables(fit: memory.Fit, zero: int | None) -> Iterator[Table]:
    """The table of the layouts that fit, or of the one nearest to fitting, with notes.

    The notes give the memory of the fullest device, and changes that would make the model fit.
    zero: the ZeRO level that the user asked for; None: any.
    """
    workload = fit.workload
    job = (
        f"{workload.model.name} in {workload.precision} on "
        f"{devices_counted(workload.cluster.counts())}"
    )
    rows = list(fit.layouts)
    if not rows and fit.nearest is not None:
        rows = [fit.nearest]
    notes = layout_notes(fit, rows)
    levels_without_layout = sorted(set(workload.framework.levels) - {row.zero for row in rows})
    if fit.fits and zero is None and levels_without_layout:
        levels = " or ".join(map(str, levels_without_layout))
        notes.append(f"no layout fits with ZeRO {levels}")
    total = len(workload.cluster.devices)
    unused = 0
    if rows:
        unused = total - rows[0].shape.devices
    if unused > 0:
        notes.append(f"unused: {unused} of {total} devices")
    if fit.fits:
        title = f"fits: {job}: {rows[0].text}"  # ORDER: the simplest comes first
        notes.append(ORDER)
    else:
        title = f"does not fit: {job}"
        if rows:
            title += f"; nearest is {rows[0].text}"
        notes.append("tried: all ZeRO levels, degrees, recomputations and micro-batches allowed")
        if fit.advice:
            notes += [f"would fit: {line}" for line in fit.advice]
        else:
            notes.append("no number of devices would do")
    yield Table.of(
        title,
        rows,
        [
            Column("ZeRO", lambda row: row.zero, right=True),
            Column("tensor", lambda row: row.shape.tensor, right=True),
            Column("pipeline", lambda row: row.shape.pipeline, right=True),
            Column("data", lambda row: row.shape.data, right=True),
            Column("recomputation", lambda row: row.recomputation),
            Column("micro-batch", lambda row: row.micro_batch, right=True),
            Column("free" if fit.fits else "lacking", free_text),
        ],
        notes=notes,
    )


def layout_notes(fit: memory.Fit, rows: Sequence[memory.CutLayout]) -> list[str]:
    """Notes on the memory of the first layout's fullest device, on the memory that is usable, and
    on device types whose speed is unknown."""
    notes = []
    if rows:
        fullest = max(rows[0].held, key=lambda device: device.allocated)
        notes.append(f"fullest device: {fullest.text}")
    limits = [f"{bytes_text(limit)} of {kind}" for kind, limit in fit.limit_bytes.items()]
    notes.append(f"usable: {', '.join(limits)}")
    for kind in fit.without_peak:
        notes.append(
            f"{kind} has no peak in {fit.workload.precision} in the catalogue or the cluster file: "
            "memory is answered, no plan can be timed"
        )
    return notes


def free_text(layout: memory.CutLayout) -> str:
    """The memory that is free, or lacking, on each device type: `6.7 GiB A100`."""
    return ", ".join(f"{bytes_text(abs(free))} {kind}" for kind, free in layout.free.items())
