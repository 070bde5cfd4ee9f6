"""The replay of plans with further degrees (`Degrees`): context, expert, expert-tensor and sequence
parallelism, full shards in pipelines, overlapped communication, offloaded optimizer states.

One formula stands in one place. Layers are those of one rank's cut of the model
(`profiling.transformer.Cut`), priced as every predicted profile is; what a block waits for inside a
pass (tokens on their way to experts, keys and heads between context ranks, shards that are
gathered) is what Astra's search charges for it (`Priced.exchanges`), for ranks in Megatron's order.
Everything else is replayed: the schedule, messages (context ranks send their own tokens), what
tensor ranks join, and at last the gradients, dense ones over replicas and context ranks, those of
experts over the ranks that hold the same ones.

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

import numpy as np

from hetplan.errors import UnsupportedError, require
from hetplan.plans.degrees import Degrees
from hetplan.plans.plan import Plan, Stage
from hetplan.profiling.models.operators import Layer
from hetplan.profiling.models.transformer import Cut
from hetplan.profiling.profiles.predict import predict
from hetplan.profiling.workload import Workload
from hetplan.replays.costs import Costs, summed
from hetplan.replays.data import Kept
from hetplan.replays.pose import PLAIN, pose
from hetplan.replays.sharding import Joined, Owner, ZeroCosts
from hetplan.replays.strategies.facts import expert_params_of, model_facts
from hetplan.replays.strategies.links import Assumptions
from hetplan.replays.strategies.offers import offers_of_cluster
from hetplan.replays.strategies.pricing import Priced, uncovered
from hetplan.replays.strategies.table import NONE, Strategies, nothing
from hetplan.schema import Range

Rings = Sequence[Sequence[int]]


def one_rank(plan: Plan, workload: Workload, degrees: Degrees) -> Workload:
    """The workload of one rank's cut of the model, with times of the plan's tensor degree and
    micro-batches."""
    tensor, facts = len(plan.replicas[0].stages[0].tensor_shares), model_facts(workload.model)
    cut = Cut(degrees.context, degrees.expert, tensor // degrees.expert_tensor)
    own, sequence_parallel = facts.divided(cut), degrees.sequence_parallel
    hidden = "tensor" in degrees.overlap and tensor <= min(
        offer.node_devices for offer in offers_of_cluster(workload.cluster)
    )
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


def strategy_of(plan: Plan, degrees: Degrees, samples: int) -> Strategies:
    """The plan as a row of Astra's table, with micro-batches of so many samples."""
    replica = plan.replicas[0]
    stage, overlap = replica.stages[0], degrees.overlap
    values = {
        "num_gpus": plan.world_size,
        "pipeline_model_parallel_size": len(replica.stages),
        "tensor_model_parallel_size": len(stage.tensor_shares),
        "expert_model_parallel_size": degrees.expert,
        "data_parallel_size": len(plan.replicas),
        "micro_batch_size": samples,
        "num_micro_batches": replica.steps,
        "context_parallel_size": degrees.context,
        "expert_tensor_parallel_size": degrees.expert_tensor,
        "use_fsdp": plan.zero == 3,
        "num_distributed_optimizer_instances": degrees.shard_groups,
        "cp_comm_type": degrees.exchange == "all-to-all",
        "sequence_parallel": degrees.sequence_parallel,
        "use_distributed_optimizer": plan.zero > 0,
        "virtual_pipeline_model_parallel_size": len(stage.layers),
        "no_overlap_offload_optimizer": "offload" not in overlap,
        "tp_comm_overlap": "tensor" in overlap,
    }
    columns = {name: np.array([int(values.get(name, NONE))]) for name in nothing().columns}
    return Strategies(columns, 1)


