"""Problem `hap` through HiGHS: the programme of `programme`."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from hetplan.formulations.hap.common import Posed, ended, pose
from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.first import first_program, simple_bound
from hetplan.formulations.hap.graphs import WIDE, choose
from hetplan.formulations.hap.programme import build, walked
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.solvers.linear_model import LinearModel, MilpAnswer
from hetplan.solvers.native import Scale
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run

Backend = Callable[[LinearModel, Run, Scale], MilpAnswer]
# States beyond which the programme is relaxed (no general solver gets far there), and given up.
STATES, CANONICAL_STATES = 8_000, 8_000


def solve(data: HapData, run: Run) -> Outcome[HapDecision]:
    """Proven optimum up to HiGHS's tolerances, or what there is when time runs out."""
    from hetplan.solvers import highs

    return solve_through(highs.solve, data, run)


def solve_through(backend: Backend, data: HapData, run: Run) -> Outcome[HapDecision]:
    """Build the programme, have `backend` minimise it, re-optimise the ratios of the program read out."""
    posed = pose(data, run)
    return posed if isinstance(posed, Outcome) else search(backend, posed, run)


def search(backend: Backend, posed: Posed, run: Run) -> Outcome[HapDecision]:
    """The same for a theory already reduced."""
    problem, theory = posed.problem, posed.theory
    first = first_program(theory)
    least = best_ratios(problem, problem.stages(first), run).seconds
    floor = simple_bound(theory)
    if least <= 0:
        return ended(posed, first, run=run, stop=Stop.OPTIMAL, bound=0.0, built=time.perf_counter())
    run.report(incumbent=least, bound=floor)
    chosen = choose(theory, STATES, CANONICAL_STATES, run)
    if chosen.graph is None or run.should_stop:
        return ended(
            posed, first, run=run, stop=Stop.LIMIT, bound=floor, built=time.perf_counter(),
            message="" if run.should_stop else "the theory is too wide for this method",
        )  # fmt: skip
    unit = 2.0 ** (10 - np.ceil(np.log2(least)))
    programme = build(problem, chosen.graph, unit, least, relaxed=not chosen.exact)
    built = time.perf_counter()
    answer = backend(programme.model, run, Scale(per_unit=unit))
    program = first
    if answer.has_solution:
        found = theory.program(walked(theory, chosen.graph, answer.values(programme.z)))
        seconds = best_ratios(problem, problem.stages(found), Run(run.options, None, run.cancel)).seconds
        program = found if seconds <= least else first
    stop = answer.stop
    if not chosen.exact and stop is Stop.OPTIMAL:
        stop = Stop.LIMIT
    return ended(
        posed, program, run=run, stop=Stop.ERROR if stop is Stop.INFEASIBLE else stop,
        bound=floor if answer.bound is None else max(floor, answer.bound), built=built, solver=answer.solver,
        message=answer.message or ("" if chosen.exact else WIDE),
        details={**answer.statistics, "states": chosen.graph.n, "arcs": len(chosen.graph.head)},
    )  # fmt: skip
