"""Methods `paper` and `paper-communication`: Ditto itself (Sections 5.3, 6.2 and Algorithm 2).

Fold the cluster, let Oobleck make the uniform virtual template of n M stages with one weakest
device each, and recover real stages by dynamic programming: a choice (i, x, x d_i) lets x devices
of type i take x d_i consecutive virtual stages; dp[j] keeps one best template of the first j
virtual stages, its cost and the devices it uses.
One entry per j forgets templates that use other devices, so the programme can miss the best merge
(method `merge` finds it). The text also speaks of merging "up to" x d_i stages; the choices it
lists are these, and with fewer stages per device the first stages use up devices that the last ones
lack: on the paper's clusters the programme then recovers nothing.
"""

from __future__ import annotations

import time

import numpy as np

from hetplan.formulations.ditto.data import DittoData, DittoDecision
from hetplan.formulations.ditto.folding import Folding, fold
from hetplan.formulations.ditto.heuristic import concluded, nothing
from hetplan.formulations.ditto.problem import (
    DittoProblem,
    Stages,
    compile_problem,
    infeasible_because,
    total_seconds,
)
from hetplan.formulations.ditto.virtual import uniform_template
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run

Atoms = list[tuple[int, int]]


def solve(data: DittoData, run: Run) -> Outcome[DittoDecision]:
    """Ditto, folding without communication (as in its evaluation)."""
    return _solve(data, run, communication=False)


def solve_with_communication(data: DittoData, run: Run) -> Outcome[DittoDecision]:
    """Ditto, folding with the in-node communication of Section 5.3.2."""
    return _solve(data, run, communication=True)


def _solve(data: DittoData, run: Run, *, communication: bool) -> Outcome[DittoDecision]:
    begun = time.perf_counter()
    problem = compile_problem(data)
    reason = infeasible_because(problem)
    if reason is not None:
        return nothing(reason, begun)
    folded = virtual_stages(data, run, communication=communication)
    if isinstance(folded, str):
        return nothing(folded, begun)
    if folded is None:
        return nothing("out of time", begun, Stop.INTERRUPTED if run.cancelled else Stop.LIMIT)
    folding, atoms = folded
    found = recover(problem, folding, atoms)
    if found is None:
        return nothing("Algorithm 2 recovers no template within the devices", begun)
    return concluded(
        problem, found, begun, virtual_stages=len(atoms), factors=dict(folding.factors)
    )


def virtual_stages(
    data: DittoData, run: Run, *, communication: bool
) -> tuple[Folding, Atoms] | str | None:
    """Folding and uniform virtual template; the reason why there is none; None when time ran
    out."""
    folding = fold(data, communication=communication)
    if folding is None:
        return "no folding: a device type computes the model in no time"
    needed = folding.nodes(data) * folding.devices_per_node
    if data.layers < needed:
        return f"Ditto needs as many layers as virtual devices: {data.layers} layers, {needed} virtual devices"
    atoms = uniform_template(data, folding, run)
    return None if atoms is None else (folding, atoms)


def recover(problem: DittoProblem, folding: Folding, atoms: Atoms) -> Stages | None:
    """Algorithm 2: dp[j] = (cost, devices used per kind, template) of the first j virtual
    stages."""
    choices = [
        (r, int(problem.option_devices[r]) * factor(problem, folding, r))
        for r in range(problem.options)
    ]
    none = np.zeros(len(problem.kinds), dtype=np.int64)
    table: list[tuple[float, np.ndarray, Stages, list[float]] | None] = [(0.0, none, [], [])]
    for j in range(1, len(atoms) + 1):
        best: tuple[float, np.ndarray, Stages, list[float]] | None = None
        for r, y in choices:
            before = table[j - y] if y <= j else None
            if before is None:
                continue
            used = before[1].copy()
            used[problem.option_kind[r]] += problem.option_devices[r]
            if (used > problem.devices).any():
                continue
            first, last = atoms[j - y][0], atoms[j - 1][1]
            times = [*before[3], float(problem.time[r, first, last])]
            cost = total_seconds(problem.micro_batches, times)
            if best is None or cost < best[0]:
                best = cost, used, [*before[2], (first, last, r)], times
        table.append(best)
    return None if table[-1] is None else table[-1][2]


def factor(problem: DittoProblem, folding: Folding, r: int) -> int:
    """d_i of an option's kind."""
    return folding.factors[problem.kinds[problem.option_kind[r]].names[0]]
