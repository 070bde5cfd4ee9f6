"""Best-first branch and bound over cells of ratios."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

import numpy as np

from hetplan.formulations.hap.cells import OneSegment, Shape
from hetplan.formulations.hap.exact.arrays import Arrays
from hetplan.formulations.hap.exact.bounds import Evaluate, Incumbent
from hetplan.formulations.hap.problem import Floats, HapProblem
from hetplan.solvers.run import Run

# Rounding in sums of thousands of terms, as a share of the optimum: deduction from bounds.
ROUNDING = 1e-10


@dataclass
class Ended:
    """bound: proven for all programs and ratios, None when nothing is; counts for the curious."""

    bound: float
    finished: bool
    cells: int
    labels: int


ONE_SEGMENT = OneSegment()


def search(
    problem: HapProblem,
    evaluate: Evaluate,
    incumbent: Incumbent,
    run: Run,
    *,
    patience: int | None = None,
    most: int | None = None,
    shape: Shape = ONE_SEGMENT,
) -> Ended:
    """Explore cells until the gap asked for is proven or the run should stop.

    patience: give up after so many cells without a graph that suffices for their parts, while the
    bound rose by less than a hundredth of the gap. most: cells at most.
    """
    order = itertools.count()
    open_cells: list[tuple[float, int, Floats, Floats | None, Arrays | None]] = [
        (0.0, next(order), shape.whole(problem), incumbent_point(incumbent), None)
    ]
    closed, cells, labels = np.inf, 0, 0
    idle, risen = 0, 0.0
    while open_cells:
        bound, _, here, hint, arrays = heapq.heappop(open_cells)
        threshold = incumbent.threshold
        if bound >= threshold:
            closed = min(closed, bound)
            break
        if bound > risen + 0.01 * (incumbent.seconds - risen):
            idle, risen = 0, bound
        if run.should_stop or (patience is not None and idle > patience) or cells == most:
            heapq.heappush(open_cells, (bound, next(order), here, hint, arrays))
            break
        cells += 1
        inside = hint is not None and shape.holds(here, hint)
        found = evaluate(here, hint if inside else None, threshold, arrays)
        labels += found.labels
        idle += found.arrays is None
        bound, hint = max(bound, found.bound), found.point
        if bound >= incumbent.threshold:
            closed = min(closed, bound)
            continue
        for half in shape.parts(here, problem.counts.astype(float), hint):
            heapq.heappush(open_cells, (bound, next(order), half, hint, found.arrays))
        run.report(bound=min(closed, open_cells[0][0]) * (1 - ROUNDING))
    left = min((entry[0] for entry in open_cells), default=np.inf)
    finished = left >= incumbent.threshold
    lowest = min(closed, left, incumbent.seconds)
    return Ended(lowest * (1 - ROUNDING), finished, cells, labels)


def incumbent_point(incumbent: Incumbent) -> Floats | None:
    """The incumbent's ratios, if there are any: [K], of several segments [g, K]."""
    ratios = incumbent.ratios
    return ratios if ratios is None or len(ratios) > 1 else ratios[0]