def check_replayable(plan: Plan, workload: Workload, degrees: Degrees) -> None:
    """Raise UnsupportedError for what this replay does not have, InputError for degrees that the
    model cannot have."""
    shape, tensor = model_facts(workload.model).shape, len(plan.replicas[0].stages[0].tensor_shares)
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    forms = {str(([s.layers for s in r.stages], r.micro_batches)) for r in plan.replicas}
    lacking = {
        "ZeRO 2": plan.zero == 2,
        "zero_shares": plan.zero_shares is not None,
        "recomputation of some layers": degrees.recompute_layers is not None,
        "unlike replicas": len(forms) > 1,
        "stages of several device types": any(
            len({plan.devices[d].type for d in stage.all_devices}) > 1 for stage in stages
        ),
        "unequal tensor ranks": any({*s.parts} != {1 / tensor} for s in stages),
        "a model without a text decoder": workload.model.spec.shape is None,
    }
    names = [name for name, lacks in lacking.items() if lacks]
    require(
        not names,
        f"the replay of further degrees has no {', '.join(names)}",
        where=plan.name,
        got=degrees.text,
        kind=UnsupportedError,
    )
    experts, heads = shape.experts, math.gcd(shape.heads, shape.kv_heads)
    width = (experts.width if experts else None) or shape.feed_forward
    ranks = degrees.context * tensor if degrees.exchange == "all-to-all" else 1
    divisions = (
        (
            "degrees.context",
            degrees.context,
            "the tokens of a sample",
            workload.model.tokens_per_sample,
        ),
        ("degrees.context x tensor ranks", ranks, "the heads", heads),
        ("degrees.expert", degrees.expert, "the experts", experts.count if experts else 1),
        ("degrees.expert_tensor", degrees.expert_tensor, "the tensor ranks", tensor),
        ("degrees.expert_tensor", degrees.expert_tensor, "an expert's columns", width),
    )
    for name, parts, what, whole in divisions:
        require(
            whole % parts == 0,
            f"{name} does not divide {what}",
            where=plan.name,
            got=parts,
            expected=f"a divisor of {whole}",
        )
    require(
        not scattered(plan, degrees),
        "the replay of further degrees has no ranks that exchange tokens in another order than "
        "Megatron's",
        where=plan.name,
        got=degrees.text,
        kind=UnsupportedError,
    )


def scattered(plan: Plan, degrees: Degrees) -> bool:
    """Whether context ranks, or ranks that share a block's experts, are on more nodes than as many
    devices behind the first of them, or of several types: in a stage's order of replicas, row
    groups and tensor ranks they follow each other."""
    for stages in zip(*(replica.stages for replica in plan.replicas), strict=True):
        order, tensor = [d for s in stages for d in s.all_devices], len(stages[0].tensor_shares)
        for ranks in (degrees.context * tensor, degrees.expert * degrees.expert_tensor):
            for begin in range(0, len(order), ranks):
                block = order[begin : begin + ranks]
                straight = plan.devices[min(block) : min(block) + ranks]
                nodes = {plan.devices[device].node for device in block}
                types = {plan.devices[device].type for device in block}
                if len(nodes) > len({device.node for device in straight}) or len(types) > 1:
                    return True
    return False


