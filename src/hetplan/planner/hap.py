"""The strategy `hap`: one SPMD program over all devices with sharding ratios, beside HAP's
procedure and its baselines.

Objective, bound and status are of the instance, in seconds per iteration (its seconds times the
runs of an iteration); the predicted iteration is that of whole units: samples, heads and experts do
not divide.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hetplan.errors import UnsupportedError
from hetplan.formulations import family
from hetplan.formulations.hap.data import HapDecision
from hetplan.formulations.hap.describe import describe
from hetplan.formulations.hap.listing import stages_of
from hetplan.formulations.hap.pose import Posed, pose
from hetplan.formulations.hap.rounding import shard_lengths
from hetplan.formulations.hap.spmd.one_way import in_one_way
from hetplan.formulations.hap.spmd.whole import whole_seconds
from hetplan.planner.amp import inner_run, plan_workload
from hetplan.planner.candidate import Candidate
from hetplan.planner.hap_settings import HapSettings
from hetplan.profiling.workload import Workload
from hetplan.runtime.plan import MicroBatches, Plan, PlanDevice, Replica, Stage
from hetplan.runtime.spmd_decision import write_program
from hetplan.solvers.options import Options
from hetplan.solvers.registry import evaluate, solve
from hetplan.solvers.result import Result
from hetplan.solvers.run import Run as SolverRun
from hetplan.solvers.run import Stopped
from hetplan.text import Table, bytes_text, seconds_text

METHODS = ("auto", "paper", "dp-even", "dp-proportional")
ONE_WAY_SECONDS = 5.0  # for programs that read every parameter in one way


def propose(
    workload: Workload,
    run: SolverRun,
    settings: HapSettings | None = None,
    methods: Sequence[str] = METHODS,
) -> list[Candidate]:
    """One candidate per method."""
    settings, begun = settings or HapSettings(), time.perf_counter()
    usable = workload.device_bytes()
    room = sum(usable[device.type] for device in workload.cluster.devices)
    if workload.state_bytes > room:  # however the parameters are sliced, somebody holds each
        held = bytes_text(workload.state_bytes)
        text = f"one copy of the model states takes {held}, all devices have {bytes_text(room)}"
        return [nothing(method, "infeasible", text) for method in methods]
    try:
        posed = pose(workload, settings.steps, inner_run(run, "hap"))
    except UnsupportedError as error:
        return [nothing(method, "unknown", str(error)) for method in methods]
    except Stopped:
        text = f"no time to write its theory down ({seconds_text(time.perf_counter() - begun)})"
        return [nothing(method, "unknown", text) for method in methods]
    posing = time.perf_counter() - begun
    return [
        one(posed, method, run, settings, posing if method == methods[0] else 0.0)
        for method in methods
    ]


def nothing(method: str, status: str, reason: str, seconds: float = 0.0) -> Candidate:
    """A candidate without a plan."""
    return Candidate(
        strategy="hap", method=method, status=status, message=reason, solve_seconds=seconds
    )


def one(
    posed: Posed, method: str, run: SolverRun, settings: HapSettings, posing: float
) -> Candidate:
    """The candidate of one method; `posing`: seconds spent before, which count to it."""
    if run.cancelled:
        return nothing(method, "unknown", "not begun: stopped from the keyboard")
    own = inner_run(run, f"hap/{method}")
    share = settings.seconds if method == "auto" else settings.seconds / 60
    left = share if run.options.time_limit is None else max(run.options.time_limit - posing, 1e-3)
    limit = min(share, left)
    own.options = replace(own.options, time_limit=limit)
    result = solve(family("hap"), posed.theory.data, method, own)
    return candidate(posed, result, posing)


def candidate(posed: Posed, result: Result[Any], posing: float) -> Candidate:
    """A solver's result as a candidate."""
    if result.decision is None:
        reason = (
            result.message
            or f"no program within {seconds_text(result.seconds)}; hap.seconds gives it longer"
        )
        if result.status == "infeasible":
            reason += f" in {in_runs(posed)}; hap.steps sets how many"
        return nothing(result.method, result.status, reason, result.seconds + posing)
    assert isinstance(result.decision, HapDecision) and result.objective is not None
    decision, objective = in_whole_units(posed, result.decision), result.objective
    if not posed.fits(decision):
        decision, objective = in_one_way_each(posed, decision, objective)
    seconds = posed.steps * whole_seconds(posed.theory, decision)
    usable, peak = posed.workload.device_bytes(), posed.device_bytes(decision)
    limits = [usable[device.type] for device in posed.workload.cluster.devices]
    over = [p for p, limit in zip(peak, limits, strict=True) if p > limit]
    told = [result.message] if result.message else []
    if over:
        told.append(f"does not fit: one device has to hold {bytes_text(max(over))}")
    if result.method == "auto":
        told.append(
            "objective and bound are of ratios that divide everything; the iteration is in whole units"
        )
    return Candidate(
        strategy="hap",
        method=result.method,
        status=result.status if objective == result.objective else "feasible",
        predicted_seconds=seconds,
        objective=posed.steps * objective,
        bound=None if result.bound is None else posed.steps * result.bound,
        fits_memory=not over,
        peak_bytes=peak,
        solve_seconds=result.seconds + posing,
        plan=to_plan(posed, decision, f"hap/{result.method}"),
        message="; ".join(told),
        tables=tables(posed, decision),
    )


