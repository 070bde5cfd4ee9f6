"""AMP's problem through Pyomo: the programmes of general/linear.py by any solver that Pyomo
knows."""

from __future__ import annotations

from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.amp.general.linear import ask, size
from hetplan.formulations.amp.general.loop import Question, Reply, solve_each
from hetplan.solvers import pyomo_driver
from hetplan.solvers.native import Sink
from hetplan.solvers.result import Outcome
from hetplan.solvers.run import Run


def solve(data: AmpData, run: Run) -> Outcome[AmpDecision]:
    """The best decision over all configurations and a proven bound; see general/loop.py.

    Raises InputError for an unknown solver name, UnsupportedError where the solver is not
    installed.
    """
    pyomo_driver.require(run.options)
    return solve_each(data, run, solve_configuration, pyomo_driver.solver_label(run.options), size)


def solve_configuration(question: Question, run: Run, report: Sink) -> Reply:
    """One configuration."""
    return ask(pyomo_driver.solve, question, run, report)
