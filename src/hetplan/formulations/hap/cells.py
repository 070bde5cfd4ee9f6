"""Where optimal ratios of one segment lie: a simplex with as many vertices as device types, and its
cells.

For fixed stage times T_s and a fixed largest ratio M the ratios are bounded by u_d = min(M, min_s
(T_s v_d - F_s) / S_s), a concave nondecreasing function of the speed v_d; scaling u to sum 1 keeps
all bounds. So some optimum is concave and nondecreasing in speed, and those functions on K speeds
are the cone spanned by 1 and by min(v, v_k) - v_1 for k > 1.
"""

from __future__ import annotations

import itertools
from typing import Protocol

import numpy as np

from hetplan.formulations.hap.problem import Floats, HapProblem


def whole_cell(problem: HapProblem) -> Floats:
    """[K, K]: the vertices (rows) of the simplex that holds an optimum."""
    v = problem.speeds
    rows: list[Floats] = [
        np.ones(problem.K),
        *(np.asarray(np.minimum(v, v[k]) - v[0]) for k in range(1, problem.K)),
    ]
    return np.array([row / float(row @ problem.counts) for row in rows])


def coordinates(cell: Floats, point: Floats) -> Floats:
    """Barycentric coordinates of a point (negative outside)."""
    return np.asarray(np.linalg.solve(cell.T, point), dtype=np.float64)


def halves(cell: Floats, weight: Floats, at: Floats | None = None) -> tuple[Floats, Floats]:
    """Two cells that share the cut of the longest edge, at its middle or, where `at` projects well
    inside, there."""
    K = len(cell)
    pairs = [(i, j) for i in range(K) for j in range(i)]
    lengths = [float(np.abs(cell[i] - cell[j]) @ weight) for i, j in pairs]
    i, j = pairs[int(np.argmax(lengths))]
    part = 0.5
    if at is not None:
        here = coordinates(cell, at)
        if here.min() > -1e-9 and here[i] + here[j] > 0.5:
            part = float(here[i] / (here[i] + here[j]))
            part = part if 0.02 < part < 0.98 else 0.5
    middle = part * cell[i] + (1 - part) * cell[j]
    one, other = cell.copy(), cell.copy()
    one[i], other[j] = middle, middle
    return one, other


class Shape(Protocol):
    """What cells are, for a search that divides them."""

    def whole(self, problem: HapProblem) -> Floats:
        """The cell that holds an optimum."""

    def holds(self, cell: Floats, point: Floats) -> bool:
        """Whether a point lies in a cell."""

    def parts(self, cell: Floats, weight: Floats, at: Floats | None) -> tuple[Floats, Floats]:
        """Two cells that cover a cell, cut at a point where one is given and lies well inside."""


class OneSegment:
    """Cells [K, K] of `whole_cell`; points [K]."""

    def whole(self, problem: HapProblem) -> Floats:
        """The simplex."""
        return whole_cell(problem)

    def holds(self, cell: Floats, point: Floats) -> bool:
        """Up to rounding."""
        return bool(coordinates(cell, point).min() > -1e-9)

    def parts(self, cell: Floats, weight: Floats, at: Floats | None) -> tuple[Floats, Floats]:
        """By the longest edge."""
        return halves(cell, weight, at)


class Segments:
    """Cells [g, K, K] of any ratios, a simplex for each segment; points [g, K]."""

    def whole(self, problem: HapProblem) -> Floats:
        """All ratios: type d has everything at its vertex."""
        return np.tile(np.diag(1.0 / problem.counts), (problem.g, 1, 1))

    def holds(self, cell: Floats, point: Floats) -> bool:
        """Up to rounding."""
        return all(coordinates(*pair).min() > -1e-9 for pair in zip(cell, point, strict=True))

    def parts(self, cell: Floats, weight: Floats, at: Floats | None) -> tuple[Floats, Floats]:
        """By the longest edge of all segments."""
        pairs = list(itertools.combinations(range(cell.shape[1]), 2))
        longest = [max(float(np.abs(s[i] - s[j]) @ weight) for i, j in pairs) for s in cell]
        k = int(np.argmax(longest))
        one, other = cell.copy(), cell.copy()
        one[k], other[k] = halves(cell[k], weight, None if at is None else at[k])
        return one, other


def product(cell: Floats) -> Floats:
    """[V, g, K]: the vertices of the product of simplices [g, K, K], the last segment's changing
    first."""
    g, K, _ = cell.shape
    return np.array(
        [[cell[k, v] for k, v in enumerate(pick)] for pick in itertools.product(range(K), repeat=g)]
    )
