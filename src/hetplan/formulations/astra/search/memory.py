"""Bytes per device of every strategy at once, and the memory filter (Astra, eq. 20-21).

The formula is that of the replay (`hetplan.replays.memory`) and depends on the framework. A device
holds model states of its stage's layers, activations of the micro-batches in flight, the logits at
the loss or what a block's backward pass needs, gathered layers, buffers and workspace.

P stages j, K micro-batches, v virtual stages on each device. Under 1F1B, stage j has
min(K, P - j) micro-batches in flight. Under the interleaved schedule it has
min(K v, 2 (P - j - 1) + (v - 1) P + 1) chunks in flight, each of 1/v of a stage. Optimizer states
are offloaded `auto`: by the smallest share that makes the stage fit.

Blocks of different kinds count as what they are: a stage has those of its own places in the model,
virtual stage i of stage j those of place i P + j.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.astra.search.pricing import Priced
from hetplan.formulations.astra.search.table import METHODS, Strategies
from hetplan.profiling.frameworks import StateBytes
from hetplan.profiling.models.operators import ELEMENT_BYTES, Layer
from hetplan.profiling.rates.times import CORE_SAVED
from hetplan.replays.arrays import Floats, Ints
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.facts import ModelFacts, expert_params_of, frozen_bytes_of
from hetplan.replays.memory import (
    ATTENTION_OUTPUT,
    Passes,
    PeakBytes,
    UnusedGradients,
    gathered_for_experts,
    head_inputs,
    head_of,
    held_on,
    inputs_bytes,
    logits_of,
    on_a_rank,
    saved_bytes_of,
    weight_shapes,
    working_gradients,
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


@dataclass(frozen=True)
class Chunk:
    """Blocks of a stage that follow one another, in each of R strategies: a virtual stage; or all
    blocks of a stage, where all blocks of the model are alike."""

    count: tuple[Ints, ...]  # [kinds][R] blocks of each of the model's `different_blocks`
    plain: tuple[Ints, ...]  # [kinds][R] those of them that are not fully recomputed

    @property
    def layers(self) -> Ints:
        """[R] number of blocks."""
        return np.asarray(sum(self.count))


def boundary(priced: Priced, number: Ints) -> Ints:
    """[R] the first block of virtual stage `number` where all blocks are divided over all virtual
    stages, whose sizes differ by at most one, the larger ones first."""
    each, rest = np.divmod(priced.facts.layers, priced.pp * priced.v)
    return np.asarray(number * each + np.minimum(number, rest))


def chunk_between(priced: Priced, begin: Ints, end: Ints) -> Chunk:
    """The chunk of blocks [begin, end) of each strategy. The method `block` recomputes the first
    blocks of a chunk."""
    before = priced.facts.kinds_before
    again = np.minimum(priced.recomputed_of_chunk(end - begin), end - begin)
    count = tuple(of_kind[end] - of_kind[begin] for of_kind in before)
    plain = tuple(of_kind[end] - of_kind[begin + again] for of_kind in before)
    return Chunk(count, plain)


def chunks_of(
    priced: Priced, layers: Ints, place: Ints, begin: Ints | None = None
) -> tuple[Chunk, ...]:
    """The chunks of stage number `place` with `layers` blocks.

    begin: the first block of a stage of one chunk; None: stages divide the blocks evenly. Where all
    blocks are alike, the stage is one chunk.
    """
    if len(priced.facts.different_blocks) == 1:
        again = priced.fully_recomputed(layers).astype(np.int64)
        return (Chunk((layers,), (layers - again,)),)
    chunks = []
    for number in range(int(priced.v.max())):
        virtual_stage = np.minimum(number * priced.pp + place, priced.pp * priced.v - 1)
        first, end = boundary(priced, virtual_stage), boundary(priced, virtual_stage + 1)
        if number == 0:
            # A stage of one chunk has its own number of `layers`, which may differ from that of an
            # even division. Without `begin` it begins as in that division, or earlier where
            # the model would end before the stage does.
            begin_alone = begin
            if begin_alone is None:
                begin_alone = np.minimum(first, priced.facts.layers - layers)
            first = np.where(priced.v == 1, begin_alone, first)
            end = np.where(priced.v == 1, begin_alone + layers, end)
        first = np.where(number < priced.v, first, end)  # further chunks have no blocks
        chunks.append(chunk_between(priced, first, end))
    return tuple(chunks)


def fullest_chunk(priced: Priced, layers: Ints) -> Chunk:
    """A chunk with the most blocks of each kind that any `layers` consecutive blocks have. No stage
    of `layers` blocks needs more memory."""
    count = tuple(of_kind[layers] for of_kind in priced.facts.most_of_kinds)
    all_again = priced.fully_recomputed(layers) >= layers
    return Chunk(count, tuple(np.where(all_again, 0, of_kind) for of_kind in count))


class BlockBytes(NamedTuple):
    """[R] bytes per sample that a rank needs of a block of one kind."""

    entire: Floats  # bytes kept without recomputation
    core: Floats  # the part of `entire` that attention's core keeps
    # gradients of activations in its backward pass, where the framework counts them
    gradients: Floats


def block_bytes(priced: Priced, block: Layer) -> BlockBytes:
    """Bytes per sample that a rank needs of a block.

    Context ranks that exchange tokens for heads keep the attention's output before and after the
    exchange. Tensor ranks that divide tokens may keep the inputs that they gather. Tensor ranks
    that divide the columns of an expert each keep the expert's whole input.
    """
    precision, framework = priced.facts.precision, priced.assumed.framework
    divided = divided_tokens(priced)
    whole = block.replicated_saved_bytes(precision)
    split = block.saved_bytes(precision) - whole
    inputs = inputs_bytes(block, precision) if framework.whole_inputs else 0.0
    common = gathered_for_experts(block, precision, priced.tp, priced.etp)
    output = saved_bytes_of(block, ATTENTION_OUTPUT, precision)
    exchanged_output = np.where(priced.exchanged, output, 0.0)
    core = sum(saved_bytes_of(block, name, precision) for name in CORE_SAVED)
    all_gradients = whole_gradients = 0.0
    if framework.activation_gradients:
        all_gradients, whole_gradients = working_gradients(block, precision)
    split_gradients = all_gradients - whole_gradients
    return BlockBytes(
        entire=on_a_rank(
            split + exchanged_output, whole, np.maximum(inputs, common), priced.tp, divided
        ),
        core=core / priced.tp,
        gradients=on_a_rank(split_gradients, whole_gradients, 0.0, priced.tp, divided),
    )


def end_bytes(priced: Priced, layer: Layer) -> Floats:
    """[R] bytes per sample that a rank keeps of `layer`, the embedding or the head."""
    precision = priced.facts.precision
    whole = layer.replicated_saved_bytes(precision)
    split = layer.saved_bytes(precision) - whole
    inputs = 0.0
    if priced.assumed.framework.whole_inputs:
        inputs = inputs_bytes(layer, precision)
    return on_a_rank(split, whole, inputs, priced.tp, divided_tokens(priced))


def kept_group(priced: Priced) -> Ints:
    """[R] number of consecutive layers for which full recomputation keeps one input: the layers of
    a group under the method `uniform`, else 1."""
    uniform = priced.method == METHODS.index("uniform")
    return np.where(uniform, np.maximum(priced.recomputed, 1), 1)


def kept_by_chunk(priced: Priced, chunk: Chunk) -> Floats:
    """[R] bytes per sample that a rank keeps of the blocks of a chunk.

    Without recomputation all activations are kept. Selective recomputation frees those of the
    attention core. Of a fully recomputed layer the input is kept; by the method `uniform`, one
    input for each group of layers.
    """
    again = chunk.layers - np.asarray(sum(chunk.plain))
    kept = np.ceil(again / kept_group(priced)) * block_input(priced)
    for (block, _), plain in zip(priced.facts.different_blocks, chunk.plain, strict=True):
        each = block_bytes(priced, block)
        kept = kept + plain * np.where(priced.selective, each.entire - each.core, each.entire)
    return np.asarray(kept)


def block_input(priced: Priced) -> Floats:
    """[R] bytes per sample of a block's input on a rank, as large as its output."""
    return np.asarray(priced.facts.boundary_bytes / np.where(divided_tokens(priced), priced.tp, 1))


