"""A plan whose micro-batches are rows of tokens, into which samples of unequal length are packed.

A micro-batch of n samples of L tokens becomes one row of n L tokens. So each replica computes as
many tokens as planned, and the plan's balance over unequal replicas stays.
"""

from hetplan.errors import UnsupportedError, require
from hetplan.plans.plan import MicroBatches, Plan


def packed_plan(plan: Plan) -> tuple[Plan, tuple[int, ...]]:
    """(the plan of rows, [row] the tokens of each row of the global batch).

    All rows of a replica are as wide as its largest micro-batch. Raises UnsupportedError for a plan
    that divides micro-batches or tokens over ranks, or that is of no texts.
    """
    length = plan.workload.sequence
    divides = plan.degrees is not None or any(
        len(stage.devices) > 1 for replica in plan.replicas for stage in replica.stages
    )
    require(
        plan.program is None and length is not None and not divides,
        "rows of packed samples are for texts, and for stages whose ranks compute whole rows",
        where=plan.name,
        expected="a plan of other strategies or of --strategies poplar, dp, amp",
        kind=UnsupportedError,
    )
    assert length is not None
    replicas, widths = [], list[int]()
    for replica in plan.replicas:
        rows = [
            MicroBatches(count=batch.count, samples=min(batch.samples, 1))
            for batch in replica.micro_batches
        ]
        packed = replica.model_copy(update={"micro_batches": rows})
        largest = max(batch.samples for batch in replica.micro_batches)
        widths += [largest * length] * packed.samples
        replicas.append(packed)
    workload = plan.workload.model_copy(update={"global_batch": len(widths)})
    changed = plan.model_copy(update={"replicas": replicas, "workload": workload})
    return changed, tuple(widths)