def in_whole_units(posed: Posed, decision: HapDecision) -> HapDecision:
    """The decision with ratios that cut samples whole, where the program in whole units then fits
    and is no slower."""
    batch = posed.samples
    cut = [[n / batch for n in shard_lengths(row, batch)] for row in decision.ratios]
    rounded = decision.model_copy(update={"ratios": cut})
    return min(
        (rounded, decision), key=lambda d: (not posed.fits(d), whole_seconds(posed.theory, d))
    )


def in_one_way_each(
    posed: Posed, decision: HapDecision, objective: float
) -> tuple[HapDecision, float]:
    """The decision and its objective; where devices have no room for parameters that it reads in
    several ways, the fastest that reads each in one way, if one fits."""
    found = [
        (whole_seconds(posed.theory, other), other)
        for each in in_one_way(
            posed.theory, decision, SolverRun(Options(time_limit=ONE_WAY_SECONDS))
        )
        if posed.fits(other := in_whole_units(posed, each))
    ]
    if not found:
        return decision, objective
    best = min(found, key=lambda pair: pair[0])[1]
    priced = evaluate(family("hap"), posed.theory.data, best).objective
    return (decision, objective) if priced is None else (best, priced)


def in_runs(posed: Posed) -> str:
    """`8 runs of 64 samples`."""
    return f"{posed.steps} run{'s' if posed.steps > 1 else ''} of {posed.samples} samples"


def tables(posed: Posed, decision: HapDecision) -> tuple[Table, ...]:
    """The ratios, and how the program's time divides."""
    ratios, *_ = describe(posed.theory.data, decision, posed.workload.cluster.shown)
    stages = stages_of(posed.theory.data, decision)
    waiting = posed.steps * sum(stage.comm_seconds for stage in stages)
    note = f"{len(decision.program)} instructions in {len(stages)} stages; {seconds_text(waiting)} in collectives"
    return (
        replace(
            ratios,
            title=f"one SPMD program, {in_runs(posed)}: {ratios.title}",
            notes=(*ratios.notes, note),
        ),
    )


def to_plan(posed: Posed, decision: HapDecision, source: str) -> Plan:
    """One replica of one stage on all devices, with the program that they run."""
    workload = posed.workload
    devices = workload.cluster.devices
    stage = Stage(
        layers=[(0, len(workload.profile.layers))],
        devices=[list(range(len(devices)))],
        tensor_shares=[1.0] * len(devices),
    )
    batches = [MicroBatches(count=posed.steps, samples=posed.samples)]
    return Plan(
        name=f"{workload.model.name} on {workload.cluster.name}"[:200],
        origin=source,
        workload=plan_workload(workload),
        devices=[PlanDevice(type=device.type, node=device.node) for device in devices],
        schedule="spmd",
        replicas=[Replica(stages=[stage], micro_batches=batches)],
        program=write_program(posed.theory, decision),
    )
