"""Bytes per device of every strategy at once, and the memory filter (Astra, eq. 20-21).

The formula is that of the replay (`hetplan.replays.memory`) and depends on the framework. A device
holds model states of its stage's layers, activations of the micro-batches in flight, the logits at
the loss or the layer that is recomputed, gathered layers, buffers and workspace.

P stages j, K micro-batches, v virtual stages on each device. Under 1F1B, stage j has
min(K, P - j) micro-batches in flight. Under the interleaved schedule it has
min(K v, 2 (P - j - 1) + (v - 1) P + 1) chunks in flight, each of 1/v of a stage. Only the first and
the last stage are checked: the first has the most micro-batches in flight, and the last has the
head. Optimizer states are offloaded `auto`: by the smallest share that makes the stage fit.

Blocks of different sizes count as equal blocks of the average size, but for gathered layers, where
the largest block counts.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.astra.search.pricing import Priced
from hetplan.formulations.astra.search.table import METHODS, Strategies
from hetplan.profiling.frameworks import StateBytes
from hetplan.profiling.models.operators import ELEMENT_BYTES, Layer
from hetplan.replays.arrays import Floats, Ints
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.facts import ModelFacts, expert_params_of
from hetplan.replays.memory import (
    ATTENTION_OUTPUT,
    Passes,
    PeakBytes,
    gathered_for_experts,
    held_on,
    inputs_bytes,
    logits_of,
    on_a_rank,
)
from hetplan.replays.offers import Offer

# (ZeRO level, whether the model has a pipeline) of the strategies: replicated, with the distributed
# optimizer, fully sharded without and with a pipeline. Only full sharding depends on the pipeline.
LEVELS = ((0, False), (1, False), (3, False), (3, True))


def by_degree(degrees: Ints, of: Callable[[int], float]) -> Floats:
    """[R] the values of a function of a degree. It is called once for each distinct degree.

    degrees: [R]. of: the function.
    """
    distinct, number = np.unique(degrees, return_inverse=True)
    return np.array([of(degree) for degree in distinct.tolist()])[number]


def divided_tokens(priced: Priced) -> NDArray[np.bool_]:
    """[R] whether tensor ranks divide the tokens between their matrix products (sequence
    parallelism)."""
    return np.asarray((priced.sp == 1) | priced.assumed.framework.sequence_parallel)


def block_bytes(priced: Priced) -> tuple[Floats, Floats]:
    """([R] all, [R] the attention core's): bytes per sample that a rank keeps of an average block.

    Context ranks that exchange tokens for heads keep the attention's output before and after the
    exchange. Tensor ranks that divide tokens may keep the inputs that they gather. Where tensor
    ranks divide experts, they keep the activations that the divided columns of an expert share.
    """
    facts, framework = priced.facts, priced.assumed.framework
    split, whole, core = facts.saved
    gathered = np.zeros_like(priced.rank_samples)
    for block, share in facts.different_blocks:
        inputs = 0.0
        if framework.whole_inputs:
            inputs = inputs_bytes(block, facts.precision)
        common = gathered_for_experts(block, facts.precision, priced.tp, priced.etp)
        gathered = gathered + share * np.maximum(inputs, common)
    exchanged_output = np.where(priced.exchanged, facts.tensor_bytes(ATTENTION_OUTPUT), 0.0)
    entire = on_a_rank(split + exchanged_output, whole, gathered, priced.tp, divided_tokens(priced))
    return entire, core / priced.tp


def end_bytes(priced: Priced, layer: Layer) -> Floats:
    """[R] bytes per sample that a rank keeps of `layer`, the embedding or the head."""
    precision = priced.facts.precision
    whole = layer.replicated_saved_bytes(precision)
    split = layer.saved_bytes(precision) - whole
    inputs = 0.0
    if priced.assumed.framework.whole_inputs:
        inputs = inputs_bytes(layer, precision)
    return on_a_rank(split, whole, inputs, priced.tp, divided_tokens(priced))


def passes_of(priced: Priced, layers: Ints, last: Floats | float) -> Passes[Floats]:
    """Bytes per sample that the passes of a stage keep on each rank; `saved` counts its blocks
    only.

    Without recomputation all activations are kept. Selective recomputation frees those of the
    attention core. Of a fully recomputed layer the input is kept; by the method `uniform`, one
    input for each group of layers. One such layer or group is held whole while it is recomputed.

    layers: number of the stage's blocks. last: 1 where the stage has the head, else 0.
    """
    facts, framework = priced.facts, priced.assumed.framework
    entire, core = block_bytes(priced)
    boundary = facts.boundary_bytes / np.where(divided_tokens(priced), priced.tp, 1)
    again = priced.fully_recomputed(layers)
    uniform = priced.method == METHODS.index("uniform")
    group = np.where(uniform, np.maximum(priced.recomputed, 1), 1)  # layers with one kept input
    inputs = np.ceil(again / group) * boundary
    kept_block = np.where(priced.selective, entire - core, entire)  # of a block not in `again`
    # the input of the group is counted in `inputs`
    whole_group = np.minimum(group, layers) * entire - boundary
    core_if_selective = np.where(priced.selective, core, 0.0)
    logits, logit_bytes = logits_of(facts.head, facts.precision)
    loss = by_degree(priced.tp, lambda tensor: framework.loss_bytes(logits, logit_bytes, tensor))
    return Passes(
        saved=inputs + (layers - again) * kept_block,
        working=np.where(again > 0, whole_group, core_if_selective),
        logits=last * logit_bytes / priced.tp,
        loss=last * loss,
        boundary=np.where(priced.pp * priced.v > 1, boundary, 0.0),
    )


def in_flight(priced: Priced, stage: Ints) -> Floats:
    """[R] micro-batches that stage number `stage` has in flight at its peak; a chunk counts as 1/v
    of a micro-batch."""
    plain = np.minimum(priced.K, priced.pp - stage)
    chunks = 2 * (priced.pp - stage - 1) + (priced.v - 1) * priced.pp + 1
    interleaved = np.minimum(priced.K * priced.v, chunks) / priced.v
    return np.asarray(np.where(priced.interleaved, interleaved, plain), dtype=np.float64)


def first_in_flight(priced: Priced) -> Floats:
    """[R] micro-batches whose embedding's activations the first stage keeps at its peak.

    The embedding is in the first chunk. Every round of P v chunks that has begun counts with all
    its P micro-batches.
    """
    chunks = in_flight(priced, np.zeros_like(priced.pp)) * priced.v
    # `in_flight` has divided a whole number of chunks by v; rint undoes its rounding
    rounds = np.ceil(np.rint(chunks) / (priced.pp * priced.v))
    return np.asarray(np.minimum(priced.K, rounds * priced.pp), dtype=np.float64)


def largest_params(priced: Priced, first: Floats | float, last: Floats | float) -> Floats:
    """[R] parameters on a rank of the largest layer of a stage with blocks. first, last: 1 where
    the stage has embedding or head, else 0."""
    embedding, head = priced.end_params
    largest = np.maximum(first * embedding, last * head)
    for block, _ in priced.facts.different_blocks:
        experts = expert_params_of(block)
        params = (block.params - experts) / priced.tp + experts / (priced.etp * priced.ep)
        largest = np.maximum(largest, params)
    return np.asarray(largest)


def states_of(
    priced: Priced, layers: Ints, first: Floats | float, last: Floats | float
) -> StateBytes[Floats]:
    """Bytes of the model states of a stage with so many `layers` on each rank.

    Frozen parameters have neither gradients nor optimizer states; under FP8 they are held in 8
    bits. first, last: 1 where the stage has embedding or head, else 0.
    """
    facts, assumed = priced.facts, priced.assumed
    framework, width = assumed.framework, ELEMENT_BYTES[facts.precision]
    trained = facts.trained_share
    embedding, head = priced.end_params
    dense = layers * priced.stage_params + first * embedding + last * head
    experts = layers * priced.expert_stage_params
    largest = width * largest_params(priced, first, last)
    weights = width * (dense + experts)
    # a stage without layers has no parameters to share
    trained_params = np.maximum(trained * (dense + experts), 1.0)
    share = priced.optimizer_params(dense, experts) / trained_params
    zero_level = np.where(priced.fsdp, 3, np.where(priced.sharded, 1, 0))
    sharded_stages = priced.fsdp & (priced.pp > 1)
    # the states under each of LEVELS, and the strategies that have this level
    by_level = []
    has_level = []
    for level, staged in LEVELS:
        by_level.append(
            framework.held_bytes(
                trained * weights, trained * largest, width, level, share, staged=staged
            )
        )
        has_level.append((zero_level == level) & (sharded_stages == staged))
    states = StateBytes(*(np.select(has_level, parts) for parts in zip(*by_level, strict=True)))
    frozen_width = 1 if assumed.stack.fp8 else width  # bytes of a frozen parameter
    frozen_share = (1 - trained) / width * frozen_width  # of the bytes of weights
    held_share = np.where(priced.fsdp, share, 1.0)
    frozen_gathered = framework.gathered_layers * (1 - trained) * largest
    gathered = np.where(priced.fsdp, frozen_gathered, 0.0)
    return states._replace(
        weights=states.weights + frozen_share * weights * held_share,
        buffers=states.buffers + gathered,
    )


def held_by(
    priced: Priced, layers: Ints, place: Ints, first: Floats | float, last: Floats | float
) -> PeakBytes[Floats]:
    """Bytes that the devices of a stage hold, by what they are for, without offloading.

    layers: number of the stage's blocks. place: number of the stage in the pipeline. first, last: 1
    where the stage has embedding or head, else 0.
    """
    assumed, passes = priced.assumed, passes_of(priced, layers, last)
    # activations per sample of a micro-batch on the rank
    of_blocks = in_flight(priced, place) * passes.saved
    of_embedding = first * first_in_flight(priced) * end_bytes(priced, priced.facts.embedding)
    of_head = last * end_bytes(priced, priced.facts.head)
    kept = priced.rank_samples * (of_blocks + of_embedding + of_head)
    states = states_of(priced, layers, first, last)
    return held_on(assumed.framework, states, passes, kept, priced.rank_samples, assumed.reserved)


def stage_bytes(
    priced: Priced, layers: Ints, place: Ints, first: Floats | float, last: Floats | float
) -> tuple[Floats, Floats]:
    """(all bytes with the reserve, bytes of optimizer states among them) of a stage; parameters as
    for `held_by`."""
    peak = held_by(priced, layers, place, first, last)
    return peak.allocated + peak.reserved, peak.optimizer


def usable_bytes(priced: Priced) -> float:
    """Bytes of a device that training may use, with the reserve."""
    return (1 - priced.assumed.memory_margin) * priced.offer.spec.memory_bytes


def offload_share(priced: Priced) -> Floats:
    """[R] least share of the optimizer states to offload so that every stage fits in memory; above
    1 where no share is enough."""
    layers = -(-priced.facts.layers // priced.pp)  # of the largest stage
    return np.maximum(share_needed(priced, layers), 0.0)


def share_needed(priced: Priced, layers: Ints) -> Floats:
    """[R] least share of the optimizer states to offload so that stages of so many `layers` fit in
    memory; below 0 where memory is left over.

    Only the first and the last stage are checked. A stage between them has no more layers than the
    first, no embedding and fewer micro-batches in flight, so it fits where the first one does.
    """
    alone, capacity = (priced.pp == 1).astype(float), usable_bytes(priced)
    first, first_states = stage_bytes(priced, layers, np.zeros_like(priced.pp), 1.0, alone)
    last, last_states = stage_bytes(priced, layers, priced.pp - 1, alone, 1.0)
    share_of_first = (first - capacity) / first_states
    share_of_last = (last - capacity) / last_states
    return np.asarray(np.maximum(share_of_first, share_of_last))


def stage_peaks(
    facts: ModelFacts,
    table: Strategies,
    r: int,
    stages: Sequence[tuple[Offer, int]],
    offloaded: float,
    assumed: Assumptions,
) -> tuple[float, ...]:
    """Bytes on each device of every stage of strategy r, in pipeline order.

    stages: (type, layers) of each stage. offloaded: share of the optimizer states on the host.
    """
    P = len(stages)
    any_offer, _ = stages[0]  # bytes do not depend on the type
    priced = Priced(facts, table.take(np.full(P, r)), any_offer, assumed)  # a row for each stage
    place = np.arange(P)
    layers = np.array([layers for _, layers in stages], dtype=np.int64)
    first, last = (place == 0).astype(float), (place == P - 1).astype(float)
    total, states = stage_bytes(priced, layers, place, first, last)
    return tuple(float(peak) for peak in total - offloaded * states)