def passes_of(priced: Priced, chunks: Sequence[Chunk], last: Floats | float) -> Passes[Floats]:
    """Bytes per sample that the passes of a stage keep on each rank; `saved` counts its blocks
    only.

    A fully recomputed layer, or group of layers, is held whole while it is recomputed, and its
    gradients with it.

    last: 1 where the stage has the head, else 0.
    """
    facts, framework = priced.facts, priced.assumed.framework
    boundary = block_input(priced)
    layers = np.asarray(sum(chunk.layers for chunk in chunks))
    group = np.minimum(kept_group(priced), layers)
    working = np.zeros(priced.table.rows)
    for kind, (block, _) in enumerate(facts.different_blocks):
        each = block_bytes(priced, block)
        count = np.asarray(sum(chunk.count[kind] for chunk in chunks))
        plain = np.asarray(sum(chunk.plain[kind] for chunk in chunks))
        # the input of the group is counted as kept
        whole_group = group * each.entire - boundary + each.gradients
        core = np.where(priced.selective, each.core, 0.0) + each.gradients
        working = np.maximum(working, np.where(count > plain, whole_group, 0.0))
        working = np.maximum(working, np.where(plain > 0, core, 0.0))
    logits, logit_bytes = logits_of(facts.head, facts.precision)
    loss = by_degree(priced.tp, lambda tensor: framework.loss_bytes(logits, logit_bytes, tensor))
    head = np.zeros(priced.table.rows)
    if framework.unused_gradients:
        _, head_input = head_of(facts.head, facts.precision)
        if head_input:
            head = logits * ELEMENT_BYTES[facts.precision] / priced.tp
            head = head + head_inputs(head_input, priced.tp, divided_tokens(priced))
    return Passes(
        saved=np.asarray(sum(kept_by_chunk(priced, chunk) for chunk in chunks)),
        working=working,
        logits=last * logit_bytes / priced.tp,
        loss=last * loss,
        head=last * head,
        boundary=np.where(priced.pp * priced.v > 1, boundary, 0.0),
    )


