"""Seconds per iteration of every strategy at once (Astra, Sections 3.3, 3.5).

A stage of n layers takes n (forward + backward + recomputation) + h; with v virtual stages the
pipeline fills v times faster (Narayanan et al. 2021, Section 2.2) and each micro-batch crosses each
boundary v times (eq. 22 where v = 1):

    T = (sum_i t_i - max_i t_i) / v + K max_i t_i + reduction + optimizer

Overlapped communication costs what its window of computation leaves uncovered: tensor-parallel
collectives hide behind the block's matrix products, gradients behind the last backward, parameters
behind the first forward.

The physics is the replay's, evaluated on arrays: computation of blocks
(`hetplan.replays.blocks`), collectives and messages (`exchanges`, `groups`), what overlap leaves
uncovered (`overlap`), Adam on device and host (`updates`). Seconds of an operator are theta / (phi
eta) (Astra, eq. 25-26): theta FLOPs of a matrix product or bytes of anything else, phi the
datasheet's peak or bandwidth, eta in (0, 1] the share of it that the operator reaches.
"""

from collections.abc import Sequence
from functools import cached_property, partial

import numpy as np

from hetplan.formulations.astra.search.table import GRANULARITIES, METHODS, NONE, Strategies
from hetplan.profiling.models.transformer import Cut
from hetplan.replays.arrays import Floats, Ints
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.blocks import BlockSeconds, Pass, block_times
from hetplan.replays.exchanges import (
    EXCHANGED_BYTES,
    BlockExchanges,
    Shared,
    crossing_seconds,
    tensor_seconds,
)
from hetplan.replays.facts import ModelFacts
from hetplan.replays.groups import group_seconds
from hetplan.replays.offers import Offer
from hetplan.replays.overlap import bucket_count, bucket_params, uncovered, uncovered_buckets
from hetplan.replays.ranks import Ranks, own_shards
from hetplan.replays.updates import FP32, adam_bytes, host_update_seconds

# Columns in the order of `Priced`'s attributes.
DEGREES = (
    "pipeline_model_parallel_size", "tensor_model_parallel_size", "expert_model_parallel_size",
    "data_parallel_size", "context_parallel_size", "expert_tensor_parallel_size",
    "num_distributed_optimizer_instances", "micro_batch_size", "num_micro_batches",
    "sequence_parallel",
)  # fmt: skip
AGAIN = ("recompute_granularity", "recompute_method", "recompute_num_layers")
SELECTIVE, FULL, HYBRID = range(len(GRANULARITIES))
ADAM_BANDWIDTH = 0.8  # share of the memory's bandwidth that Adam reaches

# Rows of what `block_seconds` returns: the fields of `BlockSeconds`.
FORWARD, BACKWARD, CORE_FORWARD, PRODUCTS_FORWARD, PRODUCTS_BACKWARD, EMBEDDING, HEAD = range(
    len(BlockSeconds._fields)
)


