"""HAP's own procedure: a program for fixed ratios and ratios for a fixed program, in turn.

It begins with ratios in proportion to speed, ends when a program repeats, and keeps the best pair
of program and ratios. The ratios for a fixed program are those of the linear programme of Section
5.1. The program for fixed ratios is that of A* (Fig. 10, module `astar`) with the prunings of
Section 4.5. HAP does not limit memory. Where the instance does, A* prunes partial programs that do
not fit at the fixed ratios, and the linear programme keeps to the memory.

A* is cut off where it grows too large. The search in the order of the single-device program (module
`ordered_search`) then takes its place. With memory it runs at several prices of bytes, and the
cheapest program that fits counts. The message says where A* was cut off, and where the other search
has left states out.

Source: HAP, Section 3.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetplan.formulations.hap import astar
from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.first_programs import (
    fitting_program,
    greedy_program,
    seconds_at,
    tried_byte_prices,
)
from hetplan.formulations.hap.ordered_search import search
from hetplan.formulations.hap.outcomes import outcome_of, reduced_or_answered
from hetplan.formulations.hap.problem import Floats
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.formulations.hap.theory import ReducedTheory
from hetplan.solvers.run import Outcome, Run, Stop, stop_reason

DOES_NOT_FIT = "no program was found that fits in memory at the ratios tried"
REPEATED = "no program communicates each tensor at most once; that pruning was left out"
CUT_OFF = "HAP's A*, cut off at {states} states{instead}"
NOT_BEGUN = "HAP's A*, stopped before its first state{instead}"
IN_ORDER = "; the same search in the program's order ended"
KEPT = " and completed in the program's order, {width} states of each tensor, or greedily"
DERIVED = " and completed greedily"


@dataclass(frozen=True)
class Parameters:
    """Limits of A* as printed, and of A* in the order of the single-device program (ordered)."""

    extensions: int = 1_000  # partial programs that A* extends at most
    seconds: float = 2.0  # seconds of A* at most
    share: float = 0.25  # share of the time left that A* takes at most
    ordered_seconds: float = 10.0  # seconds of the ordered A* at most, at all prices together
    ordered_share: float = 0.75  # share of the time left that the ordered A* takes at most
    ordered_states: int = 256  # states of each tensor that the ordered A* extends at most


def solve(data: HapData, run: Run, parameters: Parameters = Parameters()) -> Outcome[HapDecision]:
    """The best program and ratios of the alternation, without a bound."""
    theory = reduced_or_answered(data, run)
    if isinstance(theory, Outcome):  # at most one program: a heuristic claims no optimum
        if theory.decision is None:
            return theory
        return replace(theory, stop=Stop.DONE, bound=None)
    problem, programs = theory.problem, _Programs(theory, run, parameters)
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
        details={"rounds": len(tried)},
    )


class _Programs:
    """Finds programs for fixed ratios.

    It searches by A* with both prunings of the theory. Where they leave no program, it searches
    without the second pruning from then on. Once A* has grown too large, the ordered A* takes its
    place.
    """

    def __init__(self, theory: ReducedTheory, run: Run, parameters: Parameters) -> None:
        self.theory, self.run, self.parameters = theory, run, parameters
        # for each search by A* that is still to be tried, whether it has the second pruning
        self._searches_left: tuple[bool, ...] = (True, False)
        self._states = 0  # partial programs that the last A* extended
        self._instead = IN_ORDER  # the end of the message: what took the place of A*

    @property
    def note(self) -> str:
        """The message that says which part of HAP's procedure was left out; empty without any."""
        if len(self._searches_left) == 2:  # A* with both prunings is still in use
            return ""
        if len(self._searches_left) == 1:  # without the second pruning
            return REPEATED
        cut_off = CUT_OFF if self._states else NOT_BEGUN
        return cut_off.format(states=self._states, instead=self._instead)

    def at(self, ratios: Floats) -> Sequence[int]:
        """A program (triple numbers) for ratios [g, K]."""
        while self._searches_left:
            share = self.parameters.share * self.run.remaining
            program, finished, self._states = astar.search(
                self.theory,
                ratios,
                self.run.part(time_limit=min(self.parameters.seconds, share)),
                once=self._searches_left[0],
                most=self.parameters.extensions,
            )
            if program is not None:
                return program
            # a search that was cut off would be cut off again with more moves
            self._searches_left = self._searches_left[1:] if finished else ()
        return self._without_a_star(ratios)

    def _without_a_star(self, ratios: Floats) -> Sequence[int]:
        """The cheapest program at these ratios of those that fit in memory at them.

        The candidates are a greedy program and those of the ordered A*, with memory at several
        prices of bytes. Where none fits at these ratios, the candidate that is cheapest under its
        own best ratios is returned.
        """
        problem = self.theory.problem
        prices = [0.0]  # of a byte, in seconds
        if problem.capacity is not None:
            prices += tried_byte_prices(problem)
        share = self.parameters.ordered_share * self.run.remaining
        seconds = min(self.parameters.ordered_seconds, share) / len(prices)
        programs: list[Sequence[int]] = [
            greedy_program(self.theory, seconds_at(self.theory, ratios))
        ]
        self._instead = IN_ORDER
        for price in prices:
            program, width = search(
                self.theory, ratios, self.run.part(time_limit=seconds),
                most=self.parameters.ordered_states, byte_price=price,
            )  # fmt: skip
            if program is not None:
                programs.append(program)
            if width is not None:
                self._instead = KEPT.format(width=width)
        if len(programs) == 1:  # the greedy one alone
            self._instead = DERIVED
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
