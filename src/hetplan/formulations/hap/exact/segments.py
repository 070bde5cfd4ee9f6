"""Several segments: bounds of cells of ratios in which one stage may mix work of several segments.

A cell is a product of simplices, one for each segment's ratios; x are its V = K^g vertices. For one
mean over types per stage, and one per segment in place of the largest ratio, a program's cost is
affine in all ratios together, so that sums over a graph of needs bound a cell as for one segment
(`bounds`), V values each. Whole stages as arcs
(`staging`), work shared by segment, make that exact at a point; there is no listing of programs
here, so that cells are divided until sums close them. Means come from the matrix game of the best
ratios of the incumbent in the cell.

Ratios are any of sum 1: those of one segment that are concave in speed need not hold an optimum
where stages mix.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hetplan.formulations.hap.cutting import game_value
from hetplan.formulations.hap.exact import kernels
from hetplan.formulations.hap.exact.arrays import Arrays
from hetplan.formulations.hap.exact.bounds import (
    FEWER,
    Evaluated,
    Failed,
    Incumbent,
    open_room,
)
from hetplan.formulations.hap.exact.opened import Explorer
from hetplan.formulations.hap.exact.segment_means import Means, Work, by_segment, work_of
from hetplan.formulations.hap.exact.staging import staged
from hetplan.formulations.hap.graph_kernels import shortest_paths
from hetplan.formulations.hap.problem import Floats, HapProblem


@dataclass
class SegmentsCell:
    """Bounds by sums, over the graph of all orders or of what sums on the canonical one leave
    open."""

    problem: HapProblem
    arrays: Arrays
    incumbent: Incumbent
    explorer: Explorer
    _steps: Work = field(init=False)
    _failed: Failed = field(default_factory=Failed)

    def __post_init__(self) -> None:
        self._steps = work_of(self.problem, self.arrays.graph.theory.steps)

    def __call__(
        self, cell: Floats, hint: Floats | None, threshold: float, arrays: Arrays | None = None
    ) -> Evaluated:
        """One cell [g, K, K]; the point [g, K]. A graph handed down bounds no more than the
        threshold."""
        most = np.inf if arrays is None else threshold
        arrays = self.arrays if arrays is None else arrays
        means = Means(self.problem, cell, self.incumbent.stages, hint)
        bound, potential, step = sums(arrays, means)
        if bound >= threshold:
            return self._told(min(bound, most), means, arrays)
        if self._offer(means, arrays):
            threshold = min(threshold, self.incumbent.threshold)
            value, potential, step = sums(arrays, means)
            bound = max(bound, value)
        if bound >= threshold or not np.isfinite(threshold):
            return self._told(min(bound, most), means, arrays)
        missing = 1 - bound / threshold
        if not arrays.ordered:
            opened = self._opened(cell, means, threshold, missing)
            if opened is None:
                return self._told(bound, means, arrays)
            arrays = opened
            if not len(arrays.graph.head):
                return self._told(threshold, means, arrays)
            value, potential, step = sums(arrays, means)
            bound = max(bound, value)
        arrays, bound = self._narrowed(cell, means, arrays, (bound, potential, step), threshold)
        return self._told(min(bound, threshold), means, arrays)

    def _told(self, bound: float, means: Means, arrays: Arrays) -> Evaluated:
        return Evaluated(bound, means.point, 0, arrays if arrays.ordered else None)

    def _opened(
        self, cell: Floats, means: Means, threshold: float, missing: float
    ) -> Arrays | None:
        """All orders of what sums leave open, if that is not too much."""
        if not self._failed.unlike(cell, missing) or self.incumbent.run.should_stop:
            return None
        cost = means.prices(self._steps)
        found = self.explorer.left_open(
            cost, threshold, open_room(self.incumbent.run), self.incumbent.run
        )
        if found is None:
            self._failed.note(cell, missing)
            return None
        return by_segment(self.problem, found, ordered=True)

    def _narrowed(
        self,
        cell: Floats,
        means: Means,
        arrays: Arrays,
        known: tuple[float, Floats, Floats],
        threshold: float,
    ) -> tuple[Arrays, float]:
        """(Without the arcs of no program below the threshold, and by stages where these are few;
        the bound)."""
        bound, potential, step = known
        missing = 1 - bound / threshold
        if not missing < FEWER * arrays.missing or arrays.start > 0:
            return arrays, bound
        least = kernels.through(arrays.reverse, arrays.graph.head, step, potential)
        arrays, nodes = arrays.without(least.max(axis=1) >= threshold, missing)
        if not len(arrays.graph.head):
            return arrays, threshold
        if arrays.chains is not None:
            return arrays, bound
        corners = np.stack([cell.min(axis=(1, 2)), cell.max(axis=(1, 2))], axis=1)
        extremes = np.array(
            [[corners[k, c >> k & 1] for k in range(len(cell))] for c in range(2 ** len(cell))]
        )
        step, potential = means.prices(arrays), np.ascontiguousarray(potential[nodes])
        whole = staged(arrays, step, means.inside, potential, threshold, extremes)
        if whole is None:
            return arrays, bound
        if not len(whole.graph.head):
            return whole, threshold
        bound = max(bound, sums(whole, means)[0])
        if bound < threshold:
            self._offer(means, whole)
        return whole, bound

    def _offer(self, means: Means, arrays: Arrays) -> bool:
        """Price the best program at the point; whether it is better than all before, from which
        means learn."""
        g = arrays.graph
        _, arc = shortest_paths(g.first, g.head, g.component, means.at_point(arrays)[:, None])
        node, taken = arrays.start, []
        while node < g.n - 1:
            taken.append(int(arc[node, 0]))
            node = int(g.head[taken[-1]])
        before = self.incumbent.seconds
        self.incumbent.offer(arrays.program(reversed(taken)))
        better = self.incumbent.seconds < before
        if better and self.incumbent.stages is not None:
            means.learn(self.incumbent.stages)
        return better


def sums(arrays: Arrays, means: Means) -> tuple[float, Floats, Floats]:
    """(Bound of all programs in the cell, potential [n, L, V], prices [A, L, V])."""
    step = means.prices(arrays)
    first, head, component = arrays.graph.first, arrays.graph.head, arrays.graph.component
    potential = kernels.potentials_of(
        first, head, arrays.comm, component, step, means.inside, arrays.ordered
    )
    if arrays.chains is not None:
        own = means.own(arrays)
        potential = np.concatenate(
            [potential, kernels.lengths(first, head, component, own)], axis=1
        )
        step = np.concatenate([step, own], axis=1)
    return game_value(potential[arrays.start]), potential, step
