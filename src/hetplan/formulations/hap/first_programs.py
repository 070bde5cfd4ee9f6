"""Programs found without search: cheapest derivations, for theories of any width.

The preconditions of a triple cost their sum, or their maximum. Sums count a shared branch once for
each of its users. In a chain of residual blocks that grows as 2^depth, until the cost of a late
triple is lost in rounding. Maxima do not grow so, but see only the dearest branch. So both are
tried.
"""

from itertools import product

import numpy as np

from hetplan.formulations.hap.derivations import Combine, TripleSeconds, derivations
from hetplan.formulations.hap.problem import Floats, HapProblem, Step
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.formulations.hap.theory import NOTHING, ReducedTheory
from hetplan.solvers.run import Run

COMBINED: tuple[Combine, ...] = (sum, max)
# What all memory together costs, in multiples of the seconds of all triples.
TRIED_MULTIPLES = (1.0, 1e4, 0.1, 10.0, 0.01)


def greedy_program(
    theory: ReducedTheory, seconds_of: TripleSeconds, combine: Combine = sum
) -> list[int]:
    """Triple numbers, in order, of the program that derives each property by its cheapest triple,
    where the preconditions of a triple cost their total (`combine` is sum) or the dearest of them
    (max)."""
    by = derivations(theory.steps, seconds_of, combine)[1]
    order: list[int] = []
    derived: set[int] = set()
    stack: list[tuple[int, bool]] = [] if theory.goal == NOTHING else [(theory.goal, False)]
    while stack:
        p, ready = stack.pop()
        if p in derived:
            continue
        if ready:
            derived.add(p)
            order.append(theory.steps[by[p]].index)
            continue
        stack.append((p, True))
        stack += [(q, False) for q in theory.steps[by[p]].pre if q not in derived]
    return theory.program(order)


def seconds_at(theory: ReducedTheory, ratios: Floats) -> TripleSeconds:
    """Seconds of a triple as a stage of its own at ratios [g, K]."""
    problem = theory.problem

    def seconds_of(step: Step) -> float:
        row = ratios[step.segment]
        return (
            step.fixed + step.shared * float(row.max())
            if step.comm
            else float(((step.fixed + step.shared * row) / problem.speeds).max())
        )

    return seconds_of


def first_program(theory: ReducedTheory) -> list[int]:
    """The cheapest of the greedy programs at proportional and at even ratios, by their cost
    there."""
    problem = theory.problem
    ratios = [np.tile(row, (problem.g, 1)) for row in (problem.proportional, problem.even)]
    programs = [
        (at, greedy_program(theory, seconds_at(theory, at), combine))
        for at, combine in product(ratios, COMBINED)
    ]
    return min((problem.seconds(problem.cost_of(p), at), p) for at, p in programs)[1]


def fitting_program(theory: ReducedTheory, run: Run) -> tuple[list[int], float]:
    """(A program, its seconds under its best ratios; infinite where it does not fit).

    Without memory it is the first program. With memory, programs are derived with every byte at a
    price in seconds, for several prices. The cheapest of these and of the first one that fits is
    taken."""
    problem, program = theory.problem, first_program(theory)
    best = best_ratios(problem, problem.cost_of(program), run).seconds, program
    if problem.capacity is None:
        return best[1], best[0]
    seconds = seconds_at(theory, np.tile(problem.proportional, (problem.g, 1)))
    devices = float(problem.counts.sum())
    for byte_price, combine in product(tried_byte_prices(problem), COMBINED):

        def both(step: Step, byte_price: float = byte_price) -> float:
            return seconds(step) + byte_price * (devices * step.fixed_bytes + step.shared_bytes)

        program = greedy_program(theory, both, combine)
        best = min(best, (best_ratios(problem, problem.cost_of(program), run).seconds, program))
        if run.should_stop and np.isfinite(best[0]):
            break
    return best[1], best[0]


def tried_byte_prices(problem: HapProblem) -> list[float]:
    """Seconds per byte that are tried: all memory together then costs the seconds of all triples,
    or multiples of that."""
    assert problem.capacity is not None
    room = float(problem.capacity @ problem.counts) or 1.0
    return [times * (problem.seconds_of_all or 1.0) / room for times in TRIED_MULTIPLES]
