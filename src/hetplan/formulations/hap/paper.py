"""HAP's own procedure: a program for fixed ratios and ratios for a fixed program, in turn.

Source: HAP, Section 3.1: from ratios proportional to speed, until the program repeats; the best
pair is kept. The ratios are those of the linear programme of Section 5.1, the program for fixed
ratios is that of A* (Fig. 10, module `astar`) with the prunings of Section 4.5. With memory, which
HAP does not limit, partial programs that do not fit at the fixed ratios are pruned, and the linear
programme has memory.

Where A* grows too large, it is cut off, which the message says, and the search in the order of the
single-device program (module `ordered_search`) takes its place. The message says as well where that
has left states out. With memory it is asked at several prices of bytes, and the cheapest program
that fits counts.
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
    """When A* has grown too large, printed or in the program's order."""

    # Partial programs that A* may extend, its seconds, and its share of the time left.
    extensions: int = 1_000
    seconds: float = 2.0
    share: float = 0.25
    # Seconds of A* in the order of the single-device program, and its share of the time left.
    ordered_seconds: float = 10.0
    ordered_share: float = 0.75
    # States of each tensor that it extends at most.
    ordered_states: int = 256


def solve(data: HapData, run: Run, parameters: Parameters = Parameters()) -> Outcome[HapDecision]:
    """The best pair of the alternation; no bound."""
    theory = reduced_or_answered(data, run)
    if isinstance(theory, Outcome):  # one program at most: its ratios, without a claim
        return theory if theory.decision is None else replace(theory, stop=Stop.DONE, bound=None)
    problem, programs = theory.problem, _Programs(theory, run, parameters)
    ratios = np.tile(problem.proportional, (problem.g, 1))
    best: Sequence[int] | None = None
    least, tried = np.inf, set[tuple[int, ...]]()
    while best is None or not run.should_stop:
        program = programs.at(ratios)
        answer = best_ratios(problem, problem.cost_of(program), run)
        if tuple(program) in tried or not answer.fits:
            break
        tried.add(tuple(program))
        ratios = answer.ratios
        if answer.seconds < least:
            best, least = program, answer.seconds
            run.report(incumbent=least)
    return outcome_of(
        theory, best, run=run, bound=None, details={"rounds": len(tried)},
        stop=stop_reason(run) if run.should_stop else Stop.DONE,
        message=DOES_NOT_FIT if best is None else programs.note,
    )  # fmt: skip


class _Programs:
    """Programs for fixed ratios: by A* with both prunings of the theory; without the second one
    where both leave no program; in the program's order once A* has grown too large."""

    def __init__(self, theory: ReducedTheory, run: Run, parameters: Parameters) -> None:
        self.theory, self.run, self.parameters = theory, run, parameters
        # of the searches by A* that are still to be tried: whether they have the second pruning
        self._searches_left: tuple[bool, ...] = (True, False)
        self._states, self._instead = 0, IN_ORDER

    @property
    def note(self) -> str:
        """The text of what was left out of HAP's procedure."""
        cut_off = CUT_OFF if self._states else NOT_BEGUN
        cut_off = cut_off.format(states=self._states, instead=self._instead)
        return (cut_off, REPEATED, "")[len(self._searches_left)]

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
            self._searches_left = self._searches_left[1:] if finished else ()
        return self._without_a_star(ratios)

    def _without_a_star(self, ratios: Floats) -> Sequence[int]:
        """The cheapest at these ratios of the cheapest derivation and the programs of A* in the
        order of the single-device program, with memory at several prices of bytes; where none fits
        at them, the cheapest at any."""
        problem = self.theory.problem
        prices = [0.0] if problem.capacity is None else [0.0, *tried_byte_prices(problem)]
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
        if len(programs) == 1:
            self._instead = DERIVED
        fitting = [q for q in programs if problem.fits(problem.cost_of(q), ratios)]
        if fitting:
            return min(fitting, key=lambda q: problem.program_seconds(problem.cost_of(q), ratios))
        distinct = dict.fromkeys(map(tuple, [*programs, fitting_program(self.theory, self.run)[0]]))
        return min(
            distinct, key=lambda q: best_ratios(problem, problem.cost_of(q), self.run).seconds
        )
