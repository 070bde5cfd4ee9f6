"""HAP's own procedure: programs by A* for fixed ratios, ratios by linear programming for a fixed
program.

Source: HAP, Section 3.1 (alternation, from ratios proportional to speed, until the program repeats;
the best pair is kept), Fig. 10 (A* with dominance), Section 4.5 (fusion, one communication per
tensor, redundant properties), Section 5.1 (linear programme). A partial program costs its time up
to the last synchronisation; the estimate of the rest assumes infinite bandwidth. With memory, which
HAP does not limit, partial programs that do not fit at the fixed ratios are pruned, and ratios are
those of the linear programme with memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

import numpy as np

from hetplan.formulations.hap.astar import Found, search
from hetplan.formulations.hap.common import Posed, ended, pose
from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.first import fitting_program, greedy_program, price_at
from hetplan.formulations.hap.fusion import fuse
from hetplan.formulations.hap.problem import Floats
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.solvers.native import stopped
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run

# Partial programs that the search as printed may extend before stricter rules are taken, and under
# those.
EXTENSIONS, STRICT_EXTENSIONS = 1_000, 4_000


def solve(data: HapData, run: Run) -> Outcome[HapDecision]:
    """The best pair of the alternation; no bound."""
    posed = pose(data, run)
    if isinstance(posed, Outcome):  # one program at most: its ratios, without a claim
        return posed if posed.decision is None else replace(posed, stop=Stop.DONE, bound=None)
    built = time.perf_counter()
    problem = posed.problem
    ratios: Floats = np.tile(problem.proportional, (problem.g, 1))
    best: tuple[float, Sequence[int]] | None = None
    seen: set[tuple[int, ...]] = set()
    rules = Rules.PRINTED
    while best is None or not run.should_stop:
        program, rules = _program(posed, ratios, run, rules)
        if program is None or tuple(program) in seen:
            break
        seen.add(tuple(program))
        found = best_ratios(problem, problem.stages(program), run)
        if not found.fits:
            break
        ratios = found.ratios
        if best is None or found.seconds < best[0]:
            best = found.seconds, program
            run.report(incumbent=found.seconds)
    note = rules.value
    if best is None and problem.capacity is not None:
        note = DOES_NOT_FIT
    return ended(
        posed, None if best is None else best[1], run=run, bound=None, built=built,
        stop=stopped(run) if run.should_stop else Stop.DONE, message=note, details={"rounds": len(seen)},
    )  # fmt: skip


DOES_NOT_FIT = "no program was found that fits in memory at the ratios tried"


class Rules(Enum):
    """Which prunings the search has; the value is what the result says about it."""

    PRINTED = ""
    COMPUTED_ONCE = "the search as printed grows too large; as in the released program, a tensor is computed one way"
    REPEATED = "no program communicates each tensor at most once; that pruning was left out"
    COMPLETED = (
        "the search grows too large; the cheapest derivations completed its best partial programs"
    )


def _program(
    posed: Posed, ratios: Floats, run: Run, rules: Rules
) -> tuple[Sequence[int] | None, Rules]:
    """A program for these ratios, under the first rules, from `rules` on, that give one. Where none
    do within their limits, the cheapest one that the searches met or that completes their partial
    programs."""
    met: list[Found] = []
    if rules is Rules.PRINTED:
        met.append(search(fuse(posed.theory, once=True), ratios, _share(run, 4), EXTENSIONS))
        if met[0].finished and met[0].program is not None:
            return met[0].program, rules
        rules = Rules.REPEATED if met[0].finished else Rules.COMPUTED_ONCE
    if rules is Rules.COMPUTED_ONCE:
        theory = fuse(posed.theory, once=True, computed_once=True)
        met.append(search(theory, ratios, _share(run, 2), STRICT_EXTENSIONS))
        if met[-1].finished and met[-1].program is not None:
            return met[-1].program, rules
        rules = Rules.REPEATED if met[-1].finished else Rules.COMPLETED
    if rules is Rules.REPEATED:
        met.append(
            search(fuse(posed.theory, once=False), ratios, _share(run, 2), STRICT_EXTENSIONS)
        )
        if met[-1].finished and met[-1].program is not None:
            return met[-1].program, rules
    return _cheapest(posed, ratios, met, run), Rules.COMPLETED


def _share(run: Run, parts: int) -> Run:
    """A search may take one of so many parts of the time left."""
    return run.part(time_limit=None if run.options.time_limit is None else run.remaining / parts)


def _cheapest(posed: Posed, ratios: Floats, met: Sequence[Found], run: Run) -> Sequence[int]:
    """Of the programs that searches cut short met, of what completes their partial ones by the
    cheapest derivations, and of those derivations alone, the cheapest at these ratios; where none
    fits at them, the cheapest that derivations priced with bytes give for any ratios."""
    theory, problem = posed.theory, posed.problem
    alone = price_at(theory, ratios)
    found = [fitting_program(theory, run)[0]] if problem.capacity is not None else []
    found += [greedy_program(theory, alone), *(f.program for f in met if f.program is not None)]
    for partial in (steps for f in met for steps in f.partial):
        done = frozenset(partial)
        rest = greedy_program(
            theory, lambda step, done=done: 0.0 if step.index in done else alone(step)
        )  # type: ignore[misc]
        found.append(theory.program([*partial, *rest]))

    def seconds(program: Sequence[int]) -> tuple[bool, float]:
        stages = problem.stages(program)
        return not problem.fits(stages, ratios), problem.seconds(stages, ratios)

    least = min(found, key=seconds)
    return found[0] if seconds(least)[0] else least
