"""Problem `astra` through HiGHS: the programme of `programme`."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from hetplan.formulations.astra.data import AstraData, AstraDecision
from hetplan.formulations.astra.problem import compile_problem, decision_of, infeasible_because
from hetplan.formulations.astra.programme import build
from hetplan.solvers.linear_model import LinearModel, MilpAnswer
from hetplan.solvers.native import Scale
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run

Backend = Callable[[LinearModel, Run, Scale], MilpAnswer]


def solve(data: AstraData, run: Run) -> Outcome[AstraDecision]:
    """Proven optimum up to HiGHS's tolerances, or what there is when time runs out."""
    from hetplan.solvers import highs

    return solve_through(highs.solve, data, run)


def solve_through(backend: Backend, data: AstraData, run: Run) -> Outcome[AstraDecision]:
    """Build the programme, have `backend` minimise it, read the stages out."""
    begun = time.perf_counter()
    problem = compile_problem(data)
    reason = infeasible_because(problem)
    if reason is not None:
        return Outcome(stop=Stop.INFEASIBLE, message=reason)
    programme = build(problem)
    built = time.perf_counter()
    answer = backend(programme.model, run, Scale(per_unit=programme.per_second))
    decision = None
    if answer.has_solution:
        counts = np.rint(answer.values(programme.w)).astype(np.int64)
        decision = decision_of(problem, programme.kinds.stages(counts))
    no_division = "proven by the solver: no numbers of layers, one per type, add up to all layers"
    return Outcome(
        stop=answer.stop,
        decision=decision,
        bound=answer.bound,
        build_seconds=built - begun,
        solve_seconds=time.perf_counter() - built,
        solver=answer.solver,
        message=answer.message or (no_division if answer.stop is Stop.INFEASIBLE else ""),
        details=answer.statistics,
    )
