"""Seconds per iteration of every strategy at once (Astra, Sections 3.3, 3.5).

A stage of n layers takes n (forward + backward + recomputation) + h; with v virtual stages the
pipeline fills v times faster (Narayanan et al. 2021, Section 2.2) and each micro-batch crosses each
boundary v times (eq. 22 where v = 1):

    T = (sum_i t_i - max_i t_i) / v + K max_i t_i + reduction + optimizer

Overlapped communication costs what its window of computation leaves uncovered: tensor-parallel
collectives hide behind the block's matrix products, gradients behind the last backward, parameters
behind the first forward.

Seconds of an operator = theta / (phi eta) (Astra, eq. 25-26): theta FLOPs of a matrix product or
bytes of anything else, phi the datasheet's peak or bandwidth, eta in (0, 1] the share of it that
the operator reaches. Operators and the host's launches take what `hetplan.profiling.rates.times`
says, so that the search prices a layer exactly as predicted profiles do. Links reach all of what
cluster files state.

Ranks are numbered tensor first, then expert and data, pipeline last, as Megatron-LM does; a node
holds consecutive ranks. A group with stride s and size n stays inside a node when s n <= devices
per node; else each of the min(s, devices) groups that meet in a node gets an equal share of its
network.

The operators of a block are the profiling layer's; sequence parallelism divides the ones that
tensor parallelism leaves whole (Korthikanti et al. 2022, Section 4.2.2). A measured profile
replaces the totals where it has a table; the part that selective recomputation repeats keeps its
analytical share.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from hetplan.profiling.models.operators import CONTENTION, Layer, Matmul, Precision
from hetplan.profiling.models.transformer import Cut
from hetplan.profiling.profiles.profile import Profile
from hetplan.profiling.rates.times import CORE, Rates, layer_time, operator_time
from hetplan.replays.arrays import Floats, Ints
from hetplan.replays.strategies.facts import ModelFacts
from hetplan.replays.strategies.links import Assumptions, group_seconds
from hetplan.replays.strategies.offers import Offer
from hetplan.replays.strategies.table import GRANULARITIES, METHODS, NONE, Strategies

# Columns in the order of `Priced`'s attributes.
DEGREES = (
    "pipeline_model_parallel_size", "tensor_model_parallel_size", "expert_model_parallel_size",
    "data_parallel_size", "context_parallel_size", "expert_tensor_parallel_size",
    "num_distributed_optimizer_instances", "micro_batch_size", "num_micro_batches",
    "sequence_parallel",
)  # fmt: skip
AGAIN = ("recompute_granularity", "recompute_method", "recompute_num_layers")
SELECTIVE, FULL, HYBRID = range(len(GRANULARITIES))
# Bytes per parameter of weight, gradient and optimizer state (fp32 master weight and Adam's two
# moments).
# Megatron-LM accumulates bf16 gradients in fp32 (--accumulate-allreduce-grads-in-fp32, forced for
# bf16).
STATE_BYTES: dict[Precision, tuple[int, int, int]] = {
    "bf16": (2, 4, 12),
    "fp16": (2, 2, 12),
    "fp32": (4, 4, 8),
}
# Adam on one parameter reads gradient, master weight and moments (16 bytes) and writes the latter
# and the weight (14).
ADAM_BYTES = 30


# Rows of what `block_seconds` returns: an average block's forward, backward, attention core
# forward, matrix products forward and backward; embedding and head, forward and backward together.
FORWARD, BACKWARD, CORE_FORWARD, PRODUCTS_FORWARD, PRODUCTS_BACKWARD, EMBEDDING, HEAD = range(7)


def block_seconds(
    facts: ModelFacts, offer: Offer, columns: Sequence[Ints], assumed: Assumptions
) -> Floats:
    """[7, R] seconds of all rows, each distinct combination computed once.

    columns: tensor degree, micro-batch, sequence parallelism, and the cut: context and expert
    degrees, tensor ranks that hold whole experts.
    """
    distinct, of = np.unique(np.stack(columns), axis=1, return_inverse=True)
    keys: list[list[int]] = distinct.T.tolist()
    table = np.zeros((7, len(keys)))
    for number, key in enumerate(keys):
        own = facts.divided(Cut(*key[3:]))
        for block, weight in own.different_blocks:
            table[:5, number] += weight * _layer(block, own, offer, key, assumed)
        for figure, layer in ((EMBEDDING, own.first), (HEAD, own.last)):
            table[figure, number] = _layer(layer, own, offer, key, assumed)[:2].sum()
    if assumed.profile is not None:
        _overwrite(table, keys, facts, offer, assumed.profile)
    return np.asarray(table[:, of])


def _layer(
    layer: Layer, facts: ModelFacts, offer: Offer, key: Sequence[int], assumed: Assumptions
) -> Floats:
    """[5] forward, backward, core forward, products forward, products backward of one layer."""
    tensor, micro_batch, sequence_parallel, *_ = key
    learned = assumed.learned.get(offer.name)
    stack = replace(assumed.stack, sequence_parallel=bool(sequence_parallel))
    rates = Rates(offer.name, offer.spec, facts.precision, stack)
    whole = layer_time(layer, rates, micro_batch=micro_batch, tensor=tensor, learned=learned)
    parts = np.zeros(3)
    for op in layer.operators:
        if isinstance(op, Matmul) or op.name in CORE:
            time = operator_time(op, rates, micro_batch, tensor)
            factor = learned.factor(op, micro_batch, tensor) if learned else 1.0
            of = np.array([op.name in CORE, isinstance(op, Matmul), isinstance(op, Matmul)])
            parts += factor * of * (time.forward, time.forward, time.backward)
    return np.array([whole.forward, whole.backward, *parts])


def _overwrite(
    table: Floats,
    keys: list[list[int]],
    facts: ModelFacts,
    offer: Offer,
    profile: Profile,
) -> None:
    """Take totals from the profile's tables; parts of a block keep their shares."""
    inside = [i for i, layer in enumerate(facts.model.layers) if layer in facts.blocks]
    for number, (tensor, micro_batch, _, *cut) in enumerate(keys):
        measured = profile.table(offer.name, tensor, micro_batch)
        if measured is None or cut != [1, 1, 1]:
            continue
        forward = float(np.mean([measured.forward_seconds[i] for i in inside]))
        backward = float(np.mean([measured.backward_seconds[i] for i in inside]))
        table[[CORE_FORWARD, PRODUCTS_FORWARD], number] *= forward / table[FORWARD, number]
        table[PRODUCTS_BACKWARD, number] *= backward / table[BACKWARD, number]
        table[FORWARD, number], table[BACKWARD, number] = forward, backward
        seconds = measured.seconds()
        table[EMBEDDING, number], table[HEAD, number] = seconds[0], seconds[-1]