def unused_of(
    priced: Priced, chunks: Sequence[Chunk], last: Floats | float
) -> UnusedGradients[Floats]:
    """Bytes on a rank of the gradients of weights that nobody reads. The framework holds one such
    gradient for each shape that a weight of the stage's blocks has (`UnusedGradients`), so that
    every shape counts once. last: see `passes_of`."""
    facts, framework = priced.facts, priced.assumed.framework
    nothing = np.zeros(priced.table.rows)
    if not framework.unused_gradients:
        return UnusedGradients(nothing, nothing)
    width = ELEMENT_BYTES[facts.precision]
    # rows and columns of weights on a rank, and the strategies that have such a weight
    seen: list[tuple[Floats, Floats, NDArray[np.bool_]]] = []
    of_blocks = nothing
    for kind, (block, _) in enumerate(facts.different_blocks):
        has_kind = np.asarray(sum(chunk.count[kind] for chunk in chunks)) > 0
        for shape in weight_shapes(block):
            ranks = priced.etp if shape.expert else priced.tp
            rows, columns = (np.asarray(size) for size in shape.on_a_rank(ranks))
            is_new = has_kind
            for other_rows, other_columns, present in seen:
                same = (rows == other_rows) & (columns == other_columns)
                is_new = is_new & ~(present & same)
            of_blocks = of_blocks + np.where(is_new, width * rows * columns, 0.0)
            seen.append((rows, columns, has_kind))
    head_weight, _ = head_of(facts.head, facts.precision)
    return UnusedGradients(of_blocks, last * head_weight / priced.tp)


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


def interleaved_kept(P: Ints, v: Ints, K: Ints, place: Ints, kept: Sequence[Floats]) -> Floats:
    """[n] the most bytes per sample that stages of the interleaved schedule keep at a time.

    Forward passes take P micro-batches through each chunk in turn, backward passes through the
    chunks in reverse order. After the first passes, forward and backward passes alternate. While
    neither changes its chunk, the bytes grow or fall steadily, so that the most is kept where one
    of them does.

    P, v, K, place: [n] stages, chunks of a stage, micro-batches, number of the stage. kept:
    [chunks][n] bytes per sample of each chunk.
    """
    round_passes, passes = P * v, K * v
    warm_up = np.minimum(2 * (P - place - 1) + (v - 1) * P + 1, passes)

    def done(number: Ints, chunk: Ints) -> Ints:
        """[n] passes of a chunk among the first `number` ones."""
        rounds, rest = np.divmod(number, round_passes)
        return np.asarray(rounds * P + np.clip(rest - chunk * P, 0, P))

    most = np.zeros(len(P))
    for turn in range(int(v.max(initial=0)) + 1):
        # steps after which backward passes change their chunk, and those for forward passes
        for step in (turn * P, turn * P + (-warm_up) % P):
            backward = np.minimum(step, passes - warm_up)
            forward = warm_up + backward
            here = np.zeros(len(P))
            for number, of_chunk in enumerate(kept):
                chunk = np.full_like(P, number)
                alive = done(forward, chunk) - done(backward, v - 1 - chunk)
                here = here + np.where(number < v, alive * of_chunk, 0.0)
            most = np.maximum(most, here)
    return most


