"""The class of plans with equal replicas, which frameworks with one data-parallel degree run."""

from hetplan.plans.passes import WHOLE_SCHEDULES
from hetplan.plans.plan import Plan, Replica


def has_equal_replicas(plan: Plan) -> bool:
    """Whether a plan belongs to the class: all replicas have the same stages on the same types of
    devices and the same micro-batches, of which only the last one may be smaller. Its backward
    passes are whole.

    Every stage is a single tensor group with equal shares, and the plan has none of the further
    degrees. A single pipeline may be such a plan, too.
    """
    if plan.schedule not in WHOLE_SCHEDULES or plan.degrees is not None:
        return False
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    single_groups = all(len(stage.devices) == 1 for stage in stages)
    equal_shares = all(len(set(stage.tensor_shares)) == 1 for stage in stages)
    full, *rest = plan.replicas[0].micro_batches
    regular = not rest or (len(rest) == 1 == rest[0].count and rest[0].samples < full.samples)
    shapes = {shape(plan, replica) for replica in plan.replicas}
    return single_groups and equal_shares and regular and len(shapes) == 1


def shape(plan: Plan, replica: Replica) -> tuple[object, ...]:
    """(runs of layers, types of devices) of each stage, and the micro-batches: equal replicas have
    equal shapes."""
    stages = [
        (tuple(stage.layers), tuple(plan.devices[device].type for device in stage.all_devices))
        for stage in replica.stages
    ]
    return tuple(stages), tuple((batch.count, batch.samples) for batch in replica.micro_batches)


def largest_micro_batch(plan: Plan) -> int:
    """The most samples of a micro-batch of the plan."""
    return max(batch.samples for replica in plan.replicas for batch in replica.micro_batches)
