"""What the replay of plans with further degrees refuses."""

import math

from hetplan.errors import UnsupportedError, require
from hetplan.plans.degrees import Degrees
from hetplan.plans.plan import Plan
from hetplan.profiling.workload import Workload
from hetplan.replays.facts import facts_of
from hetplan.replays.ranks import Ranks


def ranks_of(plan: Plan, degrees: Degrees) -> Ranks[int]:
    """How the plan's ranks divide the model, all replicas being alike."""
    return Ranks(
        tensor=len(plan.replicas[0].stages[0].tensor_shares),
        context=degrees.context,
        data=len(plan.replicas),
        expert=degrees.expert,
        expert_tensor=degrees.expert_tensor,
        shard_groups=degrees.shard_groups,
    )


def check_replayable(plan: Plan, workload: Workload, degrees: Degrees) -> None:
    """Raise UnsupportedError for what this replay does not have, InputError for degrees that the
    model or the plan cannot have."""
    lacking = [name for name, lacks in unsupported(plan, workload, degrees).items() if lacks]
    require(
        not lacking,
        f"the replay of further degrees has no {', '.join(lacking)}",
        where=plan.name,
        got=degrees.text,
        kind=UnsupportedError,
    )
    for name, parts, what, whole in divisions(plan, workload, degrees):
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


def unsupported(plan: Plan, workload: Workload, degrees: Degrees) -> dict[str, bool]:
    """Whether the plan has each of the things that the replay lacks, by name."""
    tensor = len(plan.replicas[0].stages[0].tensor_shares)
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    forms = {str(([s.layers for s in r.stages], r.micro_batches)) for r in plan.replicas}
    types = [{plan.devices[d].type for d in stage.all_devices} for stage in stages]
    return {
        "ZeRO 2": plan.zero == 2,
        "zero_shares": plan.zero_shares is not None,
        "groups of shards without ZeRO 3": degrees.shard_groups > 1 and plan.zero < 3,
        "recomputation of some layers": degrees.recompute_layers is not None,
        "unlike replicas": len(forms) > 1,
        "stages of several device types": max(map(len, types)) > 1,
        "unequal tensor ranks": any({*stage.parts} != {1 / tensor} for stage in stages),
        "a model without a text decoder": workload.model.spec.shape is None,
    }


def divisions(
    plan: Plan, workload: Workload, degrees: Degrees
) -> tuple[tuple[str, int, str, int], ...]:
    """(degree's name, degree, what it must divide, how many of these there are)."""
    shape, ranks = facts_of(workload).shape, ranks_of(plan, degrees)
    experts = shape.experts
    heads = math.gcd(shape.heads, shape.kv_heads)
    exchanging = degrees.context * ranks.tensor if degrees.exchange == "all-to-all" else 1
    width = (experts.width if experts else None) or shape.feed_forward
    tokens = workload.model.tokens_per_sample
    held = experts.count if experts else 1
    alike = ranks.tensor * ranks.context * ranks.data // ranks.expert_ranks
    return (
        ("degrees.context", degrees.context, "the tokens of a sample", tokens),
        ("degrees.context x tensor ranks", exchanging, "the heads", heads),
        ("degrees.expert", degrees.expert, "the experts", held),
        ("degrees.expert_tensor", degrees.expert_tensor, "the tensor ranks", ranks.tensor),
        ("degrees.expert_tensor", degrees.expert_tensor, "an expert's columns", width),
        ("degrees.shard_groups", degrees.shard_groups, "the ranks with the same experts", alike),
    )


def scattered(plan: Plan, degrees: Degrees) -> bool:
    """Whether context ranks, or ranks that share a block's experts, are on more nodes than as many
    devices behind the first of them, or of several types.

    In a stage's order of replicas, row groups and tensor ranks they follow each other.
    """
    for stages in zip(*(replica.stages for replica in plan.replicas), strict=True):
        order = [device for stage in stages for device in stage.all_devices]
        tensor = len(stages[0].tensor_shares)
        for ranks in (degrees.context * tensor, degrees.expert * degrees.expert_tensor):
            blocks = [order[begin : begin + ranks] for begin in range(0, len(order), ranks)]
            if any(is_scattered(plan, block) for block in blocks):
                return True
    return False


def is_scattered(plan: Plan, block: list[int]) -> bool:
    """Whether these devices are of several types, or on more nodes than as many devices in a row
    behind the first of them."""
    first = min(block)
    straight = plan.devices[first : first + len(block)]
    nodes = {plan.devices[device].node for device in block}
    types = {plan.devices[device].type for device in block}
    return len(nodes) > len({device.node for device in straight}) or len(types) > 1
