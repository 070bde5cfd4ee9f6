"""The strategy `amp`: the workload as an AMP problem, proven, beside AMP's own procedure and
Megatron's rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hetplan.formulations import family
from hetplan.formulations.amp.breakdown import peak_bytes
from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.amp.describe import describe
from hetplan.formulations.amp.pose import pose
from hetplan.planner.candidate import Candidate
from hetplan.planner.known import solve_unless_known
from hetplan.profiling.workload import Workload
from hetplan.runtime.plan import MicroBatches, Plan, PlanDevice, PlanWorkload, Replica, Stage
from hetplan.solvers.registry import solve
from hetplan.solvers.result import Result
from hetplan.solvers.run import Progress, Run

METHODS = ("auto", "paper", "megatron")


def propose(workload: Workload, run: Run, methods: Sequence[str] = METHODS) -> list[Candidate]:
    """One candidate per method; a method after an interruption says that it has not begun."""
    data = pose(workload)
    candidates = []
    for method in methods:
        if run.cancelled:
            reason = "not begun: stopped from the keyboard"
            candidates.append(
                Candidate(strategy="amp", method=method, status="unknown", message=reason)
            )
            continue
        own = inner_run(run, f"amp/{method}")
        if method == "auto":
            result = solve_unless_known(family("amp"), data, own)
        else:
            result = solve(family("amp"), data, method, own)
        candidates.append(candidate(workload, data, result))
    return candidates


def inner_run(run: Run, label: str) -> Run:
    """A run for one method with the whole time limit, whose progress shows in `run` under
    `label`."""
    run.incumbent = run.bound = None  # bounds of different problems do not compare
    run.report(note=label)

    def forward(progress: Progress) -> None:
        run.report(
            incumbent=progress.incumbent,
            bound=progress.bound,
            note=f"{label} {progress.note}".strip(),
        )

    return Run(run.options, forward, run.cancel)


def candidate(workload: Workload, data: AmpData, result: Result[Any]) -> Candidate:
    """A solver's result as a candidate; the evaluator has checked that its decision fits in
    memory."""
    found: dict[str, Any] = {}
    if result.decision is not None:
        found = {
            "predicted_seconds": result.objective,
            "objective": result.objective,
            "fits_memory": True,
            "peak_bytes": peak_bytes(data, result.decision),
            "plan": to_plan(workload, data, result.decision, f"amp/{result.method}"),
            "tables": tuple(describe(data, result.decision, shown=workload.cluster.shown)),
        }
    return Candidate(
        strategy="amp",
        method=result.method,
        status=result.status,
        bound=result.bound,
        solve_seconds=result.seconds,
        message=result.message,
        **found,
    )


def to_plan(workload: Workload, data: AmpData, decision: AmpDecision, source: str) -> Plan:
    """A feasible AMP decision as a plan: data rank i is replica i; 1F1B, no ZeRO, no recomputation.

    Every tensor group takes all rows of a micro-batch and equal parts of every weight.
    """
    gas = data.global_batch // (decision.data * decision.micro_batch)
    batches = [MicroBatches(count=gas, samples=decision.micro_batch)]
    replicas = [
        Replica(
            stages=[
                Stage(
                    layers=[decision.stages[j]],
                    devices=[decision.placement[j][i]],
                    tensor_shares=[1.0] * decision.tensor,
                )
                for j in range(decision.pipeline)
            ],
            micro_batches=batches,
        )
        for i in range(decision.data)
    ]
    return Plan(
        name=f"{workload.model.name} on {workload.cluster.name}"[:200],
        origin=source,
        workload=plan_workload(workload),
        devices=[
            PlanDevice(type=device.type, node=device.node) for device in workload.cluster.devices
        ],
        replicas=replicas,
    )


def plan_workload(workload: Workload) -> PlanWorkload:
    """What a plan says of the workload that it was made for."""
    return PlanWorkload(
        model=workload.model.name,
        cluster=workload.cluster.name,
        global_batch=workload.global_batch,
        sequence=workload.sequence,
        precision=workload.precision,
        layers=[layer.name for layer in workload.profile.layers],
    )
