"""Problem `poplar` through HiGHS: the programme of `programme`; `pyomo_model` hands the same one to Pyomo."""

from __future__ import annotations

import time
from collections.abc import Callable

from hetplan.formulations.poplar.data import PoplarData, PoplarDecision
from hetplan.formulations.poplar.levels import TOO_LARGE, build_levels, decode
from hetplan.formulations.poplar.problem import NOTHING_FITS, compile_problem
from hetplan.formulations.poplar.programme import build
from hetplan.solvers import highs
from hetplan.solvers.linear_model import LinearModel, MilpAnswer
from hetplan.solvers.native import Scale
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run

BackEnd = Callable[[LinearModel, Run, Scale], MilpAnswer]


def solve(data: PoplarData, run: Run) -> Outcome[PoplarDecision]:
    """Proven optimum up to HiGHS's tolerances, or what there is when time runs out."""
    return solve_through(highs.solve, data, run)


def solve_through(back_end: BackEnd, data: PoplarData, run: Run) -> Outcome[PoplarDecision]:
    """Build the programme, solve it with `back_end`, read the decision out of its columns."""
    begun = time.perf_counter()
    problem = compile_problem(data)
    if not problem.groups:
        return Outcome(stop=Stop.INFEASIBLE, message=NOTHING_FITS)
    levels = build_levels(problem)
    if levels is None:
        return Outcome(stop=Stop.LIMIT, message=TOO_LARGE)
    programme = build(levels, highs.objective_unit(levels.ceiling))
    built = time.perf_counter()
    scale = Scale(per_unit=programme.per_second, offset=levels.offset)
    answer = back_end(programme.model, run, scale)
    decision = decode(levels, *programme.counts(answer.values)) if answer.has_solution else None
    return Outcome(
        stop=answer.stop,
        decision=decision,
        bound=answer.bound,
        build_seconds=built - begun,
        solve_seconds=time.perf_counter() - built,
        solver=answer.solver,
        message=answer.message,
        details=answer.statistics,
    )
