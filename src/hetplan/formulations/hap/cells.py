"""Cells of ratios: simplices that the search divides.

A cell holds a simplex of ratios for each segment, [g, K, K]: row i of a segment's simplex is its
vertex i, one ratio for a device of each type. Its V = K^g vertices are those of the product.
"""

import itertools

import numpy as np

from hetplan.formulations.hap.problem import Floats, HapProblem


def whole_cell(problem: HapProblem) -> Floats:
    """[g, K, K] the cell that holds an optimum.

    Any ratios of sum 1 are a simplex whose vertex d gives everything to type d. With one segment
    and without memory a smaller one holds an optimum. For fixed stage times T_s and a fixed largest
    ratio M the ratios are bounded by u_d = min(M, min_s (T_s v_d - F_s) / S_s), a concave
    nondecreasing function of the speed v_d, and scaling u to sum 1 keeps all bounds. So some
    optimum is concave and nondecreasing in speed. Those functions on K speeds are the cone spanned
    by 1 and by min(v, v_k) - v_1 for k > 1.
    """
    if problem.g > 1 or problem.capacity is not None:
        return np.tile(np.diag(1.0 / problem.counts), (problem.g, 1, 1))
    v = problem.speeds
    rows = np.vstack([np.ones(problem.K), *(np.minimum(v, top) - v[0] for top in v[1:])])
    return np.asarray(rows / (rows @ problem.counts)[:, None])[None]


def vertices(cell: Floats) -> Floats:
    """[V, g, K]; the vertex of the last segment varies fastest."""
    picks = itertools.product(range(cell.shape[1]), repeat=len(cell))
    return np.array([[cell[k, v] for k, v in enumerate(pick)] for pick in picks])


def halves(cell: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """Two cells that share the cut through the middle of the longest edge."""
    edges = [
        (float(np.abs(cell[k, i] - cell[k, j]) @ counts), k, i, j)
        for k in range(len(cell))
        for i, j in itertools.combinations(range(cell.shape[1]), 2)
    ]
    _, k, i, j = max(edges)
    one, other = cell.copy(), cell.copy()
    one[k, i] = other[k, j] = (cell[k, i] + cell[k, j]) / 2
    return one, other
