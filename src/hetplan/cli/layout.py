"""`hetplan export layout`: a model's balanced cut into virtual pipeline stages, for Megatron-LM and
torchtitan."""

from typing import Annotated

import typer

from hetplan.adapters.exports.balancing import balanced
from hetplan.cli.help_page import described
from hetplan.cli.options import (
    JsonOption,
    ModelOption,
    PrecisionOption,
    SequenceOption,
    number,
    require_option,
)
from hetplan.cli.output import emit
from hetplan.profiling.hardware.cluster import Cluster
from hetplan.profiling.models.model import load_model
from hetplan.profiling.profiles.predict import predict
from hetplan.replays.offers import offer_of
from hetplan.text import (
    Column,
    Table,
    percent_text,
    seconds_text,
)


@described(
    examples=(
        (
            "A balanced cut into two virtual stages on each of four ranks",
            "hetplan export layout --model gpt2-xl --pipeline 4 --virtual 2",
        ),
    ),
)
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
    trained = load_model(model, sequence=sequence, precision=precision)
    offer = offer_of(device, 1)
    names = [layer.name for layer in trained.layers]
    is_language_model = names[0] == "embedding" and names[-1] == "head"
    require_option(is_language_model, "--model", model, "a language model")
    require_option(trained.tensor_degree_fits(tensor), "--tensor", tensor, "a divisor of the heads")
    (table,) = predict(
        trained,
        Cluster(offer.name, (offer.node,), {offer.name: offer.spec}),
        micro_batches=[micro_batch],
        tensor_degrees=[tensor],
    ).tables
    best = balanced(table.layer_seconds(), pipeline, virtual, mtp)
    titan = best.torchtitan()
    slowest = max(best.seconds)
    # Virtual stage k is on pipeline rank k mod P.
    rank_seconds = [sum(best.seconds[rank::pipeline]) for rank in range(pipeline)]
    mean_stage = sum(rank_seconds) / len(best.seconds)  # the ranks' sum is that of all stages
    mean_rank = sum(rank_seconds) / pipeline
    document = {
        "model": trained.name,
        "pipeline": pipeline,
        "virtual": virtual,
        "pipeline_model_parallel_layout": best.megatron(),
        "module_fqns_per_model_part": titan,
        "stage_seconds": list(best.seconds),
        "slowest_seconds": slowest,
        "rank_seconds": rank_seconds,
    }
    notes = [
        f"--pipeline-model-parallel-layout {best.megatron()!r}",
        f"proven: no cut has a slowest stage below {seconds_text(slowest)}; the mean is "
        f"{percent_text(mean_stage / slowest)} of it",
        f"slowest rank {seconds_text(max(rank_seconds))} a micro-batch, the mean "
        f"{seconds_text(mean_rank)}",
    ]
    notes += trained.notes
    columns: list[Column[int]] = [  # the columns of virtual stage k
        Column("virtual stage", lambda k: k, right=True),
        Column("rank", lambda k: k % pipeline, right=True),
        Column("units", lambda k: "".join(best.stages[k]) or "-"),
        Column("torchtitan", lambda k: f"{titan[k][0]} .. {titan[k][-1]}" if titan[k] else "-"),
        Column("forward and backward", lambda k: best.seconds[k], seconds_text, right=True),
    ]
    shown = Table.of(
        f"{trained.name} on {pipeline} x {virtual} virtual stages of {offer.name}",
        range(len(titan)),
        columns,
        notes,
    )
    return emit(document, [shown], json=json)
