"""Published runs with expert or context parallelism, priced in closed form; and every published
configuration ranked among all that its model, batch and GPUs allow.

Prices are those of Astra's search (`formulations.astra.search.pricing`), whose whole space of like
replicas is enumerated: tensor, context, expert, pipeline and virtual degrees, data and fully
sharded replicas, micro-batches, recomputation of nothing or of everything.
"""

from dataclasses import replace
from functools import cache

import numpy as np

from evidence.truth.job import Job, predicted as replayed, published_bytes
from evidence.truth.tables import Predicted, Ranked
from hetplan.errors import require
from hetplan.formulations.astra.search.engine import columns_of
from hetplan.formulations.astra.search.memory import stage_peaks
from hetplan.formulations.astra.search.pool import homogeneous
from hetplan.formulations.astra.search.priced_sets import OnOneType, Task
from hetplan.formulations.astra.search.pricing import BACKWARD, FORWARD, Priced, iteration_parts
from hetplan.formulations.astra.search.result import Job as SearchJob, summary
from hetplan.formulations.astra.search.rules import default_rules
from hetplan.formulations.astra.search.space import Space, strategies
from hetplan.formulations.astra.search.table import NONE, Strategies
from hetplan.profiling.hardware.cluster import GBIT
from hetplan.profiling.models.model import load_model
from hetplan.profiling.models.zoo import text_model
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.facts import ModelFacts, model_facts
from hetplan.replays.offers import Offer, offer_of

CAUSES = (
    "computing", "recomputing", "exchanges of experts", "other exchanges of layers",
    "bubble, ends and messages", "gradients", "optimizer",
)  # fmt: skip


def predicted(job: Job) -> Predicted:
    """The job replayed where a plan says it, else in closed form; raises NotPosedError where
    neither can."""
    has_plan = job.context * job.expert == 1 and job.shape.layers >= job.pipeline * job.chunks
    further = job.shape.adapters or job.shape.pattern or job.recomputed
    sharded = job.zero == 3 and job.pipeline > 1
    return replayed(job) if has_plan and not (further or sharded) else priced(job)


