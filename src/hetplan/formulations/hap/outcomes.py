"""Where every method starts and ends: the reduced theory, or an answer that needs no search; the
outcome of a search.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.derivations import derivable
from hetplan.formulations.hap.evaluate import check_program
from hetplan.formulations.hap.problem import HapProblem, compile_problem
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.formulations.hap.theory import NOTHING, ReducedTheory, reduce_theory
from hetplan.solvers.highs import check_native
from hetplan.solvers.registry import objections
from hetplan.solvers.run import OPTIMAL_GAP, Outcome, Run, Stop, stop_reason

NO_RATIOS = "no ratios fit the given program in memory"
NONE_FITS = "no program fits in memory"


def reduced_or_answered(data: HapData, run: Run) -> ReducedTheory | Outcome[HapDecision]:
    """The reduced theory; or the outcome where there is no program, or where the program is given
    or costs nothing."""
    check_native(run.options)
    problem = compile_problem(data)
    reason = infeasible_because(data, problem)
    if reason is not None:
        return Outcome(stop=Stop.INFEASIBLE, message=reason)
    if problem.program is not None:
        return ratios_only(problem, problem.program, run)
    theory = reduce_theory(problem)
    return ratios_only(problem, theory.program([]), run) if theory.goal == NOTHING else theory


def infeasible_because(data: HapData, problem: HapProblem) -> str | None:
    """Why there is no program, None where there is one: the goal cannot be derived, or the given
    program is no program. Memory is not looked at."""
    if data.program is not None:
        return next(iter(objections(check_program, data, data.program)), None)
    known, _ = derivable(problem.steps)
    if problem.goal in known:
        return None
    waiting = [s for s in problem.steps if problem.goal in s.post]
    if not waiting:
        return f"no triple establishes the goal {data.goal!r}"
    lacking = sorted(problem.properties[p] for p in waiting[0].pre - known)
    return (
        f"the goal {data.goal!r} cannot be derived: {data.triples[waiting[0].index].instruction} "
        f"needs {lacking[0]!r}, which no applicable triple establishes"
    )


def ratios_only(problem: HapProblem, program: Sequence[int], run: Run) -> Outcome[HapDecision]:
    """The best ratios of the only program in question. Source: HAP, Section 5."""
    cost = problem.cost_of(program)
    best = best_ratios(problem, cost, run)
    stop, message = stop_reason(run), ""
    if best.proven_unfit:
        stop, message = Stop.INFEASIBLE, NO_RATIOS
    elif not best.fits:
        message = "no ratios found that fit"
    elif best.bound is not None and best.seconds - best.bound <= OPTIMAL_GAP * best.seconds:
        stop = Stop.OPTIMAL
    return Outcome(
        stop=stop,
        decision=problem.decision(program, best.ratios) if best.fits else None,
        bound=best.bound if best.fits else None,
        message=message,
        details={"stages": len(cost.F)},
    )


def outcome_of(
    theory: ReducedTheory,
    program: Sequence[int] | None,
    *,
    run: Run,
    stop: Stop,
    bound: float | None,
    build_seconds: float = 0.0,
    solver: str = "hetplan",
    message: str = "",
    details: Mapping[str, object] | None = None,
) -> Outcome[HapDecision]:
    """The outcome with `program` (triple numbers) under its best ratios, if any fit in memory. A
    bound is never below 0."""
    decision = None
    if program is not None:
        kept, problem = theory.program(program), theory.problem
        best = best_ratios(problem, problem.cost_of(kept), run)
        if best.fits:
            decision = problem.decision(kept, best.ratios)
    return Outcome(
        stop=stop,
        decision=decision,
        bound=None if bound is None or not np.isfinite(bound) else max(float(bound), 0.0),
        build_seconds=build_seconds,
        solver=solver,
        message=message,
        details=details or {},
    )
