"""HAP's own procedure, the method `paper`: a program for fixed ratios and ratios for a fixed
program, in turn.

Source: HAP, Section 3.1: from ratios proportional to speed, until the program repeats; the best
pair is kept. The ratios are those of the linear programme of Section 5.1, the program for fixed
ratios is that of A* (Fig. 10, module `astar`) with the prunings of Section 4.5. With memory, which
HAP does not limit, partial programs that do not fit at the fixed ratios are pruned, and the linear
programme has memory.

Where A* grows too large, it is cut off, which the message says; the search of module `ordered`
takes its place, and where that does not end either, shortest paths. At ratios B a stage lasts
max_d (F + S B_d) / v_d. Any mean over types bounds that from below, and sums of it over a program
are the length of a path in the canonical graph. Each path is a program, whose own seconds count.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hetplan.formulations.hap import astar, ordered
from hetplan.formulations.hap.common import (
    Reduced,
    fitting_program,
    greedy_program,
    outcome_of,
    reduced_or_answered,
    seconds_at,
    tried_byte_prices,
)
from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.graph import Graph, graph_of_needs, path, shortest
from hetplan.formulations.hap.problem import Floats
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.formulations.hap.theory import ReducedTheory
from hetplan.solvers.native import stop_reason
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run, Stopped

DOES_NOT_FIT = "no program was found that fits in memory at the ratios tried"
REPEATED = "no program communicates each tensor at most once; that pruning was left out"
CUT_OFF = "HAP's A*, cut off at {states} states{instead}"
IN_ORDER = "; the same search in the program's order ended"
COMPLETED = " and completed by shortest paths and cheapest derivations"


@dataclass(frozen=True)
class Parameters:
    """When A* has grown too large, and what shortest paths try."""

    # Partial programs that A* may extend, its seconds, and its share of the time left.
    extensions: int = 1_000
    seconds: float = 2.0
    share: float = 0.25
    # Seconds of A* in the order of the single-device program, and its share of the time left.
    ordered_seconds: float = 10.0
    ordered_share: float = 0.75
    # Nodes of the canonical graph, beyond which only the cheapest derivations are left.
    states: int = 300_000
    # Means over types between each type alone and all alike.
    means: int = 8


def solve(data: HapData, run: Run, parameters: Parameters = Parameters()) -> Outcome[HapDecision]:
    """The best pair of the alternation; no bound."""
    reduced = reduced_or_answered(data, run)
    if isinstance(reduced, Outcome):  # one program at most: its ratios, without a claim
        return reduced if reduced.decision is None else replace(reduced, stop=Stop.DONE, bound=None)
    problem, programs = reduced.problem, _Programs(reduced, run, parameters)
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
        reduced, best, run=run, bound=None, details={"rounds": len(tried)},
        stop=stop_reason(run) if run.should_stop else Stop.DONE,
        message=DOES_NOT_FIT if best is None else programs.note,
    )  # fmt: skip


class _Programs:
    """Programs for fixed ratios: by A* with both prunings of the theory; without the second one
    where both leave no program; by shortest paths once A* has grown too large."""

    def __init__(self, reduced: Reduced, run: Run, parameters: Parameters) -> None:
        self.theory, self.run, self.parameters = reduced.theory, run, parameters
        # of the searches by A* that are still to be tried: whether they have the second pruning
        self._searches_left: tuple[bool, ...] = (True, False)
        self._states, self._instead = 0, IN_ORDER

    @property
    def note(self) -> str:
        """What was left out of HAP's procedure."""
        cut_off = CUT_OFF.format(states=self._states, instead=self._instead)
        return (cut_off, REPEATED, "")[len(self._searches_left)]

    def at(self, ratios: Floats) -> Sequence[int]:
        """A program (triple numbers) for ratios [g, K]."""
        while self._searches_left:
            share = self.parameters.share * self.run.remaining
            part = self.run.part(time_limit=min(self.parameters.seconds, share))
            program, finished, self._states = astar.search(
                self.theory,
                ratios,
                part,
                once=self._searches_left[0],
                most=self.parameters.extensions,
            )
            if program is not None:
                return program
            self._searches_left = self._searches_left[1:] if finished else ()
        return self._without_a_star(ratios)

    def _without_a_star(self, ratios: Floats) -> Sequence[int]:
        """The program of A* in the order of the single-device program. Where that does not end, or
        memory is limited, the cheapest at these ratios of the shortest paths and the cheapest
        derivations; where none fits at them, the cheapest at any."""
        problem = self.theory.problem
        if self._instead == IN_ORDER and problem.capacity is None:
            share = self.parameters.ordered_share * self.run.remaining
            part = self.run.part(time_limit=min(self.parameters.ordered_seconds, share))
            program = ordered.search(self.theory, ratios, part)
            if program is not None:
                return program
        self._instead, graph = COMPLETED, self._graph
        programs = [greedy_program(self.theory, seconds_at(self.theory, ratios))]
        if graph is not None:
            programs += shortest_paths(self.theory, graph, ratios, self.parameters.means)
        fitting = [q for q in programs if problem.fits(problem.cost_of(q), ratios)]
        if fitting:
            return min(fitting, key=lambda q: problem.seconds(problem.cost_of(q), ratios))
        distinct = dict.fromkeys(map(tuple, [*programs, fitting_program(self.theory, self.run)[0]]))
        return min(
            distinct, key=lambda q: best_ratios(problem, problem.cost_of(q), self.run).seconds
        )

    @cached_property
    def _graph(self) -> Graph | None:
        """The canonical graph; None where it is too large, or time is up."""
        try:
            return graph_of_needs(self.theory, self.parameters.states, self.run, canonical=True)
        except Stopped:
            return None


def shortest_paths(
    theory: ReducedTheory, graph: Graph, ratios: Floats, means: int
) -> list[list[int]]:
    """The programs that are shortest by some mean over types at ratios [g, K]; with memory also by
    such a mean and a price of bytes.

    graph: the canonical one. means: how many are tried between each type alone and all alike.
    """
    problem, work = theory.problem, graph.work
    alone, alike = np.eye(problem.K), np.full((1, problem.K), 1.0 / problem.K)
    weights = np.vstack([p * alike + (1 - p) * alone for p in np.linspace(0.0, 1.0, means + 1)])
    paid = work.fixed_seconds + work.shared_seconds @ ratios.max(axis=1)
    busy = (
        (work.fixed_seconds[:, None] + work.shared_seconds @ ratios)
        * problem.speeds[-1]
        / problem.speeds
    )
    seconds = np.where(work.comm[:, None], paid[:, None], busy @ weights.T)
    held = problem.counts.sum() * work.fixed_bytes + work.shared_bytes.sum(axis=1)
    byte_prices = (0.0,) if problem.capacity is None else (0.0, *tried_byte_prices(problem))
    _, arc = shortest(graph, np.hstack([seconds + price * held[:, None] for price in byte_prices]))
    return [theory.program(graph.program(path(graph, first))) for first in arc.T]