def cheapest(job: Job) -> Job:
    """The job of a row that publishes no recomputation, with the fewest layers of each chunk
    computed again so that it fits; with none where nothing does."""
    layers = range(1, -(-job.shape.layers // (job.pipeline * job.chunks)) + 1)
    again = (replace(job, recomputation="full", recomputed=n) for n in layers)
    return next((each for each in (job, *again) if predicted(each).fits), job)


def setting(job: Job) -> tuple[ModelFacts, Offer, Assumptions]:
    """The model, the GPUs in their nodes, and the software."""
    spec = text_model("published", "a published run", job.sequence, job.shape)
    model, kind = load_model(spec, sequence=job.sequence, precision=job.precision), job.machine
    offer = replace(
        offer_of(kind.device, job.gpus),
        node_devices=kind.per_node,
        intra=kind.within * GBIT,
        network=kind.between * GBIT,
    )
    assumed = Assumptions(framework=job.framework, stack=job.stack)
    return model_facts(model), offer, assumed


def own_strategy(job: Job, facts: ModelFacts) -> Strategies:
    """The one row of the configuration; raises NotPosedError where batch and degrees do not
    divide."""
    require(job.shape.tensor_degree_fits(job.tensor), f"tensor {job.tensor} divides no heads")
    stages = job.pipeline * job.chunks  # embedding and loss may count as layers
    require(facts.layers + 2 >= stages, f"{facts.layers} blocks are too few for the stages")
    space = Space(
        pipeline=(job.pipeline,),
        tensor=(job.tensor,),
        micro_batch=(job.micro_batch,),
        expert=(job.expert,),
        context=(job.context,),
        whole_experts=(job.expert_tensor < job.tensor,),
        fsdp=(job.zero == 3,),
        virtual=(-(-facts.layers // stages),),
        interleaving=job.chunks > 1,
        sequence_parallel=(job.stack.sequence_parallel and job.tensor > 1,),
        distributed_optimizer=(job.zero > 0,),
        recompute=(None if job.recomputation == "none" else job.recomputation,),
        recompute_method=("block",) if job.recomputed else ("uniform",),
        recompute_layers=(job.recomputed or 1,),
        no_overlap_offload=(True,),
        offload=False,
    )
    whole = strategies(
        facts, space, [], gpus=job.gpus, global_batch=job.global_batch, whole_stages=False
    )
    chunked = whole.columns["virtual_pipeline_model_parallel_size"] != NONE
    table = whole.take(chunked == (job.chunks > 1))
    if job.expert_tensor < job.tensor:
        table.columns["expert_tensor_parallel_size"][:] = job.expert_tensor
    table.columns["tp_comm_overlap"] *= int(job.stack.hidden_reduces)
    require(table.rows == 1, f"degrees and batch do not divide {job.gpus} GPUs")
    return table


@cache
def priced(job: Job) -> Predicted:
    """In closed form; raises NotPosedError."""
    facts, offer, assumed = setting(job)
    table = own_strategy(job, facts)
    each = Priced(facts, table, offer, assumed)
    seconds = float(np.sum(iteration_parts(each, np.zeros(1))))
    stages = [(offer, layers) for layers in blocks_of(job, facts)]
    peaks = stage_peaks(facts, table, 0, stages, 0.0, assumed)
    held = (peaks[-1] if job.last_stage else max(peaks)) - assumed.reserved
    limit = offer.spec.memory_bytes - assumed.reserved
    return Predicted(seconds, published_bytes(job, held, limit), held <= limit)


def blocks_of(job: Job, facts: ModelFacts) -> tuple[int, ...]:
    """Blocks of each stage; the last ones have one less where they do not divide."""
    stages = job.pipeline
    even = tuple((facts.layers + place) // stages for place in reversed(range(stages)))
    return even if job.blocks is None or job.chunks > 1 else job.blocks


@cache
def ranked(job: Job) -> Ranked:
    """The configuration among all of its model, batch and GPUs; raises NotPosedError."""
    facts, offer, assumed = setting(job)
    own, outcome, pool = own_strategy(job, facts), priced(job), homogeneous(offer)
    task = Task(
        SearchJob(facts.model, job.global_batch), pool, facts, wide(job, facts),
        default_rules(columns_of(pool)), assumed, 1,
    )  # fmt: skip
    alone = OnOneType(task)
    require(alone.table.rows > 0, "no configuration fits")
    (best,), first = alone.fastest(1), int(np.argmin(alone.seconds))
    tables = own, alone.table.take(np.array([first]))
    both = (causes(Priced(facts, table, offer, assumed)) for table in tables)
    return Ranked(
        outcome,
        float(np.mean(alone.seconds >= outcome.seconds * (1 - 1e-9))),
        alone.table.rows,
        summary(best),
        best.seconds,
        tuple(sorted(zip(CAUSES, *both, strict=True), key=lambda pair: -abs(pair[1] - pair[2]))),
    )


def wide(job: Job, facts: ModelFacts) -> Space:
    """All powers of two, and what the configuration has."""
    powers = [2**i for i in range(job.gpus.bit_length())]
    held = job.shape.experts.count if job.shape.experts else 1

    def up_to(most: int, own: int) -> tuple[int, ...]:
        return tuple(sorted({own, *(p for p in powers if p <= most)}))

    return Space(
        pipeline=up_to(min(facts.layers, 32), job.pipeline),
        tensor=up_to(min(8, job.machine.per_node), job.tensor),
        micro_batch=up_to(8, job.micro_batch),
        expert=up_to(held, job.expert),
        context=up_to(8, job.context),
        whole_experts=(False, True),
        fsdp=(False, True),
        uneven=True,
        distributed_optimizer=(True,),
        recompute=(None, "full"),
        recompute_method=("uniform",),
        recompute_layers=(1,),
        no_overlap_offload=(True,),
        offload=False,
    )


def causes(one: Priced) -> list[float]:
    """Seconds of one strategy's iteration by cause, in the order of `CAUSES`; of layers those of
    all micro-batches on the slowest stage."""
    layers = -(-one.facts.layers // one.pp)
    pipeline, reduction, update = iteration_parts(one, np.zeros(1))
    passes, work = layers * (one.forward + one.backward), one.layers_seconds(layers)
    computing = layers * (one.blocks[FORWARD] + one.blocks[BACKWARD])
    experts = 2 * layers * one.exchanges.experts
    steady = (computing, work - passes, experts, passes - computing - experts)
    rows = (*(one.K * row for row in steady), pipeline - one.K * work, reduction, update)
    return [float(row[0]) for row in rows]
