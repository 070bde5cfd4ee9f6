"""The labels of one cell, and the programs that they stand for, priced (kernels in `labelling`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetplan.formulations.hap.cutting import best_in_cell
from hetplan.formulations.hap.exact import labelling
from hetplan.formulations.hap.exact.arrays import Arrays
from hetplan.formulations.hap.exact.kernels import means
from hetplan.formulations.hap.problem import Floats, Ints

NO_MIXTURES = np.zeros(0)


@dataclass(frozen=True)
class Labels:
    """size: labels set; parent, arc [size], sums [size, 6]. last: those at the empty set, the one
    of the least bound first. bound: holds for every program and ratio of the cell, up to the
    threshold."""

    arrays: Arrays
    size: int
    parent: Ints
    arc: Ints
    sums: Floats
    last: Ints
    bound: float

    def path(self, label: int) -> list[int]:
        """The triple numbers of a label's program in order."""
        return self.arrays.path(self.parent, self.arc, label)

    def price(self, x: Floats, enough: float) -> tuple[Floats, Floats, Floats]:
        """Each program's least cost over the cell x [V, K]: (lower bounds [c], costs [c] at points
        [c, K]), for the labels `last` [c]. A bound of `enough` suffices."""
        rows = [self._priced(int(label), x, enough) for label in self.last]
        bounds, costs, points = zip(*rows, strict=True)
        return np.array(bounds), np.array(costs), np.array(points)

    def _priced(self, label: int, x: Floats, enough: float) -> tuple[float, float, Floats]:
        slow = self.arrays.slow
        found = np.empty((self.size + 1, 2))
        count = labelling.stages_of(
            label, self.parent, self.arc, self.sums, *self.arrays.common[2:5], found
        )
        constant, top = found[0]
        F, S = found[1:count].T
        constant += slow[0] * F[S == 0].sum()
        mixed = (F > 0) & (S > 0)
        # stages of shared work alone are in proportion: one
        F, S = np.append(0.0, F[mixed]), np.append(S[F == 0].sum(), S[mixed])
        point, _, bound = best_in_cell(F, S, float(top), x, slow, enough - constant)
        busy = ((F[:, None] + S[:, None] * point) * slow).max(axis=1).sum()
        return bound + constant, float(constant + top * point[-1] + busy), point


def labels(
    arrays: Arrays,
    x: Floats,
    reference: Floats,
    potential: Floats,
    weights: Floats,
    threshold: float,
    *,
    slack: float,
    room: int,
    per_node: int,
    mixtures: Floats = NO_MIXTURES,
    blends: Floats | None = None,
) -> tuple[int, Labels | None]:
    """Label setting from {goal} to the empty set over one cell: (labels set, all there is; None:
    too many of them).

    A label holds, per vertex, the closed stages' true cost (convex in b, so its interpolation is an
    upper bound) and an affine lower bound, and sums (`labelling`). The lower bound takes a stage by
    its slowest type at `reference` or, where its mixture F / (F + S) stands in `mixtures` [m]
    (ascending), by the blend of types blends [m, K] (a convex combination, so never above the
    maximum).
    Labels that cannot stay below `threshold` at any vertex by a potential [n, L, V] with weights
    [L, K] are dropped.
    The labels kept at the empty set hold an optimal program for each ratio of the cell.
    """
    slow, graph = arrays.slow, arrays.graph
    n, V, K = graph.n, len(x), len(slow)
    if blends is None:
        blends = np.zeros((0, K))
    mean, share = means(x, slow, weights)
    upper, lower, sums = np.empty((room, V)), np.empty((room, V)), np.empty((room, 6))
    parent, arc, after, state = (np.empty(room, np.int64) for _ in range(4))
    upper[0], lower[0], sums[0] = 0.0, 0.0, 0.0
    parent[0] = arc[0] = after[0] = -1
    state[0] = labelling.OPEN
    newest, alive = np.full(n, -1, np.int64), np.zeros(n, np.int64)
    newest[arrays.start] = 0
    blend, mine, others = np.empty(K), *np.empty((2, labelling.LISTED, 2))
    labelling._choose(0.0, 1.0, reference, slow, mixtures, blends, blend)
    unit = x * slow
    size = labelling.set_labels(
        *arrays.common, x, slow, unit.max(axis=1), unit @ blend, reference, mixtures, blends, potential, mean, share,
        threshold, slack, per_node, upper, lower, sums, parent, arc, after, state, newest, alive, blend, mine, others,
    )  # fmt: skip
    if size < 0:
        return -1 - size, None
    last, here = [], int(newest[n - 1])
    while here >= 0:
        if state[here] != labelling.DEAD:
            last.append(here)
        here = int(after[here])
    least = lower[last].min(axis=1)
    if last:
        best = int(np.argmin(least))
        last[0], last[best] = last[best], last[0]
    bound = min(threshold, float(least.min(initial=np.inf)))
    found = Labels(
        arrays, size, parent[:size], arc[:size], sums[:size], np.array(last, np.int64), bound
    )
    return size, found
