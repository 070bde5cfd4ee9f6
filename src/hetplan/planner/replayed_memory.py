"""Problems posed with the memory that the replay counts.

The problems' formats divide all that a stage keeps by its tensor degree t, and know nothing of
recomputation's working memory. The replay counts, of a device with `alive` micro-batches of b
    samples, states / t + alive b (split / t + whole) + b working(t) <= capacity.
AMP    A problem with the tables of one degree (and one micro-batch, where there is working memory)
       alone can say it: layers keep split + t whole, devices have capacity - b working(t). Together
       these problems have the decisions of the whole one: the best of their optima is its optimum,
       the least of their bounds its bound.
Ditto  Stages of one template differ in width, so it cannot be said. With stages of at most M
       devices, layers keep split + M whole and devices have capacity - b working(1): never looser
       than the replay, exact for M = 1. The best over M = 1, 2, 4, … is taken; its bound is that of
       its micro-batch's problem as first posed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hetplan.formulations import family
from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.amp.pose import pose as pose_amp
from hetplan.formulations.ditto.data import DittoData
from hetplan.formulations.ditto.pose import group_size, micro_batch_sizes
from hetplan.formulations.ditto.pose import pose as pose_ditto
from hetplan.planner import amp, ditto
from hetplan.planner.candidate import Candidate
from hetplan.profiling.workload import Workload
from hetplan.solvers.registry import solve
from hetplan.solvers.result import Result
from hetplan.solvers.run import Run

# relative: a sum that reaches the capacity exceeds it in the last digits of another order
SAME = 1e-6


def amp_optimum(workload: Workload, run: Run, floor: float | None) -> list[Candidate]:
    """AMP's optimum within the replay's memory, and its bound. floor: a bound that holds anyway;
    reaching it ends."""
    problems = list(amp_problems(workload))
    best: tuple[float, AmpData, Result[AmpDecision]] | None = None
    bounds: list[float] = []
    seconds = 0.0
    for left, data in zip(range(len(problems), 0, -1), problems, strict=True):
        if run.should_stop:
            bounds.append(0.0 if floor is None else floor)
            break
        result = solve(family("amp"), data, "auto", run.part(time_limit=run.remaining / left))
        seconds += result.seconds
        if result.status != "infeasible":
            bounds.append(result.bound or 0.0)
        if result.objective is not None and (best is None or result.objective < best[0]):
            best = result.objective, data, result
            if floor is not None and best[0] <= floor * (1 + SAME):
                bounds = [floor]
                break
    if best is None:
        status = "unknown" if bounds else "infeasible"
        return [Candidate(strategy="amp", method="auto", status=status, solve_seconds=seconds)]
    found = amp.candidate(workload, best[1], best[2])
    bound = min(max(min(bounds), floor or 0.0), best[0])
    status = "optimal" if bound >= best[0] * (1 - SAME) else "feasible"
    return [replace(found, bound=bound, status=status, solve_seconds=seconds)]


def amp_problems(workload: Workload) -> Iterator[AmpData]:
    """The problem of every degree, and of every micro-batch where it matters; those that devices
    have no room for are left out."""
    whole = pose_amp(workload)
    assert whole.memory is not None
    layers = workload.profile.layers
    pairs = sorted({(entry.tensor, entry.micro_batch) for entry in whole.layer_seconds})
    apart = any(workload.working_bytes.values())
    keys = (
        pairs if apart else [(tensor, None) for tensor in sorted({tensor for tensor, _ in pairs})]
    )
    for tensor, size in keys:
        tables = [
            entry
            for entry in whole.layer_seconds
            if entry.tensor == tensor and size in (None, entry.micro_batch)
        ]
        if {entry.type for entry in tables} != {device.type for device in whole.devices}:
            continue
        beside = (size or 0) * workload.working_bytes.get(tensor, 0.0)
        memory = whole.memory.model_copy(
            update={
                "device_bytes": {k: room(b, beside) for k, b in whole.memory.device_bytes.items()},
                "layer_bytes_per_sample": [
                    layer.saved_bytes + (tensor - 1) * layer.replicated_saved_bytes
                    for layer in layers
                ],
            }
        )
        if any(memory.device_bytes.values()):
            yield whole.model_copy(update={"layer_seconds": tables, "memory": memory})


def room(capacity: float, beside: float) -> float:
    """What is left of a device's bytes."""
    return max(0.0, capacity * (1 - SAME) - beside)


def ditto_optimum(workload: Workload, run: Run, _: float | None) -> list[Candidate]:
    """Ditto's best over all largest widths, priced on the cluster as the strategy prices."""
    widths = [1 << k for k in range(group_size(workload).bit_length())]
    solved: list[ditto.Posed] = []
    jobs = [(width, size) for width in widths for size in micro_batch_sizes(workload)]
    for left, (width, size) in zip(range(len(jobs), 0, -1), jobs, strict=True):
        if run.should_stop:
            break
        data = ditto_problem(workload, size, width)
        result = solve(family("ditto"), data, "auto", run.part(time_limit=run.remaining / left))
        solved.append(ditto.Posed(size, data, result))
    if all(posed.result.decision is None for posed in solved) and len(solved) < len(jobs):
        return [ditto.nothing("auto", "unknown", "out of time")]
    found = ditto.candidate(workload, solved, "auto")
    if found.objective is None or found.plan is None:
        return [found]
    taken = found.plan.replicas[0].micro_batches[0].samples
    loose = solve(
        family("ditto"), pose_ditto(workload, taken), "auto", run.part(time_limit=run.remaining)
    )
    reached = loose.bound is not None and found.objective <= loose.bound * (1 + SAME)
    return [replace(found, bound=loose.bound, status="optimal" if reached else "feasible")]


def ditto_problem(workload: Workload, micro_batch: int, width: int) -> DittoData:
    """The problem of one micro-batch size whose stages take at most `width` devices."""
    data = pose_ditto(workload, micro_batch, width=width)
    assert data.memory is not None
    beside = micro_batch * workload.working_bytes.get(1, 0.0)
    kept = [
        (layer.saved_bytes + (width - 1) * layer.replicated_saved_bytes) * micro_batch
        for layer in workload.profile.layers
    ]
    rooms = {name: room(capacity, beside) for name, capacity in data.memory.device_bytes.items()}
    memory = data.memory.model_copy(update={"device_bytes": rooms, "layer_activation_bytes": kept})
    return data.model_copy(update={"memory": memory})
