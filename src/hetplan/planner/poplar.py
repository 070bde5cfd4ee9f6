"""The strategy `poplar`: data parallelism under each ZeRO stage with unequal shares, beside the
paper's algorithm.

Under ZeRO 2 the weights are gathered once per iteration whatever the plan. The instance has no
place for that, so objective and bound of a candidate are those of its instance plus this constant:
both are seconds per iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hetplan.formulations import family
from hetplan.formulations.poplar.awareness import NoStageFits
from hetplan.formulations.poplar.data import PoplarDecision
from hetplan.formulations.poplar.describe import describe, pieces_of
from hetplan.formulations.poplar.pose import Assumptions, Posed, pose, pose_lowest_stage
from hetplan.planner.amp import inner_run, plan_workload
from hetplan.planner.candidate import Candidate
from hetplan.planner.poplar_settings import PoplarSettings
from hetplan.profiling.workload import Workload
from hetplan.runtime.plan import MicroBatches, Plan, PlanDevice, Replica, Stage
from hetplan.solvers.registry import solve
from hetplan.solvers.result import Result
from hetplan.solvers.run import Run
from hetplan.text import ranges_text, seconds_text

METHODS = ("auto", "paper")


def propose(
    workload: Workload,
    run: Run,
    settings: PoplarSettings | None = None,
    methods: Sequence[str] = METHODS,
) -> list[Candidate]:
    """One candidate per method and ZeRO stage; one with a reason for a stage that the cluster
    cannot hold."""
    settings = settings or PoplarSettings()
    assumed = settings.assumptions()
    if settings.zero == "lowest":
        try:
            posed = pose_lowest_stage(workload, assumed)
        except NoStageFits as error:
            return [rejected("auto", "infeasible", str(error))] if "auto" in methods else []
        return at_stage(workload, posed, assumed, run, methods)
    stages = [pose(workload, stage, assumed) for stage in settings.stages]
    return [
        candidate
        for posed in stages
        for candidate in at_stage(workload, posed, assumed, run, methods)
    ]


def at_stage(
    workload: Workload, posed: Posed, assumed: Assumptions, run: Run, methods: Sequence[str]
) -> list[Candidate]:
    """The candidates of one ZeRO stage."""
    stage = posed.data.zero_stage
    if posed.unfit is not None:
        return (
            [rejected(f"auto-zero{stage}", "infeasible", posed.unfit)] if "auto" in methods else []
        )
    candidates = []
    for method in methods:
        label = f"{method}-zero{stage}"
        if run.cancelled:
            candidates.append(rejected(label, "unknown", "not begun: stopped from the keyboard"))
            continue
        result = solve(family("poplar"), posed.data, method, inner_run(run, f"poplar/{label}"))
        told = [result.message, *once_note(posed), *posed.notes]
        if method == "auto" and assumed.shards == "memory" and stage > 0:
            told.append(gain_of_shards(workload, posed, result, assumed, run))
        candidates.append(
            candidate(workload, posed, result, label, "; ".join(filter(None, told)), assumed)
        )
    return candidates


def rejected(label: str, status: str, reason: str) -> Candidate:
    """A candidate without a plan."""
    return Candidate(strategy="poplar", method=label, status=status, message=reason)


def once_note(posed: Posed) -> list[str]:
    """What iteration, objective and bound hold beside the instance's own."""
    if not posed.once_seconds:
        return []
    return [
        f"iteration and bound include {seconds_text(posed.once_seconds)} of all-gather once per iteration"
    ]


def gain_of_shards(
    workload: Workload, posed: Posed, result: Result[Any], assumed: Assumptions, run: Run
) -> str:
    """How the optimum with shards by memory compares with that of equal ones."""
    equal = pose(workload, posed.data.zero_stage, replace(assumed, shards="equal"))
    if equal.unfit is not None:
        return f"shards by memory; with equal ones: {equal.unfit}"
    other = solve(family("poplar"), equal.data, "auto", inner_run(run, "poplar/equal shards"))
    if result.objective is None or other.objective is None:
        return f"shards by memory; equal ones: {other.status}"
    here, there = result.objective + posed.once_seconds, other.objective + equal.once_seconds
    return f"shards by memory: {there / here:.3f} times the speed of equal ones ({seconds_text(there)})"


