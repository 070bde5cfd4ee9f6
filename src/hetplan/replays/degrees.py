"""The replay of plans with further degrees (`Degrees`): context, expert, expert-tensor and sequence
parallelism, full shards in pipelines, overlapped communication, offloaded optimizer states.

Layers are those of one rank's cut of the model (`profiling.transformer.Cut`), priced as every
predicted profile is. What a block waits for inside a pass (tokens on their way to experts, keys and
heads between context ranks, shards that are gathered) is what `exchanges.BlockExchanges` says, for
ranks in Megatron's order. Everything else is replayed: the schedule, messages (context ranks send
their own tokens), what tensor ranks join, and at last the gradients, dense ones over replicas and
context ranks, those of experts over the ranks that hold the same ones.

With `degrees` ZeRO 3 is FSDP, on pipelines too: each block's weights are gathered in both passes
and its gradients scattered, behind its computation; with several shard groups (HSDP) the gradients
of shards are joined over the groups at the end. Embedding and head are not gathered.
`overlap`: tensor ranks' collectives hide behind the computation of their pass; gradients leave in
buckets during the last backward pass; weights are gathered during the next forward pass, and what
that leaves uncovered stands behind the update; messages leave when they are made, their receives
being posted ahead.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

from hetplan.plans.degrees import Degrees
from hetplan.plans.plan import Plan, Stage
from hetplan.profiling.models.operators import Layer
from hetplan.profiling.models.transformer import Cut
from hetplan.profiling.profiles.predict import predict
from hetplan.profiling.workload import Workload
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.blocks import Pass, block_times
from hetplan.replays.costs import Costs, prefix_sums
from hetplan.replays.data import Kept
from hetplan.replays.degree_checks import check_replayable, ranks_of
from hetplan.replays.exchanges import EXCHANGED_BYTES, BlockExchanges
from hetplan.replays.facts import expert_params_of, facts_of
from hetplan.replays.groups import group_seconds
from hetplan.replays.memory import (
    ATTENTION_OUTPUT,
    gathered_for_experts,
    saved_bytes_of,
)
from hetplan.replays.offers import offers_of_cluster
from hetplan.replays.overlap import bucket_count, bucket_params, uncovered_buckets
from hetplan.replays.pose import PLAIN, pose
from hetplan.replays.ranks import own_shards
from hetplan.replays.updates import FP32, adam_bytes, host_update_seconds
from hetplan.replays.zero import Joined, Owner, ZeroCosts
from hetplan.schema import Range

Rings = Sequence[Sequence[int]]


def cut_of(plan: Plan, degrees: Degrees) -> Cut:
    """What one rank has of every block."""
    ranks = ranks_of(plan, degrees)
    return Cut(ranks.context, ranks.expert, ranks.tensor // ranks.expert_tensor)


def one_rank(plan: Plan, workload: Workload, degrees: Degrees) -> Workload:
    """The workload of one rank's cut of the model, with times of the plan's tensor degree and
    micro-batches."""
    tensor, cut = ranks_of(plan, degrees).tensor, cut_of(plan, degrees)
    own, sequence_parallel = facts_of(workload).divided(cut), degrees.sequence_parallel
    in_a_node = tensor <= min(o.node_devices for o in offers_of_cluster(workload.cluster))
    hidden = "tensor" in degrees.overlap and in_a_node
    stack, framework, profile = workload.stack, workload.framework, workload.profile
    divided = {"sequence_parallel": sequence_parallel or framework.sequence_parallel}
    framework = framework.model_copy(update=divided)
    stack = replace(
        stack,
        sequence_parallel=stack.sequence_parallel or sequence_parallel,
        hidden_reduces=stack.hidden_reduces or hidden,
    )
    model = replace(workload.model, layers=(own.first, *own.blocks, own.last))
    if cut != Cut() or (sequence_parallel and profile.provenance.kind == "predicted"):
        sizes = sorted({batch.samples for batch in plan.replicas[0].micro_batches})
        profile = predict(
            model, workload.cluster, micro_batches=sizes, tensor_degrees=[tensor], stack=stack
        )
    return replace(workload, model=model, profile=profile, stack=stack, framework=framework)


class DegreeCosts(Costs):
    """Costs of plans with these degrees.

    ranks: how a plan's ranks divide the model. tensor: ranks of a tensor group. cut: what one rank
    has of every block. fully_sharded: whether weights are gathered for each pass. facts: of the
    whole model. offers: the cluster's device types by name. waits: of a device type and samples of
    a micro-batch, see `_waits`.

    Bytes of weights are such that a tensor rank's part of them is what it holds of dense weights
    and of experts together.
    """

    degrees: Degrees

    def __init__(self, plan: Plan, workload: Workload, degrees: Degrees) -> None:
        own = one_rank(plan, workload, degrees)
        self.ranks, self.cut = ranks_of(plan, degrees), cut_of(plan, degrees)
        self.tensor = self.ranks.tensor
        data = pose(own, tuple(dict.fromkeys((*PLAIN, plan.recomputation))))
        experts, layers = [], []
        for posed, whole, part in zip(
            data.layers, workload.model.layers, own.model.layers, strict=True
        ):
            all_experts = expert_params_of(whole) * data.element_bytes
            held_experts = all_experts * self.tensor / self.ranks.expert_ranks
            dense = posed.param_bytes - all_experts
            kept = {
                mode: further_kept(each, part, degrees, self.tensor, own, again=mode == "full")
                for mode, each in posed.kept.items()
            }
            experts.append(held_experts)
            update = {"param_bytes": dense + held_experts, "kept": kept}
            layers.append(posed.model_copy(update=update))
        super().__init__(
            data.model_copy(update={"layers": layers}), plan.recomputation, workload.links
        )
        self.degrees, self.context = degrees, degrees.context
        self.fully_sharded = plan.zero == 3
        self.expert_sums = prefix_sums(experts)
        self.assumed = Assumptions(profile=own.profile, links=workload.links, stack=own.stack)
        self.facts = facts_of(workload)
        self.offers = {offer.name: offer for offer in offers_of_cluster(workload.cluster)}
        self.waits = cache(self._waits)

    def exchanges(self, kind: str, samples: int) -> BlockExchanges[int]:
        """What a block exchanges on devices of that type, for a micro-batch of so many samples."""
        return BlockExchanges(
            facts=self.facts,
            group_seconds=partial(group_seconds, self.offers[kind], self.assumed),
            ranks=self.ranks,
            rows=samples / self.context,
            sequence_parallel=self.degrees.sequence_parallel,
            all_to_all=self.degrees.exchange == "all-to-all",
            fully_sharded=self.fully_sharded,
        )

    def _waits(self, kind: str, samples: int) -> tuple[float, float]:
        """Seconds that a block waits for exchanges, forward and backward."""
        on_rank = Pass(self.tensor, samples, self.degrees.sequence_parallel, self.cut)
        block = block_times(self.facts, self.offers[kind], self.assumed, on_rank)
        there, back = self.exchanges(kind, samples).waits(
            block.forward, block.backward, block.core_forward
        )
        return float(there), float(back)

    def passes(self, stage: Stage, layers: Range, samples: int) -> tuple[float, float]:
        """(forward, backward) seconds of one micro-batch, with what blocks wait for inside passes;
        a full recomputation waits for the forward pass's exchanges again."""
        forward, backward = super().passes(stage, layers, samples)
        blocks = self.blocks_among(layers)
        forward_wait, backward_wait = self.waits(self.device_types[stage.devices[0][0]], samples)
        if self.recomputation == "full":
            backward_wait += forward_wait
        return forward + blocks * forward_wait, backward + blocks * backward_wait

    def blocks_among(self, layers: Range) -> int:
        """Blocks of a range of layers: all but the model's first and last layer."""
        first, last = max(layers[0], 1), min(layers[1], len(self.data.layers) - 1)
        return last - first


