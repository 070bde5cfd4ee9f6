"""Seconds of the communication of ranks in the passes of a block, and between stages.

Every function takes numbers of one plan, or arrays over many strategies. The argument
`group_seconds` is a `groups.GroupSeconds`: it gives the seconds of one collective or message in
groups of ranks. Sizes are bytes on one rank unless a parameter says otherwise. `BlockExchanges`
applies these functions to an average block of a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, NamedTuple

import numpy as np

from hetplan.profiling.models.operators import Precision
from hetplan.replays.arrays import Flags, Floats, Numbers
from hetplan.replays.facts import ModelFacts
from hetplan.replays.groups import GroupSeconds
from hetplan.replays.overlap import uncovered
from hetplan.replays.ranks import Degree, Ranks

# Bytes per parameter of a weight that is gathered, and of a gradient that is reduced. Gradients in
# bf16 are accumulated in fp32 (Megatron-LM: --accumulate-allreduce-grads-in-fp32, forced for bf16).
EXCHANGED_BYTES: dict[Precision, tuple[int, int]] = {"bf16": (2, 4), "fp16": (2, 2), "fp32": (4, 4)}


class Shared(NamedTuple):
    """Parameters on one rank, and the group of ranks that all-reduce their gradients."""

    params: Numbers  # parameters on one rank
    stride: Numbers  # ranks from one member of the group to the next
    ranks: Numbers  # members of the group


def expert_seconds(
    group_seconds: GroupSeconds, size: Numbers, expert: Numbers, expert_tensor: Numbers
) -> Floats:
    """Seconds of sending a block's tokens to their experts and back, in one pass: two all-to-alls.

    size: bytes of the tokens that one rank dispatches; a token counts once for each expert that it
    visits. expert: ranks over which the experts are spread; they are `expert_tensor` apart.
    Source: Lepikhin et al. 2021 (GShard), Section 3.2.
    """
    return np.asarray(2 * group_seconds("all-to-all", size, expert_tensor, expert))


def dispatched_copies(
    experts: float, expert: Numbers, expert_tensor: Numbers, node_devices: int
) -> Floats:
    """Copies of a token that leave its rank where a dispatcher sends one to each place: of p
    places, p (1 - (1 - 1 / p)^k), the number that a token visits on average which chooses k of all
    experts alike.

    Places are the nodes over which the expert ranks are spread, since a node's ranks pass the token
    on (DeepSeek-AI, DeepEP; NVIDIA, HybridEP). Within one node they are the expert ranks.

    experts: k, the experts that a token visits. expert: ranks over which the experts are spread;
    they are `expert_tensor` apart. node_devices: ranks of one node.
    """
    nodes = np.ceil(expert * expert_tensor / node_devices)
    places = np.where(nodes > 1, nodes, expert)
    return np.asarray(places * (1 - (1 - 1 / places) ** experts))


def ring_seconds(
    group_seconds: GroupSeconds, size: Numbers, context: Numbers, tensor: Numbers
) -> Floats:
    """Seconds in which a block's keys and values go once round the ring of context ranks: context -
    1 messages, one after the other.

    size: bytes of a rank's keys and values. context: ranks of the ring; they are `tensor` apart.
    Source: Liu et al. 2023 (Ring Attention), Section 3.
    """
    return np.asarray((context - 1) * group_seconds("send", size, tensor, context))


def heads_seconds(
    group_seconds: GroupSeconds, size: Numbers, context: Numbers, tensor: Numbers
) -> Floats:
    """Seconds of exchanging tokens for heads in one pass of a block: four all-to-alls, of queries,
    keys, values and outputs.

    size: bytes of a rank's queries, keys, values and outputs together. context: ranks that
    exchange; they are `tensor` apart. Source: Jacobs et al. 2023 (DeepSpeed Ulysses), Section 3.1.
    """
    # With fewer key heads than query heads the four differ; each is taken to have their mean size.
    return np.asarray(4 * group_seconds("all-to-all", size / 4, tensor, context))


def tensor_seconds(
    group_seconds: GroupSeconds,
    size: Numbers,
    all_reduces: Numbers,
    tensor: Numbers,
    sequence_parallel: Numbers,
) -> Floats:
    """Seconds of the tensor ranks' collectives in one pass of a block.

    They are all-reduces. With sequence parallelism, an all-gather and a reduce-scatter, which take
    equally long, replace each all-reduce (Korthikanti et al. 2022, Section 4.2.2).

    size: bytes of a block's output for all tokens. all_reduces: number of all-reduces in one pass
    (2: after attention and after the feed-forward network). tensor: tensor ranks, which are
    neighbours. sequence_parallel: whether tensor ranks divide tokens between their products.
    """
    reduced = all_reduces * group_seconds("all-reduce", size, 1, tensor)
    gathered = 2 * all_reduces * group_seconds("all-gather", size, 1, tensor)
    # the flag may be a column of numbers, 1 or 0
    return np.where(np.equal(sequence_parallel, 1), gathered, reduced)


def shard_seconds(
    group_seconds: GroupSeconds, shared: Sequence[Shared], element_bytes: int
) -> Floats:
    """Seconds of all-gathering a block's weights from their shards, or of reduce-scattering its
    gradients to the shards, which takes equally long.

    shared: parameters of dense weights, and of experts. element_bytes: bytes of a parameter's
    weight or gradient. Source: Rajbhandari et al. 2020 (ZeRO), Section 7.
    """
    of_parts = [
        group_seconds("all-gather", part.params * element_bytes, part.stride, part.ranks)
        for part in shared
    ]
    return np.asarray(sum(of_parts))


def crossing_seconds(
    group_seconds: GroupSeconds, size: Numbers, stage_ranks: Numbers, stages: Numbers
) -> Floats:
    """Seconds of the two messages of one micro-batch over a stage boundary, before any overlap: its
    activation forward and its gradient backward; 0 for one stage.

    size: bytes of the activation that one rank sends. stage_ranks: ranks of a stage, and so the
    distance from a rank to its neighbour in the next stage. stages: number of stages.
    """
    return np.asarray(2 * group_seconds("send", size, stage_ranks, stages))


@dataclass(frozen=True)
class BlockExchanges(Generic[Degree]):
    """Seconds of the exchanges of an average block of a model, for one micro-batch."""

    facts: ModelFacts  # facts of the whole model
    group_seconds: GroupSeconds  # seconds of collectives on the devices of the ranks
    ranks: Ranks[Degree]  # the degrees by which ranks divide the model
    rows: Numbers  # samples of the micro-batch over the context degree
    sequence_parallel: bool | Flags  # whether tensor ranks divide tokens between products
    all_to_all: bool | Flags  # whether context ranks exchange tokens for heads; else by the ring
    # whether weights are all-gathered for each pass, and gradients are reduce-scattered after the
    # backward pass
    fully_sharded: bool | Flags
    # micro-batches for which weights are gathered once, and gradients are scattered once: all of an
    # iteration where stages keep gathered weights; 0: both happen in every pass
    kept_for: Numbers = 0
    # ranks of a node where the dispatcher sends one copy of a token to each of its places; None: it
    # sends one to each expert
    one_copy_in: int | None = None
    # whether the exchange with experts hides behind the computation of another micro-batch
    hidden_experts: bool = False

    @cached_property
    def experts(self) -> Floats:
        """Seconds of sending tokens to their experts and back, in one pass; 0 without experts.

        Tensor ranks each dispatch a part of the tokens where they are sequence parallel, and where
        some of them hold whole experts. Otherwise each rank dispatches all tokens.
        """
        ranks = self.ranks
        divided = self.sequence_parallel | np.less(ranks.expert_tensor, ranks.tensor)
        size = self.facts.dispatched_bytes * self.rows / np.where(divided, ranks.tensor, 1)
        experts = self.facts.shape.experts
        if experts is not None and self.one_copy_in is not None:
            copies = dispatched_copies(
                experts.active, ranks.expert, ranks.expert_tensor, self.one_copy_in
            )
            size = size * copies / experts.active
        return expert_seconds(self.group_seconds, size, ranks.expert, ranks.expert_tensor)

    @cached_property
    def ring(self) -> Floats:
        """Seconds of sending keys and values round the context ranks, in one forward pass."""
        ranks, keys = self.ranks, self.facts.attention_bytes(self.facts.shape.kv_heads)
        size = keys * self.rows / ranks.tensor
        return ring_seconds(self.group_seconds, size, ranks.context, ranks.tensor)

    @cached_property
    def heads(self) -> Floats:
        """Seconds of exchanging tokens for heads, in one pass; their gradients take as long."""
        ranks, shape = self.ranks, self.facts.shape
        queries = self.facts.attention_bytes(shape.heads)
        keys = self.facts.attention_bytes(shape.kv_heads)
        size = (queries + keys) * self.rows / ranks.tensor
        return heads_seconds(self.group_seconds, size, ranks.context, ranks.tensor)

    def shared(self, dense: Numbers, experts: Numbers) -> list[Shared]:
        """The dense parameters on a rank and, where the model has experts, the parameters of
        experts, each with the group that all-reduces their gradients."""
        ranks = self.ranks
        parts = [Shared(dense, ranks.tensor, ranks.sharing)]
        if self.facts.has_experts:
            parts.append(Shared(experts, ranks.expert_ranks, ranks.expert_sharing))
        return parts

    @cached_property
    def dense_params(self) -> Floats:
        """Trained parameters of a block on one rank, without experts."""
        return np.asarray((self.facts.block_params - self.facts.expert_params) / self.ranks.tensor)

    @cached_property
    def expert_params(self) -> Floats:
        """Trained parameters of a block's experts on one rank."""
        return np.asarray(self.facts.expert_params / self.ranks.expert_ranks)

    @cached_property
    def shards(self) -> tuple[Floats, Floats]:
        """(seconds of all-gathering a block's weights, of reduce-scattering its gradients); 0
        without full shards."""
        weight, gradient = EXCHANGED_BYTES[self.facts.precision]
        shared = self.shared(self.dense_params, self.expert_params)
        # Frozen weights are gathered in the bits in which they are held, and have no gradients.
        # They count as the trained parameters of as many bytes.
        frozen_dense = self.facts.frozen.dense / weight / self.ranks.tensor
        frozen_experts = self.facts.frozen.experts / weight / self.ranks.expert_ranks
        held = self.shared(self.dense_params + frozen_dense, self.expert_params + frozen_experts)
        gather = shard_seconds(self.group_seconds, held, weight)
        scatter = shard_seconds(self.group_seconds, shared, gradient)
        gather = np.where(self.fully_sharded, gather, 0.0)
        scatter = np.where(self.fully_sharded, scatter, 0.0)
        return gather, scatter

    def waits(
        self, forward: Numbers, backward: Numbers, core_forward: Numbers
    ) -> tuple[Floats, Floats]:
        """(forward, backward) seconds that one block's passes wait for experts, context ranks and
        shards.

        Stages that keep gathered weights (PyTorch FSDP2, `reshard_after_forward=False`) wait in
        their first forward pass and in their last backward pass. These seconds are spread evenly
        over all micro-batches here.

        The ring hides behind attention's core. In the backward pass keys, values and their
        gradients go round, which takes twice as long, beside twice the core's seconds. The
        all-gathers of weights hide behind both passes, the reduce-scatters of gradients behind the
        backward pass. The exchange of tokens with experts hides behind a whole block of another
        micro-batch, or not at all (Megatron Core, `overlap_moe_expert_parallel_comm`).

        forward, backward: seconds of the block's computation. core_forward: seconds of attention's
        core in the forward pass.
        """
        gather, scatter = self.shards
        again = np.where(np.greater(self.kept_for, 0), 0.0, gather)  # of the backward pass
        share = 1 / np.maximum(self.kept_for, 1)
        gather, scatter = gather * share, scatter * share
        forward_wait = self._context(1, core_forward) + uncovered(gather, forward)
        backward_wait = self._context(2, core_forward) + uncovered(again + scatter, backward)
        hides = float(self.hidden_experts)
        forward_wait += uncovered(self.experts, hides * forward)
        backward_wait += uncovered(self.experts, hides * backward)
        return np.asarray(forward_wait), np.asarray(backward_wait)

    def split_waits(
        self, inputs: Numbers, weights: Numbers, core_forward: Numbers
    ) -> tuple[Floats, Floats]:
        """(inputs, weights) seconds that the two parts of one block's backward pass wait.

        The gradients of inputs go through the block's products and attention. So their pass waits
        for experts, context ranks and the gathered weights. The gradients of weights follow from
        what the pass before has left, and are scattered to the shards.

        inputs, weights: seconds of the block's computation in either pass. core_forward: as in
        `waits`.
        """
        gather, scatter = self.shards
        inputs_wait = self.experts + self._context(2, core_forward) + uncovered(gather, inputs)
        return np.asarray(inputs_wait), uncovered(scatter, weights)

    def _context(self, rounds: int, core_forward: Numbers) -> Floats:
        """Seconds that context ranks wait in a pass in which keys and values go round `rounds`
        times."""
        ring = uncovered(rounds * self.ring, rounds * core_forward)
        return np.where(self.all_to_all, self.heads, ring)
