"""What is answered of a model without planning: `hetplan fits`, whether it can be trained on a
cluster, by memory alone; and `hetplan layout`, its balanced cut into virtual pipeline stages, for
Megatron-LM and torchtitan."""

from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from hetplan.cli.options import (
    ClusterOption,
    FrameworkOption,
    JsonOption,
    MarginOption,
    ModelOption,
    PrecisionOption,
    SequenceOption,
    number,
    open_cluster,
    require_option,
)
from hetplan.cli.output import emit
from hetplan.planner import fits as memory
from hetplan.profiling.cluster import Cluster
from hetplan.profiling.models import load_model
from hetplan.profiling.predict import predict
from hetplan.replays.strategies.offers import offer_of
from hetplan.runtime.export.balancing import balanced
from hetplan.text import (
    Table,
    bytes_text,
    devices_counted,
    lines_that_hold,
    percent_text,
    seconds_text,
)

ORDER = (
    "one row for each ZeRO level, simplest first: least recomputation, then fewest devices in a "
    "replica, then the lowest level"
)


def fits(
    model: ModelOption,
    cluster: ClusterOption,
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
    framework: FrameworkOption = "hetplan",
    memory_margin: MarginOption = 0.05,
    zero: Annotated[
        int | None, number("--zero", least=0, most=3, help="ZeRO level; default any.")
    ] = None,
    recomputation: Annotated[
        str | None,
        typer.Option(
            "--recomputation",
            metavar="none|selective|operators|full",
            help="Recomputation of layers; default any.",
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
        model,
        open_cluster(cluster),
        global_batch=global_batch,
        sequence=sequence,
        precision=precision,
        framework=framework,
        memory_margin=memory_margin,
        zero=zero,
        recomputation=recomputation,
        micro_batch=micro_batch,
    )
    return emit(fit.document(), fit_tables(fit, zero), json=json, ok=fit.fits)


def fit_tables(fit: memory.Fit, zero: int | None) -> Iterator[Table]:
    """One line, the layouts, what the first one's fullest device holds, and what would help. zero:
    the level that was asked for."""
    workload = fit.workload
    job = (
        f"{workload.model.name} in {workload.precision} on "
        f"{devices_counted(workload.cluster.counts())}"
    )
    rows = fit.layouts or (() if fit.nearest is None else (fit.nearest,))
    limits = (f"{bytes_text(limit)} of {kind}" for kind, limit in fit.limit_bytes.items())
    fullest = (max(row.held, key=lambda held: held.allocated) for row in rows[:1])
    notes = [*(f"fullest device: {held.text}" for held in fullest), f"usable: {', '.join(limits)}"]
    total = len(workload.cluster.devices)
    notes += [
        f"{kind} has no peak in {workload.precision} in the catalogue or the cluster file: "
        "memory is answered, no plan can be timed"
        for kind in fit.without_peak
    ]
    lacking = sorted({*workload.framework.levels} - {row.zero for row in rows})
    used = rows[0].shape.devices if rows else total
    notes += lines_that_hold(
        {
            f"no layout fits with ZeRO {' or '.join(map(str, lacking))}": (
                fit.fits and zero is None and bool(lacking)
            ),
            f"unused: {total - used} of {total} devices": used < total,
        }
    )
    if fit.fits:
        title = f"fits: {job}: {rows[0].text}"
        notes.append(ORDER)
    else:
        title = f"does not fit: {job}" + (f"; nearest is {rows[0].text}" if rows else "")
        notes.append("tried: all ZeRO levels, degrees, recomputations and micro-batches allowed")
        notes += [f"would fit: {line}" for line in fit.advice] or ["no number of devices would do"]
    yield Table.of(
        title,
        rows,
        {
            "ZeRO": lambda row: str(row.zero),
            "tensor": lambda row: str(row.shape.tensor),
            "pipeline": lambda row: str(row.shape.pipeline),
            "data": lambda row: str(row.shape.data),
            "recomputation": lambda row: row.recomputation,
            "micro-batch": lambda row: str(row.micro_batch),
            "free" if fit.fits else "lacking": free_text,
        },
        notes=notes,
        right=(0, 1, 2, 3, 5),
    )


def free_text(layout: memory.Layout) -> str:
    """What is free, or lacking, on each device type: `6.7 GiB A100`."""
    return ", ".join(f"{bytes_text(abs(free))} {kind}" for kind, free in layout.free.items())


def layout(
    model: ModelOption,
    pipeline: Annotated[
        int, number("--pipeline", least=1, most=256, help="Pipeline parallel degree.")
    ],
    virtual: Annotated[
        int, number("--virtual", least=1, most=64, help="Virtual stages of each rank.")
    ] = 1,
    mtp: Annotated[
        int, number("--mtp", least=0, most=64, help="Layers of multi-token prediction.")
    ] = 0,
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="Device type whose times count.")
    ] = "H100-SXM5-80GB",
    tensor: Annotated[int, number("--tensor", least=1, most=4096, help="Tensor degree.")] = 1,
    micro_batch: Annotated[
        int, number("--micro-batch", least=1, most=10**6, help="Samples of a micro-batch.")
    ] = 1,
    sequence: SequenceOption = None,
    precision: PrecisionOption = "bf16",
    json: JsonOption = False,
) -> int:
    """Cut a model into virtual pipeline stages so that no cut has a faster slowest stage.

    Prints Megatron-LM's --pipeline-model-parallel-layout, and torchtitan's module lists.
    """
    trained, offer = load_model(model, sequence=sequence, precision=precision), offer_of(device, 1)
    names = [layer.name for layer in trained.layers]
    require_option(
        (names[0], names[-1]) == ("embedding", "head"), "--model", model, "a language model"
    )
    require_option(trained.tensor_degree_fits(tensor), "--tensor", tensor, "a divisor of the heads")
    (table,) = predict(
        trained,
        Cluster(offer.name, (offer.node,), {offer.name: offer.spec}),
        micro_batches=[micro_batch],
        tensor_degrees=[tensor],
    ).tables
    best = balanced(table.seconds(), pipeline, virtual, mtp)
    slowest, titan = max(best.seconds), best.torchtitan()
    loads = [sum(best.seconds[rank::pipeline]) for rank in range(pipeline)]
    document = {
        "model": trained.name,
        "pipeline": pipeline,
        "virtual": virtual,
        "pipeline_model_parallel_layout": best.megatron(),
        "module_fqns_per_model_part": titan,
        "stage_seconds": list(best.seconds),
        "slowest_seconds": slowest,
        "rank_seconds": loads,
    }
    notes = [
        f"--pipeline-model-parallel-layout {best.megatron()!r}",
        f"proven: no cut has a slowest stage below {seconds_text(slowest)}; the mean is "
        f"{percent_text(sum(loads) / len(best.seconds) / slowest)} of it",
        f"slowest rank {seconds_text(max(loads))} a micro-batch, the mean "
        f"{seconds_text(sum(loads) / pipeline)}",
    ]
    notes += trained.notes
    columns: dict[str, Callable[[int], str]] = {
        "virtual stage": str,
        "rank": lambda k: str(k % pipeline),
        "units": lambda k: "".join(best.stages[k]) or "-",
        "torchtitan": lambda k: f"{titan[k][0]} .. {titan[k][-1]}" if titan[k] else "-",
        "forward and backward": lambda k: seconds_text(best.seconds[k]),
    }
    shown = Table.of(
        f"{trained.name} on {pipeline} x {virtual} virtual stages of {offer.name}",
        range(len(titan)),
        columns,
        notes,
        right=(0, 1, 4),
    )
    return emit(document, [shown], json=json)
