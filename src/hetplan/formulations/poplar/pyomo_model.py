"""Problem `poplar` through Pyomo: the programme of `programme`, for any solver that Pyomo knows."""

from __future__ import annotations

from hetplan.formulations.poplar.data import PoplarData, PoplarDecision
from hetplan.formulations.poplar.milp import solve_through
from hetplan.solvers import pyomo_driver
from hetplan.solvers.result import Outcome
from hetplan.solvers.run import Run


def solve(data: PoplarData, run: Run) -> Outcome[PoplarDecision]:
    """Proven optimum up to the solver's tolerances, or what there is when time runs out."""
    pyomo_driver.require(run.options)
    return solve_through(pyomo_driver.solve, pyomo_driver.solver_label(run.options), data, run)
