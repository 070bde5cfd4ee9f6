"""AMP's problem by HiGHS: the mixed-integer programmes of general/linear.py, one per
configuration."""

from __future__ import annotations

from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.amp.general.linear import ask, size
from hetplan.formulations.amp.general.loop import Question, Reply, solve_each
from hetplan.solvers import highs
from hetplan.solvers.native import Sink
from hetplan.solvers.result import Outcome
from hetplan.solvers.run import Run


def solve(data: AmpData, run: Run) -> Outcome[AmpDecision]:
    """The best decision over all configurations and a proven bound; see general/loop.py."""
    return solve_each(data, run, solve_configuration, highs.SOLVER, size)


def solve_configuration(question: Question, run: Run, report: Sink) -> Reply:
    """One configuration."""
    return ask(highs.solve, question, run, report)