def candidate(
    workload: Workload,
    posed: Posed,
    result: Result[Any],
    label: str,
    message: str,
    assumed: Assumptions,
) -> Candidate:
    """A solver's result as a candidate; curves end where memory does, so that every decision
    fits."""
    found: dict[str, Any] = {}
    if result.decision is not None and result.objective is not None:
        peak = peak_bytes(posed, result.decision)
        usable = workload.device_bytes()
        measured = assumed.curves
        seconds = result.objective + posed.once_seconds
        found = {
            "predicted_seconds": seconds,
            "objective": seconds,
            "fits_memory": all(
                p <= usable[d.type] or d.type in measured  # tried on the device, not predicted
                for p, d in zip(peak, workload.cluster.devices, strict=True)
            ),
            "peak_bytes": peak,
            "plan": to_plan(workload, posed, result.decision, origin(label, posed, assumed)),
            "tables": tuple(
                describe(
                    posed.data,
                    result.decision,
                    peak,
                    once_seconds=posed.once_seconds,
                    notes=(*idle_note(posed, result.decision, workload), *posed.dips, *posed.notes),
                    shown=workload.cluster.shown,
                )
            ),
        }
    return Candidate(
        strategy="poplar",
        method=label,
        status=result.status,
        bound=None if result.bound is None else result.bound + posed.once_seconds,
        solve_seconds=result.seconds,
        details=result.details,
        message=message,
        **found,
    )


def origin(label: str, posed: Posed, assumed: Assumptions) -> str:
    """Which method found a plan, and what it took for granted that a replay on the profile does not
    know of."""
    if not assumed.curves and not assumed.overlap:
        return f"poplar/{label}"
    return "; ".join((f"poplar/{label}, priced with what a replay does not know of", *posed.notes))


def largest_batches(posed: Posed, decision: PoplarDecision) -> list[int]:
    """[n] the largest micro-batch of each device, 0 where it takes no samples."""
    return [max((b for _, b in row), default=0) for row in pieces_of(posed.data, decision)]


def peak_bytes(posed: Posed, decision: PoplarDecision) -> tuple[float, ...]:
    """[n] predicted bytes of each device.

    From stage 1 on every device holds its shards, with samples or without; under stage 0 a device
    without samples is left out and holds nothing.
    """
    return tuple(
        posed.device_bytes(i, batch) if batch or posed.data.zero_stage else 0.0
        for i, batch in enumerate(largest_batches(posed, decision))
    )


def idle_note(posed: Posed, decision: PoplarDecision, workload: Workload) -> list[str]:
    """What devices without samples do."""
    shown = workload.cluster.shown
    batches = enumerate(largest_batches(posed, decision))
    idle = [i if shown is None else shown[i][1] for i, batch in batches if not batch]
    if not idle:
        return []
    if posed.data.zero_stage == 0:
        return [f"left out, without samples: devices {ranges_text(idle)}"]
    return [
        f"without samples, but with their shards and in every collective: devices {ranges_text(idle)}"
    ]


def to_plan(workload: Workload, posed: Posed, decision: PoplarDecision, source: str) -> Plan:
    """A feasible decision as a plan: every device that takes part is a replica of one stage.

    From stage 1 on all devices take part, some without samples. Shards that are not equal stand in
    the plan.
    """
    stage, every_layer = posed.data.zero_stage, [(0, len(workload.profile.layers))]
    none = [(1, 0)] if stage else []
    rows = [(i, row or none) for i, row in enumerate(pieces_of(posed.data, decision))]
    replicas = [
        Replica(
            stages=[Stage(layers=every_layer, devices=[[i]])],
            micro_batches=[MicroBatches(count=times, samples=batch) for times, batch in row],
        )
        for i, row in rows
        if row
    ]
    unequal = stage > 0 and len(set(posed.parts.tolist())) > 1
    return Plan(
        name=f"{workload.model.name} on {workload.cluster.name}"[:200],
        origin=source,
        workload=plan_workload(workload),
        devices=[
            PlanDevice(type=device.type, node=device.node) for device in workload.cluster.devices
        ],
        zero=stage,
        zero_shares=posed.parts.tolist() if unequal else None,
        replicas=replicas,
    )
