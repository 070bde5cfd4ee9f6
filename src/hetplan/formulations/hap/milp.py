"""Problem `hap` through HiGHS: the programme of `programme`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hetplan.formulations.hap.common import NONE_FITS, Posed, ended, pose
from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.first import fitting_program, simple_bound
from hetplan.formulations.hap.graph import WIDE, choose
from hetplan.formulations.hap.programme import build, forbid, walked
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
    """Build the programme, have `backend` minimise it, re-optimise the ratios of the program read
    out."""
    posed = pose(data, run)
    return posed if isinstance(posed, Outcome) else search(backend, posed, run)


def search(
    backend: Backend,
    posed: Posed,
    run: Run,
    *,
    known: Sequence[int] | None = None,
    floor: float = 0.0,
    details: Mapping[str, object] | None = None,
) -> Outcome[HapDecision]:
    """The same for a theory already reduced. known: a program (triple numbers) that fits; floor: a
    bound in seconds."""
    problem, theory = posed.problem, posed.theory
    first, least = (list(known), np.inf) if known is not None else fitting_program(theory, run)
    if known is not None:
        least = best_ratios(problem, problem.stages(first), run).seconds
    floor = max(floor, simple_bound(theory))
    if least <= 0:
        return ended(posed, first, run=run, stop=Stop.OPTIMAL, bound=0.0, built=time.perf_counter())
    run.report(incumbent=least if np.isfinite(least) else None, bound=floor)
    chosen = choose(theory, STATES, CANONICAL_STATES, run)
    if chosen is None or run.should_stop:
        return ended(
            posed, first, run=run, stop=Stop.LIMIT, bound=floor, built=time.perf_counter(),
            message="" if run.should_stop else "the theory is too wide for this method",
        )  # fmt: skip
    upper = least if np.isfinite(least) else problem.most_seconds
    unit = 2.0 ** (10 - np.ceil(np.log2(upper))) if upper > 0 else 1.0
    programme = build(problem, chosen, unit, upper, relaxed=not chosen.ordered)
    built = time.perf_counter()
    program = first
    while True:
        answer = backend(programme.model, run, Scale(per_unit=unit))
        if not answer.has_solution:
            break
        found = theory.program(walked(theory, chosen, answer.values(programme.z)))
        ratios = best_ratios(problem, problem.stages(found), Run(run.options, None, run.cancel))
        if ratios.seconds <= least:
            program, least = found, ratios.seconds
        if answer.stop is not Stop.OPTIMAL or not ratios.impossible:
            break
        forbid(programme, found)
    stop = answer.stop
    if stop is Stop.INFEASIBLE and problem.capacity is not None and not np.isfinite(least):
        return ended(
            posed,
            None,
            run=run,
            stop=stop,
            bound=None,
            built=built,
            solver=answer.solver,
            message=NONE_FITS,
        )
    if not chosen.ordered and stop is Stop.OPTIMAL:
        stop = Stop.LIMIT
    return ended(
        posed, program, run=run, stop=Stop.ERROR if stop is Stop.INFEASIBLE else stop,
        bound=floor if answer.bound is None else max(floor, answer.bound), built=built, solver=answer.solver,
        message=answer.message or ("" if chosen.ordered else WIDE),
        details={**(details or {}), **answer.statistics, "states": chosen.n, "arcs": len(chosen.head)},
    )  # fmt: skip
