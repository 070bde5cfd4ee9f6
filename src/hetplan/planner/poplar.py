"""The strategy `poplar`: data parallelism under each ZeRO stage with unequal shares, beside the paper's algorithm."""

from __future__ import annotations

from typing import Any

from hetplan.formulations import family
from hetplan.formulations.poplar.data import PoplarDecision
from hetplan.formulations.poplar.describe import describe, pieces_of
from hetplan.formulations.poplar.pose import Posed, pose
from hetplan.formulations.poplar.zero import STAGES
from hetplan.planner.amp import inner_run, plan_workload
from hetplan.planner.candidate import Candidate
from hetplan.profiling.workload import Workload
from hetplan.runtime.plan import MicroBatches, Plan, PlanDevice, Replica, Stage
from hetplan.solvers.registry import solve
from hetplan.solvers.result import Result
from hetplan.solvers.run import Run

METHODS = ("auto", "paper")


def propose(workload: Workload, run: Run) -> list[Candidate]:
    """One candidate per method and ZeRO stage; one with a reason for a stage that the cluster cannot hold."""
    candidates = []
    for stage in STAGES:
        posed = pose(workload, stage)
        if posed.unfit is not None:
            candidates.append(rejected(f"auto-zero{stage}", "infeasible", posed.unfit))
            continue
        for method in METHODS:
            label = f"{method}-zero{stage}"
            if run.cancelled:
                candidates.append(rejected(label, "unknown", "not begun: stopped from the keyboard"))
                continue
            result = solve(family("poplar"), posed.data, method, inner_run(run, f"poplar/{label}"))
            candidates.append(candidate(workload, posed, result, label))
    return candidates


def rejected(label: str, status: str, reason: str) -> Candidate:
    """A candidate without a plan."""
    return Candidate(strategy="poplar", method=label, status=status, message=reason)


def candidate(workload: Workload, posed: Posed, result: Result[Any], label: str) -> Candidate:
    """A solver's result as a candidate; curves end where memory does, so that every decision fits.

    The prediction adds what stage 2 pays once per iteration whatever the plan.
    """
    found: dict[str, Any] = {}
    if result.decision is not None and result.objective is not None:
        peak = peak_bytes(posed, result.decision)
        usable = workload.device_bytes()
        found = {
            "predicted_seconds": result.objective + posed.once_seconds,
            "objective": result.objective,
            "fits_memory": all(
                p <= usable[d.type] for p, d in zip(peak, workload.cluster.devices, strict=True)
            ),
            "peak_bytes": peak,
            "plan": to_plan(workload, posed, result.decision, f"poplar/{label}"),
            "tables": tuple(describe(posed.data, result.decision, peak)),
        }
    return Candidate(
        strategy="poplar",
        method=label,
        status=result.status,
        bound=result.bound,
        solve_seconds=result.seconds,
        message=result.message,
        **found,
    )


def peak_bytes(posed: Posed, decision: PoplarDecision) -> tuple[float, ...]:
    """[n] predicted bytes of each device; one that a plan leaves out holds nothing.

    Under ZeRO 0 and 1 devices without samples are left out, and the others share their shards.
    """
    largest = [max((b for _, b in row), default=0) for row in pieces_of(posed.data, decision)]
    if posed.data.stepwise:
        return tuple(posed.device_bytes(i, batch) for i, batch in enumerate(largest))
    taking = sum(posed.parts[i] for i, batch in enumerate(largest) if batch)
    return tuple(
        posed.states.resident(posed.data.zero_stage, float(posed.parts[i] / taking))
        + batch * posed.states.per_sample
        if batch
        else 0.0
        for i, batch in enumerate(largest)
    )


def to_plan(workload: Workload, posed: Posed, decision: PoplarDecision, source: str) -> Plan:
    """A feasible decision as a plan: every device that takes part is a replica of one stage.

    Under ZeRO 2 and 3 all devices take part in every step, some with 0 samples.
    """
    every_layer = [(0, len(workload.profile.layers))]
    replicas = [
        Replica(
            stages=[Stage(layers=every_layer, devices=[[i]])],
            micro_batches=[MicroBatches(count=times, samples=batch) for times, batch in row],
        )
        for i, row in enumerate(pieces_of(posed.data, decision))
        if row
    ]
    return Plan(
        name=f"{workload.model.name} on {workload.cluster.name}"[:200],
        origin=source,
        workload=plan_workload(workload),
        devices=[PlanDevice(type=device.type, node=device.node) for device in workload.cluster.devices],
        zero=posed.data.zero_stage,
        replicas=replicas,
    )
