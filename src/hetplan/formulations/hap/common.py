"""What every method starts and ends with: the reduced theory, or an answer that needs no search."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.problem import HapProblem, compile_problem, infeasible_because
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.formulations.hap.theory import Theory, reduce_theory
from hetplan.solvers.native import stopped
from hetplan.solvers.result import OPTIMAL_GAP, Outcome, Stop
from hetplan.solvers.run import Run

NO_RATIOS = "no ratios fit the given program in memory"
NONE_FITS = "no program fits in memory"


@dataclass(frozen=True)
class Posed:
    """A theory whose goal costs something, its triples' instructions, and when work on it began
    (perf_counter seconds)."""

    theory: Theory
    instructions: tuple[str, ...]
    begun: float

    @property
    def problem(self) -> HapProblem:
        """The problem behind the theory."""
        return self.theory.problem


def pose(data: HapData, run: Run) -> Posed | Outcome[HapDecision]:
    """The reduced theory; or the outcome where there is no program, only one (given), or one for
    nothing."""
    begun = time.perf_counter()
    problem = compile_problem(data)
    reason = infeasible_because(data, problem)
    if reason is not None:
        spent = time.perf_counter() - begun
        return Outcome(stop=Stop.INFEASIBLE, message=reason, build_seconds=spent)
    if problem.given is not None:
        return ratios_only(problem, problem.given, run, begun)
    theory = reduce_theory(problem)
    if theory.goal is None:
        return ratios_only(problem, theory.program([]), run, begun)
    return Posed(theory, tuple(triple.instruction for triple in data.triples), begun)


def ratios_only(
    problem: HapProblem, program: Sequence[int], run: Run, begun: float
) -> Outcome[HapDecision]:
    """The best ratios of the only program in question. Source: HAP, Section 5."""
    stages = problem.stages(program)
    built = time.perf_counter()
    found = best_ratios(problem, stages, run)
    if not found.fits:
        stop, message = (
            (Stop.INFEASIBLE, NO_RATIOS)
            if found.impossible
            else (stopped(run), "no ratios found that fit")
        )
        spent = time.perf_counter() - built
        return Outcome(stop=stop, message=message, build_seconds=built - begun, solve_seconds=spent)
    proven = found.bound is not None and found.seconds - found.bound <= OPTIMAL_GAP * found.seconds
    return Outcome(
        stop=Stop.OPTIMAL if proven else stopped(run),
        decision=problem.decision(program, found.ratios),
        bound=found.bound,
        build_seconds=built - begun,
        solve_seconds=time.perf_counter() - built,
        details={"ratios": found.how, "stages": len(stages.F)},
    )


def ended(
    posed: Posed,
    program: Sequence[int] | None,
    *,
    run: Run,
    stop: Stop,
    bound: float | None,
    built: float,
    solver: str = "hetplan",
    message: str = "",
    details: Mapping[str, object] | None = None,
) -> Outcome[HapDecision]:
    """The outcome with `program` (triple numbers) under its best ratios, if any fit in memory. A
    bound is at least the empty one."""
    decision = None
    if program is not None:
        kept = posed.theory.program(program)
        found = best_ratios(
            posed.problem, posed.problem.stages(kept), Run(run.options, None, run.cancel)
        )
        if found.fits:
            decision = posed.problem.decision(kept, found.ratios)
    if bound is not None and not np.isfinite(bound):
        bound = None
    return Outcome(
        stop=stop,
        decision=decision,
        bound=None if bound is None else max(float(bound), 0.0),
        build_seconds=built - posed.begun,
        solve_seconds=time.perf_counter() - built,
        solver=solver,
        message=message,
        details=details or {},
    )