def kept_blocks(priced: Priced, place: Ints, chunks: Sequence[Chunk]) -> Floats:
    """[R] the most bytes per sample that a stage keeps of its blocks at a time."""
    kept = [kept_by_chunk(priced, chunk) for chunk in chunks]
    most = np.asarray(in_flight(priced, place) * np.asarray(sum(kept)))
    if len(kept) > 1:
        rows = np.flatnonzero(priced.v > 1)
        most[rows] = interleaved_kept(
            priced.pp[rows],
            priced.v[rows],
            priced.K[rows],
            place[rows],
            [of_chunk[rows] for of_chunk in kept],
        )
    return most


def largest_params(
    priced: Priced, chunks: Sequence[Chunk], first: Floats | float, last: Floats | float
) -> Floats:
    """[R] trained parameters on a rank of the largest layer of a stage with blocks. first, last: 1
    where the stage has embedding or head, else 0."""
    embedding, head = priced.end_params
    largest = np.maximum(first * embedding, last * head)
    for kind, (block, _) in enumerate(priced.facts.different_blocks):
        count = np.asarray(sum(chunk.count[kind] for chunk in chunks))
        params = np.sum(block_params(priced, block), axis=0)
        largest = np.maximum(largest, np.where(count > 0, params, 0.0))
    return np.asarray(largest)


def block_params(priced: Priced, block: Layer) -> tuple[Floats, Floats]:
    """([R] dense parameters, [R] parameters of experts) of a block on a rank that are trained."""
    experts = expert_params_of(block)
    dense = (block.trained - experts) / priced.tp
    return np.asarray(dense), np.asarray(experts / (priced.etp * priced.ep))


def frozen_block_bytes(priced: Priced, block: Layer) -> tuple[Floats, Floats]:
    """([R] dense bytes, [R] bytes of experts) of a block on a rank that are frozen. Under FP8 they
    are held in 8 bits at most."""
    frozen = frozen_bytes_of(block, priced.facts.precision)
    narrower = 1.0
    if priced.assumed.stack.fp8 and not block.quantised:
        narrower = 1 / ELEMENT_BYTES[priced.facts.precision]
    dense = narrower * frozen.dense / priced.tp
    experts = narrower * frozen.experts / (priced.etp * priced.ep)
    return np.asarray(dense), np.asarray(experts)


def frozen_end_bytes(priced: Priced) -> tuple[Floats, Floats]:
    """([R] bytes of the embedding, [R] bytes of the head) on a rank that are frozen. A tied head
    has a copy of the embedding's weights where it is on another stage."""
    facts = priced.facts
    width = 1 if priced.assumed.stack.fp8 else ELEMENT_BYTES[facts.precision]
    head = facts.head.frozen + np.where(priced.pp > 1, facts.head.frozen_tied, 0)
    return width * facts.embedding.frozen / priced.tp, width * head / priced.tp


def states_of(
    priced: Priced, chunks: Sequence[Chunk], first: Floats | float, last: Floats | float
) -> StateBytes[Floats]:
    """Bytes of the model states of a stage on each rank.

    Frozen weights have neither gradients nor optimizer states. first, last: 1 where the stage has
    embedding or head, else 0.
    """
    facts, assumed = priced.facts, priced.assumed
    framework, width = assumed.framework, ELEMENT_BYTES[facts.precision]
    embedding, head = priced.end_params
    frozen_embedding, frozen_head = frozen_end_bytes(priced)
    dense = first * embedding + last * head
    frozen_dense = first * frozen_embedding + last * frozen_head
    largest_frozen = np.maximum(first * frozen_embedding, last * frozen_head)
    experts, frozen_experts = np.zeros_like(dense), np.zeros_like(dense)
    for kind, (block, _) in enumerate(facts.different_blocks):
        count = np.asarray(sum(chunk.count[kind] for chunk in chunks))
        of_block, experts_of_block = block_params(priced, block)
        dense, experts = dense + count * of_block, experts + count * experts_of_block
        frozen_of_block = frozen_block_bytes(priced, block)
        frozen_dense = frozen_dense + count * frozen_of_block[0]
        frozen_experts = frozen_experts + count * frozen_of_block[1]
        present = np.where(count > 0, np.sum(frozen_of_block, axis=0), 0.0)
        largest_frozen = np.maximum(largest_frozen, present)
    largest = width * largest_params(priced, chunks, first, last)
    weights, frozen = width * (dense + experts), frozen_dense + frozen_experts
    share = priced.share_of_states(width * dense + frozen_dense, width * experts + frozen_experts)
    zero_level = np.where(priced.fsdp, 3, np.where(priced.sharded, 1, 0))
    sharded_stages = priced.fsdp & (priced.pp > 1)
    # the states under each of LEVELS, and the strategies that have this level
    by_level = []
    has_level = []
    for level, staged in LEVELS:
        by_level.append(
            framework.held_bytes(
                weights,
                largest,
                width,
                level,
                share,
                staged=staged,
                frozen=frozen,
                largest_frozen=largest_frozen,
            )
        )
        has_level.append((zero_level == level) & (sharded_stages == staged))
    return StateBytes(*(np.select(has_level, parts) for parts in zip(*by_level, strict=True)))


