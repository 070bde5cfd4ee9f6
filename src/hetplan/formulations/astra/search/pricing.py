"""Seconds per iteration of every strategy at once (Astra, Sections 3.3, 3.5).

A stage i of n layers takes t_i = n (forward + backward + recomputation) + h seconds for one
micro-batch, where h is the exchange with the next stage. With v virtual stages on each device the
pipeline fills v times faster (Narayanan et al. 2021, Section 2.2), and each micro-batch crosses
each stage boundary v times. An iteration of K micro-batches takes (eq. 22 where v = 1):

    T = (sum_i t_i - max_i t_i) / v + K max_i t_i + reduction + optimizer

Overlapped communication takes only the time that exceeds its window of computation, its exposed
time. The window of tensor-parallel collectives is the block's matrix products, that of gradients
the last backward pass, that of parameters the first forward pass.

The costs are those of the replay, evaluated on arrays: computation of blocks
(`hetplan.replays.blocks`), collectives and messages (`exchanges`, `groups`), exposed time
(`overlap`), Adam on device and host (`updates`). Seconds of an operator are theta / (phi eta)
(Astra, eq. 25-26): theta FLOPs of a matrix product or bytes of any other operator, phi the
datasheet's peak or bandwidth, eta in (0, 1] the share of phi that the operator reaches.
"""

from collections.abc import Sequence
from functools import cached_property, partial

import numpy as np

from hetplan.formulations.astra.search.table import (
    EXCHANGES,
    GRANULARITIES,
    METHODS,
    NONE,
    Strategies,
)
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

# Columns of the table of strategies, in the order in which `Priced` unpacks them: degrees, then
# recomputation.
DEGREES = (
    "pipeline_model_parallel_size", "tensor_model_parallel_size", "expert_model_parallel_size",
    "data_parallel_size", "context_parallel_size", "expert_tensor_parallel_size",
    "num_distributed_optimizer_instances", "micro_batch_size", "num_micro_batches",
    "sequence_parallel",
)  # fmt: skip
RECOMPUTATION = ("recompute_granularity", "recompute_method", "recompute_num_layers")
SELECTIVE, FULL, HYBRID = range(len(GRANULARITIES))  # values of column `recompute_granularity`
ADAM_BANDWIDTH = 0.8  # share of the memory's bandwidth that Adam reaches

# Row numbers in the table of `block_seconds`, one for each field of `BlockSeconds`.
FORWARD, BACKWARD, CORE_FORWARD, PRODUCTS_FORWARD, PRODUCTS_BACKWARD, EMBEDDING, HEAD = range(
    len(BlockSeconds._fields)
)


def block_seconds(
    facts: ModelFacts, offer: Offer, columns: Sequence[Ints], assumed: Assumptions
) -> Floats:
    """[7, R] the seconds of `BlockSeconds`, by field, of R strategies; each distinct combination of
    columns is computed once.

    columns: [R] each: tensor degree, samples of a micro-batch, whether sequence parallel, and the
    fields of `Cut`.
    """
    distinct, combination = np.unique(np.stack(columns), axis=1, return_inverse=True)
    seconds = []
    for tensor, micro_batch, sequence_parallel, context, expert, whole in distinct.T.tolist():
        cut = Cut(context, expert, whole)
        rank_pass = Pass(tensor, micro_batch, bool(sequence_parallel), cut)
        seconds.append(block_times(facts, offer, assumed, rank_pass))
    table = np.array(seconds, dtype=np.float64).reshape(-1, len(BlockSeconds._fields)).T
    return np.asarray(table[:, combination])


