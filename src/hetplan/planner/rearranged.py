"""AMP's optimum on rearranged devices: its degrees, stages and micro-batches, other devices of the
same types.

AMP prices a group by its slowest link, so that many placements cost the same or nearly so. The
replay tells them apart: how many data ranks share a node's network card, and which neighbours of a
pipeline meet over it. Rearrangements are priced by AMP's evaluator too, and the optimum's bound
holds for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hetplan.formulations import family
from hetplan.formulations.amp.data import AmpDecision
from hetplan.formulations.amp.describe import describe
from hetplan.formulations.amp.pose import pose
from hetplan.planner.amp import to_plan
from hetplan.planner.candidate import Candidate
from hetplan.planner.recomputation import recomputed
from hetplan.planner.simulated import simulated
from hetplan.profiling.workload import Workload
from hetplan.runtime.plan import Plan
from hetplan.solvers.registry import evaluate
from hetplan.solvers.run import Run
from hetplan.text import percent_text

Placement = list[list[list[int]]]
NEAR = 0.01  # by how much AMP's price may be above the optimum's
GAIN = 1e-3  # by how much the replay must be shorter


def rearranged(workload: Workload, found: Candidate, run: Run) -> Candidate | None:
    """The best rearrangement of a replayed candidate of AMP; None where none is shorter when
    replayed."""
    if found.plan is None or found.objective is None or found.predicted_seconds is None:
        return None
    data = pose(recomputed(workload, found.plan.recomputation), memory=False)
    decision, best = decision_of(found.plan), None
    most = found.predicted_seconds * (1 - GAIN)
    for placement in placements(workload, decision):
        if run.should_stop:
            break
        other = decision.model_copy(update={"placement": placement})
        objective = evaluate(family("amp"), data, other).objective
        if objective is None or objective > found.objective * (1 + NEAR):
            continue
        dearer = percent_text(objective / found.objective - 1)
        plan = to_plan(workload, data, other, "amp/rearranged")
        plan = plan.model_copy(update={"recomputation": found.plan.recomputation})
        candidate = simulated(
            replace(
                found,
                method=found.method.replace("auto", "rearranged"),
                status="feasible",
                objective=objective,
                predicted_seconds=objective,
                fits_memory=True,
                plan=plan,
                message=f"{found.name} on other devices, {dearer} dearer by AMP's price",
            ),
            workload,
        )
        shown = tuple(describe(data, other, candidate.peak_bytes, workload.cluster.shown))
        candidate = replace(candidate, tables=shown)
        seconds = candidate.predicted_seconds
        if candidate.fits_memory and seconds is not None and seconds < most:
            best, most = candidate, seconds
    return best


def decision_of(plan: Plan) -> AmpDecision:
    """The decision that a plan of the strategy `amp` stands for."""
    first = plan.replicas[0]
    return AmpDecision(
        pipeline=len(first.stages),
        data=len(plan.replicas),
        tensor=len(first.stages[0].devices[0]),
        micro_batch=first.micro_batches[0].samples,
        placement=[
            [r.stages[j].devices[0] for r in plan.replicas] for j in range(len(first.stages))
        ],
        stages=[stage.layers[0] for stage in first.stages],
    )


def placements(workload: Workload, decision: AmpDecision) -> Iterator[Placement]:
    """The devices of every type handed out in order: stage after stage, so that few stages share a
    node, or data rank after data rank, so that a pipeline's neighbours do. Every group keeps its
    types."""
    ranks = [(j, i) for j in range(decision.pipeline) for i in range(decision.data)]
    for order in (ranks, sorted(ranks, key=lambda rank: rank[::-1])):
        left = {
            name: iter(
                [d for d, device in enumerate(workload.cluster.devices) if device.type == name]
            )
            for name in workload.cluster.types
        }
        placement: Placement = [[[] for _ in row] for row in decision.placement]
        for j, i in order:
            types = [workload.cluster.devices[d].type for d in decision.placement[j][i]]
            placement[j][i] = [next(left[name]) for name in types]
        if placement != decision.placement:
            yield placement
