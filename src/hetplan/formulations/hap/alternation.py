"""HAP's own procedure: a program for fixed ratios and ratios for a fixed program, in turn.

Source: HAP, Section 3.1: from ratios proportional to speed, until the program repeats; the best
pair is kept. The ratios are those of the linear programme of Section 5.1. The program for fixed
ratios is found in one of two ways:

- `solve`, the method `paper`: A* (Fig. 10, module `astar`) with the prunings of Section 4.5. Where
  that grows too large, stricter rules are taken, and at last the cheapest derivations complete its
  best partial programs. With memory, which HAP does not limit, partial programs that do not fit at
  the fixed ratios are pruned, and the linear programme has memory.
- `alternate`, for the gap study: shortest paths. For fixed ratios B a stage lasts
  max_d (F + S B_d) / v_d. Any mean over types bounds it from below, and sums of it over a program
  are the length of a path in the canonical graph. The path is a program and is priced as it is; the
  largest shortest length over the means tried is a bound of the best program for B. Where both
  meet, the search is exact, as A* is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from hetplan.formulations.hap import astar
from hetplan.formulations.hap.common import (
    Posed,
    ended,
    fitting_program,
    greedy_program,
    pose,
    price_at,
)
from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.graph import Graph, build, lengths, path
from hetplan.formulations.hap.problem import Floats, HapProblem, compile_problem
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.formulations.hap.theory import Theory, reduce_theory
from hetplan.solvers.native import stopped
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run

# Nodes of the canonical graph for shortest paths; means over types that are tried for each B beyond
# the types alone; what counts as exact.
STATES, HALVINGS, EXACT = 300_000, 8, 1e-6
DOES_NOT_FIT = "no program was found that fits in memory at the ratios tried"

Programs = Callable[[Floats], Sequence[int] | None]


@dataclass(frozen=True)
class Alternated:
    """The best pair."""

    seconds: float
    program: Sequence[int]
    ratios: Floats  # [g, K]
    first: float  # seconds of the first pair
    rounds: int
    exact: int = 0  # in how many rounds the program was proven best for its ratios


def alternated(
    problem: HapProblem, program_at: Programs, run: Run
) -> tuple[Alternated | None, int]:
    """(The best pair, None where none fits; how many programs there were)."""
    ratios: Floats = np.tile(problem.proportional, (problem.g, 1))
    best: Alternated | None = None
    seen: set[tuple[int, ...]] = set()
    first = np.inf
    while best is None or not run.should_stop:
        program = program_at(ratios)
        if program is None or tuple(program) in seen:
            break
        seen.add(tuple(program))
        found = best_ratios(problem, problem.stages(program), run)
        if not found.fits:
            break
        ratios, first = found.ratios, min(first, found.seconds) if best is None else first
        if best is None or found.seconds < best.seconds:
            best = Alternated(found.seconds, program, ratios, first, 0)
            run.report(incumbent=found.seconds)
    return None if best is None else replace(best, rounds=len(seen)), len(seen)


def solve(data: HapData, run: Run) -> Outcome[HapDecision]:
    """The best pair of the alternation with A*; no bound."""
    posed = pose(data, run)
    if isinstance(posed, Outcome):  # one program at most: its ratios, without a claim
        return posed if posed.decision is None else replace(posed, stop=Stop.DONE, bound=None)
    built, search = time.perf_counter(), _ByAStar(posed, run)
    best, rounds = alternated(posed.problem, search, run)
    note = search.rules.value
    if best is None and posed.problem.capacity is not None:
        note = DOES_NOT_FIT
    return ended(
        posed, None if best is None else best.program, run=run, bound=None, built=built,
        stop=stopped(run) if run.should_stop else Stop.DONE, message=note,
        details={"rounds": rounds},
    )  # fmt: skip


class Rules(Enum):
    """Which prunings A* has; the value is what the result says about it."""

    PRINTED = ""
    COMPUTED_ONCE = (
        "the search as printed grows too large; as in the released program, a tensor is computed "
        "one way"
    )
    REPEATED = "no program communicates each tensor at most once; that pruning was left out"
    COMPLETED = (
        "the search grows too large; the cheapest derivations completed its best partial programs"
    )


# Per rules: communicate once, compute once, a share of the time left, partial programs that may be
# extended, and which rules come next where the search is cut short.
ATTEMPTS = {
    Rules.PRINTED: (True, False, 4, 1_000, Rules.COMPUTED_ONCE),
    Rules.COMPUTED_ONCE: (True, True, 2, 4_000, Rules.COMPLETED),
    Rules.REPEATED: (False, False, 2, 4_000, Rules.COMPLETED),
}


@dataclass
class _ByAStar:
    """Programs for fixed ratios, under the first rules that give one."""

    posed: Posed
    run: Run
    rules: Rules = field(default=Rules.PRINTED)

    def __call__(self, ratios: Floats) -> Sequence[int] | None:
        """Where no rules give a program within their limits, the cheapest one that the searches met
        or that completes their partial programs."""
        met: list[astar.Found] = []
        while self.rules is not Rules.COMPLETED:
            once, computed_once, share, most, cut_short = ATTEMPTS[self.rules]
            limit = None if self.run.options.time_limit is None else self.run.remaining / share
            theory = astar.fuse(self.posed.theory, once=once, computed_once=computed_once)
            found = astar.search(theory, ratios, self.run.part(time_limit=limit), most)
            if found.finished and found.program is not None:
                return found.program
            met.append(found)
            proven = found.finished and self.rules is not Rules.REPEATED
            self.rules = Rules.REPEATED if proven else cut_short
        return self._cheapest(ratios, met)

    def _cheapest(self, ratios: Floats, met: Sequence[astar.Found]) -> Sequence[int]:
        """Of the programs met, of what completes partial ones by the cheapest derivations, and of
        those derivations alone, the cheapest at these ratios; where none fits at them, the cheapest
        that derivations priced with bytes give for any ratios."""
        theory, problem = self.posed.theory, self.posed.problem
        alone = price_at(theory, ratios)
        programs = [] if problem.capacity is None else [fitting_program(theory, self.run)[0]]
        programs.append(greedy_program(theory, alone))
        programs += [found.program for found in met if found.program is not None]
        for partial in (steps for found in met for steps in found.partial):
            rest = greedy_program(theory, alone, done=frozenset(partial))
            programs.append(theory.program([*partial, *rest]))

        def seconds(program: Sequence[int]) -> tuple[bool, float]:
            stages = problem.stages(program)
            return not problem.fits(stages, ratios), problem.seconds(stages, ratios)

        least = min(programs, key=seconds)
        return programs[0] if seconds(least)[0] else least


def alternate(data: HapData, run: Run | None = None) -> Alternated | None:
    """The alternation with shortest paths; None where the theory is too large even for canonical
    states."""
    theory = reduce_theory(compile_problem(data))
    graph = None if theory.goal is None else build(theory, STATES, canonical=True)
    if graph is None:
        return None
    exact: dict[tuple[int, ...], bool] = {}

    def program_at(ratios: Floats) -> Sequence[int]:
        found = program_for(theory, graph, ratios)
        exact.setdefault(tuple(found.program), found.exact)
        return found.program

    best, _ = alternated(theory.problem, program_at, run or Run())
    return None if best is None else replace(best, exact=sum(exact.values()))


@dataclass(frozen=True)
class AtRatios:
    """For fixed ratios: a program (triple numbers), its seconds at them, and a bound of the best
    one's."""

    program: list[int]
    seconds: float
    bound: float

    @property
    def exact(self) -> bool:
        """Whether no program is better for these ratios."""
        return self.seconds - self.bound <= EXACT * self.seconds