def uncovered(seconds: Floats, window: Floats) -> Floats:
    """What communication costs beside a window of computation: the part that does not fit, and of
    the rest what it takes from the computation."""
    return np.asarray(seconds - (1 - CONTENTION) * np.minimum(seconds, window))


class Priced:
    """Figures of the strategies [R] on one type of device; every figure is computed when first
    asked for."""

    def __init__(
        self, facts: ModelFacts, table: Strategies, offer: Offer, assumed: Assumptions
    ) -> None:
        self.facts, self.table, self.offer, self.assumed = facts, table, offer, assumed
        columns = table.columns
        (
            self.pp,
            self.tp,
            self.ep,
            self.dp,
            self.cp,
            self.etp,
            self.copies,
            self.mbs,
            self.K,
            self.sp,
        ) = (columns[name] for name in DEGREES)
        self.granularity, self.method, self.recomputed = (columns[name] for name in AGAIN)
        self.fsdp = columns["use_fsdp"] == 1
        self.own: Floats = self.mbs / self.cp  # samples of a micro-batch, by their tokens on a rank
        self.v: Ints = np.maximum(columns["virtual_pipeline_model_parallel_size"], 1)
        self.interleaved = columns["virtual_pipeline_model_parallel_size"] != NONE
        self.sharded = columns["use_distributed_optimizer"] == 1
        self.exchanged = columns["cp_comm_type"] == 1
        self.replicas: Ints = self.dp * self.cp // self.copies  # that share what is sharded
        self.expert_replicas: Ints = self.tp * self.replicas // (self.etp * self.ep)
        self.selective = (self.granularity == SELECTIVE) | (self.granularity == HYBRID)

    @cached_property
    def blocks(self) -> Floats:
        """Computation of blocks, embedding and head (`timing.block_seconds`)."""
        columns = (self.tp, self.mbs, self.sp, self.cp, self.ep, self.tp // self.etp)
        return block_seconds(self.facts, self.offer, columns, self.assumed)

    def together(self, operation: str, size: Floats, stride: Ints, ranks: Ints) -> Floats:
        """Seconds of a collective or message in such groups."""
        return group_seconds(self.offer, self.assumed, operation, size, stride, ranks)

    @cached_property
    def tensor_seconds(self) -> Floats:
        """Tensor-parallel collectives of one block, one pass: two all-reduces of s h, or with
        sequence parallelism as many gathers and scatters (Korthikanti et al. 2022, Section
        4.2.2)."""
        size = np.asarray(self.facts.boundary_bytes * self.own, dtype=np.float64)
        ones = np.ones_like(self.tp)
        joins = self.facts.joins
        reduced = joins * self.together("all-reduce", size, ones, self.tp)
        gathered = 2 * joins * self.together("all-gather", size, ones, self.tp)
        return np.where(self.sp == 1, gathered, reduced)

    @cached_property
    def expert_seconds(self) -> Floats:
        """Dispatch and combine of one block, one pass (0 without experts)."""
        divided = (self.sp == 1) | (self.etp < self.tp)
        size = self.facts.dispatched_bytes * self.own / np.where(divided, self.tp, 1)
        return 2.0 * self.together("all-to-all", size, self.etp, self.ep)

    @cached_property
    def ring_seconds(self) -> Floats:
        """Keys and values that go round the context ranks in one forward pass of a block."""
        size = self.facts.head_bytes(self.facts.shape.kv_heads) * self.own / self.tp
        return (self.cp - 1) * self.together("send", size, self.tp, self.cp)

    @cached_property
    def exchange_seconds(self) -> Floats:
        """Queries, keys, values and outputs exchanged, tokens for heads, in one pass of a block; of
        their gradients as much."""
        shape = self.facts.shape
        size = sum(map(self.facts.head_bytes, (shape.heads, shape.kv_heads))) / 4
        return 4 * self.together("all-to-all", size * self.own / self.tp, self.tp, self.cp)

    @cached_property
    def sharded_seconds(self) -> tuple[Floats, Floats]:
        """Of one block whose weights are sharded: gathering them, and scattering gradients; else
        0."""
        weight, gradient, _ = STATE_BYTES[self.facts.precision]
        gather = scatter = np.zeros_like(self.own)
        for params, stride, ranks in self.groups(self.stage_params, self.expert_stage_params):
            gather = gather + self.together("all-gather", params * weight, stride, ranks)
            scatter = scatter + self.together("all-gather", params * gradient, stride, ranks)
        return self.fsdp * gather, self.fsdp * scatter

    def groups(self, dense: Floats, experts: Floats) -> list[tuple[Floats, Ints, Ints]]:
        """(parameters per rank, stride, ranks) of what exchanges gradients: of dense parameters,
        and of experts where there are some."""
        apart = (experts, self.etp * self.ep, self.expert_replicas)
        return [(dense, self.tp, self.replicas), apart][: 1 + (self.facts.expert_params > 0)]

    @cached_property
    def forward(self) -> Floats:
        """One block forward, with its exposed collectives."""
        return self._pass(FORWARD, PRODUCTS_FORWARD, self.exchanges[0])

    @cached_property
    def backward(self) -> Floats:
        """One block backward, with its exposed collectives, without recomputation; keys, values and
        their gradients go round."""
        return self._pass(BACKWARD, PRODUCTS_BACKWARD, self.exchanges[1])

    @cached_property
    def exchanges(self) -> tuple[Floats, Floats]:
        """What one block waits for, forward and backward, beside its tensor ranks: experts' tokens,
        context ranks' keys or heads, and shards."""
        gather, scatter = self.sharded_seconds
        return self._exchanges(FORWARD, 1, gather), self._exchanges(BACKWARD, 2, gather + scatter)

    def _exchanges(self, figure: int, rounds: int, shards: Floats) -> Floats:
        ring = uncovered(rounds * self.ring_seconds, rounds * self.blocks[CORE_FORWARD])
        ring = np.where(self.exchanged, self.exchange_seconds, ring)
        return self.expert_seconds + ring + uncovered(shards, self.blocks[figure])

    def _pass(self, figure: int, products: int, exchanges: Floats) -> Floats:
        # Transformer Engine overlaps these collectives through NVLink-mapped buffers: inside a node
        # only.
        overlapped = (self.table.columns["tp_comm_overlap"] == 1) & (
            self.tp <= self.offer.node_devices
        )
        exposed = uncovered(self.tensor_seconds, np.where(overlapped, self.blocks[products], 0.0))
        return np.asarray(self.blocks[figure] + exposed + exchanges)

    def fully_recomputed(self, layers: Ints) -> Floats:
        """How many of a stage's `layers` are computed again in full. The number counts per
        virtual stage."""
        full = self.granularity == FULL
        counted = np.minimum(np.maximum(self.recomputed, 0) * self.v, layers)
        uniform = self.method == METHODS.index("uniform")
        return np.where(full & uniform, layers, np.where(self.granularity >= 1, counted, 0)).astype(
            float
        )

    def layers_seconds(self, layers: Ints) -> Floats:
        """Forward, backward and recomputation of a stage of so many layers, one micro-batch."""
        again = self.fully_recomputed(layers)
        core = np.where(self.selective, (layers - again) * self.blocks[CORE_FORWARD], 0.0)
        return layers * (self.forward + self.backward) + again * self.forward + core

    @cached_property
    def crossing_seconds(self) -> Floats:
        """One stage boundary, forward and backward, before any overlap: h of eq. 22 (0 for one
        stage)."""
        size = self.facts.boundary_bytes * self.own / np.where(self.sp == 1, self.tp, 1)
        whole = self.tp * self.cp * self.dp  # stages lie that far apart
        return 2.0 * self.together("send", size, whole, self.pp)

    @cached_property
    def stage_params(self) -> Floats:
        """Dense parameters per layer and rank; experts apart in `expert_stage_params`."""
        return np.asarray((self.facts.block_params - self.facts.expert_params) / self.tp)

    @cached_property
    def expert_stage_params(self) -> Floats:
        """Expert parameters per layer and rank."""
        return np.asarray(self.facts.expert_params / (self.etp * self.ep))

    @cached_property
    def end_params(self) -> tuple[Floats, Floats]:
        """Parameters per rank of embedding and head (a tied head keeps a copy when it is on another
        stage)."""
        head = self.facts.last.params + np.where(self.pp > 1, self.facts.last.tied_params, 0)
        return self.facts.first.params / self.tp, head / self.tp

    def exposed_reduction(
        self, dense: Floats, experts: Floats, forward: Floats, backward: Floats
    ) -> Floats:
        """Gradient reduction (and parameter gathering) that windows of computation leave
        uncovered.

        dense, experts: parameters per rank, of which the trained ones are exchanged. All-reduce;
        with the distributed optimizer reduce-scatter of gradients and all-gather of weights
        (Rajbhandari et al. 2020, Section 7). Fully sharded stages reduce their shards once over the
        groups that hold the same ones.
        """
        weight, gradient, _ = STATE_BYTES[self.facts.precision]
        columns = self.table.columns
        seconds = across = np.zeros_like(dense)
        dense, experts = dense * self.facts.trained, experts * self.facts.trained
        after = np.where(columns["overlap_grad_reduce"] == 1, backward, 0.0)
        before = np.where(columns["overlap_param_gather"] == 1, forward, 0.0)
        for params, stride, ranks in self.groups(dense, experts):
            part, group = params / (dense + experts), (stride, ranks)
            reduce = self._exchanged("all-reduce", params, gradient, group, part * after)
            scatter = self._exchanged("all-gather", params, gradient, group, part * after)
            gather = self._exchanged("all-gather", params, weight, group, part * before)
            seconds = seconds + np.where(self.sharded, scatter + gather, reduce)
            apart = (stride * ranks, self.copies)
            across = across + self._exchanged(
                "all-reduce", params / ranks, gradient, apart, part * after
            )
        return np.where(self.fsdp, across, seconds)

    def _exchanged(
        self, operation: str, params: Floats, element: int, group: tuple[Ints, Ints], window: Floats
    ) -> Floats:
        """Exposed seconds of so many parameters, bucket by bucket where a window hides them: all
        but the bucket that is ready last (of weights: needed first)."""
        assumed, (stride, ranks) = self.assumed, group
        largest = np.maximum(assumed.bucket_params, assumed.bucket_params_per_rank * ranks)
        bucket = np.where(window > 0, largest, np.inf)
        once = self.together(operation, np.minimum(params, bucket) * element, stride, ranks)
        return once + uncovered(once * np.maximum(params / bucket - 1.0, 0.0), window)

    def optimizer_params(self, dense: Floats, experts: Floats) -> Floats:
        """Parameters whose states a rank updates: all of its own that are trained, or its share
        with the distributed optimizer."""
        return self.facts.trained * np.asarray(
            dense / np.where(self.sharded | self.fsdp, self.replicas, 1)
            + experts / np.where(self.sharded | self.fsdp, self.expert_replicas, 1)
        )

    def optimizer_seconds(self, params: Floats, offloaded: Floats, covered: Floats) -> Floats:
        """Adam on the device, and for the `offloaded` share on the host, gradients down and weights
        up over PCIe.

        covered: computation that hides the transfers unless `no_overlap_offload_optimizer`.
        """
        here = (1 - offloaded) * params * ADAM_BYTES / (self.offer.spec.memory_bytes_per_s * 0.8)
        return np.asarray(here + self.offload_seconds(params, offloaded, covered))

    def offload_seconds(self, params: Floats, offloaded: Floats, covered: Floats) -> Floats:
        """The host's part of `optimizer_seconds`."""
        weight, gradient, _ = STATE_BYTES[self.facts.precision]
        there = offloaded * params * ADAM_BYTES / self.offer.host_memory
        moved = offloaded * params * (weight + gradient) / self.offer.host_link
        blocking = self.table.columns["no_overlap_offload_optimizer"] == 1
        return np.asarray(there + np.where(blocking, moved, np.maximum(0.0, moved - covered)))


def after_pipeline(
    priced: Priced, layers: Ints, ends: Floats, offloaded: Floats
) -> tuple[Floats, Floats]:
    """(exposed reduction, optimizer) seconds of stages with so many layers and `ends` parameters
    besides."""
    dense, experts = layers * priced.stage_params + ends, layers * priced.expert_stage_params
    forward, backward = layers * priced.forward, layers * priced.backward
    return priced.exposed_reduction(dense, experts, forward, backward), priced.optimizer_seconds(
        priced.optimizer_params(dense, experts), offloaded, backward
    )


def iteration_parts(priced: Priced, offloaded: Floats) -> tuple[Floats, Floats, Floats]:
    """(pipeline, exposed reduction, optimizer) seconds of every strategy whose stages hold the same
    number of layers, or the last ones one less."""
    layers = -(-priced.facts.layers // priced.pp)
    work = priced.layers_seconds(layers)
    overlapped = priced.table.columns["overlap_p2p_communication"] == 1
    stage = work + priced.v * uncovered(
        priced.crossing_seconds, np.where(overlapped, work / priced.v, 0.0)
    )
    first, last = priced.blocks[EMBEDDING], priced.blocks[HEAD]
    total = priced.facts.layers / layers * stage + first + last
    # where layers do not divide evenly, the last stage has one less
    spared = work - priced.layers_seconds(priced.facts.layers // priced.pp)
    slowest = stage + np.where(priced.pp == 1, first + last, np.maximum(first, last - spared))
    pipeline = (total - slowest) / priced.v + priced.K * slowest
    params = np.where(priced.pp == 1, sum(priced.end_params), np.maximum(*priced.end_params))
    return pipeline, *after_pipeline(priced, layers, params, offloaded)