def casts_of(priced: Priced, chunks: Sequence[Chunk]) -> Floats:
    """[R] bytes on a rank of the largest frozen weight that a product of a stage casts."""
    facts = priced.facts
    largest = np.zeros(priced.table.rows)
    for kind, (block, _) in enumerate(facts.different_blocks):
        count = np.asarray(sum(chunk.count[kind] for chunk in chunks))
        size = block.cast * ELEMENT_BYTES[facts.precision] / priced.tp
        largest = np.maximum(largest, np.where(count > 0, size, 0.0))
    return largest


def held_by(
    priced: Priced,
    layers: Ints,
    place: Ints,
    first: Floats | float,
    last: Floats | float,
    chunks: Sequence[Chunk] | None = None,
) -> PeakBytes[Floats]:
    """Bytes that the devices of a stage hold, by what they are for, without offloading.

    layers: number of the stage's blocks. place: number of the stage in the pipeline. first, last: 1
    where the stage has embedding or head, else 0. chunks: the stage's blocks; None: those of
    `chunks_of`.
    """
    if chunks is None:
        chunks = chunks_of(priced, layers, place)
    assumed, passes = priced.assumed, passes_of(priced, chunks, last)
    # activations per sample of a micro-batch on the rank
    of_embedding = first * first_in_flight(priced) * end_bytes(priced, priced.facts.embedding)
    of_head = last * end_bytes(priced, priced.facts.head)
    kept = priced.rank_samples * (kept_blocks(priced, place, chunks) + of_embedding + of_head)
    return held_on(
        assumed.framework,
        states_of(priced, chunks, first, last),
        passes,
        kept,
        priced.rank_samples,
        assumed.reserved,
        unused_of(priced, chunks, last),
        casts_of(priced, chunks),
    )


def stage_bytes(
    priced: Priced,
    layers: Ints,
    place: Ints,
    first: Floats | float,
    last: Floats | float,
    chunks: Sequence[Chunk] | None = None,
) -> tuple[Floats, Floats]:
    """(all bytes with the reserve, bytes of optimizer states among them) of a stage; parameters as
    for `held_by`."""
    peak = held_by(priced, layers, place, first, last, chunks)
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
    """[R] least share of the optimizer states to offload so that stages of `layers` blocks fit in
    memory; below 0 where memory is left over.

    Where all blocks are alike, only the first and the last stage are checked. A stage between them
    has no more layers than the first, no embedding and fewer micro-batches in flight, so it fits
    where the first one does. Otherwise every stage is checked.
    """
    capacity, last_place = usable_bytes(priced), priced.pp - 1
    places = [np.zeros_like(priced.pp), last_place]
    if len(priced.facts.different_blocks) > 1:
        places = [np.minimum(place, last_place) for place in range(int(priced.pp.max()))]
    needed = np.full(priced.table.rows, -np.inf)
    for place in places:
        first, last = (place == 0).astype(float), (place == last_place).astype(float)
        held, states = stage_bytes(priced, layers, place, first, last)
        # a model whose weights are all frozen has no states: at least a byte, to divide by
        needed = np.maximum(needed, (held - capacity) / np.maximum(states, 1.0))
    return needed


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
    chunks = chunks_of(priced, layers, place, begin=np.cumsum(layers) - layers)
    total, states = stage_bytes(priced, layers, place, first, last, chunks)
    return tuple(float(peak) for peak in total - offloaded * states)
