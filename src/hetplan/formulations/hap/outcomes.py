"""The start and the end of every method.

A method starts from the reduced theory, or ends at once where the answer needs no search. It ends
with the outcome of its best program under that program's best ratios.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.derivations import derivable
from hetplan.formulations.hap.evaluate import program_violations
from hetplan.formulations.hap.problem import HapProblem, compile_problem
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.formulations.hap.theory import NOTHING, ReducedTheory, reduce_theory
from hetplan.solvers.highs import check_native
from hetplan.solvers.run import OPTIMAL_GAP, Outcome, Run, Stop, stop_reason

NO_RATIOS = "no ratios fit the given program in memory"
NONE_FITS = "no program fits in memory"


def reduced_or_answered(data: HapData, run: Run) -> ReducedTheory | Outcome[HapDecision]:
    """The reduced theory; or the outcome where no search is needed.

    No search is needed where there is no program, where the program is given, and where the goal
    holds at no cost.
    """
    check_native(run.options)
    problem = compile_problem(data)
    reason = infeasible_because(data, problem)
    if reason is not None:
        return Outcome(stop=Stop.INFEASIBLE, message=reason)
    if problem.program is not None:
        return ratios_only(problem, problem.program, run)
    theory = reduce_theory(problem)
    if theory.goal == NOTHING:
        return ratios_only(problem, theory.program([]), run)
    return theory


def infeasible_because(data: HapData, problem: HapProblem) -> str | None:
    """The reason why there is no program, whatever the memory; None where there is one.

    Either the goal cannot be derived, or the given program violates a constraint.
    """
    if data.program is not None:
        return next(program_violations(data, data.program), None)
    established, _ = derivable(problem.steps)
    if problem.goal in established:
        return None
    step = next((step for step in problem.steps if problem.goal in step.post), None)
    if step is None:
        return f"no triple establishes the goal {data.goal!r}"
    # the first by name; there is one, because the step does not apply
    missing = min(problem.properties[p] for p in step.pre - established)
    return (
        f"the goal {data.goal!r} cannot be derived: {data.triples[step.index].instruction} "
        f"needs {missing!r}, which no applicable triple establishes"
    )


def ratios_only(problem: HapProblem, program: Sequence[int], run: Run) -> Outcome[HapDecision]:
    """The outcome of the only possible program under its best ratios. Source: HAP, Section 5."""
    cost = problem.cost_of(program)
    best = best_ratios(problem, cost, run)
    details = {"stages": len(cost.F)}
    if best.proven_unfit:
        return Outcome(stop=Stop.INFEASIBLE, message=NO_RATIOS, details=details)
    if not best.fits:
        return Outcome(stop=stop_reason(run), message="no ratios found that fit", details=details)
    stop = stop_reason(run)
    if best.bound is not None and best.seconds - best.bound <= OPTIMAL_GAP * best.seconds:
        stop = Stop.OPTIMAL
    return Outcome(
        stop=stop,
        decision=problem.decision(program, best.ratios),
        bound=best.bound,
        details=details,
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
    """The outcome of a search that ended with `program` (triple numbers; None: it found none).

    The decision is the program under its best ratios, None where none fit in memory. The bound is
    at least 0, and None where it is not finite.
    """
    decision = None
    if program is not None:
        minimal, problem = theory.program(program), theory.problem
        best = best_ratios(problem, problem.cost_of(minimal), run)
        if best.fits:
            decision = problem.decision(minimal, best.ratios)
    if bound is not None:
        bound = max(float(bound), 0.0) if np.isfinite(bound) else None
    return Outcome(
        stop=stop,
        decision=decision,
        bound=bound,
        build_seconds=build_seconds,
        solver=solver,
        message=message,
        details=details or {},
    )
