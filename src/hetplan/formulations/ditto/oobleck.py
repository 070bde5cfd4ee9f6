"""Method `oobleck`: the exhaustive baseline of Ditto, Oobleck's divide and conquer over device
vectors.

Source: Ditto, Section 3, eq. 1-3; Oobleck (SOSP 2023), Section 4.1.2. All devices are used, as
printed.
"""

from __future__ import annotations

import time

from hetplan.formulations.ditto.data import DittoData, DittoDecision
from hetplan.formulations.ditto.division import Division
from hetplan.formulations.ditto.heuristic import concluded, nothing
from hetplan.formulations.ditto.problem import compile_problem, infeasible_because
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run


def solve(data: DittoData, run: Run) -> Outcome[DittoDecision]:
    """The template of least T among the states (S, all layers, all devices)."""
    begun = time.perf_counter()
    problem = compile_problem(data)
    reason = infeasible_because(problem)
    if reason is not None:
        return nothing(reason, begun)
    division = Division(problem)
    if not division.fill(run):
        stop = Stop.INTERRUPTED if run.cancelled else Stop.LIMIT
        return nothing("the table of states was not finished", begun, stop)
    ranked = division.ranked()
    if not ranked:
        return nothing("no template uses all devices: too few layers or micro-batches", begun)
    return concluded(
        problem, division.template(ranked[0][1]), begun, states=int(division.total.size)
    )
