"""Brute force for problem `ditto`: every template, priced by formulas of its own.

It shares nothing with the package but the data classes.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.formulations.ditto.data import DittoData, DittoDecision, DittoStage

# The contract's tie: of stages this close to the slowest, relative to it, the first counts.
TIE = 1e-9
# Bytes may exceed a capacity by this relative amount: rounding.
SLACK = 1e-9


@dataclass(frozen=True)
class Optimum:
    """The least T, a template that attains it, and how many templates fit."""

    objective: float
    decision: DittoDecision
    feasible: int


def total(micro_batches: int, times: list[float]) -> float:
    """T1 + T2 + T3, term by term as Ditto's eq. 1-3 unroll."""
    count, most = len(times), max(times)
    k = 0
    while times[k] < most * (1 - TIE):
        k += 1
    t1 = sum(times)
    t2 = (micro_batches - count + k - 1) * times[k]
    t3 = sum(times[k:])
    return t1 + t2 + t3


def fits(data: DittoData, stages: list[DittoStage]) -> bool:
    """The memory of 1F1B, stage by stage from the end."""
    memory = data.memory
    if memory is None:
        return True
    for alive, stage in enumerate(reversed(stages), start=1):
        held = 0.0
        for l in range(stage.first, stage.last):
            held += memory.layer_state_bytes[l]
            held += min(data.micro_batches, alive) * memory.layer_activation_bytes[l]
        if held / stage.devices > memory.device_bytes[stage.type] * (1 + SLACK):
            return False
    return True


def solve(data: DittoData) -> Optimum | None:
    """The optimum by enumeration; None when no template is feasible."""
    layers = len(data.device_types[0].forward_seconds)
    kinds = {kind.name: kind for kind in data.device_types}
    left = {kind.name: kind.nodes * kind.devices_per_node for kind in data.device_types}
    sizes = [x for x in (1, 2, 4, 8, 16) if x <= data.device_types[0].devices_per_node]
    best: tuple[float, list[DittoStage]] | None = None
    feasible = 0
    stages: list[DittoStage] = []
    times: list[float] = []

    def seconds(first: int, last: int, name: str, x: int) -> float:
        kind, t = kinds[name], 0.0
        for l in range(first, last):
            t += (kind.forward_seconds[l] + kind.backward_seconds[l]) / x
            if x > 1:
                t += 2 * kind.allreduce_seconds[str(x)][l]
        return t

    def extend(first: int) -> None:
        nonlocal best, feasible
        if first == layers:
            if fits(data, stages):
                feasible += 1
                cost = total(data.micro_batches, times)
                if best is None or cost < best[0]:
                    best = cost, list(stages)
            return
        if len(stages) == data.micro_batches:
            return
        for name in kinds:
            for x in sizes:
                if left[name] < x:
                    continue
                left[name] -= x
                for last in range(first + 1, layers + 1):
                    stages.append(DittoStage(first=first, last=last, type=name, devices=x))
                    times.append(seconds(first, last, name, x))
                    extend(last)
                    stages.pop()
                    times.pop()
                left[name] += x

    extend(0)
    return None if best is None else Optimum(best[0], DittoDecision(stages=best[1]), feasible)
