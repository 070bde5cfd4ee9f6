"""HAP's own procedure: programs by A* for fixed ratios, ratios by linear programming for a fixed program.

Source: HAP, Section 3.1 (alternation, from ratios proportional to speed, until the program repeats; the best
pair is kept), Fig. 10 (A* with dominance), Section 4.5 (fusion, one communication per tensor, redundant
properties), Section 5.1 (linear programme). A partial program costs its time up to the last synchronisation;
the estimate of the rest assumes infinite bandwidth.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

import numpy as np

from hetplan.formulations.hap.astar import search
from hetplan.formulations.hap.common import Posed, ended, pose
from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.fusion import fuse
from hetplan.formulations.hap.problem import Floats
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.solvers.native import stopped
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run

# Partial programs that the search as printed may extend before stricter rules are taken.
EXTENSIONS = 1_000


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
    while not run.should_stop:
        program, rules = _program(posed, ratios, run, rules)
        if program is None or tuple(program) in seen:
            break
        seen.add(tuple(program))
        found = best_ratios(problem, problem.stages(program), run)
        ratios = found.ratios
        if best is None or found.seconds < best[0]:
            best = found.seconds, program
            run.report(incumbent=found.seconds)
    note = rules.value if best else "stopped before the first program was found"
    return ended(
        posed, None if best is None else best[1], run=run, bound=None, built=built,
        stop=stopped(run) if run.should_stop else Stop.DONE, message=note, details={"rounds": len(seen)},
    )  # fmt: skip


class Rules(Enum):
    """Which prunings the search has; the value is what the result says about it."""

    PRINTED = ""
    COMPUTED_ONCE = (
        "the search as printed grows too large; as in the released program, a tensor is computed one way"
    )
    REPEATED = "no program communicates each tensor at most once; that pruning was left out"


def _quarter(run: Run) -> Run:
    """The search as printed may take a quarter of the time left."""
    return run.part(time_limit=None if run.options.time_limit is None else run.remaining / 4)


def _program(posed: Posed, ratios: Floats, run: Run, rules: Rules) -> tuple[Sequence[int] | None, Rules]:
    """A program for these ratios, under the first rules, from `rules` on, that give one."""
    if rules is Rules.PRINTED:
        found = search(fuse(posed.theory, once=True), ratios, _quarter(run), EXTENSIONS)
        if found.program is not None or run.should_stop:
            return found.program, rules
        rules = Rules.REPEATED if found.finished else Rules.COMPUTED_ONCE
    if rules is Rules.COMPUTED_ONCE:
        found = search(fuse(posed.theory, once=True, computed_once=True), ratios, run)
        if found.program is not None or run.should_stop:
            return found.program, rules
    return search(fuse(posed.theory, once=False), ratios, run).program, Rules.REPEATED
