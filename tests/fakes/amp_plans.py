"""Plans read as decisions of AMP's problem."""

from __future__ import annotations

from hetplan.formulations.amp.data import AmpDecision
from hetplan.plans.plan import Plan


def decision_of(plan: Plan) -> AmpDecision:
    """The decision of AMP's problem that a plan stands for."""
    first = plan.replicas[0]
    stages = range(len(first.stages))
    return AmpDecision(
        pipeline=len(first.stages),
        data=len(plan.replicas),
        tensor=len(first.stages[0].devices[0]),
        micro_batch=first.micro_batches[0].samples,
        placement=[[r.stages[j].devices[0] for r in plan.replicas] for j in stages],
        stages=[stage.layers[0] for stage in first.stages],
    )
