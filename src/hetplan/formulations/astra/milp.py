"""Problem `astra` through HiGHS: the programme of `programme`."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from hetplan.formulations.astra.counted import Kinds, known_before
from hetplan.formulations.astra.data import AstraData, AstraDecision
from hetplan.formulations.astra.problem import compile_problem, decision_of, infeasible_because
from hetplan.formulations.astra.programme import Programme, build
from hetplan.solvers.linear_model import LinearModel, MilpAnswer
from hetplan.solvers.native import Scale
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run
from hetplan.solvers.whole import Whole

Backend = Callable[[LinearModel, Run, Scale], MilpAnswer]


def solve(data: AstraData, run: Run) -> Outcome[AstraDecision]:
    """Proven optimum up to HiGHS's tolerances, or what there is when time runs out."""
    from hetplan.solvers import highs

    return solve_through(highs.solve, highs.SOLVER, data, run)


def solve_through(
    backend: Backend, solver: str, data: AstraData, run: Run
) -> Outcome[AstraDecision]:
    """Build the programme, have `backend` minimise it, read the stages out. solver: name and
    version of it."""
    begun = time.perf_counter()
    problem = compile_problem(data)
    reason = infeasible_because(problem)
    if reason is not None:
        spent = time.perf_counter() - begun
        return Outcome(stop=Stop.INFEASIBLE, message=reason, build_seconds=spent, solver=solver)
    kinds = Kinds(problem)

    def read(programme: Programme, answer: MilpAnswer) -> AstraDecision:
        counts = np.rint(answer.values(programme.w)).astype(np.int64)
        return decision_of(problem, kinds.stages(counts))

    return Whole(
        build=lambda: build(kinds, run),
        ask=lambda programme: backend(programme.model, run, Scale(per_unit=programme.per_second)),
        read=read,
        solver=solver,
        infeasible="proven by the solver: no numbers of layers, one per type, add up to all layers",
        known=known_before(kinds),
    ).solve(run, begun)
