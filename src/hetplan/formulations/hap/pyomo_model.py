"""Problem `hap` through Pyomo: the programme of `programme`, for any solver that Pyomo knows."""

from __future__ import annotations

from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.milp import solve_through
from hetplan.solvers import pyomo_driver
from hetplan.solvers.result import Outcome
from hetplan.solvers.run import Run


def solve(data: HapData, run: Run) -> Outcome[HapDecision]:
    """Proven optimum up to the solver's tolerances, or what there is when time runs out."""
    return solve_through(pyomo_driver.solve, data, run)