def program_for(theory: Theory, graph: Graph, ratios: Floats) -> AtRatios:
    """The best program found for ratios [g, K], and a bound of the best there is.

    graph: the canonical one.
    """
    problem, work = theory.problem, graph.work
    programs = [greedy_program(theory, price_at(theory, ratios))]
    paid = work.fixed + work.shared @ ratios.max(axis=1)
    busy = (work.fixed[:, None] + work.shared @ ratios) * problem.speeds[-1] / problem.speeds
    bound = 0.0

    def tried(weights: Floats) -> Floats:
        """Seconds of each type along the shortest path, as if every stage waited for that type
        alone."""
        nonlocal bound
        length, arc = lengths(graph, np.where(work.comm, paid, busy @ weights)[:, None])
        bound = max(bound, float(length[graph.start, 0]))
        program = theory.program(graph.program(path(graph, arc[:, 0])))
        programs.append(program)
        stages = problem.stages(program)
        return np.asarray(
            ((stages.F[:, None] + stages.S @ ratios) / problem.speeds).sum(axis=0), dtype=float
        )

    def seconds(program: Sequence[int]) -> float:
        return problem.seconds(problem.stages(program), ratios)

    for weights in np.eye(problem.K):
        tried(weights)
    low, high = 0.0, 1.0
    for _ in range(HALVINGS if problem.K > 1 else 0):
        best = min(map(seconds, programs))
        if best - bound <= EXACT * best:
            break
        middle = (low + high) / 2
        mean = np.full(problem.K, (1 - middle) / (problem.K - 1))
        mean[0] = middle
        totals = tried(mean)
        low, high = (middle, high) if totals[0] >= totals[1:].max() else (low, middle)
    program = min(programs, key=seconds)
    return AtRatios(program, seconds(program), min(bound, seconds(program)))
