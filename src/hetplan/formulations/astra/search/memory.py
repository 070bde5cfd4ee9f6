"""Bytes per device of every strategy at once, and the memory filter (Astra, eq. 20-21).

What a device holds follows from the framework that trains, by the formula that the replay uses
(`replays.memory`): model states of its stage's layers, activations of the micro-batches in
flight, logits at the loss or the layer that is computed again, gathered layers, buffers and
workspace. In flight are min(K, P - j) micro-batches on stage j of 1F1B; interleaved,
min(K v, 2 (P - j - 1) + (v - 1) P + 1) chunks of 1/v of a stage. First and last stage bind: the
first keeps most in flight, the last has the head. Optimizer states are offloaded `auto`: the
smallest share that makes the stage fit.

Blocks that differ count as equal blocks of their average, but for the largest one, which is
gathered whole.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.astra.search.pricing import Priced
from hetplan.formulations.astra.search.table import Strategies
from hetplan.profiling.frameworks import States
from hetplan.profiling.models.operators import ELEMENT_BYTES, Layer
from hetplan.replays.arrays import Floats, Ints
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.facts import ModelFacts, expert_params_of
from hetplan.replays.memory import (
    ATTENTION_OUTPUT,
    Held,
    Passes,
    gathered_for_experts,
    held_on,
    inputs_bytes,
    logits_of,
    on_a_rank,
)
from hetplan.replays.offers import Offer

# (ZeRO level, whether on stages of a pipeline) of the strategies: replicated, the distributed
# optimizer, full shards without and with a pipeline. Only full shards depend on the second.
LEVELS = ((0, False), (1, False), (3, False), (3, True))


def by_degree(degrees: Ints, of: Callable[[int], float]) -> Floats:
    """[R] a figure that depends on a degree alone, worked out once for each distinct one."""
    distinct, place = np.unique(degrees, return_inverse=True)
    return np.array([of(degree) for degree in distinct.tolist()])[place]


def divided_tokens(priced: Priced) -> NDArray[np.bool_]:
    """[R] whether tensor ranks divide what lies between their products, too."""
    return np.asarray((priced.sp == 1) | priced.assumed.framework.sequence_parallel)


def block_bytes(priced: Priced) -> tuple[Floats, Floats]:
    """Bytes per sample on each rank that an average block keeps: all of them, and those of the
    attention's core.

    Context ranks that exchange tokens for heads keep attention's output before and after the
    exchange. Tensor ranks that divide tokens may keep the inputs that they gather, and keep what
    the columns of an expert have in common where these are divided.
    """
    facts, framework = priced.facts, priced.assumed.framework
    split, whole, core = facts.saved
    gathered = np.zeros_like(priced.own)
    for block, share in facts.different_blocks:
        inputs = framework.whole_inputs * inputs_bytes(block, facts.precision)
        common = gathered_for_experts(block, facts.precision, priced.tp, priced.etp)
        gathered = gathered + share * np.maximum(inputs, common)
    split = split + priced.exchanged * facts.tensor_bytes(ATTENTION_OUTPUT)
    entire = on_a_rank(split, whole, gathered, priced.tp, divided_tokens(priced))
    return entire, core / priced.tp


def end_bytes(priced: Priced, layer: Layer) -> Floats:
    """Bytes per sample on each rank that embedding or head keeps."""
    precision = priced.facts.precision
    whole = layer.replicated_saved_bytes(precision)
    split = layer.saved_bytes(precision) - whole
    inputs = priced.assumed.framework.whole_inputs * inputs_bytes(layer, precision)
    return on_a_rank(split, whole, inputs, priced.tp, divided_tokens(priced))


def passes_of(priced: Priced, layers: Ints, last: Floats | float) -> Passes[Floats]:
    """Bytes per sample of a stage of so many blocks; `saved` is of its blocks alone. last: whether
    it holds the head.

    Without recomputation everything is kept; selective frees the attention core; a fully recomputed
    layer keeps its input, `uniform` one input for each group of layers, and one layer (or group) is
    whole while it is recomputed.
    """
    facts, framework = priced.facts, priced.assumed.framework
    entire, core = block_bytes(priced)
    boundary = facts.boundary_bytes / np.where(divided_tokens(priced), priced.tp, 1)
    again = priced.fully_recomputed(layers)
    group = np.where(priced.method == 1, np.maximum(priced.recomputed, 1), 1)
    frugal = np.where(priced.selective, entire - core, entire)
    whole_group = np.minimum(group, layers) * entire - boundary  # beside the input, which is kept
    logits, logit_bytes = logits_of(facts.head, facts.precision)
    loss = by_degree(priced.tp, lambda tensor: framework.loss_bytes(logits, logit_bytes, tensor))
    return Passes(
        saved=np.ceil(again / group) * boundary + (layers - again) * frugal,
        working=np.where(again > 0, whole_group, np.where(priced.selective, core, 0.0)),
        logits=last * logit_bytes / priced.tp,
        loss=last * loss,
        boundary=np.where(priced.pp * priced.v > 1, boundary, 0.0),
    )


def in_flight(priced: Priced, stage: Ints) -> Floats:
    """Micro-batches (in whole stages' worth) that stage number `stage` keeps at its peak."""
    plain = np.minimum(priced.K, priced.pp - stage)
    chunks = 2 * (priced.pp - stage - 1) + (priced.v - 1) * priced.pp + 1
    interleaved = np.minimum(priced.K * priced.v, chunks) / priced.v
    return np.asarray(np.where(priced.interleaved, interleaved, plain), dtype=np.float64)


def first_in_flight(priced: Priced) -> Floats:
    """Micro-batches whose embedding the first stage keeps at its peak: P of every round of P v
    chunks that is begun, since at the end of a round they are all of the first chunk."""
    chunks = in_flight(priced, np.zeros_like(priced.pp)) * priced.v
    rounds = np.ceil(np.rint(chunks) / (priced.pp * priced.v))
    return np.asarray(np.minimum(priced.K, rounds * priced.pp), dtype=np.float64)


def largest_params(priced: Priced, first: Floats | float, last: Floats | float) -> Floats:
    """Parameters on a rank of the largest layer of a stage with blocks."""
    embedding, head = priced.end_params
    largest = np.maximum(first * embedding, last * head)
    for block, _ in priced.facts.different_blocks:
        experts = expert_params_of(block)
        own = (block.params - experts) / priced.tp + experts / (priced.etp * priced.ep)
        largest = np.maximum(largest, own)
    return np.asarray(largest)


def states_of(
    priced: Priced, layers: Ints, first: Floats | float, last: Floats | float
) -> States[Floats]:
    """Model states of a stage. Frozen parameters have neither gradients nor optimizer states; in
    FP8 they are held in 8 bits."""
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
    levels = np.where(priced.fsdp, 3, np.where(priced.sharded, 1, 0))
    of_stages = priced.fsdp & (priced.pp > 1)
    each = [
        framework.held_bytes(
            trained * weights, trained * largest, width, level, share, staged=staged
        )
        for level, staged in LEVELS
    ]
    here = [(levels == level) & (of_stages == staged) for level, staged in LEVELS]
    states = States(*(np.select(here, parts) for parts in zip(*each, strict=True)))
    frozen = (1 - trained) / width * (1 if assumed.stack.fp8 else width)
    gathered = priced.fsdp * framework.gathered_layers * (1 - trained) * largest
    return states._replace(
        weights=states.weights + frozen * weights * np.where(priced.fsdp, share, 1.0),
        buffers=states.buffers + gathered,
    )


def held_by(
    priced: Priced, layers: Ints, place: Ints, first: Floats | float, last: Floats | float
) -> Held[Floats]:
    """What the devices of stage number `place` with so many layers hold, nothing being offloaded.

    first, last: whether the stage holds embedding or head.
    """
    assumed, passes = priced.assumed, passes_of(priced, layers, last)
    embedding = end_bytes(priced, priced.facts.embedding)
    head = end_bytes(priced, priced.facts.head)
    blocks = in_flight(priced, place) * passes.saved
    kept = priced.own * (blocks + first * first_in_flight(priced) * embedding + last * head)
    states = states_of(priced, layers, first, last)
    return held_on(assumed.framework, states, passes, kept, priced.own, assumed.reserved)


def stage_bytes(
    priced: Priced, layers: Ints, place: Ints, first: Floats | float, last: Floats | float
) -> tuple[Floats, Floats]:
    """(all bytes with the reserve, optimizer states among them) as `held_by`."""
    held = held_by(priced, layers, place, first, last)
    return held.allocated + held.reserved, held.optimizer


def usable_bytes(priced: Priced) -> float:
    """Bytes of a device that may be in use, the reserve among them."""
    return (1 - priced.assumed.memory_margin) * priced.offer.spec.memory_bytes


def offload_share(priced: Priced) -> Floats:
    """Share of the optimizer states to offload so that every device fits [R]; > 1: does not fit
    even so.

    Stages between the ends hold as many layers as the first, without its embedding and with fewer
    micro-batches in flight: they fit, with no more offloaded, where it does.
    """
    return np.maximum(share_needed(priced, -(-priced.facts.layers // priced.pp)), 0.0)


def share_needed(priced: Priced, layers: Ints) -> Floats:
    """The same for stages of so many layers; below 0: there is room to spare."""
    alone, capacity = (priced.pp == 1).astype(float), usable_bytes(priced)
    front, front_states = stage_bytes(priced, layers, np.zeros_like(priced.pp), 1.0, alone)
    back, back_states = stage_bytes(priced, layers, priced.pp - 1, alone, 1.0)
    return np.asarray(
        np.maximum((front - capacity) / front_states, (back - capacity) / back_states)
    )


def stage_peaks(
    facts: ModelFacts,
    table: Strategies,
    r: int,
    stages: Sequence[tuple[Offer, int]],
    offloaded: float,
    assumed: Assumptions,
) -> tuple[float, ...]:
    """Bytes per device of every stage of strategy r, in pipeline order; stages: (type, layers) of
    each."""
    P = len(stages)
    priced = Priced(facts, table.take(np.full(P, r)), stages[0][0], assumed)
    place = np.arange(P)
    layers = np.array([layers for _, layers in stages], dtype=np.int64)
    first, last = (place == 0).astype(float), (place == P - 1).astype(float)
    total, states = stage_bytes(priced, layers, place, first, last)
    return tuple(float(v) for v in total - offloaded * states)
