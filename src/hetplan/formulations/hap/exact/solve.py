"""Problem `hap` to proven optimality, jointly over programs and ratios.

One segment: branch and bound over cells of ratios (`cells`, `search`); a cell is bounded by sums
over the graph of needs, and closed by listing all programs that can be best in it (`bounds`,
`labelling`). Where the graph of all orders has too many states, sums on the canonical graph bound a
cell until the states that they leave open are few
(`opened`, `explore`, `parking`). Several segments: the same over all their ratios, without listing
(`segments`), because the argument for the simplex fails where a stage mixes segments, and then or
for more device types the mixed-integer programme. Theories too wide even so get a bound in which
the order of parallel branches is relaxed, and say so. With memory: module `limited`.
Source: hetplan, for HAP, Section 3.2.
"""

from __future__ import annotations

import time
from dataclasses import replace

from hetplan.formulations.hap import limited, milp
from hetplan.formulations.hap.cells import Segments
from hetplan.formulations.hap.common import Posed, ended, pose
from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.exact.arrays import priced_graph
from hetplan.formulations.hap.exact.bounds import Incumbent, LabelCell, WideCell
from hetplan.formulations.hap.exact.opened import Explorer
from hetplan.formulations.hap.exact.search import search
from hetplan.formulations.hap.exact.segment_means import by_segment
from hetplan.formulations.hap.exact.segments import SegmentsCell
from hetplan.formulations.hap.first import first_program, simple_bound
from hetplan.formulations.hap.graphs import WIDE, choose
from hetplan.formulations.hap.theory import Theory
from hetplan.solvers.native import stopped
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run

STATES, CANONICAL_STATES = 3_000, 300_000
MOST_TYPES = 6
# Free ratios of all segments beyond which cells are too many; the share of the time that they get
# where the programme may do better; how many they may be on a graph of so few arcs that it surely
# takes seconds.
MOST_DIMENSIONS, SEGMENTS_SHARE = 4, 0.5
MOST_CELLS, FEW_ARCS = 400, 2_000
MANY = f"more than {MOST_DIMENSIONS} free ratios (segments x types less one): by the mixed-integer programme"


def solve(data: HapData, run: Run) -> Outcome[HapDecision]:
    """Proven optimum, or with the time limit the best found so far and a proven bound."""
    posed = pose(data, run)
    if isinstance(posed, Outcome):
        return posed
    segments = {step.segment for step in posed.theory.steps if step.shared > 0}
    several = len(segments) > 1 or posed.problem.K > MOST_TYPES
    if posed.problem.capacity is not None:
        unlimited = data.model_copy(update={"memory": None})
        quick = not several or few_ratios(posed)
        return limited.search(posed, run, (lambda part: solve(unlimited, part)) if quick else None)
    return by_segments(posed, run) if several else joint(posed, run)


def few_ratios(posed: Posed) -> bool:
    """Whether cells of the free ratios of all segments are not too many."""
    return posed.problem.g * (posed.problem.K - 1) <= MOST_DIMENSIONS


def joint(posed: Posed, run: Run) -> Outcome[HapDecision]:
    """The search over one segment's ratios."""
    theory = one_segment(posed.theory)
    problem = theory.problem
    incumbent = Incumbent(theory, run)
    incumbent.offer(first_program(theory))
    floor = simple_bound(theory)
    run.report(bound=floor)
    chosen = choose(theory, STATES, CANONICAL_STATES, run)
    built = time.perf_counter()
    if chosen.graph is None or incumbent.seconds <= 0:
        late = chosen.graph is None and run.should_stop
        stop = stopped(run) if late else Stop.LIMIT if chosen.graph is None else Stop.OPTIMAL
        message = WIDE if chosen.graph is None and not late else ""
        return ended(
            posed, incumbent.program, run=run, stop=stop, bound=floor, built=built, message=message
        )
    arrays = priced_graph(problem, chosen.graph, ordered=chosen.exact)
    evaluate = (
        LabelCell(problem, arrays, incumbent)
        if chosen.exact
        else WideCell(problem, arrays, incumbent, Explorer(problem, theory))
    )
    done = search(problem, evaluate, incumbent, run, patience=None if chosen.exact else PATIENCE)
    return ended(
        posed, incumbent.program, run=run, built=built, bound=max(floor, done.bound),
        stop=Stop.OPTIMAL if done.finished else Stop.LIMIT if not run.should_stop else stopped(run),
        message="" if done.finished or chosen.exact else WIDE,
        details={
            "states": chosen.graph.n, "arcs": len(chosen.graph.head), "cells": done.cells,
            "labels": done.labels, "programs": len(incumbent.priced),
        },
    )  # fmt: skip


def by_segments(posed: Posed, run: Run) -> Outcome[HapDecision]:
    """The search over the ratios of several segments, and of more types than one segment's search
    takes; where it does not end, or dimensions are too many for it, the mixed-integer programme
    from what it found."""
    from hetplan.solvers import highs

    theory, problem = posed.theory, posed.problem
    chosen = choose(theory, STATES, CANONICAL_STATES, run) if few_ratios(posed) else None
    if chosen is None or chosen.graph is None:
        found = milp.search(highs.solve, posed, run)
        told = found.stop is Stop.OPTIMAL or found.message or chosen is not None
        return found if told else replace(found, message=MANY)
    share = SEGMENTS_SHARE if chosen.exact else 1.0
    part = run.part(time_limit=share * run.remaining, quiet=False)
    incumbent = Incumbent(theory, part)
    incumbent.offer(first_program(theory))
    built = time.perf_counter()
    if incumbent.seconds <= 0:
        return ended(posed, incumbent.program, run=run, stop=Stop.OPTIMAL, bound=0.0, built=built)
    arrays = by_segment(problem, chosen.graph, ordered=chosen.exact)
    evaluate = SegmentsCell(problem, arrays, incumbent, Explorer(problem, theory))
    patience = None if chosen.exact else SEGMENTS_PATIENCE
    most = MOST_CELLS if chosen.exact and len(chosen.graph.head) <= FEW_ARCS else None
    done = search(
        problem, evaluate, incumbent, part, patience=patience, most=most, shape=Segments()
    )
    bound, details = max(simple_bound(theory), done.bound), {"cells": done.cells}
    if chosen.exact and not done.finished and not run.should_stop:
        known = incumbent.program
        return milp.search(highs.solve, posed, run, known=known, floor=bound, details=details)
    return ended(
        posed, incumbent.program, run=run, built=built, bound=bound,
        stop=Stop.OPTIMAL if done.finished else Stop.LIMIT if not run.should_stop else stopped(run),
        message="" if done.finished or chosen.exact else WIDE,
        details={
            "states": chosen.graph.n, "arcs": len(chosen.graph.head), **details, "programs": len(incumbent.priced),
        },
    )  # fmt: skip


def one_segment(theory: Theory) -> Theory:
    """The theory with all triples in segment 0: only one segment's ratios cost anything."""
    if theory.problem.g == 1:
        return theory
    moved = replace(
        theory.problem, g=1, steps=tuple(replace(s, segment=0) for s in theory.problem.steps)
    )
    return replace(theory, problem=moved, steps=tuple(replace(s, segment=0) for s in theory.steps))


# Cells without progress after which a relaxed bound is taken as it is; of several segments it takes
# longer to see.
PATIENCE, SEGMENTS_PATIENCE = 40, 400
