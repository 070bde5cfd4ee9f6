"""Method `merge`: the paper's virtual template, its stages merged to proven optimality.

The virtual stages are atoms; which consecutive ones each real group takes is chosen by the exact
search. What separates `merge` from the optimum is lost by folding and template, what separates
`paper` from `merge` by the recovery programme (Algorithm 2). Memory counts.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from hetplan.formulations.ditto import exact
from hetplan.formulations.ditto.data import DeviceType, DittoData, DittoDecision, Memory
from hetplan.formulations.ditto.heuristic import nothing
from hetplan.formulations.ditto.paper import Atoms, virtual_stages
from hetplan.formulations.ditto.problem import compile_problem, infeasible_because
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run


def solve(data: DittoData, run: Run) -> Outcome[DittoDecision]:
    """The best template that cuts only between virtual stages; proves nothing about other
    templates."""
    begun = time.perf_counter()
    reason = infeasible_because(compile_problem(data))
    if reason is not None:
        return nothing(reason, begun)
    folded = virtual_stages(data, run, communication=False)
    if isinstance(folded, str):
        return nothing(folded, begun)
    if folded is None:
        return nothing("out of time", begun, Stop.INTERRUPTED if run.cancelled else Stop.LIMIT)
    _, atoms = folded
    found = exact.solve(merged(data, atoms), run)
    if found.decision is None:
        stop = Stop.DONE if found.stop is Stop.INFEASIBLE else found.stop
        return nothing("no merge of virtual stages is feasible", begun, stop)
    stages = [
        stage.model_copy(update={"first": atoms[stage.first][0], "last": atoms[stage.last - 1][1]})
        for stage in found.decision.stages
    ]
    return replace(
        found,
        stop=Stop.DONE if found.stop is Stop.OPTIMAL else found.stop,
        decision=DittoDecision(stages=stages),
        bound=None,
        build_seconds=0.0,
        solve_seconds=time.perf_counter() - begun,
        details={**found.details, "virtual_stages": len(atoms), "best_merge": found.bound},
    )


def merged(data: DittoData, atoms: Atoms) -> DittoData:
    """The instance whose layers are the atoms: all per-layer rows summed over each."""

    def summed(row: list[float]) -> list[float]:
        return [math.fsum(row[a:b]) for a, b in atoms]

    kinds = [
        DeviceType(
            name=kind.name,
            nodes=kind.nodes,
            devices_per_node=kind.devices_per_node,
            forward_seconds=summed(kind.forward_seconds),
            backward_seconds=summed(kind.backward_seconds),
            allreduce_seconds={x: summed(row) for x, row in kind.allreduce_seconds.items()},
        )
        for kind in data.device_types
    ]
    memory = data.memory
    if memory is not None:
        memory = Memory(
            device_bytes=memory.device_bytes,
            layer_state_bytes=summed(memory.layer_state_bytes),
            layer_activation_bytes=summed(memory.layer_activation_bytes),
        )
    return DittoData(micro_batches=data.micro_batches, device_types=kinds, memory=memory)