class DegreeCosts(Costs):
    """Costs of plans with these degrees. tensor: ranks of a tensor group. apart: ranks over which
    a block's experts are divided. assumed, priced: of Astra's search, by device type and samples of
    a micro-batch; bytes of weights are such that a tensor rank's part of
    them is what it holds of dense weights and of experts together."""

    degrees: Degrees

    def __init__(self, plan: Plan, workload: Workload, degrees: Degrees) -> None:
        own, self.apart = one_rank(plan, workload, degrees), degrees.expert * degrees.expert_tensor
        tensor = len(plan.replicas[0].stages[0].tensor_shares)
        modes = tuple(dict.fromkeys((*PLAIN, plan.recomputation)))
        data, facts = pose(own, modes), model_facts(workload.model)
        chain = zip(data.layers, workload.model.layers, own.model.layers, strict=True)
        experts, layers = [], []
        for posed, whole, part in chain:
            all_experts = expert_params_of(whole) * data.element_bytes
            experts.append(all_experts * tensor / self.apart)
            dense = posed.param_bytes - all_experts
            kept = {
                mode: further_kept(each, part, degrees, tensor, own, again=mode == "full")
                for mode, each in posed.kept.items()
            }
            layers.append(
                posed.model_copy(update={"param_bytes": dense + experts[-1], "kept": kept})
            )
        super().__init__(
            data.model_copy(update={"layers": layers}), plan.recomputation, workload.links
        )
        self.degrees, self.context, self.tensor = degrees, degrees.context, tensor
        self.expert_sums = summed(experts)
        self.assumed = Assumptions(profile=workload.profile, links=workload.links, stack=own.stack)
        offers = {offer.name: offer for offer in offers_of_cluster(workload.cluster)}
        rows = partial(strategy_of, plan, degrees)
        self.priced = cache(lambda kind, n: Priced(facts, rows(n), offers[kind], self.assumed))

    def passes(self, stage: Stage, layers: Range, samples: int) -> tuple[float, float]:
        """With what blocks wait for inside passes."""
        forward, backward = super().passes(stage, layers, samples)
        priced = self.priced(self.kind[stage.devices[0][0]], samples)
        blocks = min(layers[1], len(self.data.layers) - 1) - max(layers[0], 1)
        there, back = (blocks * float(x[0]) for x in priced.exchanges)
        return forward + there, backward + back + there * (self.mode == "full")


def further_kept(
    kept: Kept, layer: Layer, degrees: Degrees, tensor: int, own: Workload, *, again: bool
) -> Kept:
    """What a layer keeps, with attention's output before the exchange of tokens for heads, and with
    what tensor ranks gather for an expert whose columns they divide.

    again: whether the layer is computed again."""
    sizes = {t.name: t.size(own.precision) for t in layer.saved}
    doubled = sizes.get("attention output", 0.0) * (degrees.exchange == "all-to-all")
    columns = (degrees.expert_tensor - 1) / max(tensor - 1, 1) * (layer.kind == "moe-block")
    what = "working" if again else "saved"
    name, beside = f"{what}_bytes", "gathered_working_bytes" if again else "gathered_bytes"
    gathered = max(getattr(kept, beside), columns * sizes.get("up input", 0.0))
    return kept.model_copy(update={name: getattr(kept, name) + doubled, beside: gathered})


