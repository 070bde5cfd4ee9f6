"""Programs without a search: cheapest derivations, for theories of any width (number of parallel
branches).

The preconditions of a triple cost their sum, or their maximum. A sum counts a shared branch once
for each of its users. In a chain of residual blocks sums grow as 2^depth, until the cost of a late
triple is lost in rounding. A maximum does not grow so fast, but sees only the most expensive
branch. So both are tried.
"""

from itertools import product

import numpy as np

from hetplan.formulations.hap.derivations import Combine, TripleSeconds, cheapest_derivations
from hetplan.formulations.hap.problem import Floats, HapProblem, Step
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.formulations.hap.theory import NOTHING, ReducedTheory
from hetplan.solvers.run import Run

# Seconds that a program counts towards the budget of a run.
PROGRAM_SECONDS = 5e-3

COMBINED: tuple[Combine, ...] = (sum, max)
# The prices of all memory together that are tried, in multiples of the seconds of all triples. They
# are tried in this order, until time is up and a program fits.
TRIED_MULTIPLES = (1.0, 1e4, 0.1, 10.0, 0.01)


def greedy_program(
    theory: ReducedTheory, seconds_of: TripleSeconds, combine: Combine = sum
) -> list[int]:
    """The program (triple numbers in order) that derives each property by its cheapest triple.

    seconds_of: the seconds of one triple alone. combine: whether the preconditions of a triple cost
    their sum or their maximum.
    """
    if theory.goal == NOTHING:
        return theory.program([])
    step_of = cheapest_derivations(theory.steps, seconds_of, combine).step_of
    order: list[int] = []
    derived: set[int] = set()
    # a depth-first walk from the goal: each property follows its preconditions
    stack = [(theory.goal, False)]
    while stack:
        p, preconditions_are_derived = stack.pop()
        if p in derived:
            continue
        step = theory.steps[step_of[p]]
        if preconditions_are_derived:
            derived.add(p)
            order.append(step.index)
            continue
        stack.append((p, True))
        stack += [(q, False) for q in step.pre if q not in derived]
    return theory.program(order)


def seconds_at(theory: ReducedTheory, ratios: Floats) -> TripleSeconds:
    """The function that gives the seconds of a triple as a stage of its own at ratios [g, K]."""
    speeds = theory.problem.speeds

    def seconds_of(step: Step) -> float:
        row = ratios[step.segment]
        if step.comm:
            return step.fixed + step.shared * float(row.max())
        return float(((step.fixed + step.shared * row) / speeds).max())

    return seconds_of


def first_program(theory: ReducedTheory) -> list[int]:
    """The cheapest of the greedy programs at proportional and at even ratios, by their cost
    there."""
    problem = theory.problem
    programs: list[tuple[float, list[int]]] = []
    for row, combine in product((problem.proportional, problem.even), COMBINED):
        ratios = np.tile(row, (problem.g, 1))
        program = greedy_program(theory, seconds_at(theory, ratios), combine)
        programs.append((problem.program_seconds(problem.cost_of(program), ratios), program))
    return min(programs)[1]


def fitting_program(theory: ReducedTheory, run: Run) -> tuple[list[int], float]:
    """(A program, its seconds under its best ratios; infinite where it does not fit in memory).

    Without a memory limit it is `first_program`. With one, further programs are derived with every
    byte at a price in seconds, for several prices. Of `first_program` and these programs it is the
    fastest that fits in memory.
    """
    problem = theory.problem

    def priced(program: list[int]) -> tuple[float, list[int]]:
        return best_ratios(problem, problem.cost_of(program), run).seconds, program

    best = priced(first_program(theory))
    if problem.capacity is None:
        return best[1], best[0]
    seconds_of = seconds_at(theory, np.tile(problem.proportional, (problem.g, 1)))
    for byte_price, combine in product(tried_byte_prices(problem), COMBINED):
        with_bytes = _with_bytes(problem, seconds_of, byte_price)
        best = min(best, priced(greedy_program(theory, with_bytes, combine)))
        run.count(PROGRAM_SECONDS)
        if run.should_stop and np.isfinite(best[0]):
            break
    return best[1], best[0]


def _with_bytes(problem: HapProblem, seconds_of: TripleSeconds, byte_price: float) -> TripleSeconds:
    """The seconds of a triple, and those of its bytes on all devices at a price in s/byte."""
    devices = float(problem.counts.sum())

    def priced_seconds(step: Step) -> float:
        return seconds_of(step) + byte_price * (devices * step.fixed_bytes + step.shared_bytes)

    return priced_seconds


def tried_byte_prices(problem: HapProblem) -> list[float]:
    """The prices of a byte that are tried, in seconds per byte.

    At them all memory together costs the seconds of all triples, or multiples of that.
    """
    assert problem.capacity is not None
    room = float(problem.capacity @ problem.counts) or 1.0
    return [multiple * (problem.seconds_of_all or 1.0) / room for multiple in TRIED_MULTIPLES]
