"""Checks of plans with further degrees (`Degrees`): what their replay cannot do, and degrees that
the model or the plan cannot have."""

import math

from hetplan.errors import UnsupportedError, require
from hetplan.plans.degrees import Degrees
from hetplan.plans.plan import Plan
from hetplan.profiling.workload import Workload
from hetplan.replays.facts import facts_of
from hetplan.replays.ranks import Ranks


def ranks_of(plan: Plan, degrees: Degrees) -> Ranks[int]:
    """The degrees by which the plan's ranks divide the model; all replicas are alike."""
    return Ranks(
        tensor=len(plan.replicas[0].stages[0].tensor_shares),
        context=degrees.context,
        data=len(plan.replicas),
        expert=degrees.expert,
        expert_tensor=degrees.expert_tensor,
        shard_groups=degrees.shard_groups,
    )


def check_replayable(plan: Plan, workload: Workload, degrees: Degrees) -> None:
    """Raise UnsupportedError for a plan that this replay does not support, InputError for degrees
    that the model or the plan cannot have."""
    features = unsupported(plan, workload, degrees)
    lacking = [name for name, plan_has_it in features.items() if plan_has_it]
    require(
        not lacking,
        f"the replay of further degrees has no {', '.join(lacking)}",
        where=plan.name,
        got=degrees.text,
        kind=UnsupportedError,
    )
    for name, degree, divided, count in divisions(plan, workload, degrees):
        require(
            count % degree == 0,
            f"{name} does not divide {divided}",
            where=plan.name,
            got=degree,
            expected=f"a divisor of {count}",
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
    """Name of each feature that the replay does not support -> whether the plan has it."""
    tensor = len(plan.replicas[0].stages[0].tensor_shares)
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    forms = set()  # layers of the stages and micro-batches of each replica, as a text
    for replica in plan.replicas:
        layers = [stage.layers for stage in replica.stages]
        forms.add(str((layers, replica.micro_batches)))
    types = [{plan.devices[d].type for d in stage.all_devices} for stage in stages]
    unequal_ranks = any(
        len(stage.tensor_shares) != tensor or len(set(stage.tensor_shares)) > 1 for stage in stages
    )
    return {
        "ZeRO 2": plan.zero == 2,
        "zero_shares": plan.zero_shares is not None,
        "groups of shards without ZeRO 3": degrees.shard_groups > 1 and plan.zero < 3,
        "recomputation of some layers": degrees.recompute_layers is not None,
        "unlike replicas": len(forms) > 1,
        "stages of several device types": max(map(len, types)) > 1,
        "unequal tensor ranks": unequal_ranks,
        "a model without a text decoder": workload.model.spec.shape is None,
    }


def divisions(
    plan: Plan, workload: Workload, degrees: Degrees
) -> tuple[tuple[str, int, str, int], ...]:
    """(name of a degree, degree, name of the things that it must divide, number of the things)."""
    shape = facts_of(workload).shape
    ranks = ranks_of(plan, degrees)
    tokens = workload.model.tokens_per_sample
    heads = math.gcd(shape.heads, shape.kv_heads)
    # An all-to-all exchange divides the heads evenly over context and tensor ranks. A ring
    # exchanges no heads, and the tensor ranks may then have unequal numbers of them.
    ranks_with_heads = 1
    if degrees.exchange == "all-to-all":
        ranks_with_heads = degrees.context * ranks.tensor
    experts, columns = 1, shape.feed_forward
    if shape.experts:
        experts = shape.experts.count
        columns = shape.experts.width or shape.feed_forward
    # without a remainder: rule (8) of plan files
    same_experts = ranks.tensor * ranks.context * ranks.data // ranks.expert_ranks
    groups = degrees.shard_groups
    return (
        ("degrees.context", degrees.context, "the tokens of a sample", tokens),
        ("degrees.context x tensor ranks", ranks_with_heads, "the heads", heads),
        ("degrees.expert", degrees.expert, "the experts", experts),
        ("degrees.expert_tensor", degrees.expert_tensor, "the tensor ranks", ranks.tensor),
        ("degrees.expert_tensor", degrees.expert_tensor, "an expert's columns", columns),
        ("degrees.shard_groups", groups, "the ranks with the same experts", same_experts),
    )


def scattered(plan: Plan, degrees: Degrees) -> bool:
    """Whether a group of ranks that exchange tokens is scattered (`is_scattered`).

    The groups are the tensor and context ranks of a sample, and the ranks that share a block's
    experts. The row groups of a stage are its context ranks (rule (8) of plan files). So in the
    order of replicas, row groups and tensor ranks, the ranks of a group follow one another.
    """
    for stages in zip(*(replica.stages for replica in plan.replicas), strict=True):
        order = [device for stage in stages for device in stage.all_devices]
        tensor = len(stages[0].tensor_shares)
        for size in (degrees.context * tensor, degrees.expert * degrees.expert_tensor):
            groups = [order[begin : begin + size] for begin in range(0, len(order), size)]
            if any(is_scattered(plan, group) for group in groups):
                return True
    return False


def is_scattered(plan: Plan, group: list[int]) -> bool:
    """Whether the devices of a group are of several types, or are on more nodes than the same
    number of consecutive devices would be, counted from the group's first device."""
    first = min(group)
    straight = plan.devices[first : first + len(group)]
    nodes = {plan.devices[device].node for device in group}
    types = {plan.devices[device].type for device in group}
    return len(nodes) > len({device.node for device in straight}) or len(types) > 1