class DegreeZero(ZeroCosts):
    """ZeRO's costs in a plan with degrees."""

    costs: DegreeCosts

    @property
    def sharing(self) -> tuple[int, int]:
        """Ranks over which a group's shards of dense weights are spread, and those of experts."""
        degrees, costs = self.costs.degrees, self.costs
        ranks = len(self.plan.replicas) * degrees.context // degrees.shard_groups
        return ranks, ranks * costs.tensor // costs.apart

    def held(self, stage: Stage) -> tuple[float, float]:
        """Bytes of dense weights and of experts, as `DegreeCosts` counts them."""
        both = (self.costs.param_sums, self.costs.expert_sums)
        every, experts = (sum(s[last] - s[first] for first, last in stage.layers) for s in both)
        return every - experts + sum(size for _, size in self.copied_in(stage)), experts

    def shares(self, stage: Stage) -> tuple[float, ...]:
        """Of the states of dense weights and experts together."""
        held, ranks = self.held(stage), self.sharing if self.plan.zero else (1, 1)
        own = sum(size / n for size, n in zip(held, ranks, strict=True))
        return (own / sum(held),) * len(stage.all_devices)

    def update_seconds(self, stage: Stage) -> float:
        """On the device, and of the offloaded part on the host."""
        here, share = super().update_seconds(stage), self.costs.degrees.offloaded
        if not share:
            return here
        held = sum(self.held(stage)) * stage.parts[0] * self.shares(stage)[0]
        sizes = (held / self.costs.data.element_bytes, share, self.window(stage, 1))
        priced = self.costs.priced(self.costs.kind[stage.devices[0][0]], self.samples)
        there = priced.offload_seconds(*(np.array([size]) for size in sizes))
        return (1 - share) * here + float(there[0])

    @property
    def samples(self) -> int:
        """Of a micro-batch."""
        return self.plan.replicas[0].micro_batches[0].samples

    def window(self, stage: Stage, side: int) -> float:
        """Seconds of one micro-batch on the stage, forward or (1) backward."""
        return sum(self.costs.passes(stage, run, self.samples)[side] for run in stage.layers)

    def ring_parts(self, owners: Sequence[Owner]) -> Iterator[tuple[Rings, float]]:
        """(rings, part of a rank's bytes that they join) of dense weights, and of experts."""
        replicas, groups = self.plan.replicas, self.costs.degrees.shard_groups
        in_order = sorted(owners, key=lambda owner: owner[1])
        order = [d for i, j in in_order for d in replicas[i].stages[j].all_devices]
        stages, strides = len({j for _, j in owners}), (self.costs.tensor, self.costs.apart)
        for stride, same in zip(strides, self.sharing, strict=True):
            if self.plan.zero < 3:
                yield spaced(order, stride, stages * same), 1.0
            elif stages > 1:  # the same shard of tied weights in both
                yield spaced(order, len(order) // stages, stages), 1 / same
            else:
                yield spaced(order, stride * same, groups), 1 / same

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
        part: of that pass that may hide them."""
        assumed, overlap = self.costs.assumed, self.costs.degrees.overlap
        bucket = max(assumed.bucket_params, assumed.bucket_params_per_rank * ranks)
        buckets = max(size / self.costs.data.element_bytes / bucket, 1.0)
        if "gradients" in overlap:
            joined = joined._replace(buckets=math.ceil(buckets))
        if joined.weights is None or "weights" not in overlap:
            return joined
        (i, j), once = joined.owners[0], joined.weights.seconds / buckets
        window = part * self.window(self.plan.replicas[i].stages[j], 0)
        left = uncovered(np.array(once * (buckets - 1)), np.array(window))
        return joined._replace(weights=joined.weights._replace(seconds=once + float(left)))


def spaced(order: Sequence[int], stride: int, ranks: int) -> Rings:
    """Groups of so many of the ranks in order, `stride` apart."""
    blocks = range(0, len(order), stride * ranks)
    return [order[b + o : b + stride * ranks : stride] for b in blocks for o in range(stride)]


def zero_costs(plan: Plan, workload: Workload) -> ZeroCosts | None:
    """Costs of a plan with degrees; made once, kept with the workload. None where the plan is the
    same without them."""
    degrees, tensor = plan.degrees, len(plan.replicas[0].stages[0].tensor_shares)
    if degrees is not None and not model_facts(workload.model).expert_params:
        degrees = degrees.model_copy(update={"expert_tensor": tensor})
    # on pipelines full shards are further degrees themselves: without, the runtime joins once
    fully_sharded = plan.zero == 3 and len(plan.replicas[0].stages) > 1
    if degrees is None or (degrees == Degrees(expert_tensor=tensor) and not fully_sharded):
        return None
    check_replayable(plan, workload, degrees)
    sizes = [batch.samples for batch in plan.replicas[0].micro_batches]
    key = (
        str(degrees),
        plan.recomputation,
        str(sizes),
        str(strategy_of(plan, degrees, sizes[0]).row(0)),
    )
    kept: dict[object, DegreeCosts] = vars(workload).setdefault("_degree_costs", {})
    if key not in kept:
        kept[key] = DegreeCosts(plan, workload, degrees)
    return DegreeZero(plan, kept[key], 0, (), None)
