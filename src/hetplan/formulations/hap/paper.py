"""HAP's own procedure: programs by A* for fixed ratios, ratios by linear programming for a fixed program.

Source: HAP, Section 3.1 (alternation, from ratios proportional to speed, until the program repeats; the best
pair is kept), Fig. 10 (A* with dominance), Section 4.5 (fusion, one communication per tensor, redundant
properties), Section 5.1 (linear programme). A partial program costs its time up to the last synchronisation;
the estimate of the rest assumes infinite bandwidth.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

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


def solve(data: HapData, run: Run) -> Outcome[HapDecision]:
    """The best pair of the alternation; no bound."""
    posed = pose(data, run)
    if isinstance(posed, Outcome):
        return posed
    built = time.perf_counter()
    problem = posed.problem
    ratios: Floats = np.tile(problem.proportional, (problem.g, 1))
    best: tuple[float, Sequence[int]] | None = None
    seen: set[tuple[int, ...]] = set()
    note = ""
    while not run.should_stop:
        program, unpruned = _program(posed, ratios, run)
        if unpruned:
            note = "no program communicates each tensor once at most; that pruning was left out"
        if program is None or tuple(program) in seen:
            break
        seen.add(tuple(program))
        found = best_ratios(problem, problem.stages(program), run)
        ratios = found.ratios
        if best is None or found.seconds < best[0]:
            best = found.seconds, program
            run.report(incumbent=found.seconds)
    return ended(
        posed, None if best is None else best[1], run=run, bound=None, built=built,
        stop=stopped(run) if run.should_stop else Stop.DONE,
        message=note or ("" if best else "stopped before the first program was found"),
        details={"rounds": len(seen)},
    )  # fmt: skip


def _program(posed: Posed, ratios: Floats, run: Run) -> tuple[Sequence[int] | None, bool]:
    """A program for these ratios, and whether the second pruning had to be left out to find one."""
    program = search(fuse(posed.theory, once=True), ratios, run)
    if program is not None or run.should_stop:
        return program, False
    return search(fuse(posed.theory, once=False), ratios, run), True
