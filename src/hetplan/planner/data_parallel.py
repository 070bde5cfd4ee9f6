"""The strategy `dp`, the floor: the whole model on every device, equal shares of the batch.

It is the AMP problem with pipeline = tensor = 1: only the micro-batch size is to be decided, so
that all of its decisions are priced, by the evaluator.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from hetplan.formulations import family
from hetplan.formulations.amp.breakdown import peak_bytes
from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.amp.describe import describe
from hetplan.formulations.amp.pose import pose
from hetplan.planner.amp import to_plan
from hetplan.planner.candidate import Candidate
from hetplan.profiling.workload import Workload
from hetplan.solvers.registry import evaluate
from hetplan.solvers.run import Run
from hetplan.text import bytes_text

METHOD = "enumeration"


def propose(workload: Workload, run: Run, methods: Sequence[str] = (METHOD,)) -> list[Candidate]:
    """The fastest micro-batch size that fits; where none fits, the fastest of all, marked so."""
    if METHOD not in methods:
        return []
    begun = time.perf_counter()
    data = pose(workload)
    memory = held(workload, data)
    choices = decisions(data)
    if not choices:
        message = (
            f"no micro-batch size with a table divides {data.global_batch} samples over "
            f"{len(data.devices)} devices"
        )
        return [Candidate(strategy="dp", method=METHOD, status="infeasible", message=message)]
    # Memory is judged apart, so that what does not fit has a price as well.
    unlimited = data.model_copy(update={"memory": None})
    priced = [
        (evaluate(family("amp"), unlimited, decision).objective, decision) for decision in choices
    ]
    best = min(
        ((seconds, decision) for seconds, decision in priced if seconds is not None),
        key=lambda pair: (not fits(memory, pair[1]), pair[0]),
    )
    return [candidate(workload, data, best[1], best[0], time.perf_counter() - begun)]


def held(workload: Workload, data: AmpData) -> AmpData:
    """The data whose memory is that of plain data parallelism: tied weights once, a sample's
    activations with what is computed again beside them."""
    assert data.memory is not None
    kept = list(data.memory.layer_bytes_per_sample)
    kept[0] += workload.working_bytes.get(1, 0.0)
    layers = [
        layer.model_copy(update={"param_bytes": own.param_bytes})
        for layer, own in zip(data.layers, workload.profile.layers, strict=True)
    ]
    memory = data.memory.model_copy(update={"layer_bytes_per_sample": kept})
    return data.model_copy(update={"layers": layers, "memory": memory})


def decisions(data: AmpData) -> list[AmpDecision]:
    """Every micro-batch size that all device types have a table for and that divides the batch
    evenly."""
    count = len(data.devices)
    types = {device.type for device in data.devices}
    whole = {(entry.type, entry.micro_batch) for entry in data.layer_seconds if entry.tensor == 1}
    sizes = sorted({size for _, size in whole if all((name, size) in whole for name in types)})
    return [
        AmpDecision(
            pipeline=1,
            data=count,
            tensor=1,
            micro_batch=size,
            placement=[[[device] for device in range(count)]],
            stages=[(0, len(data.layers))],
        )
        for size in sizes
        if data.global_batch % (count * size) == 0
    ]


def fits(data: AmpData, decision: AmpDecision) -> bool:
    """Whether the evaluator finds nothing against the decision, memory included."""
    return evaluate(family("amp"), data, decision).objective is not None


def candidate(
    workload: Workload, data: AmpData, decision: AmpDecision, seconds: float, spent: float
) -> Candidate:
    """The best of all decisions: proven by having looked at each."""
    memory = held(workload, data)
    peak = peak_bytes(memory, decision)
    fitting = fits(memory, decision)
    message = ""
    if not fitting and peak is not None:
        message = f"does not fit: one device has to hold {bytes_text(max(peak))}"
    return Candidate(
        strategy="dp",
        method=METHOD,
        status="optimal" if fitting else "infeasible",
        predicted_seconds=seconds,
        objective=seconds if fitting else None,
        bound=seconds if fitting else None,
        fits_memory=fitting,
        peak_bytes=peak,
        solve_seconds=spent,
        plan=to_plan(workload, data, decision, "dp/enumeration"),
        message=message,
        tables=tuple(describe(data, decision, peak, workload.cluster.shown)),
    )
