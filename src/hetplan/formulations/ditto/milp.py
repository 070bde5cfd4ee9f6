"""Problem `ditto` through HiGHS: the programme of `programme`."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from hetplan.formulations.ditto.arcs import known_before, list_arcs
from hetplan.formulations.ditto.data import DittoData, DittoDecision
from hetplan.formulations.ditto.problem import Ints, compile_problem, infeasible_because
from hetplan.formulations.ditto.programme import Programme, build
from hetplan.solvers.linear_model import LinearModel, MilpAnswer
from hetplan.solvers.native import Scale
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run
from hetplan.solvers.whole import Whole

Backend = Callable[[LinearModel, Run, Scale], MilpAnswer]
NONE_FITS = "proven by the solver: no template fits in memory"


def solve(data: DittoData, run: Run) -> Outcome[DittoDecision]:
    """Proven optimum up to HiGHS's tolerances, or what there is when time runs out."""
    from hetplan.solvers import highs

    return solve_through(highs.solve, highs.SOLVER, data, run)


def solve_through(
    backend: Backend, solver: str, data: DittoData, run: Run
) -> Outcome[DittoDecision]:
    """Build the programme, have `backend` minimise it, read the template out. solver: name and
    version of it."""
    begun = time.perf_counter()
    problem = compile_problem(data)
    reason = infeasible_because(problem)
    if reason is not None:
        spent = time.perf_counter() - begun
        return Outcome(stop=Stop.INFEASIBLE, message=reason, build_seconds=spent, solver=solver)
    arcs = list_arcs(problem, run)
    return Whole(
        build=lambda: build(arcs, run),
        ask=lambda programme: backend(programme.model, run, Scale(per_unit=programme.unit)),
        read=lambda programme, answer: problem.decision(arcs.stages(chosen(programme, answer))),
        solver=solver,
        infeasible=NONE_FITS,
        known=known_before(arcs),
    ).solve(run, begun)


def chosen(programme: Programme, answer: MilpAnswer) -> Ints:
    """The arcs that the incumbent uses."""
    used = answer.values(programme.before) + answer.values(programme.after)
    peaks = np.flatnonzero(answer.values(programme.peak) > 0.5)
    return np.concatenate([np.flatnonzero(used > 0.5), programme.arcs.peak_arc[peaks]])
