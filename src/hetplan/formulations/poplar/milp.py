"""Problem `poplar` through HiGHS: the programme of `programme`; `pyomo_model` hands the same one to
Pyomo."""

from __future__ import annotations

import time
from collections.abc import Callable

from hetplan.formulations.poplar.data import PoplarData, PoplarDecision
from hetplan.formulations.poplar.first import known_before, too_large
from hetplan.formulations.poplar.levels import NO_PLAN, build_levels, decode
from hetplan.formulations.poplar.problem import NOTHING_FITS, compile_problem
from hetplan.formulations.poplar.programme import build
from hetplan.formulations.poplar.ties import Counts, Tie, settle
from hetplan.solvers import highs
from hetplan.solvers.linear_model import LinearModel, MilpAnswer
from hetplan.solvers.native import Scale, Sink
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run
from hetplan.solvers.whole import Whole

BackEnd = Callable[[LinearModel, Run, Scale | None, Sink | None], MilpAnswer]


def solve(data: PoplarData, run: Run) -> Outcome[PoplarDecision]:
    """Proven optimum up to HiGHS's tolerances, or what there is when time runs out."""
    return solve_through(highs.solve, highs.SOLVER, data, run)


def solve_through(
    back_end: BackEnd, solver: str, data: PoplarData, run: Run
) -> Outcome[PoplarDecision]:
    """Build the programme, solve it with `back_end`, read the decision out of its columns. solver:
    name, version."""
    begun = time.perf_counter()
    problem = compile_problem(data)
    if not problem.groups:
        spent = time.perf_counter() - begun
        return Outcome(
            stop=Stop.INFEASIBLE, message=NOTHING_FITS, build_seconds=spent, solver=solver
        )
    levels = build_levels(problem)
    if levels is None:
        return too_large(problem, solver, time.perf_counter() - begun)
    per_second = highs.objective_unit(levels.ceiling)
    scale = Scale(per_unit=per_second, offset=levels.offset)

    def again(tie: Tie) -> tuple[Stop, Counts | None]:
        programme = build(levels, per_second, run, tie)
        answer = back_end(programme.model, run, None, lambda incumbent, bound: None)
        return answer.stop, programme.counts(answer.values) if answer.has_solution else None

    outcome = Whole(
        build=lambda: build(levels, per_second, run),
        ask=lambda programme: back_end(programme.model, run, scale, None),
        read=lambda programme, answer: decode(levels, *programme.counts(answer.values)),
        solver=solver,
        infeasible=NO_PLAN,
        known=known_before(problem),
    ).solve(run, begun)
    return settle(levels, outcome, run, again)