def further_kept(
    kept: Kept, layer: Layer, degrees: Degrees, tensor: int, own: Workload, *, again: bool
) -> Kept:
    """What a layer keeps, with attention's output before the exchange of tokens for heads, and with
    what tensor ranks gather for an expert whose columns they divide.

    again: whether the layer is computed again."""
    exchanged = 0.0
    if degrees.exchange == "all-to-all":
        exchanged = saved_bytes_of(layer, ATTENTION_OUTPUT, own.precision)
    common = float(gathered_for_experts(layer, own.precision, tensor, degrees.expert_tensor))
    if again:
        changes = {
            "working_bytes": kept.working_bytes + exchanged,
            "gathered_working_bytes": max(kept.gathered_working_bytes, common),
        }
    else:
        changes = {
            "saved_bytes": kept.saved_bytes + exchanged,
            "gathered_bytes": max(kept.gathered_bytes, common),
        }
    return kept.model_copy(update=changes)


class DegreeZero(ZeroCosts):
    """ZeRO's costs in a plan with degrees."""

    costs: DegreeCosts

    def held(self, stage: Stage) -> tuple[float, float]:
        """Bytes of dense weights and of experts, as `DegreeCosts` counts them."""
        weights, experts = self.costs.param_sums, self.costs.expert_sums
        all_weights = sum(weights[last] - weights[first] for first, last in stage.layers)
        of_experts = sum(experts[last] - experts[first] for first, last in stage.layers)
        copied = sum(size for _, size in self.copied_in(stage))
        return all_weights - of_experts + copied, of_experts

    def shares(self, stage: Stage) -> tuple[float, ...]:
        """Of the states of dense weights and experts together."""
        dense, experts = self.held(stage)
        ranks = self.costs.ranks
        sharing = (ranks.sharing, ranks.expert_sharing) if self.plan.zero else (1, 1)
        share = float(own_shards(dense, experts, *sharing)) / (dense + experts)
        return (share,) * len(stage.all_devices)

    def update_seconds(self, stage: Stage) -> float:
        """On the device, and of the offloaded part on the host."""
        on_device, offloaded = super().update_seconds(stage), self.costs.degrees.offloaded
        if not offloaded:
            return on_device
        return (1 - offloaded) * on_device + self.host_seconds(stage, offloaded)

    def host_seconds(self, stage: Stage, offloaded: float) -> float:
        """The host's part of a stage's update, its transfers hidden behind a backward pass where
        offloading overlaps. offloaded: share of the optimizer states."""
        costs, samples = self.costs, self.plan.replicas[0].micro_batches[0].samples
        offer = costs.offers[costs.device_types[stage.devices[0][0]]]
        weight, gradient = EXCHANGED_BYTES[costs.facts.precision]
        held = sum(self.held(stage)) * stage.parts[0] * self.shares(stage)[0]
        _, backward = self.stage_passes(stage, samples)
        return float(
            host_update_seconds(
                offloaded * held / costs.data.element_bytes,
                adam_bytes(weight, FP32),
                offer.host_memory,
                weight + gradient,
                offer.host_link,
                window=backward if "offload" in costs.degrees.overlap else 0.0,
            )
        )

    def stage_passes(self, stage: Stage, samples: int) -> tuple[float, float]:
        """(forward, backward) seconds of one micro-batch in all chunks of the stage."""
        each = [self.costs.passes(stage, chunk, samples) for chunk in stage.layers]
        return sum(forward for forward, _ in each), sum(backward for _, backward in each)

    def ring_parts(self, owners: Sequence[Owner]) -> Iterator[tuple[Rings, float]]:
        """(rings, part of a rank's bytes that they join) of dense weights, and of experts."""
        in_order = sorted(owners, key=lambda owner: owner[1])
        holders = [self.plan.replicas[i].stages[j] for i, j in in_order]
        order = [device for stage in holders for device in stage.all_devices]
        stages, ranks = len({j for _, j in owners}), self.costs.ranks
        dense = ranks.tensor, ranks.sharing
        experts = ranks.expert_ranks, ranks.expert_sharing
        for stride, sharing in (dense, experts):
            if self.plan.zero < 3:
                yield spaced(order, stride, stages * sharing), 1.0
            elif stages > 1:  # the same shard of tied weights in both
                yield spaced(order, len(order) // stages, stages), 1 / sharing
            else:
                yield spaced(order, stride * sharing, ranks.shard_groups), 1 / sharing

    def joined(self) -> Iterator[Joined]:
        """Each over its own ranks."""
        for owners, sizes in self.shared_parts().items():
            for size, (rings, part) in zip(sizes, self.ring_parts(owners), strict=True):
                own = size * part / self.costs.tensor
                if size and len(rings[0]) > 1:
                    joined = self.join(owners, rings, own, divided=0 < self.plan.zero < 3)
                    yield self.hidden(joined, own, len(rings[0]), size / sum(sizes))

    def hidden(self, joined: Joined, size: float, ranks: int, part: float) -> Joined:
        """In buckets, and with what the next forward pass leaves uncovered of gathering weights.

        size: bytes of weights on a rank. ranks: that join them. part: of that pass that may hide
        them."""
        assumed, overlap = self.costs.assumed, self.costs.degrees.overlap
        bucket = bucket_params(ranks, assumed.bucket_params, assumed.bucket_params_per_rank)
        buckets = float(bucket_count(size / self.costs.data.element_bytes, bucket))
        if "gradients" in overlap:
            joined = joined._replace(buckets=math.ceil(buckets))
        if joined.weights is None or "weights" not in overlap:
            return joined
        i, j = joined.owners[0]
        replica = self.plan.replicas[i]
        forward, _ = self.stage_passes(replica.stages[j], replica.micro_batches[0].samples)
        left = uncovered_buckets(joined.weights.seconds / buckets, buckets, part * forward)
        return joined._replace(weights=joined.weights._replace(seconds=float(left)))


def spaced(order: Sequence[int], stride: int, ranks: int) -> Rings:
    """Groups of so many of the ranks in order, `stride` apart."""
    blocks = range(0, len(order), stride * ranks)
    return [order[b + o : b + stride * ranks : stride] for b in blocks for o in range(stride)]


def zero_costs(plan: Plan, workload: Workload) -> ZeroCosts | None:
    """Costs of a plan with degrees; made once, kept with the workload. None where the plan is the
    same without them."""
    degrees, tensor = plan.degrees, len(plan.replicas[0].stages[0].tensor_shares)
    if degrees is not None and not facts_of(workload).expert_params:
        degrees = degrees.model_copy(update={"expert_tensor": tensor})
    # on pipelines full shards are further degrees themselves: without, the runtime joins once
    fully_sharded = plan.zero == 3
    staged = len(plan.replicas[0].stages) > 1
    if degrees is None or (
        degrees == Degrees(expert_tensor=tensor) and not (fully_sharded and staged)
    ):
        return None
    check_replayable(plan, workload, degrees)
    sizes = tuple(batch.samples for batch in plan.replicas[0].micro_batches)
    ranks = ranks_of(plan, degrees)
    question = (DegreeCosts, degrees, ranks, plan.recomputation, sizes, fully_sharded)
    made = partial(DegreeCosts, plan, workload, degrees)
    return DegreeZero(plan, workload.answers.once(question, made), 0, (), None)
