"""HAP's baselines DP-EV and DP-CP: data parallelism with even ratios, or ratios in proportion to
speed.

A theory does not say which of its triples are data parallelism, so that is read from names and
work. HAP's property names spell out forms: data parallelism shards dimension 0 only, and
communicates by all-reduce. Among such programs it replicates no work that can be shared. Where the
names spell no forms, or no such program exists, the forms do not restrict it. Source: HAP, Section
7.1.
"""

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hetplan.formulations.hap.common import Reduced, greedy_program, reduced_or_answered, seconds_at
from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.problem import Floats, HapProblem, Step, compile_problem, derivable
from hetplan.formulations.hap.theory import ReducedTheory, reduce_theory
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run

_OTHER_DIMENSION = re.compile(r"\|\s*all-gather\(\s*[1-9]\d*\s*\)\s*$", re.IGNORECASE)
_OTHER_COLLECTIVE = re.compile(
    r"reduce-scatter|all-to-all|all-gather|grouped-broadcast", re.IGNORECASE
)
# A second of replicated work weighs like so many seconds of anything else.
REPLICATED = 1e3
DOES_NOT_FIT = "data parallelism at these ratios does not fit in memory"

# What gives one ratio for each type.
RatioRule = Callable[[HapProblem], Floats]


def even(data: HapData, run: Run) -> Outcome[HapDecision]:
    """DP-EV: the same ratio for every device."""
    return _solve_at(data, run, lambda problem: problem.even)


def proportional(data: HapData, run: Run) -> Outcome[HapDecision]:
    """DP-CP: ratios in proportion to speed."""
    return _solve_at(data, run, lambda problem: problem.proportional)


def _solve_at(data: HapData, run: Run, rule: RatioRule) -> Outcome[HapDecision]:
    reduced = reduced_or_answered(data, run)
    if isinstance(reduced, Outcome):
        if reduced.decision is None:
            return reduced
        problem = compile_problem(data)
        program = reduced.decision.program
    else:
        problem = reduced.problem
        program = data_parallel(reduced, np.tile(rule(problem), (problem.g, 1)))
    ratios = np.tile(rule(problem), (problem.g, 1))
    if not problem.fits(problem.cost_of(program), ratios):
        return Outcome(stop=Stop.DONE, message=DOES_NOT_FIT)
    return Outcome(stop=Stop.DONE, decision=problem.decision(program, ratios))


def data_parallel(reduced: Reduced, ratios: Floats) -> list[int]:
    """The program (triple numbers) of data parallelism at ratios [g, K]."""
    theory = _data_parallel_theory(reduced) or reduced.theory
    seconds = seconds_at(theory, ratios)
    slowest = float(reduced.problem.speeds[0])

    def seconds_of(step: Step) -> float:
        return seconds(step) + (0.0 if step.comm else REPLICATED * step.fixed / slowest)

    return greedy_program(theory, seconds_of)


def _data_parallel_theory(reduced: Reduced) -> ReducedTheory | None:
    """The theory of shards on dimension 0 and all-reduces alone; None where it does not lead to the
    goal."""
    problem = reduced.problem
    other = {p for p, name in enumerate(problem.properties) if _OTHER_DIMENSION.search(name)}

    def fits(step: Step, instruction: str) -> bool:
        return not (step.pre | step.post) & other and not (
            step.comm and _OTHER_COLLECTIVE.search(instruction)
        )

    kept = [s for s, name in zip(problem.steps, reduced.instructions, strict=True) if fits(s, name)]
    known, _ = derivable(kept)
    if problem.goal not in known:
        return None
    allowed = {s.index for s in kept}
    nothing = frozenset({-1})  # a precondition that nothing gives
    steps = tuple(s if s.index in allowed else replace(s, pre=nothing) for s in problem.steps)
    theory = reduce_theory(replace(problem, steps=steps))
    return theory if theory.goal is not None else None
