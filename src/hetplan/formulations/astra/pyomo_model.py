"""Problem `astra` through Pyomo: the programme of `programme`, for any solver that Pyomo knows."""

from __future__ import annotations

from hetplan.formulations.astra.data import AstraData, AstraDecision
from hetplan.formulations.astra.milp import solve_through
from hetplan.solvers import pyomo_driver
from hetplan.solvers.result import Outcome
from hetplan.solvers.run import Run


def solve(data: AstraData, run: Run) -> Outcome[AstraDecision]:
    """Proven optimum up to the solver's tolerances, or what there is when time runs out."""
    pyomo_driver.require(run.options)
    return solve_through(pyomo_driver.solve, pyomo_driver.solver_label(run.options), data, run)