class Priced:
    """Seconds and parameters of R strategies on one type of device.

    Every attribute is an array [R] unless it says otherwise; properties are computed on first use.
    """

    def __init__(
        self, facts: ModelFacts, table: Strategies, offer: Offer, assumed: Assumptions
    ) -> None:
        self.facts, self.table, self.offer, self.assumed = facts, table, offer, assumed
        columns = table.columns
        (
            self.pp,  # pipeline stages
            self.tp,  # tensor degree
            self.ep,  # expert degree
            self.dp,  # replicas
            self.cp,  # context degree
            self.etp,  # expert-tensor degree
            self.copies,  # groups of ranks that each hold all shards of the model states
            self.mbs,  # samples of a micro-batch
            self.K,  # micro-batches of an iteration
            self.sp,  # 1 with sequence parallelism
        ) = (columns[name] for name in DEGREES)
        # numbers of granularity and method of recomputation, number of recomputed layers
        self.granularity, self.method, self.recomputed = (columns[name] for name in RECOMPUTATION)
        self.fsdp = columns["use_fsdp"] == 1  # whether fully sharded
        # samples of a micro-batch on a rank; context ranks divide the tokens of a sample
        self.rank_samples: Floats = self.mbs / self.cp
        # virtual stages on each device; 1 where the column has NONE, which is negative
        self.v: Ints = np.maximum(columns["virtual_pipeline_model_parallel_size"], 1)
        self.interleaved = columns["virtual_pipeline_model_parallel_size"] != NONE
        self.sharded = columns["use_distributed_optimizer"] == 1  # whether optimizer states are
        # whether context ranks exchange tokens for heads; otherwise keys and values go round a ring
        self.exchanged = columns["cp_comm_type"] == EXCHANGES.index("a2a")
        self.ranks = Ranks(self.tp, self.cp, self.dp, self.ep, self.etp, self.copies)
        # whether the attention core of layers that are not fully recomputed is recomputed
        self.selective = (self.granularity == SELECTIVE) | (self.granularity == HYBRID)
        self.group_seconds = partial(group_seconds, offer, assumed)

    @cached_property
    def blocks(self) -> Floats:
        """[7, R] seconds of computation of a block, embedding and head, see `block_seconds`."""
        whole = self.tp // self.etp  # the expert-tensor degree is 1 or the tensor degree
        columns = (self.tp, self.mbs, self.sp, self.cp, self.ep, whole)
        return block_seconds(self.facts, self.offer, columns, self.assumed)

    @cached_property
    def exchanges(self) -> BlockExchanges[Ints]:
        """The exchanges of one block in its passes."""
        return BlockExchanges(
            facts=self.facts,
            group_seconds=self.group_seconds,
            ranks=self.ranks,
            rows=self.rank_samples,
            sequence_parallel=self.sp == 1,
            all_to_all=self.exchanged,
            fully_sharded=self.fsdp,
            one_copy_in=self.offer.node_devices if self.assumed.stack.one_copy else None,
            hidden_experts=self.assumed.stack.hidden_experts,
            kept_for=self.kept_for,
        )

    @property
    def kept_for(self) -> Ints:
        """The micro-batches for which fully sharded stages keep gathered weights: all of an
        iteration in pipelines of a framework that keeps them, else 0."""
        keeps = (self.pp > 1) & self.assumed.framework.whole_in_pipelines
        return np.where(keeps, self.K, 0)

    @cached_property
    def waits(self) -> tuple[Floats, Floats]:
        """(forward, backward) seconds that one block waits for exchanges other than the collectives
        of tensor ranks."""
        blocks = self.blocks
        return self.exchanges.waits(blocks[FORWARD], blocks[BACKWARD], blocks[CORE_FORWARD])

    @cached_property
    def tensor_seconds(self) -> Floats:
        """Seconds of the tensor ranks' collectives of one block in one pass."""
        size = np.asarray(self.facts.boundary_bytes * self.rank_samples, dtype=np.float64)
        return tensor_seconds(
            self.group_seconds, size, self.facts.tensor_collectives, self.tp, self.sp
        )

    @cached_property
    def forward(self) -> Floats:
        """Seconds of one block's forward pass, with its exposed collectives."""
        return self._pass(FORWARD, PRODUCTS_FORWARD, self.waits[0])

    @cached_property
    def backward(self) -> Floats:
        """Seconds of one block's backward pass, with its exposed collectives, without
        recomputation."""
        return self._pass(BACKWARD, PRODUCTS_BACKWARD, self.waits[1])

    def _pass(self, computation: int, products: int, waits: Floats) -> Floats:
        """Seconds of one block's pass with its exposed collectives.

        computation, products: rows of `blocks` for the whole pass and its matrix products. waits:
        seconds of other exchanges.
        """
        # Transformer Engine overlaps these collectives through NVLink-mapped buffers: inside a node
        # only.
        in_node = self.tp <= self.offer.node_devices
        overlapped = (self.table.columns["tp_comm_overlap"] == 1) & in_node
        window = np.where(overlapped, self.blocks[products], 0.0)
        exposed = uncovered(self.tensor_seconds, window)
        return np.asarray(self.blocks[computation] + exposed + waits)

    def fully_recomputed(self, layers: Ints) -> Floats:
        """The number of a stage's layers that are fully recomputed.

        layers: number of the stage's layers. The column `recompute_num_layers` counts layers of a
        virtual stage.
        """
        # NONE, which is negative, counts as 0
        recomputed = np.minimum(np.maximum(self.recomputed, 0) * self.v, layers)
        full_or_hybrid = self.granularity >= FULL
        again = np.where(full_or_hybrid, recomputed, 0)
        # The method `uniform` recomputes all layers; the column has the size of its groups.
        uniform = (self.granularity == FULL) & (self.method == METHODS.index("uniform"))
        return np.where(uniform, layers, again).astype(float)

    def recomputed_of_chunk(self, layers: Ints) -> Ints:
        """The number of the first layers of a virtual stage that are fully recomputed.

        layers: number of the virtual stage's layers.
        """
        first = np.where(self.granularity >= FULL, np.maximum(self.recomputed, 0), 0)
        uniform = (self.granularity == FULL) & (self.method == METHODS.index("uniform"))
        return np.where(uniform, layers, np.minimum(first, layers))

    def layers_seconds(self, layers: Ints) -> Floats:
        """Seconds of forward, backward and recomputation of one micro-batch in a stage.

        layers: number of the stage's layers.
        """
        again = self.fully_recomputed(layers)
        core = np.where(self.selective, (layers - again) * self.blocks[CORE_FORWARD], 0.0)
        return layers * (self.forward + self.backward) + again * self.forward + core

    @cached_property
    def crossing_seconds(self) -> Floats:
        """Seconds of one micro-batch crossing one stage boundary, forward and backward, before any
        overlap: h of eq. 22."""
        # under sequence parallelism each tensor rank sends its share of the tokens
        size = self.facts.boundary_bytes * self.rank_samples / np.where(self.sp == 1, self.tp, 1)
        stage_ranks = self.tp * self.cp * self.dp
        return crossing_seconds(self.group_seconds, size, stage_ranks, self.pp)

    @property
    def stage_params(self) -> Floats:
        """Trained dense parameters per layer and rank; `expert_stage_params` counts experts."""
        return self.exchanges.dense_params

    @property
    def expert_stage_params(self) -> Floats:
        """Trained expert parameters per layer and rank."""
        return self.exchanges.expert_params

    @cached_property
    def end_params(self) -> tuple[Floats, Floats]:
        """(embedding, head): numbers of trained parameters per rank. A tied head has a copy of the
        embedding's weights where it is on another stage."""
        end = self.facts.head
        head = end.trained + np.where(self.pp > 1, end.tied_params - end.frozen_tied, 0)
        return self.facts.embedding.trained / self.tp, head / self.tp

    def exposed_reduction(
        self, dense: Floats, experts: Floats, forward: Floats, backward: Floats
    ) -> Floats:
        """[R] exposed seconds of reducing gradients and of gathering weights.

        Gradients are all-reduced. With the distributed optimizer they are reduced and scattered,
        and weights are gathered (Rajbhandari et al. 2020, Section 7). Fully sharded stages
        all-reduce the gradients of their shards once, over the groups that hold the same shards.

        dense, experts: trained parameters per rank. forward, backward: seconds of a stage's passes,
        the windows of weights and of gradients.
        """
        weight_bytes, gradient_bytes = EXCHANGED_BYTES[self.facts.precision]
        columns = self.table.columns
        replicated_or_sharded = np.zeros_like(dense)
        fully_sharded = np.zeros_like(dense)
        gradient_window = np.where(columns["overlap_grad_reduce"] == 1, backward, 0.0)
        weight_window = np.where(columns["overlap_param_gather"] == 1, forward, 0.0)
        for shared in self.exchanges.shared(dense, experts):
            share = shared.params / np.maximum(dense + experts, 1.0)  # of the windows
            reduce = self._in_buckets("all-reduce", shared, gradient_bytes, share * gradient_window)
            # a reduce-scatter takes as long as an all-gather
            scatter = self._in_buckets(
                "all-gather", shared, gradient_bytes, share * gradient_window
            )
            gather = self._in_buckets("all-gather", shared, weight_bytes, share * weight_window)
            exposed = np.where(self.sharded, scatter + gather, reduce)
            replicated_or_sharded = replicated_or_sharded + exposed
            shards = Shared(
                params=shared.params / shared.ranks,
                stride=shared.stride * shared.ranks,
                ranks=self.copies,
            )
            across = self._in_buckets("all-reduce", shards, gradient_bytes, share * gradient_window)
            fully_sharded = fully_sharded + across
        return np.where(self.fsdp, fully_sharded, replicated_or_sharded)

    def _in_buckets(
        self, operation: str, shared: Shared, element_bytes: int, window: Floats
    ) -> Floats:
        """[R] exposed seconds of exchanging parameters. They are exchanged in buckets where
        there is a window, otherwise all at once.

        element_bytes: bytes of a parameter. window: seconds of the computation beside the exchange.
        """
        assumed = self.assumed
        params, stride, ranks = shared
        full_bucket = bucket_params(ranks, assumed.bucket_params, assumed.bucket_params_per_rank)
        bucket = np.where(window > 0, full_bucket, np.inf)
        size = np.minimum(params, bucket) * element_bytes
        bucket_seconds = self.group_seconds(operation, size, stride, ranks)
        return uncovered_buckets(bucket_seconds, bucket_count(params, bucket), window)

    def share_of_states(self, dense: Floats, experts: Floats) -> Floats:
        """The share of a rank's parameters whose model states it holds: all of them, or with the
        distributed optimizer or full sharding its shard.

        dense, experts: parameters that a rank holds, or their bytes.
        """
        divided = self.sharded | self.fsdp
        sharing = np.where(divided, self.ranks.sharing, 1)
        expert_sharing = np.where(divided, self.ranks.expert_sharing, 1)
        # a stage without layers has no parameters to share
        all_params = np.maximum(dense + experts, 1.0)
        return np.asarray(own_shards(dense, experts, sharing, expert_sharing) / all_params)

    def optimizer_params(self, dense: Floats, experts: Floats) -> Floats:
        """The number of parameters that a rank updates: those that it holds; with the distributed
        optimizer or full sharding, its shard of these.

        dense, experts: trained parameters that a rank holds.
        """
        return np.asarray(self.share_of_states(dense, experts) * (dense + experts))

    def optimizer_seconds(self, params: Floats, offloaded: Floats, covered: Floats) -> Floats:
        """Seconds of Adam on the device, and on the host for offloaded optimizer states.

        params: parameters that a rank updates. offloaded: share of them whose states are on the
        host. covered: seconds of computation that hide the transfers, unless
        `no_overlap_offload_optimizer`.
        """
        weight_bytes, gradient_bytes = EXCHANGED_BYTES[self.facts.precision]
        moved = adam_bytes(weight_bytes, FP32)  # Megatron-LM's Adam reads fp32 gradients
        bandwidth = self.offer.spec.memory_bytes_per_s * ADAM_BANDWIDTH
        on_device = (1 - offloaded) * params * moved / bandwidth
        blocking = self.table.columns["no_overlap_offload_optimizer"] == 1
        on_host = host_update_seconds(
            params=offloaded * params,
            moved=moved,
            host_memory=self.offer.host_memory,
            exchanged=weight_bytes + gradient_bytes,
            host_link=self.offer.host_link,
            window=np.where(blocking, 0.0, covered),
        )
        return np.asarray(on_device + on_host)


