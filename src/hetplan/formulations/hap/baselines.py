"""The baselines of HAP's experiments.

DP-EV and DP-CP: data parallelism with even ratios, or ratios in proportion to speed. TAG: the
latter, where gradients may also be computed from gathered factors; its parameter servers and its
placing of whole layers on devices have no triples. DeepSpeed: even shares of a program that experts
wrote, for which HAP's A* at even ratios stands.

A theory does not say which of its triples are data parallelism, so that is read from names and
work. HAP's property names spell out forms: data parallelism shards dimension 0 only, and
communicates by all-reduce. Among such programs it replicates no work that can be shared. Where the
names spell no forms, or no such program exists, the forms do not restrict it. Source: HAP, Section
7.1.
"""

import re

import numpy as np

from hetplan.formulations.hap.astar import AStar
from hetplan.formulations.hap.data import HapData, HapDecision, Triple
from hetplan.formulations.hap.first_programs import greedy_program, seconds_at
from hetplan.formulations.hap.outcomes import reduced_or_answered
from hetplan.formulations.hap.problem import Floats, HapProblem, Step, compile_problem
from hetplan.formulations.hap.theory import ReducedTheory
from hetplan.solvers.run import Outcome, Run, Stop

_OTHER_DIMENSION = re.compile(r"\|\s*all-gather\(\s*[1-9]\d*\s*\)\s*$", re.IGNORECASE)
_OTHER_COLLECTIVE = re.compile(
    r"reduce-scatter|all-to-all|all-gather|grouped-broadcast", re.IGNORECASE
)
# A second of replicated work weighs as much as this number of seconds of other work, so that work
# is replicated only where no other way is nearly as short.
REPLICATED = 1e3
CUT_OFF = "cut off by the time limit; data parallelism takes its place"
UNFIT_DATA_PARALLEL = "data parallelism at these ratios does not fit in memory"


def solve_by(method: str, data: HapData, run: Run) -> Outcome[HapDecision]:
    """The outcome of a baseline: its program at its ratios."""
    theory = reduced_or_answered(data, run)
    if isinstance(theory, Outcome) and theory.decision is None:
        return theory
    problem = compile_problem(data)
    ratios = _ratios_of(method, problem)
    message = ""
    if isinstance(theory, Outcome):
        assert theory.decision is not None
        program = theory.decision.program
    else:
        best = None
        if method == "deepspeed":
            best = AStar(theory).at(ratios, run).program
            if best is None:
                message = CUT_OFF
        program = best or data_parallel(data, theory, ratios, factors=method == "tag")
    if not problem.fits(problem.cost_of(program), ratios):
        return Outcome(stop=Stop.DONE, message=UNFIT_DATA_PARALLEL)
    return Outcome(stop=Stop.DONE, decision=problem.decision(program, ratios), message=message)


def _ratios_of(method: str, problem: HapProblem) -> Floats:
    """[g, K] the ratios of a baseline: even ones, or ratios in proportion to speed."""
    row = problem.even if method in ("dp-even", "deepspeed") else problem.proportional
    return np.tile(row, (problem.g, 1))


def data_parallel(
    data: HapData, theory: ReducedTheory, ratios: Floats, *, factors: bool = False
) -> list[int]:
    """The program (triple numbers) of data parallelism at ratios [g, K].

    factors: whether gradients may be computed from gathered factors. Where no program of data
    parallelism exists, the cheapest program of any forms takes its place.
    """
    seconds = seconds_at(theory, ratios)
    slowest = float(theory.problem.speeds[0])

    def is_allowed(triple: Triple) -> bool:
        if factors and "factors" in triple.instruction:
            return True
        return all_reduces_slices_of_data(triple)

    def with_replicated_work(step: Step) -> float:
        if step.comm:
            return seconds(step)
        return seconds(step) + REPLICATED * step.fixed / slowest

    def restricted(step: Step) -> float:
        if not is_allowed(data.triples[step.index]):
            return np.inf  # it is used only where nothing else derives a property
        return with_replicated_work(step)

    program = greedy_program(theory, restricted)
    if all(is_allowed(data.triples[i]) for i in program):
        return program
    return greedy_program(theory, with_replicated_work)


def all_reduces_slices_of_data(triple: Triple) -> bool:
    """Whether a triple slices dimension 0 alone, and communicates by all-reduces alone."""
    if triple.kind == "comm" and _OTHER_COLLECTIVE.search(triple.instruction):
        return False
    return not any(_OTHER_DIMENSION.search(name) for name in (*triple.pre, *triple.post))
