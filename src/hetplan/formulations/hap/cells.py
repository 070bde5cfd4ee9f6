"""Cells of ratios: simplices that the search divides.

A cell holds a simplex of ratios for each segment, [g, K, K]: row i of a segment's simplex is its
vertex i, one ratio for a device of each type. The cell has V = K^g vertices: every choice of one
vertex of each segment's simplex.
"""

import itertools

import numpy as np

from hetplan.formulations.hap.problem import Floats, HapProblem


def whole_cell(problem: HapProblem) -> Floats:
    """[g, K, K] a cell that holds optimal ratios.

    Any ratios of sum 1 are a simplex whose vertex d gives everything to type d. With one segment
    and without memory a smaller one holds an optimum. For fixed stage times T_s and a fixed largest
    ratio M the ratios are bounded by u_d = min(M, min_s (T_s v_d - F_s) / S_s), a concave
    nondecreasing function of the speed v_d. The bounds sum to 1 at least, as the ratios do, so that
    scaling u to sum 1 keeps all bounds. So some optimum is concave and nondecreasing in speed.
    Those functions on K speeds are the cone spanned by 1 and by min(v, v_k) - v_1 for k > 1.
    """
    if problem.g > 1 or problem.capacity is not None:
        return np.tile(np.diag(1.0 / problem.counts), (problem.g, 1, 1))
    v = problem.speeds
    generators = np.vstack([np.ones(problem.K), *(np.minimum(v, top) - v[0] for top in v[1:])])
    return np.asarray(generators / (generators @ problem.counts)[:, None])[None]


def vertices(cell: Floats) -> Floats:
    """[V, g, K] the vertices of a cell; the vertex of the last segment varies fastest."""
    segments = np.arange(len(cell))
    picks = itertools.product(range(cell.shape[1]), repeat=len(cell))
    return np.array([cell[segments, list(pick)] for pick in picks])


def halves(cell: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """The two halves of a cell, cut through the middle of its longest edge.

    counts: [K] devices of each type; they weigh the length of an edge.
    """
    edges = []
    for k in range(len(cell)):
        for i, j in itertools.combinations(range(cell.shape[1]), 2):
            length = float(np.abs(cell[k, i] - cell[k, j]) @ counts)
            edges.append((length, k, i, j))
    _, k, i, j = max(edges)
    middle = (cell[k, i] + cell[k, j]) / 2
    first, second = cell.copy(), cell.copy()
    first[k, i] = middle
    second[k, j] = middle
    return first, second
