"""Where optimal ratios lie, and how that is divided into cells.

A cell holds a simplex of ratios for each segment, [g, K, K]: row i of a segment's simplex is its
vertex i, one ratio for a device of each type. Its V = K^g vertices are those of the product.

Any ratios of sum 1 are a simplex whose vertex d gives everything to type d. With one segment and
without memory a smaller one holds an optimum. For fixed stage times T_s and a fixed largest ratio M
the ratios are bounded by u_d = min(M, min_s (T_s v_d - F_s) / S_s), a concave nondecreasing
function of the speed v_d, and scaling u to sum 1 keeps all bounds. So some optimum is concave and
nondecreasing in speed. Those functions on K speeds are the cone spanned by 1 and by
min(v, v_k) - v_1 for k > 1.
"""

from __future__ import annotations

import itertools

import numpy as np

from hetplan.formulations.hap.problem import Floats, HapProblem

# How close to an end of an edge, as a share of it, a cell is still cut at the point asked for.
MARGIN = 0.02


def whole_cell(problem: HapProblem) -> Floats:
    """[g, K, K] the cell that holds an optimum."""
    if problem.g > 1 or problem.capacity is not None:
        return np.tile(np.diag(1.0 / problem.counts), (problem.g, 1, 1))
    v = problem.speeds
    rows = np.vstack([np.ones(problem.K), *(np.minimum(v, top) - v[0] for top in v[1:])])
    return np.asarray(rows / (rows @ problem.counts)[:, None])[None]


def vertices(cell: Floats) -> Floats:
    """[V, g, K]; the last segment's change first."""
    picks = itertools.product(range(cell.shape[1]), repeat=len(cell))
    return np.array([[cell[k, v] for k, v in enumerate(pick)] for pick in picks])


def coordinates(cell: Floats, point: Floats) -> Floats:
    """[g, K] barycentric coordinates of a point [g, K], negative outside."""
    return np.array([np.linalg.solve(s.T, row) for s, row in zip(cell, point, strict=True)])


def holds(cell: Floats, point: Floats) -> bool:
    """Whether a point lies in a cell, up to rounding."""
    return bool(coordinates(cell, point).min() > -1e-9)


def halves(cell: Floats, counts: Floats, at: Floats) -> tuple[Floats, Floats]:
    """Two cells that share the cut of the longest edge, at its middle or, where the point `at`
    [g, K] projects well inside, there."""
    edges = [
        (float(np.abs(cell[k, i] - cell[k, j]) @ counts), k, i, j)
        for k in range(len(cell))
        for i, j in itertools.combinations(range(cell.shape[1]), 2)
    ]
    _, k, i, j = max(edges)
    here = coordinates(cell[k : k + 1], at[k : k + 1])[0]
    part = 0.5
    if here.min() > -1e-9 and here[i] + here[j] > 0.5:
        part = float(here[i] / (here[i] + here[j]))
        part = part if MARGIN < part < 1 - MARGIN else 0.5
    one, other = cell.copy(), cell.copy()
    one[k, i] = other[k, j] = part * cell[k, i] + (1 - part) * cell[k, j]
    return one, other