def after_pipeline(
    priced: Priced, layers: Ints, ends: Floats, offloaded: Floats
) -> tuple[Floats, Floats]:
    """(exposed reduction, optimizer) seconds of one stage of every strategy.

    layers: number of the stage's layers. ends: parameters per rank of embedding and head on the
    stage. offloaded: share of the optimizer states that are on the host.
    """
    dense = layers * priced.stage_params + ends
    experts = layers * priced.expert_stage_params
    forward, backward = layers * priced.forward, layers * priced.backward
    reduction = priced.exposed_reduction(dense, experts, forward, backward)
    updated = priced.optimizer_params(dense, experts)
    return reduction, priced.optimizer_seconds(updated, offloaded, backward)


def iteration_parts(priced: Priced, offloaded: Floats) -> tuple[Floats, Floats, Floats]:
    """(pipeline, exposed reduction, optimizer) seconds of every strategy whose stages hold the same
    number of layers, or the last ones one less.

    offloaded: share of the optimizer states that are on the host.
    """
    one_stage = priced.pp == 1
    layers = -(-priced.facts.layers // priced.pp)  # of a stage, rounded up
    work = priced.layers_seconds(layers)
    overlapped = priced.table.columns["overlap_p2p_communication"] == 1
    window = np.where(overlapped, work / priced.v, 0.0)
    stage = work + priced.v * uncovered(priced.crossing_seconds, window)
    first, last = priced.blocks[EMBEDDING], priced.blocks[HEAD]
    # the sum over all stages: one with fewer layers counts in proportion to them
    total = priced.facts.layers / layers * stage + first + last
    # where layers do not divide evenly, the last stage has one less
    spared = work - priced.layers_seconds(priced.facts.layers // priced.pp)
    slowest = stage + np.where(one_stage, first + last, np.maximum(first, last - spared))
    pipeline = (total - slowest) / priced.v + priced.K * slowest
    embedding, head = priced.end_params
    # the parameters of the end with more of them, whose exchanges take longest
    ends = np.where(one_stage, embedding + head, np.maximum(embedding, head))
    reduction, optimizer = after_pipeline(priced, layers, ends, offloaded)
    return pipeline, reduction, optimizer
