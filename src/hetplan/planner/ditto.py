"""The strategy `ditto`: one pipeline over the cluster whose stages may differ in width, beside the
papers' algorithms.

Ditto takes the number of micro-batches as given: its problem is posed and solved for each size that
they can have.
Of the templates found the one with the best price of `planner.template` is proposed; objective,
bound and status are those of its size's problem, in Ditto's own price.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import Any

from hetplan.errors import UnsupportedError
from hetplan.formulations import family
from hetplan.formulations.amp.pose import pose as pose_amp
from hetplan.formulations.ditto.data import DittoData, DittoDecision
from hetplan.formulations.ditto.pose import group_size, micro_batch_sizes, pose
from hetplan.planner.amp import inner_run, plan_workload
from hetplan.planner.candidate import Candidate
from hetplan.planner.known import solve_unless_known
from hetplan.planner.template import Groups, Priced, place, price
from hetplan.profiling.workload import Workload
from hetplan.runtime.plan import MicroBatches, Plan, PlanDevice, Replica, Stage
from hetplan.solvers.registry import solve
from hetplan.solvers.result import Result
from hetplan.solvers.run import Run
from hetplan.text import Table, devices_text, names_text, seconds_text, share_text

METHODS = ("auto", "paper", "oobleck", "greedy")
# Oobleck's table of states takes hours on large clusters and gives nothing before its end.
BASELINE_SECONDS = 20.0


@dataclass(frozen=True)
class Posed:
    """The problem of one micro-batch size, and what a method made of it."""

    micro_batch: int
    data: DittoData
    result: Result[Any]

    @property
    def decision(self) -> DittoDecision:
        """The template, where one was found."""
        assert isinstance(self.result.decision, DittoDecision)
        return self.result.decision


def propose(workload: Workload, run: Run, methods: Sequence[str] = METHODS) -> list[Candidate]:
    """One candidate per method: its best template over all micro-batch sizes."""
    problems = {size: pose(workload, size) for size in micro_batch_sizes(workload)}
    if not problems:
        reason = "no micro-batch size with times of single devices of every type divides the global batch"
        return [nothing(method, "infeasible", reason) for method in methods]
    return [one(workload, problems, method, run) for method in methods]


def nothing(method: str, status: str, reason: str, seconds: float = 0.0) -> Candidate:
    """A candidate without a plan."""
    return Candidate(
        strategy="ditto", method=method, status=status, message=reason, solve_seconds=seconds
    )


def one(workload: Workload, problems: dict[int, DittoData], method: str, run: Run) -> Candidate:
    """The candidate of one method; a method after an interruption says that it has not begun."""
    if run.cancelled:
        return nothing(method, "unknown", "not begun: stopped from the keyboard")
    label = f"ditto/{method}"
    own = inner_run(run, label)
    if method != "auto":
        limit = min(BASELINE_SECONDS, run.options.time_limit or BASELINE_SECONDS)
        own.options = replace(own.options, time_limit=limit)
    solved: list[Posed] = []
    for left, (size, data) in zip(range(len(problems), 0, -1), problems.items(), strict=True):
        part = own.part(time_limit=own.remaining / left)
        own.report(note=f"{label} micro-batches of {size}")
        try:
            if method == "auto":
                result = solve_unless_known(family("ditto"), data, part)
            else:
                result = solve(family("ditto"), data, method, part)
        except UnsupportedError as error:
            return nothing(method, "unknown", str(error), own.elapsed)
        solved.append(Posed(size, data, result))
    return candidate(workload, solved, method)


def candidate(workload: Workload, solved: Sequence[Posed], method: str) -> Candidate:
    """The best of all sizes by its price on the cluster; without a template, the reasons."""
    seconds = fsum(posed.result.seconds for posed in solved)
    found = [posed for posed in solved if posed.result.decision is not None]
    if not found:
        proven = all(posed.result.status == "infeasible" for posed in solved)
        texts = dict.fromkeys(posed.result.message or "out of time" for posed in solved)
        return nothing(method, "infeasible" if proven else "unknown", "; ".join(texts), seconds)
    cluster = pose_amp(workload)
    placed = [(posed, place(workload, posed.decision)) for posed in found]
    priced = [price(workload, cluster, p.decision, groups, p.micro_batch) for p, groups in placed]
    at = min(range(len(found)), key=lambda i: priced[i].seconds)
    best, groups = placed[at]
    return Candidate(
        strategy="ditto",
        method=method,
        status=best.result.status,
        predicted_seconds=priced[at].seconds,
        objective=best.result.objective,
        bound=best.result.bound,
        fits_memory=True,
        peak_bytes=peak_bytes(workload, best, groups),
        solve_seconds=seconds,
        plan=to_plan(workload, best, groups, f"ditto/{method}"),
        message=told(workload, best),
        tables=(table(workload, best, groups, priced[at]),),
    )


def told(workload: Workload, best: Posed) -> str:
    """What a reader of the ranking has to know."""
    parts = [best.result.message] if best.result.message else []
    if best.result.bound is not None:
        own = f"status and bound are of Ditto's own price with micro-batches of {best.micro_batch}"
        parts.append(f"{own}: {seconds_text(best.result.objective)}, without sends between stages")
        size = group_size(workload)
        if size < max(node.devices for node in workload.cluster.nodes):
            parts.append(f"stages take at most {size} device{'s' if size > 1 else ''}")
    return "; ".join(parts)


def peak_bytes(workload: Workload, best: Posed, groups: Groups) -> tuple[float, ...]:
    """[D] memory of each device: states and the micro-batches that 1F1B keeps alive; unused ones
    hold nothing."""
    memory, stages = best.data.memory, best.decision.stages
    assert memory is not None
    peaks = [0.0] * len(workload.cluster.devices)
    for k, (stage, group) in enumerate(zip(stages, groups, strict=True)):
        layers = slice(stage.first, stage.last)
        alive = min(best.data.micro_batches, len(stages) - k)
        held = fsum(memory.layer_state_bytes[layers]) + alive * fsum(
            memory.layer_activation_bytes[layers]
        )
        for device in group:
            peaks[device] = held / len(group)
    return tuple(peaks)


def to_plan(workload: Workload, best: Posed, groups: Groups, source: str) -> Plan:
    """A template as a plan of one replica: every stage tensor parallel over its own group; 1F1B, no
    ZeRO."""
    stages = [
        Stage(layers=[(stage.first, stage.last)], devices=[group], tensor_shares=[1.0] * len(group))
        for stage, group in zip(best.decision.stages, groups, strict=True)
    ]
    batches = [MicroBatches(count=best.data.micro_batches, samples=best.micro_batch)]
    return Plan(
        name=f"{workload.model.name} on {workload.cluster.name}"[:200],
        origin=source,
        workload=plan_workload(workload),
        devices=[
            PlanDevice(type=device.type, node=device.node) for device in workload.cluster.devices
        ],
        replicas=[Replica(stages=stages, micro_batches=batches)],
    )


def table(workload: Workload, best: Posed, groups: Groups, priced: Priced) -> Table:
    """One line per stage."""
    peaks, usable = peak_bytes(workload, best, groups), workload.device_bytes()
    places = [(device.node, device.type) for device in workload.cluster.devices]
    names = [layer.name for layer in workload.profile.layers]
    rows = tuple(
        (
            str(k),
            f"{stage.first}-{stage.last - 1}" if stage.last - stage.first > 1 else str(stage.first),
            names_text(names[stage.first : stage.last]),
            devices_text(places, group),
            seconds_text(priced.stages[k]),
            seconds_text(priced.links[k]) if k + 1 < len(groups) else "-",
            share_text(peaks[group[0]], usable[places[group[0]][1]]),
        )
        for k, (stage, group) in enumerate(zip(best.decision.stages, groups, strict=True))
    )
    title = f"one pipeline of {len(groups)} stages, {best.data.micro_batches} micro-batches of {best.micro_batch}"
    header = ("stage", "layers", "", "devices", "micro-batch", "send", "memory")
    return Table(title, header, rows, right=(0, 1, 4, 5))
