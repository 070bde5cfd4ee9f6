"""HAP's own procedure: a program for fixed ratios and ratios for a fixed program, in turn.

It begins with ratios in proportion to speed, ends when a program repeats, and keeps the best pair
of program and ratios. A* finds the program for fixed ratios (Fig. 10, module `astar`), with the
prunings of Section 4.5. The linear programme of Section 5.1 finds the ratios for a fixed program.

HAP does not limit memory. Where the instance does, A* runs at several prices of bytes, and the
cheapest program that fits counts; the linear programme keeps to the memory.

Only time cuts A* off. A greedy program then takes its place, and the message says so.

Source: HAP, Section 3.1.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hetplan.formulations.hap.astar import AStar
from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.first_programs import (
    fitting_program,
    greedy_program,
    seconds_at,
    tried_byte_prices,
)
from hetplan.formulations.hap.outcomes import outcome_of, reduced_or_answered
from hetplan.formulations.hap.problem import Floats
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.formulations.hap.theory import ReducedTheory
from hetplan.solvers.run import Outcome, Run, Stop, stop_reason

DOES_NOT_FIT = "no program was found that fits in memory at the ratios tried"
CUT_OFF = "HAP's A*, cut off by the time limit and completed greedily"


def solve(data: HapData, run: Run) -> Outcome[HapDecision]:
    """The best program and ratios of the alternation, without a bound."""
    theory = reduced_or_answered(data, run)
    if isinstance(theory, Outcome):  # at most one program: a heuristic claims no optimum
        if theory.decision is None:
            return theory
        return replace(theory, stop=Stop.DONE, bound=None)
    problem, programs = theory.problem, _Programs(theory, run)
    ratios = np.tile(problem.proportional, (problem.g, 1))
    best: Sequence[int] | None = None  # the program of the best pair
    least = np.inf  # its seconds
    tried: set[tuple[int, ...]] = set()
    while best is None or not run.should_stop:  # one program is sought in any case
        program = programs.at(ratios)
        answer = best_ratios(problem, problem.cost_of(program), run)
        if tuple(program) in tried or not answer.fits:
            break  # where it does not fit, the programme has no ratios to go on with
        tried.add(tuple(program))
        ratios = answer.ratios
        if answer.seconds < least:
            best, least = program, answer.seconds
            run.report(incumbent=least)
    return outcome_of(
        theory,
        best,
        run=run,
        stop=stop_reason(run) if run.should_stop else Stop.DONE,
        bound=None,
        message=DOES_NOT_FIT if best is None else programs.note,
        details={"rounds": len(tried), "states": programs.states},
    )


class _Programs:
    """Finds programs for fixed ratios."""

    def __init__(self, theory: ReducedTheory, run: Run) -> None:
        self.theory, self.run = theory, run
        self.states = 0  # partial programs that A* extended
        self._astar = AStar(theory)
        self._was_cut_off = False

    @property
    def note(self) -> str:
        """The message that says which part of HAP's procedure was left out; empty without any."""
        return CUT_OFF if self._was_cut_off else self._astar.note

    def at(self, ratios: Floats) -> Sequence[int]:
        """A program (triple numbers) for ratios [g, K]."""
        if self.theory.problem.capacity is None:
            found = self._astar.at(ratios, self.run)
            self.states += found.states
            if found.program is not None:
                return found.program
            self._was_cut_off = True
            return self._greedy(ratios)
        return self._within_memory(ratios)

    def _greedy(self, ratios: Floats) -> list[int]:
        """The program of the cheapest derivations at these ratios."""
        return greedy_program(self.theory, seconds_at(self.theory, ratios))

    def _within_memory(self, ratios: Floats) -> Sequence[int]:
        """The cheapest program at these ratios of those that fit in memory at them.

        The candidates are a greedy program and those of A* at several prices of a byte in seconds,
        which share the time that is left. Where none fits at these ratios, the candidate that is
        cheapest under its own best ratios is returned.
        """
        programs: list[Sequence[int]] = [self._greedy(ratios)]
        prices = [0.0, *tried_byte_prices(self.theory.problem)]
        for tried, price in enumerate(prices):
            part = self.run.part(share=1 / (len(prices) - tried))
            found = self._astar.at(ratios, part, byte_price=price)
            self.states += found.states
            if found.program is None:
                self._was_cut_off = True
            else:
                programs.append(found.program)
        fitting = [program for program in programs if self._fits_at(ratios, program)]
        if fitting:
            return min(fitting, key=lambda program: self._seconds_at(ratios, program))
        programs.append(fitting_program(self.theory, self.run)[0])
        distinct = dict.fromkeys(map(tuple, programs))
        return min(distinct, key=self._least_seconds)

    def _fits_at(self, ratios: Floats, program: Sequence[int]) -> bool:
        """Whether a program fits in memory at these ratios."""
        problem = self.theory.problem
        return problem.fits(problem.cost_of(program), ratios)

    def _seconds_at(self, ratios: Floats, program: Sequence[int]) -> float:
        """Seconds of a program at these ratios."""
        problem = self.theory.problem
        return problem.program_seconds(problem.cost_of(program), ratios)

    def _least_seconds(self, program: Sequence[int]) -> float:
        """Seconds of a program under its best ratios; infinite where no ratios fit."""
        problem = self.theory.problem
        return best_ratios(problem, problem.cost_of(program), self.run).seconds
