"""The baselines of HAP's experiments.

DP-EV and DP-CP: data parallelism with even ratios, or ratios in proportion to speed. TAG: the
latter, where gradients may also be computed from gathered factors; its parameter servers and its
placing of whole layers on devices have no triples. DeepSpeed: even shares of a program that experts
wrote, of which the best at even ratios is taken.

A theory does not say which of its triples are data parallelism, so that is read from names and
work. HAP's property names spell out forms: data parallelism shards dimension 0 only, and
communicates by all-reduce. Among such programs it replicates no work that can be shared. Where the
names spell no forms, or no such program exists, the forms do not restrict it. Source: HAP, Section
7.1.
"""

import re

import numpy as np

from hetplan.formulations.hap.data import HapData, HapDecision, Triple
from hetplan.formulations.hap.first_programs import greedy_program, seconds_at
from hetplan.formulations.hap.ordered_search import search
from hetplan.formulations.hap.outcomes import reduced_or_answered
from hetplan.formulations.hap.problem import Floats, HapProblem, Step, compile_problem
from hetplan.formulations.hap.theory import ReducedTheory
from hetplan.solvers.run import Outcome, Run, Stop

_OTHER_DIMENSION = re.compile(r"\|\s*all-gather\(\s*[1-9]\d*\s*\)\s*$", re.IGNORECASE)
_OTHER_COLLECTIVE = re.compile(
    r"reduce-scatter|all-to-all|all-gather|grouped-broadcast", re.IGNORECASE
)
# A second of replicated work weighs like so many seconds of anything else.
REPLICATED = 1e3
UNFIT_DATA_PARALLEL = "data parallelism at these ratios does not fit in memory"
# States of each tensor that are extended for DeepSpeed's program.
STATES = 64


def solve_by(method: str, data: HapData, run: Run) -> Outcome[HapDecision]:
    """The baseline's program at its ratios."""

    def rule(problem: HapProblem) -> Floats:
        return problem.even if method in ("dp-even", "deepspeed") else problem.proportional

    theory, message = reduced_or_answered(data, run), ""
    if isinstance(theory, Outcome):
        if theory.decision is None:
            return theory
        problem = compile_problem(data)
        program, ratios = theory.decision.program, np.tile(rule(problem), (problem.g, 1))
    else:
        problem = theory.problem
        ratios = np.tile(rule(problem), (problem.g, 1))
        program = data_parallel(data, theory, ratios, factors=method == "tag")
        if method == "deepspeed":
            program = search(theory, ratios, run, most=STATES)[0] or program
            message = "cut off by the time limit" if run.should_stop else ""
    if not problem.fits(problem.cost_of(program), ratios):
        return Outcome(stop=Stop.DONE, message=UNFIT_DATA_PARALLEL)
    return Outcome(stop=Stop.DONE, decision=problem.decision(program, ratios), message=message)


def data_parallel(
    data: HapData, theory: ReducedTheory, ratios: Floats, *, factors: bool = False
) -> list[int]:
    """The program (triple numbers) of data parallelism at ratios [g, K]; factors: whether gradients
    may be computed from gathered factors."""
    seconds, slowest = seconds_at(theory, ratios), float(theory.problem.speeds[0])

    def least(step: Step) -> float:
        return seconds(step) + (0.0 if step.comm else REPLICATED * step.fixed / slowest)

    def restricted(step: Step) -> float:
        return least(step) if allowed(data.triples[step.index]) else np.inf

    def allowed(triple: Triple) -> bool:
        return (factors and "factors" in triple.instruction) or all_reduces_slices_of_data(triple)

    program = greedy_program(theory, restricted)
    keeps = all(allowed(data.triples[i]) for i in program)
    return program if keeps else greedy_program(theory, least)


def all_reduces_slices_of_data(triple: Triple) -> bool:
    """Whether a triple has slices of dimension 0 alone, and no collectives but all-reduces."""
    other = triple.kind == "comm" and _OTHER_COLLECTIVE.search(triple.instruction)
    names = (*triple.pre, *triple.post)
    return not other and not any(map(_OTHER_DIMENSION.search, names))