def block_seconds(
    facts: ModelFacts, offer: Offer, columns: Sequence[Ints], assumed: Assumptions
) -> Floats:
    """[7, R] `BlockSeconds` of all rows, each distinct combination computed once.

    columns: tensor degree, micro-batch, sequence parallelism, and the cut: context and expert
    degrees, tensor ranks that hold whole experts.
    """
    distinct, of = np.unique(np.stack(columns), axis=1, return_inverse=True)
    each = []
    for tensor, micro_batch, sequence_parallel, *cut in distinct.T.tolist():
        rank = Pass(tensor, micro_batch, bool(sequence_parallel), Cut(*cut))
        each.append(block_times(facts, offer, assumed, rank))
    table = np.array(each, dtype=np.float64).reshape(-1, len(BlockSeconds._fields)).T
    return np.asarray(table[:, of])


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
        self.ranks = Ranks(self.tp, self.cp, self.dp, self.ep, self.etp, self.copies)
        self.selective = (self.granularity == SELECTIVE) | (self.granularity == HYBRID)
        self.group_seconds = partial(group_seconds, offer, assumed)

    @cached_property
    def blocks(self) -> Floats:
        """Computation of blocks, embedding and head (`block_seconds`)."""
        columns = (self.tp, self.mbs, self.sp, self.cp, self.ep, self.tp // self.etp)
        return block_seconds(self.facts, self.offer, columns, self.assumed)

    @cached_property
    def exchanges(self) -> BlockExchanges[Ints]:
        """What one block exchanges in its passes."""
        return BlockExchanges(
            facts=self.facts,
            group_seconds=self.group_seconds,
            ranks=self.ranks,
            rows=self.own,
            sequence_parallel=self.sp == 1,
            all_to_all=self.exchanged,
            fully_sharded=self.fsdp,
        )

    @cached_property
    def waits(self) -> tuple[Floats, Floats]:
        """Seconds that one block waits for exchanges, forward and backward, beside those of tensor
        ranks."""
        blocks = self.blocks
        return self.exchanges.waits(blocks[FORWARD], blocks[BACKWARD], blocks[CORE_FORWARD])

    @cached_property
    def tensor_seconds(self) -> Floats:
        """Tensor ranks' collectives of one block, one pass."""
        size = np.asarray(self.facts.boundary_bytes * self.own, dtype=np.float64)
        return tensor_seconds(self.group_seconds, size, self.facts.joins, self.tp, self.sp)

    @cached_property
    def forward(self) -> Floats:
        """One block forward, with its exposed collectives."""
        return self._pass(FORWARD, PRODUCTS_FORWARD, self.waits[0])

    @cached_property
    def backward(self) -> Floats:
        """One block backward, with its exposed collectives, without recomputation."""
        return self._pass(BACKWARD, PRODUCTS_BACKWARD, self.waits[1])

    def _pass(self, figure: int, products: int, waits: Floats) -> Floats:
        # Transformer Engine overlaps these collectives through NVLink-mapped buffers: inside a node
        # only.
        overlapped = (self.table.columns["tp_comm_overlap"] == 1) & (
            self.tp <= self.offer.node_devices
        )
        exposed = uncovered(self.tensor_seconds, np.where(overlapped, self.blocks[products], 0.0))
        return np.asarray(self.blocks[figure] + exposed + waits)

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
        """One stage boundary, forward and backward, before any overlap: h of eq. 22."""
        size = self.facts.boundary_bytes * self.own / np.where(self.sp == 1, self.tp, 1)
        return crossing_seconds(self.group_seconds, size, self.tp * self.cp * self.dp, self.pp)

    @property
    def stage_params(self) -> Floats:
        """Dense parameters per layer and rank; experts apart in `expert_stage_params`."""
        return self.exchanges.dense_params

    @property
    def expert_stage_params(self) -> Floats:
        """Expert parameters per layer and rank."""
        return self.exchanges.expert_params

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
        weight, gradient = EXCHANGED_BYTES[self.facts.precision]
        columns = self.table.columns
        seconds = across = np.zeros_like(dense)
        dense, experts = dense * self.facts.trained, experts * self.facts.trained
        after = np.where(columns["overlap_grad_reduce"] == 1, backward, 0.0)
        before = np.where(columns["overlap_param_gather"] == 1, forward, 0.0)
        for shared in self.exchanges.shared(dense, experts):
            part = shared.params / (dense + experts)
            reduce = self._in_buckets("all-reduce", shared, gradient, part * after)
            scatter = self._in_buckets("all-gather", shared, gradient, part * after)
            gather = self._in_buckets("all-gather", shared, weight, part * before)
            seconds = seconds + np.where(self.sharded, scatter + gather, reduce)
            shards = Shared(shared.params / shared.ranks, shared.stride * shared.ranks, self.copies)
            across = across + self._in_buckets("all-reduce", shards, gradient, part * after)
        return np.where(self.fsdp, across, seconds)

    def _in_buckets(
        self, operation: str, shared: Shared, element_bytes: int, window: Floats
    ) -> Floats:
        """Exposed seconds of parameters that are exchanged, in buckets where a window hides
        them."""
        assumed, (params, stride, ranks) = self.assumed, shared
        several = bucket_params(ranks, assumed.bucket_params, assumed.bucket_params_per_rank)
        bucket = np.where(window > 0, several, np.inf)
        size = np.minimum(params, bucket) * element_bytes
        once = self.group_seconds(operation, size, stride, ranks)
        return uncovered_buckets(once, bucket_count(params, bucket), window)

    def optimizer_params(self, dense: Floats, experts: Floats) -> Floats:
        """Parameters whose states a rank updates: all of its own that are trained, or its share
        with the distributed optimizer."""
        divided = self.sharded | self.fsdp
        sharing = np.where(divided, self.ranks.sharing, 1)
        expert_sharing = np.where(divided, self.ranks.expert_sharing, 1)
        return np.asarray(self.facts.trained * own_shards(dense, experts, sharing, expert_sharing))

    def optimizer_seconds(self, params: Floats, offloaded: Floats, covered: Floats) -> Floats:
        """Adam on the device, and for the `offloaded` share on the host.

        covered: computation that hides the transfers unless `no_overlap_offload_optimizer`.
        """
        widths = EXCHANGED_BYTES[self.facts.precision]
        moved = adam_bytes(widths[0], FP32)  # Megatron-LM's Adam reads fp32 gradients
        bandwidth = self.offer.spec.memory_bytes_per_s * ADAM_BANDWIDTH
        on_device = (1 - offloaded) * params * moved / bandwidth
        on_host = host_update_seconds(
            offloaded * params,
            moved,
            self.offer.host_memory,
            sum(widths),
            self.offer.host_link,
            window=np.where(self.table.columns["no_overlap_offload_optimizer"] == 1, 0.0, covered),
        )
        return np.asarray(on_device + on_host)


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
