"""The exact method (and `auto`): milliseconds whatever the number of devices, for curves of any
shape."""

from __future__ import annotations

import time

from hetplan.formulations.poplar.data import PoplarData, PoplarDecision
from hetplan.formulations.poplar.exact_shares import solve_shares
from hetplan.formulations.poplar.exact_steps import solve_steps
from hetplan.formulations.poplar.problem import NOTHING_FITS, compile_problem
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run


def solve(data: PoplarData, run: Run) -> Outcome[PoplarDecision]:
    """A decision of proven least time, ties broken towards the least under-utilisation (Poplar, eq.
    4)."""
    begun = time.perf_counter()
    problem = compile_problem(data)
    built = time.perf_counter()
    if not problem.groups:
        return Outcome(stop=Stop.INFEASIBLE, message=NOTHING_FITS, build_seconds=built - begun)
    outcome = solve_steps(problem, run) if problem.stepwise else solve_shares(problem, run)
    return Outcome(
        stop=outcome.stop,
        decision=outcome.decision,
        bound=outcome.bound,
        build_seconds=built - begun,
        solve_seconds=time.perf_counter() - built,
        message=outcome.message,
        details=outcome.details,
    )
