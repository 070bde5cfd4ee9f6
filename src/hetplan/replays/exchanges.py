"""What ranks exchange in the passes of a block and between stages: seconds of collectives.

Every function takes numbers of one plan, or arrays over many strategies. `together` says what a
collective takes in groups of ranks (`groups.group_seconds`); sizes are bytes on one rank unless a
parameter says otherwise. `BlockExchanges` puts them together for the blocks of a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, NamedTuple

import numpy as np

from hetplan.profiling.models.operators import Precision
from hetplan.replays.arrays import Flags, Floats, Numbers
from hetplan.replays.facts import ModelFacts
from hetplan.replays.groups import Together
from hetplan.replays.overlap import uncovered
from hetplan.replays.ranks import Degree, Ranks

# Bytes per parameter of a weight that is gathered, and of a gradient that is reduced. Gradients in
# bf16 are accumulated in fp32 (Megatron-LM: --accumulate-allreduce-grads-in-fp32, forced for bf16).
EXCHANGED_BYTES: dict[Precision, tuple[int, int]] = {"bf16": (2, 4), "fp16": (2, 2), "fp32": (4, 4)}


class Shared(NamedTuple):
    """Parameters on one rank, whose gradients `ranks` ranks join that are `stride` apart."""

    params: Numbers
    stride: Numbers
    ranks: Numbers


def expert_seconds(
    together: Together, size: Numbers, expert: Numbers, expert_tensor: Numbers
) -> Floats:
    """Seconds of sending a block's tokens to their experts and back, in one pass: two all-to-alls.

    size: bytes of the tokens that one rank dispatches, a token once for each of its experts.
    expert: ranks over which the experts are spread; they are `expert_tensor` apart.
    Source: Lepikhin et al. 2021 (GShard), Section 3.2.
    """
    return np.asarray(2 * together("all-to-all", size, expert_tensor, expert))


def ring_seconds(together: Together, size: Numbers, context: Numbers, tensor: Numbers) -> Floats:
    """Seconds of a block's keys and values going once round the context ranks: context - 1 messages
    in turn.

    size: bytes of a rank's keys and values. context: ranks of the ring; they are `tensor` apart.
    Source: Liu et al. 2023 (Ring Attention), Section 3.
    """
    return np.asarray((context - 1) * together("send", size, tensor, context))


def heads_seconds(together: Together, size: Numbers, context: Numbers, tensor: Numbers) -> Floats:
    """Seconds of exchanging tokens for heads in one pass of a block: an all-to-all each of queries,
    keys, values and outputs.

    size: bytes of a rank's queries, keys, values and outputs together. context: ranks that
    exchange; they are `tensor` apart. Source: Jacobs et al. 2023 (DeepSpeed Ulysses), Section 3.1.
    """
    return np.asarray(4 * together("all-to-all", size / 4, tensor, context))


def tensor_seconds(
    together: Together,
    size: Numbers,
    collectives: Numbers,
    tensor: Numbers,
    sequence_parallel: Numbers,
) -> Floats:
    """Seconds of the tensor ranks' collectives in one pass of a block: all-reduces, or with
    sequence parallelism an all-gather and a reduce-scatter in place of each (Korthikanti et al.
    2022, Section 4.2.2).

    size: bytes of a block's output for all tokens. collectives: number of all-reduces in one pass
    (2: behind attention and behind the feed-forward part). tensor: ranks next to each other.
    sequence_parallel: whether tensor ranks divide tokens between their products.
    """
    reduced = collectives * together("all-reduce", size, 1, tensor)
    gathered = 2 * collectives * together("all-gather", size, 1, tensor)
    return np.where(np.equal(sequence_parallel, 1), gathered, reduced)


def shard_seconds(together: Together, shared: Sequence[Shared], element_bytes: int) -> Floats:
    """Seconds of gathering a block's weights from their shards, or of reducing and scattering its
    gradients to them: one all-gather of each part.

    shared: parameters of dense weights, and of experts. element_bytes: per parameter.
    Source: Rajbhandari et al. 2020 (ZeRO), Section 7.
    """
    each = [
        together("all-gather", part.params * element_bytes, part.stride, part.ranks)
        for part in shared
    ]
    return np.asarray(sum(each))


def crossing_seconds(
    together: Together, size: Numbers, stage_ranks: Numbers, stages: Numbers
) -> Floats:
    """Seconds of one micro-batch crossing a stage boundary: its activation forward and its gradient
    backward, before any overlap; 0 for one stage.

    size: bytes of the activation that one rank sends. stage_ranks: ranks of a stage; stages lie
    that far apart.
    """
    return np.asarray(2 * together("send", size, stage_ranks, stages))


@dataclass(frozen=True)
class BlockExchanges(Generic[Degree]):
    """Seconds of the exchanges of an average block for one micro-batch."""

    facts: ModelFacts
    """The whole model."""
    together: Together
    """Seconds of collectives on the ranks' devices."""
    ranks: Ranks[Degree]
    """How the ranks divide the model."""
    rows: Numbers
    """Samples of the micro-batch, times the share of their tokens that a context rank has."""
    sequence_parallel: bool | Flags
    """Whether tensor ranks divide tokens between products."""
    all_to_all: bool | Flags
    """Whether context ranks exchange tokens for heads. Otherwise keys and values go round."""
    fully_sharded: bool | Flags
    """Whether weights are gathered for each pass, and gradients are scattered behind it."""

    @cached_property
    def experts(self) -> Floats:
        """Seconds of sending tokens to their experts and back, in one pass; 0 without experts.
        Tensor ranks that divide tokens, or do not divide experts, each dispatch a part of them."""
        ranks = self.ranks
        divided = self.sequence_parallel | np.less(ranks.expert_tensor, ranks.tensor)
        size = self.facts.dispatched_bytes * self.rows / np.where(divided, ranks.tensor, 1)
        return expert_seconds(self.together, size, ranks.expert, ranks.expert_tensor)

    @cached_property
    def ring(self) -> Floats:
        """Seconds in which keys and values go round the context ranks, in one forward pass."""
        ranks, keys = self.ranks, self.facts.attention_bytes(self.facts.shape.kv_heads)
        size = keys * self.rows / ranks.tensor
        return ring_seconds(self.together, size, ranks.context, ranks.tensor)

    @cached_property
    def heads(self) -> Floats:
        """Seconds of exchanging tokens for heads in a forward pass. A backward pass takes as long
        for their gradients."""
        ranks, shape = self.ranks, self.facts.shape
        queries = self.facts.attention_bytes(shape.heads)
        keys = self.facts.attention_bytes(shape.kv_heads)
        size = (queries + keys) * self.rows / ranks.tensor
        return heads_seconds(self.together, size, ranks.context, ranks.tensor)

    def shared(self, dense: Numbers, experts: Numbers) -> list[Shared]:
        """The groups of ranks that synchronise the gradients of a rank's dense parameters, and of
        its experts where the model has any."""
        ranks = self.ranks
        parts = [Shared(dense, ranks.tensor, ranks.sharing)]
        if self.facts.expert_params > 0:
            parts.append(Shared(experts, ranks.expert_ranks, ranks.expert_sharing))
        return parts

    @cached_property
    def dense_params(self) -> Floats:
        """Parameters of a block on one rank, without experts."""
        return np.asarray((self.facts.block_params - self.facts.expert_params) / self.ranks.tensor)

    @cached_property
    def expert_params(self) -> Floats:
        """Parameters of a block's experts on one rank."""
        return np.asarray(self.facts.expert_params / self.ranks.expert_ranks)

    @cached_property
    def shards(self) -> tuple[Floats, Floats]:
        """Gathering a block's weights, and scattering its gradients; 0 without full shards."""
        weight, gradient = EXCHANGED_BYTES[self.facts.precision]
        shared = self.shared(self.dense_params, self.expert_params)
        gather = shard_seconds(self.together, shared, weight)
        scatter = shard_seconds(self.together, shared, gradient)
        return np.asarray(self.fully_sharded * gather), np.asarray(self.fully_sharded * scatter)

    def waits(
        self, forward: Numbers, backward: Numbers, core_forward: Numbers
    ) -> tuple[Floats, Floats]:
        """Seconds that one block's forward and backward pass wait for experts, context ranks and
        shards.

        The ring hides behind attention's core; in the backward pass keys, values and their
        gradients go round, which takes twice as long beside twice the core. Shards hide behind the
        whole pass: gathered weights in both, scattered gradients in the backward pass. Nothing
        hides tokens on their way.

        forward, backward: seconds of the block's computation. core_forward: of attention's core in
        the forward pass.
        """
        gather, scatter = self.shards
        there = self._context(1, core_forward) + uncovered(gather, forward)
        back = self._context(2, core_forward) + uncovered(gather + scatter, backward)
        return np.asarray(self.experts + there), np.asarray(self.experts + back)

    def _context(self, rounds: int, core_forward: Numbers) -> Floats:
        """What context ranks wait for in a pass in which the ring turns `rounds` times."""
        ring = uncovered(rounds * self.ring, rounds * core_forward)
        return np.where(self.all_to_all, self.heads, ring)
