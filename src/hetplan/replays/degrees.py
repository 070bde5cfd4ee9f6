"""The replay of plans with further degrees (`Degrees`): context, expert, expert-tensor and sequence
parallelism, full shards in pipelines, overlapped communication, offloaded optimizer states.

The layers of the replay are those of one rank's cut of the model
(`profiling.models.transformer.Cut`), and their seconds are predicted as in every predicted profile.
`exchanges.BlockExchanges` gives the seconds that a block waits inside a pass: for the exchange of
tokens with experts, for keys or heads between context ranks, and for the shards of its weights.
Ranks are in Megatron's order.

The simulator adds the schedule, the messages between stages (each context rank sends its tokens),
the collectives of tensor ranks, and at the end the reduction of gradients. Gradients of dense
weights are reduced over replicas and context ranks, gradients of experts over the ranks that hold
the same experts.

With `degrees` ZeRO 3 is FSDP, on pipelines too: each block's weights are gathered in both passes
and its gradients scattered, behind its computation; with several shard groups (HSDP) the gradients
of shards are reduced over the groups at the end. Embedding and head are not gathered.

`Degrees.overlap` names the communication that hides behind computation:

- `tensor`: collectives of tensor ranks hide behind the computation of their pass;
- `gradients`: gradients leave in buckets during the last backward pass;
- `weights`: weights are gathered during the next forward pass, and the seconds of gathering that
  this pass does not cover follow the update;
- `messages`: a message leaves as soon as its tensor is computed, because its receive is posted
  ahead;
- `offload`: transfers of offloaded optimizer states hide behind a backward pass.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

from hetplan.plans.degrees import Degrees
from hetplan.plans.plan import Plan, Recomputation, Stage
from hetplan.profiling.models.operators import Layer
from hetplan.profiling.models.transformer import Cut
from hetplan.profiling.profiles.predict import predict
from hetplan.profiling.workload import Workload
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.blocks import BlockSeconds, Pass, block_times
from hetplan.replays.costs import Costs, prefix_sums
from hetplan.replays.data import Kept, Layer as PosedLayer, ReplayData
from hetplan.replays.degree_checks import check_replayable, ranks_of
from hetplan.replays.exchanges import EXCHANGED_BYTES, BlockExchanges
from hetplan.replays.facts import expert_params_of, facts_of, frozen_bytes_of
from hetplan.replays.groups import group_seconds
from hetplan.replays.memory import (
    ATTENTION_OUTPUT,
    gathered_for_experts,
    saved_bytes_of,
)
from hetplan.replays.offers import offers_of_cluster
from hetplan.replays.overlap import bucket_count, bucket_params, uncovered_buckets
from hetplan.replays.pose import PLAIN, pose
from hetplan.replays.ranks import Ranks, own_shards
from hetplan.replays.updates import FP32, adam_bytes, host_update_seconds
from hetplan.replays.zero import Owner, SharedCollectives, ZeroCosts
from hetplan.schema import Range

Rings = Sequence[Sequence[int]]  # groups of devices that join the same bytes, in ring order


def cut_of(plan: Plan, degrees: Degrees) -> Cut:
    """The cut of every block of the model over a plan's ranks."""
    ranks = ranks_of(plan, degrees)
    return Cut(ranks.context, ranks.expert, ranks.tensor // ranks.expert_tensor)


def one_rank(plan: Plan, workload: Workload, degrees: Degrees) -> Workload:
    """The workload with one rank's cut of its model.

    Where the workload's profile is not of this cut, a profile is predicted for the plan's tensor
    degree and micro-batches.
    """
    tensor = ranks_of(plan, degrees).tensor
    cut = cut_of(plan, degrees)
    facts = facts_of(workload).divided(cut)
    sequence_parallel = degrees.sequence_parallel
    # Transformer Engine overlaps tensor ranks' collectives through NVLink-mapped buffers, so that
    # they hide only where every group lies within a node, also on the type with the smallest nodes.
    smallest_node = min(offer.node_devices for offer in offers_of_cluster(workload.cluster))
    hides_reduces = "tensor" in degrees.overlap and tensor <= smallest_node
    stack, framework, profile = workload.stack, workload.framework, workload.profile
    framework = framework.model_copy(
        update={"sequence_parallel": sequence_parallel or framework.sequence_parallel}
    )
    stack = replace(
        stack,
        sequence_parallel=stack.sequence_parallel or sequence_parallel,
        hidden_reduces=stack.hidden_reduces or hides_reduces,
    )
    model = replace(workload.model, layers=(facts.embedding, *facts.blocks, facts.head))
    # Sequence parallelism changes predicted times; a measured profile stands as it is.
    predicted = profile.provenance.kind == "predicted"
    if cut != Cut() or (sequence_parallel and predicted):
        # all replicas have equal micro-batches (`check_replayable`)
        sizes = sorted({batch.samples for batch in plan.replicas[0].micro_batches})
        profile = predict(
            model, workload.cluster, micro_batches=sizes, tensor_degrees=[tensor], stack=stack
        )
    return replace(workload, model=model, profile=profile, stack=stack, framework=framework)


class ExpertBytes(NamedTuple):
    """[L] bytes of each layer's experts, as the costs of a rank count them."""

    trained: list[float]
    frozen: list[float]


def layers_on_ranks(
    data: ReplayData, workload: Workload, of_rank: Workload, ranks: Ranks[int], degrees: Degrees
) -> tuple[list[PosedLayer], ExpertBytes]:
    """(layers as the costs of a rank count them, bytes of the experts as counted).

    `Costs` gives each tensor rank an even part of a layer's weights, but experts are divided by
    `Ranks.expert_ranks`. So a layer's `param_bytes` and `frozen_bytes` count its experts' bytes
    times tensor / expert_ranks: one tensor-th of the sum is then what a tensor rank holds.

    data: of `of_rank`, the workload with one rank's cut of its model. workload: with the whole one.
    """
    layers, expert_bytes = [], ExpertBytes([], [])
    for posed, uncut, cut in zip(
        data.layers, workload.model.layers, of_rank.model.layers, strict=True
    ):
        # A cut layer has the parameters of all ranks, with all experts among them.
        all_experts = expert_params_of(uncut) * data.element_bytes
        dense = posed.param_bytes - all_experts
        counted_experts = all_experts * ranks.tensor / ranks.expert_ranks
        frozen = frozen_bytes_of(uncut, data.precision)
        counted_frozen = frozen.experts * ranks.tensor / ranks.expert_ranks
        kept = {}
        for mode, plain in posed.kept.items():
            again = mode == "full"
            kept[mode] = further_kept(plain, cut, degrees, ranks.tensor, of_rank, again=again)
        expert_bytes.trained.append(counted_experts)
        expert_bytes.frozen.append(counted_frozen)
        changes = {
            "param_bytes": dense + counted_experts,
            "frozen_bytes": frozen.dense + counted_frozen,
            "kept": kept,
        }
        layers.append(posed.model_copy(update=changes))
    return layers, expert_bytes


def bytes_of_rank(
    workload: Workload, ranks: Ranks[int], degrees: Degrees, mode: Recomputation
) -> Costs:
    """Costs of one rank under further degrees, of which only the bytes are used; its seconds are
    those of one rank's cut of the model on one device.

    Raises UnsupportedError for a model that has no transformer's sizes.
    """
    facts = facts_of(workload).divided(
        Cut(ranks.context, ranks.expert, ranks.tensor // ranks.expert_tensor)
    )
    model = replace(workload.model, layers=(facts.embedding, *facts.blocks, facts.head))
    profile = predict(model, workload.cluster, micro_batches=[1], tensor_degrees=[1])
    of_rank = replace(workload, model=model, profile=profile)
    data = pose(of_rank, tuple(dict.fromkeys((*PLAIN, mode))))
    layers, expert_bytes = layers_on_ranks(data, workload, of_rank, ranks, degrees)
    costs = Costs(data.model_copy(update={"layers": layers}), mode)
    costs.expert_sums = prefix_sums(expert_bytes.trained)
    costs.frozen_expert_sums = prefix_sums(expert_bytes.frozen)
    return costs


class DegreeCosts(Costs):
    """The costs of a plan with further degrees."""

    degrees: Degrees

    def __init__(self, plan: Plan, workload: Workload, degrees: Degrees) -> None:
        of_rank = one_rank(plan, workload, degrees)
        self.ranks = ranks_of(plan, degrees)
        self.cut = cut_of(plan, degrees)
        self.tensor = self.ranks.tensor  # ranks of a tensor group
        modes = tuple(dict.fromkeys((*PLAIN, plan.recomputation)))
        data = pose(of_rank, modes)
        layers, expert_bytes = layers_on_ranks(data, workload, of_rank, self.ranks, degrees)
        super().__init__(
            data.model_copy(update={"layers": layers}), plan.recomputation, workload.links
        )
        self.degrees, self.context = degrees, degrees.context
        self.fully_sharded = plan.zero == 3  # whether weights are gathered
        # see `BlockExchanges.kept_for`
        staged = len(plan.replicas[0].stages) > 1
        keeps_weights = staged and of_rank.framework.whole_in_pipelines
        self.kept_for = micro_batch_count(plan) if keeps_weights else 0
        self.expert_sums = prefix_sums(expert_bytes.trained)
        self.frozen_expert_sums = prefix_sums(expert_bytes.frozen)
        self.assumed = Assumptions(
            profile=of_rank.profile, links=workload.links, stack=of_rank.stack
        )
        self.facts = facts_of(workload)  # of the whole model
        self.offers = {offer.name: offer for offer in offers_of_cluster(workload.cluster)}
        self.waits = cache(self._waits)  # (device type, samples) -> (forward, backward) seconds
        # (device type, samples) -> (backward pass of inputs, pass of weights) seconds
        self.split_waits = cache(self._split_waits)
        self.block_seconds = cache(self._block_seconds)

    def exchanges(self, kind: str, samples: int) -> BlockExchanges[int]:
        """The exchanges of a block for one micro-batch.

        kind: the ranks' device type. samples: number of samples of the micro-batch.
        """
        offer = self.offers[kind]
        return BlockExchanges(
            facts=self.facts,
            group_seconds=partial(group_seconds, offer, self.assumed),
            ranks=self.ranks,
            rows=samples / self.context,
            sequence_parallel=self.degrees.sequence_parallel,
            all_to_all=self.degrees.exchange == "all-to-all",
            fully_sharded=self.fully_sharded,
            one_copy_in=offer.node_devices if self.assumed.stack.one_copy else None,
            hidden_experts=self.assumed.stack.hidden_experts,
            kept_for=self.kept_for,
        )

    def _block_seconds(self, kind: str, samples: int) -> BlockSeconds:
        """Seconds in which a rank of type `kind` computes a block of `samples` samples."""
        rank_pass = Pass(self.tensor, samples, self.degrees.sequence_parallel, self.cut)
        return block_times(self.facts, self.offers[kind], self.assumed, rank_pass)

    def _waits(self, kind: str, samples: int) -> tuple[float, float]:
        """(forward, backward) seconds that a block waits for exchanges, for a micro-batch of
        `samples` samples on devices of type `kind`."""
        block = self.block_seconds(kind, samples)
        forward, backward = self.exchanges(kind, samples).waits(
            block.forward, block.backward, block.core_forward
        )
        return float(forward), float(backward)

    def _split_waits(self, kind: str, samples: int) -> tuple[float, float]:
        """Seconds that a block waits for exchanges in a backward pass of inputs, and in its pass of
        weights; arguments as those of `_waits`."""
        block = self.block_seconds(kind, samples)
        shares, seconds = self.weight_shares(kind, self.tensor, samples)
        blocks = slice(1, -1)  # all layers but the model's first and last one
        share = float((shares * seconds)[blocks].sum() / seconds[blocks].sum())
        inputs, weights = self.exchanges(kind, samples).split_waits(
            (1 - share) * block.backward, share * block.backward, block.core_forward
        )
        return float(inputs), float(weights)

    def weight_seconds(self, stage: Stage, layers: Range, samples: int) -> float:
        """Seconds of a pass of weights, with the waits of blocks for the scattering of gradients to
        full shards."""
        first_device = stage.devices[0][0]
        _, weights_wait = self.split_waits(self.device_types[first_device], samples)
        computed = self.computed_weight_seconds(stage, layers, samples)
        return computed + self.blocks_among(layers) * weights_wait

    def added_seconds(self, stage: Stage, layers: Range, samples: int) -> float:
        """Seconds by which a backward pass takes longer where it is split: beside each part is less
        computation that full shards can hide behind."""
        kind = self.device_types[stage.devices[0][0]]
        _, backward_wait = self.waits(kind, samples)
        return self.blocks_among(layers) * (sum(self.split_waits(kind, samples)) - backward_wait)

    def passes(self, stage: Stage, layers: Range, samples: int) -> tuple[float, float]:
        """(forward, backward) seconds of one micro-batch, with the waits of blocks for exchanges.

        A full recomputation repeats the exchanges of the forward pass, and waits for them again.
        """
        forward, backward = super().passes(stage, layers, samples)
        blocks = self.blocks_among(layers)
        first_device = stage.devices[0][0]  # a stage has devices of one type (`check_replayable`)
        forward_wait, backward_wait = self.waits(self.device_types[first_device], samples)
        if self.recomputation == "full":
            backward_wait += forward_wait
        return forward + blocks * forward_wait, backward + blocks * backward_wait

    def blocks_among(self, layers: Range) -> int:
        """The number of blocks in a range of layers. All layers but the model's first and last one
        are blocks."""
        first, last = max(layers[0], 1), min(layers[1], len(self.data.layers) - 1)
        return last - first


def further_kept(
    kept: Kept, layer: Layer, degrees: Degrees, tensor: int, workload: Workload, *, again: bool
) -> Kept:
    """The bytes that a layer keeps in a plan with further degrees.

    Attention's output is kept twice where context ranks exchange tokens for heads: before the
    exchange and after it. Tensor ranks that divide the columns of an expert gather its input.

    kept: the layer's bytes without further degrees. tensor: the tensor degree. workload: the one of
    `one_rank`. again: whether the layer is computed again in the backward pass.
    """
    attention_output = 0.0
    if degrees.exchange == "all-to-all":
        attention_output = saved_bytes_of(layer, ATTENTION_OUTPUT, workload.precision)
    gathered = float(gathered_for_experts(layer, workload.precision, tensor, degrees.expert_tensor))
    if again:
        changes = {
            "working_bytes": kept.working_bytes + attention_output,
            "gathered_working_bytes": max(kept.gathered_working_bytes, gathered),
        }
    else:
        changes = {
            "saved_bytes": kept.saved_bytes + attention_output,
            "gathered_bytes": max(kept.gathered_bytes, gathered),
        }
    return kept.model_copy(update=changes)


class DegreeZero(ZeroCosts):
    """The costs of ZeRO's collectives and of the update in a plan with further degrees."""

    costs: DegreeCosts

    def weight_bytes(self, stage: Stage) -> tuple[float, float]:
        """(dense, expert) bytes of the weights of a stage, as `DegreeCosts` counts them: each
        tensor rank holds one tensor-th of either."""
        weights, experts = self.costs.param_sums, self.costs.expert_sums
        all_weights = sum(weights[last] - weights[first] for first, last in stage.layers)
        expert_weights = sum(experts[last] - experts[first] for first, last in stage.layers)
        copied_tied_weights = sum(size for _, size in self.copied_in(stage))
        return all_weights - expert_weights + copied_tied_weights, expert_weights

    def shares(self, stage: Stage) -> tuple[float, ...]:
        """For each device of a stage, the share of its weights' model states that it holds.

        The share is taken of dense weights and experts together, trained and frozen ones, and is
        equal on all devices.
        """
        dense, experts = self.weight_bytes(stage)
        costs = self.costs
        for first, last in stage.layers:
            frozen = costs.frozen_sums[last] - costs.frozen_sums[first]
            of_experts = costs.frozen_expert_sums[last] - costs.frozen_expert_sums[first]
            dense, experts = dense + frozen - of_experts, experts + of_experts
        sharing = expert_sharing = 1
        if self.plan.zero:
            ranks = self.costs.ranks
            sharing, expert_sharing = ranks.sharing, ranks.expert_sharing
        shards = float(own_shards(dense, experts, sharing, expert_sharing))
        share = shards / (dense + experts)
        return (share,) * len(stage.all_devices)

    def update_seconds(self, stage: Stage) -> float:
        """Seconds of a stage's update: on the device, then on the host for offloaded states."""
        on_device = super().update_seconds(stage)
        offloaded = self.costs.degrees.offloaded
        if not offloaded:
            return on_device
        return (1 - offloaded) * on_device + self.host_seconds(stage, offloaded)

    def host_seconds(self, stage: Stage, offloaded: float) -> float:
        """Seconds of the host's part of a stage's update. Its transfers hide behind one backward
        pass where the plan overlaps offloading.

        offloaded: share of the optimizer states that is on the host.
        """
        costs = self.costs
        first_device = stage.devices[0][0]
        offer = costs.offers[costs.device_types[first_device]]
        weight_bytes, gradient_bytes = EXCHANGED_BYTES[costs.facts.precision]
        # Bytes of the weights that one device updates. All devices have equally many, because they
        # have equal parts of the weights and equal shares of the states.
        updated_bytes = sum(self.weight_bytes(stage)) * stage.parts[0] * self.shares(stage)[0]
        window = 0.0
        if "offload" in costs.degrees.overlap:
            samples = self.plan.replicas[0].micro_batches[0].samples
            _, window = self.stage_passes(stage, samples)
        seconds = host_update_seconds(
            params=offloaded * updated_bytes / costs.data.element_bytes,
            moved=adam_bytes(weight_bytes, FP32),
            host_memory=offer.host_memory,
            exchanged=weight_bytes + gradient_bytes,
            host_link=offer.host_link,
            window=window,
        )
        return float(seconds)

    def stage_passes(self, stage: Stage, samples: int) -> tuple[float, float]:
        """(forward, backward) seconds of one micro-batch in all chunks of the stage."""
        of_chunks = [self.costs.passes(stage, chunk, samples) for chunk in stage.layers]
        forward = sum(forward for forward, _ in of_chunks)
        backward = sum(backward for _, backward in of_chunks)
        return forward, backward

    def ring_parts(self, owners: Sequence[Owner]) -> Iterator[tuple[Rings, float]]:
        """(rings, part) of the gradients of dense weights, then of experts.

        owners: the stages that hold the weights. rings: devices that reduce the same gradients.
        part: the part of a rank's bytes that a ring reduces: all of them, or the rank's shard where
        stages are fully sharded.
        """
        # Megatron's order of the ranks of a stage: one replica after the other
        by_stage = sorted(owners, key=lambda owner: owner[1])
        holders = [self.plan.replicas[i].stages[j] for i, j in by_stage]
        order = [device for stage in holders for device in stage.all_devices]
        stages = len({j for _, j in owners})
        ranks = self.costs.ranks
        dense = (ranks.tensor, ranks.sharing)
        experts = (ranks.expert_ranks, ranks.expert_sharing)
        for stride, sharing in (dense, experts):
            if self.plan.zero < 3:
                # The whole gradients of all owners are summed. Below ZeRO 3 there is one group of
                # shards, so that `sharing` is the number of a stage's ranks with these weights.
                yield spaced(order, stride, stages * sharing), 1.0
                continue
            shard = 1 / sharing
            if stages > 1:  # tied weights: each ring reduces one shard over the stages that hold it
                yield spaced(order, len(order) // stages, stages), shard
            else:
                yield spaced(order, stride * sharing, ranks.shard_groups), shard

    def shared_collectives(self) -> Iterator[SharedCollectives]:
        """The collectives at the end of an iteration. Dense weights and experts have separate ones,
        because different ranks hold them."""
        for owners, sizes in self.shared_parts().items():
            for size, (rings, part) in zip(sizes, self.ring_parts(owners), strict=True):
                ranks = len(rings[0])
                if size and ranks > 1:
                    rank_bytes = size * part / self.costs.tensor
                    # Under ZeRO 3 a rank keeps its shard; weights are gathered in the passes.
                    joined = self.join(owners, rings, rank_bytes, divided=0 < self.plan.zero < 3)
                    yield self.exposed(joined, rank_bytes, ranks, size / sum(sizes))

    def exposed(
        self, joined: SharedCollectives, size: float, ranks: int, part: float
    ) -> SharedCollectives:
        """The part of the collectives that the plan's overlap leaves exposed.

        Overlapped gradients leave in buckets. Of overlapped weights, the seconds of gathering that
        the next forward pass does not cover are exposed.

        size: bytes of weights on a rank. ranks: ranks that join them. part: the part of the forward
        pass behind which the gathering may hide.
        """
        assumed, overlap = self.costs.assumed, self.costs.degrees.overlap
        bucket = bucket_params(ranks, assumed.bucket_params, assumed.bucket_params_per_rank)
        buckets = float(bucket_count(size / self.costs.data.element_bytes, bucket))
        if "gradients" in overlap:
            joined = joined._replace(buckets=math.ceil(buckets))
        if joined.weights is None or "weights" not in overlap:
            return joined
        i, j = joined.owners[0]  # replicas are alike; tied weights are needed first in stage 0
        replica = self.plan.replicas[i]
        forward, _ = self.stage_passes(replica.stages[j], replica.micro_batches[0].samples)
        bucket_seconds = joined.weights.seconds / buckets
        exposed = uncovered_buckets(bucket_seconds, buckets, part * forward)
        return joined._replace(weights=joined.weights._replace(seconds=float(exposed)))


def spaced(order: Sequence[int], stride: int, ranks: int) -> Rings:
    """Rings of `ranks` devices each; neighbours of a ring are `stride` places apart in `order`."""
    rings = []
    for begin in range(0, len(order), stride * ranks):
        end = begin + stride * ranks
        rings += [order[first:end:stride] for first in range(begin, begin + stride)]
    return rings


def micro_batch_count(plan: Plan) -> int:
    """Micro-batches of an iteration on each replica; all replicas have equally many."""
    return sum(batch.count for batch in plan.replicas[0].micro_batches)


def zero_costs(plan: Plan, workload: Workload) -> ZeroCosts | None:
    """The costs of a plan with further degrees; None where the plan has none, or where its degrees
    change nothing.

    The workload caches `DegreeCosts` by everything that they depend on. Raises UnsupportedError or
    InputError where `check_replayable` does.
    """
    degrees = plan.degrees
    if degrees is None:
        return None
    stages = plan.replicas[0].stages
    tensor = len(stages[0].tensor_shares)
    # Without experts their tensor degree changes nothing, and is set to the one that stands for it.
    if not facts_of(workload).has_experts:
        degrees = degrees.model_copy(update={"expert_tensor": tensor})
    # On pipelines, `degrees` turn ZeRO 3 into FSDP even where each degree has its default. Without
    # `degrees` the runtime reduces gradients once per iteration.
    fully_sharded = plan.zero == 3
    sharded_pipeline = fully_sharded and len(stages) > 1
    if degrees == Degrees(expert_tensor=tensor) and not sharded_pipeline:
        return None
    check_replayable(plan, workload, degrees)
    sizes = tuple(batch.samples for batch in plan.replicas[0].micro_batches)
    ranks = ranks_of(plan, degrees)
    count = micro_batch_count(plan)
    key = (DegreeCosts, degrees, ranks, plan.recomputation, sizes, count, fully_sharded)
    costs = workload.answers.once(key, partial(DegreeCosts, plan, workload, degrees))
    # No rings of steps: `DegreeCosts` counts gathers and scatters as waits of the passes.
    return DegreeZero(plan, costs, prefetch=0, rings=(), divided=None)
